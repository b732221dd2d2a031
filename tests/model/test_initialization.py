"""The first loss, the residual stream, and the distribution of every weight."""

import math

import pytest
import torch
import torch.nn.functional as F

from stackwise.model import (
    Block,
    create_block_spec,
    create_rack_from_config,
    create_rack_from_specs,
    create_simple_rack,
)

# d_model, vocabulary, tied, depth, norm: every pair of values occurs, every pair of width and vocabulary
# both tied and untied.
FIRST_LOSS = [
    (32, 8, True, 2, "rmsnorm"),
    (32, 8, False, 12, "layernorm"),
    (32, 256, True, 12, "layernorm"),
    (32, 256, False, 2, "rmsnorm"),
    (32, 10_000, True, 12, "rmsnorm"),
    (32, 10_000, False, 2, "layernorm"),
    (128, 8, True, 12, "rmsnorm"),
    (128, 8, False, 2, "layernorm"),
    (128, 256, True, 2, "layernorm"),
    (128, 256, False, 12, "rmsnorm"),
    (128, 10_000, True, 2, "rmsnorm"),
    (128, 10_000, False, 12, "layernorm"),
    (512, 8, True, 2, "layernorm"),
    (512, 8, False, 12, "rmsnorm"),
    (512, 256, True, 12, "rmsnorm"),
    (512, 256, False, 2, "layernorm"),
    (512, 10_000, True, 2, "rmsnorm"),
    (512, 10_000, False, 2, "layernorm"),
    (1024, 8, True, 2, "rmsnorm"),
    (1024, 8, False, 2, "layernorm"),
    (1024, 256, True, 2, "layernorm"),
    (1024, 256, False, 2, "rmsnorm"),
    (1024, 10_000, True, 12, "layernorm"),
    (1024, 10_000, False, 2, "rmsnorm"),
]
# d_model, vocabulary, tied, and the standard deviations of embedding and head. The head adds half the
# variance of its logits to the loss, d_model * std^2 / 2, which sqrt(0.06 / d_model) holds at 0.03 nat. Tied,
# a token's own logit of up to std * d_model adds ln(1 + (e^logit - 1) / vocabulary), held at 0.03 nat too.
EMBEDDING_STD = [
    (32, 1000, False, 0.02, 0.02),
    (640, 1000, False, 0.02, 0.009682),
    (32, 1000, True, 0.02, 0.02),
    (512, 10_000, True, 0.01083, 0.01083),
    (640, 10_000, True, 0.008917, 0.008917),
    (512, 256, True, 0.004221, 0.004221),
    (1024, 8, True, 0.002, 0.002),
]
# A sample standard deviation has a relative standard error of 1 / sqrt(2n); five of those.
SIGMAS = 5


