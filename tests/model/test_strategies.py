"""The strategies of initialisation: what each writes into every role, and what that is good for."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from stackwise.config import StackWiseConfig
from stackwise.model import (
    Block,
    create_block_spec,
    create_rack_from_config,
    create_rack_from_specs,
    create_simple_rack,
)
from stackwise.model.embedding import BoundedEmbedding, TokenEmbedding
from stackwise.model.initialization import (
    initialize_block,
    initialize_ends,
    initialize_rack,
    learning_rate_multipliers,
)

KINDS = ("normal", "kaiming", "xavier", "small", "zero_out", "mup")
# A sample standard deviation has a relative standard error of 1 / sqrt(2n); five of those.
SIGMAS = 5
WIDTH, INNER, HEADS, HEAD = 96, 160, 6, 24
LATENT = {
    "kv_lora_rank": 40,
    "q_lora_rank": 56,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
}
ATTENTION = {
    "mha": {"attention_type": "mha", "head_dim": HEAD, "qkv_bias": True},
    "gqa": {"attention_type": "gqa", "head_dim": HEAD, "n_kv_heads": 2, "qk_norm": "head"},
    "mqa": {"attention_type": "mqa", "head_dim": HEAD, "qk_norm": "width", "norm": "layernorm"},
    "mla": {"attention_type": "mla", "latent": LATENT},
    "mla, full queries": {"attention_type": "mla", "latent": {**LATENT, "q_lora_rank": None}},
    "kernel": {"attention_type": "kernel", "head_dim": HEAD, "n_kv_heads": 2},
}
FEEDFORWARD = [
    ("feedforward.gate", None, WIDTH, INNER),
    ("feedforward.up", None, WIDTH, INNER),
    ("feedforward.down", None, INNER, WIDTH),
]


def fused(kv_heads):
    """q, k and v one under the other, each a map of its own."""
    q, k = HEADS * HEAD, kv_heads * HEAD
    return [
        ("attention.qkv", slice(0, q), WIDTH, q),
        ("attention.qkv", slice(q, q + k), WIDTH, k),
        ("attention.qkv", slice(q + k, q + 2 * k), WIDTH, k),
        ("attention.out", None, HEADS * HEAD, WIDTH),
    ]


# The rows of kv_up: 20 for the key of a head, then 28 for its value, then those of the next head.
KEYS = [48 * head + i for head in range(6) for i in range(20)]
VALUES = [48 * head + 20 + i for head in range(6) for i in range(28)]
COMPRESSED = [
    ("attention.kv_down", slice(0, 40), 96, 40),
    ("attention.kv_down", slice(40, 52), 96, 12),
    ("attention.kv_up", KEYS, 40, 6 * 20),
    ("attention.kv_up", VALUES, 40, 6 * 28),
    ("attention.out", None, 6 * 28, 96),
]
MAPS = {
    "mha": fused(6),
    "gqa": fused(2),
    "mqa": fused(1),
    "mla": [("attention.q_down", None, 96, 56), ("attention.q_up", None, 56, 6 * 32), *COMPRESSED],
    "mla, full queries": [("attention.q_up", None, 96, 6 * 32), *COMPRESSED],
    "kernel": fused(2),
}


def expected_std(kind, name, fan_in, fan_out):
    return {
        "normal": 0.02,
        "kaiming": math.sqrt((2 if name == "feedforward.down" else 1) / fan_in),
        "xavier": math.sqrt(2 / (fan_in + fan_out)),
        "small": math.sqrt(0.4 / WIDTH),
        "zero_out": 0.02,
        "mup": math.sqrt(1 / fan_in),
    }[kind]


def spoiled_block(attention, **options):
    block = Block(WIDTH, INNER, HEADS, **ATTENTION[attention], **options)
    for parameter in block.parameters():
        parameter.data.fill_(7.0)
    return block


def make_rack(kind, width=64, depth=2, vocab_size=64, *, base=None, seed=0, **options):
    torch.manual_seed(seed)
    options = {"d_ff": 2 * width, "n_heads": max(1, width // 16), **options}
    rack = create_simple_rack(1, depth, width, vocab_size=vocab_size, **options)
    initialize_rack(rack, kind, (base or width) if kind == "mup" else None)
    return rack


def loss_of(rack, ids):
    return F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def assert_normal(weight, std):
    weight = weight.detach().double()
    n = weight.numel()
    assert abs(weight.mean().item()) < SIGMAS * std / math.sqrt(n)
    assert abs(weight.std().item() / std - 1) < SIGMAS / math.sqrt(2 * n)
    # 0.9545 of a normal distribution, 1 of a uniform one, lies within two standard deviations.
    share = (weight.abs() < 2 * std).double().mean().item()
    assert abs(share - math.erf(math.sqrt(2))) < SIGMAS * math.sqrt(0.9545 * 0.0455 / n)


class TestWeights:
    @pytest.mark.parametrize("n_blocks", [1, 8])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("attention", ATTENTION)
    def test_every_matrix(self, attention, kind, n_blocks):
        block = spoiled_block(attention)
        initialize_block(block, n_blocks, kind)
        for name, rows, fan_in, fan_out in MAPS[attention] + FEEDFORWARD:
            weight = block.get_submodule(name).weight
            weight = weight if rows is None else weight[rows]
            assert weight.shape == (fan_out, fan_in)
            std = expected_std(kind, name, fan_in, fan_out)
            if name not in ("attention.out", "feedforward.down"):
                assert_normal(weight, std)
            elif kind == "zero_out":
                assert (weight == 0).all()
            else:
                assert_normal(weight, std / math.sqrt(2 * n_blocks))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("attention", ATTENTION)
    def test_all_else_is_zero_or_one(self, attention, kind):
        block = spoiled_block(attention)
        initialize_block(block, 3, kind)
        matrices = {f"{name}.weight" for name, *_ in MAPS[attention] + FEEDFORWARD}
        rest = {name: p for name, p in block.named_parameters() if name not in matrices}
        assert {name for name in rest if name.endswith("bias")} == (
            {"attention.qkv.bias"} if attention == "mha" else set()
        )
        for name, parameter in rest.items():
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name

    @pytest.mark.parametrize("kind, gain", [("kaiming", 0.25), ("mup", 0.25), ("zero_out", 0.0)])
    def test_behind_a_branch_its_norm_is_scaled(self, kind, gain):
        block = spoiled_block("gqa", norm_position="post")
        initialize_block(block, 8, kind)
        for norm in (block.attention_norm, block.feedforward_norm):
            assert (norm.weight == gain).all()
        assert (block.attention.q_norm.weight == 1).all()
        for name, _, fan_in, fan_out in FEEDFORWARD:
            std = expected_std(kind, name, fan_in, fan_out)
            assert_normal(block.get_submodule(name).weight, std)

    @pytest.mark.parametrize("position", ["pre", "post"])
    @pytest.mark.parametrize("arguments", [(), ("normal",)])
    def test_normal_draws_what_it_always_drew(self, arguments, position):
        block = spoiled_block("gqa", norm_position=position)
        torch.manual_seed(5)
        initialize_block(block, 6, *arguments)
        torch.manual_seed(5)
        for name in (
            "attention.qkv",
            "attention.out",
            "feedforward.gate",
            "feedforward.up",
            "feedforward.down",
        ):
            weight = block.get_submodule(name).weight
            std = 0.02 / math.sqrt(12) if name in ("attention.out", "feedforward.down") else 0.02
            assert torch.equal(weight, torch.empty_like(weight).normal_(0.0, std)), name
        assert (block.attention_norm.weight == 1).all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_frozen_stays_frozen(self, kind):
        block = spoiled_block("mla", freeze_up_proj=True)
        initialize_block(block, 1, kind)
        frozen = [name for name, p in block.named_parameters() if not p.requires_grad]
        assert frozen == ["feedforward.up.weight"]
        assert all(p.is_leaf and p.grad_fn is None for p in block.parameters())

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_rack_is_initialised_with_its_whole_depth(self, kind):
        torch.manual_seed(0)
        rack = create_simple_rack(2, 4, 64, 128, 4, 100)
        for parameter in rack.parameters():
            parameter.data.fill_(7.0)
        initialize_rack(rack, kind, 64 if kind == "mup" else None)
        std = {"normal": 0.02, "kaiming": 1 / 8, "xavier": 1 / 8, "small": 0.0790569, "mup": 1 / 8}
        for stack in rack.stacks:
            for block in stack.blocks:
                if kind == "zero_out":
                    assert (block.attention.out.weight == 0).all()
                else:
                    assert_normal(block.attention.out.weight, std[kind] / 4)
        assert (rack.final_norm.weight == 1).all()
        assert_normal(rack.embedding.weight, 0.02)


class TestEnds:
    # Tied, at base 64 with 64 tokens: ln(1 + 0.03 * 64) / 64. The head's is sqrt(0.06 / base), at most 0.02.
    @pytest.mark.parametrize(
        "width, base, tied, embedding, head, gain",
        [
            (64, 64, True, 0.016743, 0.016743, 1.0),
            (256, 64, True, 0.016743, 0.016743, 0.25),
            (16, 64, True, 0.016743 / 2, 0.016743 / 2, 4.0),
            (64, 64, False, 0.02, 0.02, 1.0),
            (256, 64, False, 0.02, 0.02, 0.25),
            (1024, 512, False, 0.02, 0.010825, 0.5),
            (128, 512, False, 0.02, 0.010825 / 2, 4.0),
        ],
    )
    def test_of_mup_are_those_of_the_base(self, width, base, tied, embedding, head, gain):
        rack = make_rack("mup", width, 1, base=base, d_ff=8, tie_embeddings=tied)
        tolerance = 1e-4 + SIGMAS / math.sqrt(2 * 64 * width)
        assert rack.embedding.weight.std().item() == pytest.approx(embedding, rel=tolerance)
        assert rack.lm_head.weight.std().item() == pytest.approx(head, rel=tolerance)
        assert (rack.final_norm.weight == gain).all()
        assert (rack.lm_head.weight is rack.embedding.weight) == tied

    def test_alone_leave_the_blocks(self):
        rack = make_rack("kaiming")
        before = copy.deepcopy(rack.stacks.state_dict())
        embedding = rack.embedding.weight.clone()
        initialize_ends(rack)
        assert all(torch.equal(before[name], w) for name, w in rack.stacks.state_dict().items())
        assert not torch.equal(rack.embedding.weight, embedding)

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize(
        "width, vocab_size, depth, position",
        [(32, 256, 12, "pre"), (128, 8, 2, "post"), (256, 4000, 2, "pre")],
    )
    @pytest.mark.parametrize("kind, base", [*((kind, 1) for kind in KINDS), ("mup", 0.25), ("mup", 4)])
    @torch.no_grad()
    def test_first_loss_is_that_of_guessing(self, width, vocab_size, depth, position, kind, base, tied):
        rack = make_rack(
            kind,
            width,
            depth,
            vocab_size,
            base=int(base * width),
            n_heads=4,
            d_ff=width,
            tie_embeddings=tied,
            norm_position=position,
        )
        loss = loss_of(rack, torch.randint(vocab_size, (8, 65)))
        assert abs(loss.item() - math.log(vocab_size)) < 0.1

    @torch.no_grad()
    def test_first_loss_where_nothing_drowns_a_large_tied_embedding(self):
        rack = make_rack("zero_out", 1024, 1, 8, d_ff=8, n_heads=2)
        assert abs(loss_of(rack, torch.randint(8, (8, 65))).item() - math.log(8)) < 0.1


class TestResidualStream:
    @torch.no_grad()
    def size(self, kind, depth, *, as_deep_as=None, **options):
        rack = make_rack(kind, 64, depth, 256, n_kv_heads=2, **options)
        for block in rack.get_stack(0).blocks:
            initialize_block(block, as_deep_as or depth, kind)
        x = rack.embed(torch.randint(256, (4, 32)))
        return rack.forward_from_stack(x, 0).square().mean().sqrt().item()

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero_out"])
    def test_does_not_grow_with_depth(self, kind):
        sizes = [self.size(kind, depth) for depth in (2, 6, 24)]
        assert max(sizes) < 1.6 * min(sizes)
        assert self.size(kind, 24, as_deep_as=1) > 3 * self.size(kind, 2, as_deep_as=1)

    @pytest.mark.parametrize("kind", ["kaiming", "xavier", "small", "mup"])
    def test_behind_norms_is_one(self, kind):
        # 2 * depth branches of mean square 1 / (2 * depth), all but independent, and an embedding of 0.02.
        for depth in (2, 24):
            assert self.size(kind, depth, norm_position="post") == pytest.approx(1.0, abs=0.12)

    @torch.no_grad()
    def test_kaiming_keeps_the_size_of_what_passes(self):
        # silu(g) * u of independent normal numbers has the mean square E[silu(g)^2] = 0.3558.
        block = Block(256, 1024, 4)
        torch.manual_seed(0)
        initialize_block(block, 1, "kaiming")
        x = torch.randn(64, 256)
        assert block.attention.qkv(x).square().mean().item() == pytest.approx(1.0, rel=0.05)
        branch = block.feedforward(x) * math.sqrt(2)
        assert branch.square().mean().item() == pytest.approx(2 * 0.3558, rel=0.05)


@pytest.mark.parametrize("position", ["pre", "post"])
class TestZeroOut:
    @pytest.mark.parametrize("attention", ATTENTION)
    @torch.no_grad()
    def test_block_is_the_identity(self, attention, position):
        block = spoiled_block(attention, norm_position=position)
        initialize_block(block, 2, "zero_out")
        x = torch.randn(2, 9, WIDTH)
        assert torch.equal(block(x), x)
        initialize_block(block, 2, "kaiming")
        assert not torch.allclose(block(x), x, atol=0.1)

    @pytest.mark.parametrize("attention", ATTENTION)
    def test_block_trains(self, attention, position):
        torch.manual_seed(0)
        block = Block(WIDTH, INNER, HEADS, **ATTENTION[attention], norm_position=position)
        initialize_block(block, 2, "zero_out")
        zeros = {
            "pre": ("attention.out.weight", "feedforward.down.weight"),
            "post": ("attention_norm.weight", "feedforward_norm.weight"),
        }[position]
        optimizer = torch.optim.Adam(block.parameters(), 1e-3)
        x, target = torch.randn(2, 2, 9, WIDTH)
        losses = []
        for step in range(5):
            loss = F.mse_loss(block(x), target)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            for name, parameter in block.named_parameters():
                assert parameter.grad.isfinite().all(), name
                # A bias of the keys moves every logit of a query alike, which softmax does not see.
                moving = parameter.grad.abs().max() > 0
                assert moving == (step > 0 or name in zeros), name
            optimizer.step()
        assert losses == sorted(losses, reverse=True)


class TestLearningRates:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize(
        "attention, matrices, rest",
        [
            ("mha", ["qkv", "out"], ["qkv.bias"]),
            ("gqa", ["qkv", "out"], ["q_norm.weight", "k_norm.weight"]),
            ("kernel", ["qkv", "out"], []),
            ("mla", ["q_down", "q_up", "kv_down", "kv_up", "out"], ["q_norm.weight", "kv_norm.weight"]),
            ("mla, full queries", ["q_up", "kv_down", "kv_up", "out"], ["kv_norm.weight"]),
        ],
    )
    def test_of_every_parameter(self, attention, matrices, rest, tied):
        rack = create_simple_rack(2, 1, WIDTH, INNER, HEADS, 11, tie_embeddings=tied, **ATTENTION[attention])
        expected = {"embedding.weight": 1.0, "final_norm.weight": 0.5}
        if not tied:
            expected["lm_head.weight"] = 1.0
        for stack in (0, 1):
            block = f"stacks.{stack}.blocks.0."
            expected |= {f"{block}attention.{name}.weight": 0.5 for name in matrices}
            expected |= {f"{block}attention.{name}": 1.0 for name in rest}
            expected |= {f"{block}feedforward.{name}.weight": 0.5 for name in ("gate", "up", "down")}
            expected |= {f"{block}{name}_norm.weight": 1.0 for name in ("attention", "feedforward")}
        assert learning_rate_multipliers(rack, WIDTH // 2) == expected

    def test_of_the_base_are_one(self):
        rack = make_rack("mup")
        assert set(learning_rate_multipliers(rack, 64).values()) == {1.0}

    @pytest.mark.parametrize("tied", [True, False])
    def test_steps_are_those_of_a_multiplier_on_the_logits(self, tied):
        """Table 8 of arXiv:2203.03466 written out: logits * base / width, gain and head as in the base."""
        rack = make_rack("mup", 64, base=16, tie_embeddings=tied).double()
        twin = copy.deepcopy(rack)
        twin.final_norm.weight.data.fill_(1.0)
        if tied:
            assert twin.lm_head.weight is twin.embedding.weight
        ids = torch.randint(64, (2, 9))
        racks = []
        for model, multiplier, gain_lr in ((rack, 1.0, 0.25), (twin, 0.25, 1.0)):
            matrices = [p for p in model.stacks.parameters() if p.ndim == 2]
            known = {id(p) for p in matrices} | {id(model.final_norm.weight)}
            groups = [
                {"params": matrices, "lr": 0.25 * 0.01},
                {"params": [model.final_norm.weight], "lr": gain_lr * 0.01},
                {"params": [p for p in model.parameters() if id(p) not in known], "lr": 0.01},
            ]
            optimizer = torch.optim.Adam(groups, eps=1e-30)
            for _ in range(4):
                logits = multiplier * model(ids[:, :-1])
                optimizer.zero_grad()
                F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
                optimizer.step()
            racks.append(multiplier * model(ids))
        torch.testing.assert_close(*racks, rtol=1e-9, atol=1e-12)


class TestCoordinates:
    """How far a few steps of Adam move what a Rack computes, at two widths."""

    WIDTHS = (64, 256)

    @torch.no_grad()
    def coordinates(self, rack, ids):
        stream = [rack.embed(ids)]
        for i in range(2):
            stream.append(rack.get_stack(0).forward_from_block(stream[-1], i, i + 1))
        return [*stream[1:], rack.head(stream[-1])]

    def movement(self, kind, width, seed, *, multiplied=True, **options):
        if options.get("attention_type") == "mla":
            sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
            ranks = {"kv_lora_rank": 3 * width // 8, "q_lora_rank": width // 2}
            options["latent"] = ranks | sizes
        if options.get("attention_type") == "gqa":
            options["n_kv_heads"] = width // 32
        rack = make_rack(kind, width, base=64, seed=seed, **options)
        ids = torch.randint(64, (4, 17))
        multipliers = dict.fromkeys(dict(rack.named_parameters()), 1.0)
        if kind == "mup" and multiplied:
            multipliers = learning_rate_multipliers(rack, 64)
        optimizer = torch.optim.Adam(
            [{"params": [p], "lr": 2e-4 * multipliers[name]} for name, p in rack.named_parameters()]
        )
        before = self.coordinates(rack, ids)
        moved = []
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(rack, ids).backward()
            optimizer.step()
            pairs = zip(self.coordinates(rack, ids), before, strict=True)
            moved.append([(x - x_before).square().mean().sqrt() for x, x_before in pairs])
        return torch.tensor(moved)

    def slopes(self, kind, **options):
        """Of log movement over log width: (steps, block 1, block 2 and logits)."""
        moved = [
            torch.stack([self.movement(kind, width, seed, **options).log() for seed in range(3)]).mean(0)
            for width in self.WIDTHS
        ]
        return (moved[1] - moved[0]) / math.log(4)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"tie_embeddings": False},
            {"attention_type": "gqa", "qk_norm": "head"},
            {"attention_type": "mla"},
            {"attention_type": "kernel"},
            {"norm_position": "post"},
        ],
        ids=str,
    )
    def test_move_alike_at_every_width(self, options):
        slopes = self.slopes("mup", **options)
        assert slopes[:, :2].abs().max() < 0.15
        # What the random head of the start makes of the movement averages out with the width.
        assert -0.45 < slopes[:, 2].min() < slopes[:, 2].max() < 0.1

    @pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
    @pytest.mark.parametrize(
        "kind, least", [("normal", 1.3), ("kaiming", 0.45), ("xavier", 0.45), ("small", 0.6)]
    )
    def test_move_more_the_wider_without_mup(self, kind, least, tied):
        assert self.slopes(kind, tie_embeddings=tied)[:, :2].min() > least

    def test_move_more_the_wider_without_its_learning_rates(self):
        assert self.slopes("mup", multiplied=False)[:, :2].min() > 0.45


class TestRefusals:
    @pytest.mark.parametrize("kind", ["he", "", None, 3])
    def test_unknown_kind(self, kind):
        with pytest.raises(ValueError, match=r"kind: got .*; allowed: 'normal', 'kaiming'.*'mup'"):
            initialize_block(Block(16, 16, 2), 1, kind)
        with pytest.raises(ValueError, match="kind: got"):
            initialize_rack(create_simple_rack(1, 1, 16, 16, 2, 8), kind)

    @pytest.mark.parametrize("n_blocks", [0, -1, 1.0, True])
    def test_depth(self, n_blocks):
        with pytest.raises(ValueError, match=r"n_blocks: got .*; allowed: an integer >= 1"):
            initialize_block(Block(16, 16, 2), n_blocks)

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mup"])
    def test_a_base_that_nothing_reads(self, kind):
        rack = create_simple_rack(1, 1, 16, 16, 2, 8)
        for initialize in (initialize_rack, initialize_ends):
            with pytest.raises(ValueError, match=rf"base_width: got 16; allowed: None, since kind='{kind}'"):
                initialize(rack, kind, 16)

    @pytest.mark.parametrize("base_width", [None, 0, -16, 16.0, True])
    def test_mup_without_a_base(self, base_width):
        rack = create_simple_rack(1, 1, 16, 16, 2, 8)
        before = copy.deepcopy(rack.state_dict())
        for initialize in (initialize_rack, initialize_ends):
            with pytest.raises(ValueError, match=r"base_width: got .*; allowed: an integer >= 1"):
                initialize(rack, "mup", base_width)
        with pytest.raises(ValueError, match="base_width: got"):
            learning_rate_multipliers(rack, base_width)
        assert all(torch.equal(before[name], weight) for name, weight in rack.state_dict().items())

    @pytest.mark.parametrize(
        "refused, options",
        [
            ("n_heads=3", {"n_heads": 3}),
            ("n_kv_heads=3", {"n_heads": 6, "n_kv_heads": 3}),
            ("n_kv_heads=1", {"n_heads": 6, "attention_type": "mqa"}),
            ("n_kv_heads=1", {"n_heads": 6, "n_kv_heads": 1, "attention_type": "kernel"}),
            (
                "kv_lora_rank=41",
                {"n_heads": 6, "attention_type": "mla", "latent": LATENT | {"kv_lora_rank": 41}},
            ),
            (
                "q_lora_rank=57",
                {"n_heads": 6, "attention_type": "mla", "latent": LATENT | {"q_lora_rank": 57}},
            ),
        ],
    )
    def test_a_base_of_parts(self, refused, options):
        rack = create_simple_rack(1, 2, 96, 16, vocab_size=8, **options)
        for base_width in (96, 192):
            initialize_rack(rack, "mup", base_width)
        for refuse in (lambda: initialize_rack(rack, "mup", 48), lambda: learning_rate_multipliers(rack, 48)):
            with pytest.raises(ValueError, match=rf"base_width: got 48; .* of {refused} is .*d_model=96"):
                refuse()

    def test_a_base_of_whole_heads_and_ranks(self):
        create = partial(create_simple_rack, 1, 1, 96, 16, 6, 8)
        for rack in (create(n_kv_heads=2), create(attention_type="mla", latent=LATENT)):
            assert learning_rate_multipliers(rack, 48)["stacks.0.blocks.0.attention.out.weight"] == 0.5


class TestConfigured:
    def config(self, **model):
        sizes = {"vocab_size": 64, "d_model": 64, "d_ff": 96, "n_heads": 4, "n_kv_heads": 2}
        stacks = {"architecture": {"n_stacks": 2, "blocks_per_stack": 3}}
        return StackWiseConfig.from_dict({"model": sizes | stacks | model})

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("kind", KINDS)
    def test_racks_are_as_initialize_rack_leaves_them(self, kind, tied):
        base = 32 if kind == "mup" else None
        keys = {"initialization": kind, "mup_base_width": base, "tie_embeddings": tied}
        racks = [create_rack_from_config(self.config(**keys))]
        blocks = {"n_kv_heads": 2, "initialization": kind, "mup_base_width": base}
        racks.append(create_simple_rack(2, 3, 64, 96, 4, 64, tie_embeddings=tied, **blocks))
        expected = create_simple_rack(2, 3, 64, 96, 4, 64, 2, tie_embeddings=tied)
        initialize_rack(expected, kind, base)
        for rack in racks:
            assert rack.mup_base_width == expected.mup_base_width == base
            for (name, weight), wanted in zip(rack.named_parameters(), expected.parameters(), strict=True):
                if (wanted == wanted.flatten()[0]).all():
                    assert torch.equal(weight, wanted), name
                else:
                    assert_normal(weight / wanted.std(), 1.0)

    def test_a_bound_on_the_embedding(self):
        rack = create_rack_from_config(self.config(embedding_max_norm=0.25))
        assert isinstance(rack.embedding, BoundedEmbedding)
        assert rack.embedding.bound == 0.25
        assert rack.lm_head.weight is rack.embedding.weight
        assert type(create_rack_from_config(self.config()).embedding) is TokenEmbedding

    @pytest.mark.parametrize(
        "keys, refused",
        [
            ({"initialization": "mup"}, r"mup_base_width: got None .*needs the d_model of the base"),
            ({"mup_base_width": 32}, r"mup_base_width: got 32 .*initialization='normal'"),
            ({"initialization": "mup", "mup_base_width": 0}, "mup_base_width: got 0 "),
            ({"initialization": "he"}, "initialization: got 'he'"),
            ({"embedding_max_norm": 0.0}, "embedding_max_norm: got 0.0 "),
        ],
    )
    def test_refusals(self, keys, refused):
        with pytest.raises(ValueError, match=refused):
            self.config(**keys)

    def test_a_base_of_parts_is_refused(self):
        config = self.config(initialization="mup", mup_base_width=24)
        with pytest.raises(ValueError, match=r"base_width: got 24; .*n_heads=4"):
            create_rack_from_config(config)

    def test_stacks_of_two_bases_are_refused(self):
        specs = [
            {"n_blocks": 1, "block_spec": create_block_spec(64, n_heads=4, **keys)}
            for keys in ({}, {"initialization": "mup", "mup_base_width": 32})
        ]
        with pytest.raises(ValueError, match=r"mup_base_width of stack 0: got None; allowed: 32"):
            create_rack_from_specs(8, 64, specs)