def make_rack(d_model, vocab_size, depth, *, d_ff=None, norm="rmsnorm", n_kv_heads=1, **kwargs):
    return create_simple_rack(
        1,
        depth,
        d_model,
        d_ff or d_model,
        n_heads=max(1, d_model // 64),
        vocab_size=vocab_size,
        n_kv_heads=n_kv_heads,
        norm=norm,
        **kwargs,
    )


@torch.no_grad()
def first_loss(rack):
    ids = torch.randint(rack.vocab_size, (8, 33))
    return F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()


def assert_normal(weight, std):
    weight = weight.detach().double()
    n = weight.numel()
    assert abs(weight.mean().item()) < SIGMAS * std / math.sqrt(n)
    assert abs(weight.std().item() / std - 1) < SIGMAS / math.sqrt(2 * n)
    # 0.9545 of a normal distribution, 1 of a uniform one, lies within two standard deviations.
    share = (weight.abs() < 2 * std).double().mean().item()
    assert abs(share - math.erf(math.sqrt(2))) < SIGMAS * math.sqrt(0.9545 * 0.0455 / n)


class TestFirstLoss:
    @pytest.mark.parametrize("d_model, vocab_size, tied, depth, norm", FIRST_LOSS)
    def test_is_that_of_guessing(self, d_model, vocab_size, tied, depth, norm):
        rack = make_rack(d_model, vocab_size, depth, norm=norm, tie_embeddings=tied)
        assert abs(first_loss(rack) - math.log(vocab_size)) < 0.1

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("d_ff", [32, 4096])
    @pytest.mark.parametrize(
        "block",
        [
            {},
            {"use_rope": False},
            {"attention_mode": "bidirectional"},
            {"attention_type": "mqa", "head_dim": 16, "qkv_bias": True},
            {"attention_type": "mla", "n_kv_heads": None},
            {"attention_type": "kernel"},
            {"qk_norm": "head", "softcap": 5.0},
            {"norm_position": "post"},
        ],
        ids=str,
    )
    def test_whatever_the_block(self, block, d_ff, tied):
        rack = make_rack(128, 256, 2, d_ff=d_ff, tie_embeddings=tied, **block)
        assert abs(first_loss(rack) - math.log(256)) < 0.1

    def test_of_a_naive_embedding(self):
        rack = make_rack(512, 256, 2, tie_embeddings=True)
        torch.nn.init.normal_(rack.embedding.weight)
        assert first_loss(rack) > 100

    def test_of_racks_built_from_specs(self):
        specs = [
            {"n_blocks": 2, "block_spec": create_block_spec(128, 256, 2, norm=n)}
            for n in ("rmsnorm", "layernorm")
        ]
        assert abs(first_loss(create_rack_from_specs(256, 128, specs)) - math.log(256)) < 0.1


class TestResidualStream:
    @torch.no_grad()
    def growth(self, depth, norm, spoil=False):
        rack = make_rack(64, 256, depth, d_ff=256, norm=norm)
        if spoil:
            for block in rack.get_stack(0).blocks:
                for weight in (block.attention.out.weight, block.feedforward.down.weight):
                    torch.nn.init.normal_(weight, std=0.2)
        x = rack.embed(torch.randint(256, (4, 32)))
        return rack.forward_from_stack(x, 0).square().mean().sqrt().item()

    @pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
    def test_does_not_grow_with_depth(self, norm):
        sizes = [self.growth(depth, norm) for depth in (2, 6, 24)]
        assert max(sizes) < 3 * min(sizes)
        assert self.growth(24, norm, spoil=True) > 3 * self.growth(2, norm, spoil=True)

    def test_gradients_reach_the_first_block(self):
        rack = make_rack(64, 256, 24, d_ff=256)
        ids = torch.randint(256, (4, 33))
        F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        blocks = list(rack.get_stack(0).blocks)
        for part in ("attention.qkv", "attention.out", "feedforward.gate", "feedforward.down"):
            first, last = (block.get_submodule(part).weight.grad.norm() for block in (blocks[0], blocks[-1]))
            assert 0.05 < first / last < 20


class TestWeights:
    @pytest.mark.parametrize("n_stacks, blocks_per_stack", [(1, 1), (1, 4), (3, 2)])
    def test_blocks(self, n_stacks, blocks_per_stack):
        rack = create_simple_rack(n_stacks, blocks_per_stack, 64, 128, 4, 100, n_kv_heads=2)
        into_residual = 0.02 / math.sqrt(2 * n_stacks * blocks_per_stack)
        for stack in rack.stacks:
            for block in stack.blocks:
                for name, std in [
                    ("attention.qkv", 0.02),
                    ("attention.out", into_residual),
                    ("feedforward.gate", 0.02),
                    ("feedforward.up", 0.02),
                    ("feedforward.down", into_residual),
                ]:
                    assert_normal(block.get_submodule(name).weight, std)

    def test_biases_are_zero(self):
        rack = create_simple_rack(1, 2, 32, 32, 2, 100, qkv_bias=True)
        for block in rack.get_stack(0).blocks:
            assert (block.attention.qkv.bias == 0).all()

    def test_latent_attention(self):
        rack = create_simple_rack(1, 2, 64, 128, 4, 100, attention_type="mla", latent={"q_lora_rank": 48})
        for block in rack.get_stack(0).blocks:
            for name in ("q_down", "q_up", "kv_down", "kv_up"):
                assert_normal(block.attention.get_submodule(name).weight, 0.02)
            assert_normal(block.attention.out.weight, 0.02 / 2)

    def test_depth_is_that_of_the_whole_rack(self):
        stacks = [{"n_blocks": n, "block_spec": create_block_spec(64)} for n in (1, 7)]
        rack = create_rack_from_specs(100, 64, stacks)
        for stack in rack.stacks:
            assert_normal(stack.get_block(0).attention.out.weight, 0.02 / 4)
        sizes = {"d_model": 64, "n_heads": 4, "architecture": {"n_stacks": 2, "blocks_per_stack": 4}}
        rack = create_rack_from_config({"model": sizes})
        for stack in rack.stacks:
            assert_normal(stack.get_block(0).attention.out.weight, 0.02 / 4)

    @pytest.mark.parametrize("d_model, vocab_size, tied, embedding, head", EMBEDDING_STD)
    def test_embedding_and_head(self, d_model, vocab_size, tied, embedding, head):
        rack = make_rack(d_model, vocab_size, 1, d_ff=8, tie_embeddings=tied)
        # The table gives four digits.
        tolerance = 1e-3 + SIGMAS / math.sqrt(2 * d_model * vocab_size)
        assert rack.embedding.weight.std().item() == pytest.approx(embedding, rel=tolerance)
        assert rack.lm_head.weight.std().item() == pytest.approx(head, rel=tolerance)
        assert_normal(rack.embedding.weight / rack.embedding.weight.std(), 1.0)

    @pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
    def test_norms_are_one(self, norm):
        rack = create_simple_rack(2, 2, 32, 32, 2, 100, norm=norm)
        weights = [weight for name, weight in rack.named_parameters() if "norm" in name]
        assert len(weights) == 2 * 4 + 1
        assert all((weight == 1).all() for weight in weights)

    def test_blocks_differ_from_each_other(self):
        rack = create_simple_rack(2, 2, 32, 32, 2, 100)
        weights = [block.attention.qkv.weight for stack in rack.stacks for block in stack.blocks]
        for i, weight in enumerate(weights):
            assert not any(torch.equal(weight, other) for other in weights[:i])

    def test_the_seed_decides(self):
        def build(seed):
            torch.manual_seed(seed)
            return create_simple_rack(1, 2, 32, 32, 2, 100, tie_embeddings=False).state_dict()

        first, again, other = build(1), build(1), build(2)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)

    def test_frozen_up_projection_is_random(self):
        rack = create_simple_rack(1, 2, 64, 128, 2, 100, freeze_up_proj=True)
        for block in rack.get_stack(0).blocks:
            assert isinstance(block, Block)
            assert_normal(block.feedforward.up.weight, 0.02)
