"""Quantised Stacks against the formats written out, and what is left of the Rack around them."""

import copy
import sys

import pytest
import torch
from torch import nn

from stackwise.model import Stack, create_block_spec, create_simple_rack
from stackwise.model.build import create_stack_from_spec
from stackwise.model.initialization import initialize_block, initialize_rack
from stackwise.model.quantization import QuantizedLinear, quantize_stack
from stackwise.model.stack_cache import StackCache
from stackwise.model.surgery import append_stack, fuse_stacks, remove_stack, set_identity, unfreeze_stack
from stackwise.training.master import MasterAdamW

WIDTH, VOCAB = 64, 29
IDS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
KINDS = {
    "gqa": {"n_kv_heads": 2, "qkv_bias": True, "sliding_window": 4},
    "mla": {"attention_type": "mla", "latent": LATENT},
    "kernel": {"attention_type": "kernel", "kernel": {"n_features": 16}},
}
DTYPES = ("int8", "int4", "fp8")
# Relative error of the weights of a normal matrix: rounding to 1/127.5 of the largest of 64; to 1/15 of the
# range of 32; to 4 bits of precision.
WEIGHT_ERROR = {"int8": (2e-3, 8e-3), "int4": (4e-2, 9e-2), "fp8": (1.5e-2, 4e-2)}


def make_rack(n_stacks=3, seed=0, **block):
    torch.manual_seed(seed)
    rack = create_simple_rack(n_stacks, 2, WIDTH, 96, 4, VOCAB, **block)
    with torch.no_grad():
        for p in rack.parameters():
            p.mul_(4)
    return rack.eval()


@torch.no_grad()
def logits_of(rack, ids=IDS):
    return rack(ids)


@torch.no_grad()
def matrix_of(layer):
    """What a layer without bias multiplies with."""
    return torch.nn.functional.linear(torch.eye(layer.in_features), layer.weight).T


def linears(stack):
    return {name: module for name, module in stack.named_modules() if isinstance(module, nn.Linear)}


def written_out(weight, dtype):
    """The formats, in float64 where rounding allows."""
    w = weight.detach()
    if dtype == "int8":
        scale = w.abs().amax(1, keepdim=True) / 127.5
        return (w / scale).round().clamp(-128, 127) * scale
    if dtype == "fp8":
        scale = w.abs().amax(1, keepdim=True) / 448
        return (w / scale).to(torch.float8_e4m3fn).float() * scale
    groups = w.view(len(w), -1, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (high - low) / 15
    return (((groups - low) / scale).round().clamp(0, 15) * scale + low).view_as(w)


class TestFormats:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_are_those_of_the_format(self, kind, dtype):
        rack = make_rack(**KINDS[kind])
        before = copy.deepcopy(rack)
        report = quantize_stack(rack, 1, dtype)
        old, new = linears(before.get_stack(1)), linears(rack.get_stack(1))
        assert old.keys() == new.keys() == report.weight_error.keys() | report.left_out.keys()
        for name, error in report.weight_error.items():
            original = old[name].weight.detach()
            expected = written_out(original, dtype)
            actual = matrix_of(new[name])
            # What lies half-way between two steps goes to either, as the division is rounded.
            same = (actual - expected).abs() <= 1e-5 * expected.abs() + 1e-6
            assert same.double().mean() > 0.995
            assert error == pytest.approx(((expected - original).norm() / original.norm()).item(), rel=2e-3)
            assert WEIGHT_ERROR[dtype][0] < error < WEIGHT_ERROR[dtype][1], name
            if old[name].bias is not None:
                assert torch.equal(new[name].bias, old[name].bias)
        for name in report.left_out:
            assert new[name] is not old[name]
            assert type(new[name]) is type(old[name])
            assert torch.equal(new[name].weight, old[name].weight)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
    def test_bytes_are_counted(self, weights, dtype):
        rack = make_rack().to(weights)
        stack = rack.get_stack(0)
        before = sum(p.numel() for p in stack.parameters()) * weights.itemsize
        report = quantize_stack(rack, 0, dtype)
        assert report.bytes_before == before
        sizes = [(m.out_features, m.in_features) for m in linears(stack).values()]
        after = {
            # A float32 scale and an int8 zero point to each output.
            "int8": sum(n * k + 5 * n for n, k in sizes),
            "fp8": sum(n * k + 4 * n for n, k in sizes),
            # A scale and a zero point to each 32 inputs, in the dtype of the weights.
            "int4": sum(n * k // 2 + 2 * weights.itemsize * n * k // 32 for n, k in sizes),
        }[dtype]
        norms = 4 * WIDTH * weights.itemsize
        assert report.bytes_after == after + norms

    def test_buffers_count_too(self):
        rack = make_rack(**KINDS["kernel"])
        parts = [*rack.get_stack(0).parameters(), *rack.get_stack(0).buffers()]
        assert len(list(rack.get_stack(0).buffers())) == 2
        assert quantize_stack(rack, 0).bytes_before == sum(4 * each.numel() for each in parts)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_error_of_the_logits(self, dtype):
        rack = make_rack(dropout=0.5)
        before = logits_of(rack).double()
        rack.train()
        report = quantize_stack(rack, 1, dtype, IDS)
        assert all(module.training for module in rack.modules() if not isinstance(module, QuantizedLinear))
        difference = logits_of(rack.eval()).double() - before
        assert report.logits_error_max == pytest.approx((difference.abs().max() / before.abs().max()).item())
        assert report.logits_error_rms == pytest.approx((difference.norm() / before.norm()).item())
        assert 1e-4 < report.logits_error_rms < 0.3
        nothing = quantize_stack(rack, 0, dtype)
        assert (nothing.logits_error_max, nothing.logits_error_rms) == (None, None)

    def test_finer_formats_err_less(self):
        errors = [
            quantize_stack(make_rack(), 1, dtype, IDS).logits_error_rms for dtype in ("int8", "fp8", "int4")
        ]
        assert errors == sorted(errors)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_zeros(self, dtype):
        rack = make_rack()
        set_identity(rack.get_stack(1))
        expected = logits_of(rack)
        report = quantize_stack(rack, 1, dtype, IDS)
        assert torch.equal(logits_of(rack), expected)
        assert report.logits_error_max == 0
        ends = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attention.out", "feedforward.down")]
        if dtype == "fp8":
            assert list(report.left_out) == ends
            assert "a row of zeros" in report.left_out[ends[0]]
        else:
            assert [report.weight_error[name] for name in ends] == [0, 0, 0, 0]


class TestLeftOut:
    def test_latent_that_decoding_reads(self):
        report = quantize_stack(make_rack(**KINDS["mla"]), 0)
        assert list(report.left_out) == ["blocks.0.attention.kv_up", "blocks.1.attention.kv_up"]
        assert "decoding reads its weight" in report.left_out["blocks.0.attention.kv_up"]

    def test_groups_that_do_not_fit(self):
        rack = create_simple_rack(1, 1, 64, 40, 4, VOCAB)
        report = quantize_stack(rack, 0, "int4")
        assert report.left_out == {
            "blocks.0.feedforward.gate": "out_features=40 is no multiple of 16, which the CPU kernel needs",
            "blocks.0.feedforward.up": "out_features=40 is no multiple of 16, which the CPU kernel needs",
            "blocks.0.feedforward.down": "in_features=40 is no multiple of group_size=32",
        }
        assert logits_of(rack).isfinite().all()
        assert quantize_stack(create_simple_rack(1, 1, 64, 40, 4, VOCAB), 0, "int8").left_out == {}

    def test_larger_groups_err_more_and_take_less(self):
        reports = [quantize_stack(make_rack(), 0, "int4", group_size=size) for size in (32, 64)]
        assert "blocks.0.feedforward.down" in reports[1].left_out
        name = "blocks.0.attention.qkv"
        assert reports[0].weight_error[name] < reports[1].weight_error[name]

    def test_the_rest_of_the_rack_is_as_it_was(self):
        rack = make_rack(tie_embeddings=False)
        before = {name: (id(p), p.clone(), p.requires_grad) for name, p in rack.named_parameters()}
        names = set(quantize_stack(rack, 1).weight_error)
        for name, p in rack.named_parameters():
            identity, value, trained = before[name]
            inside = name.startswith("stacks.1.")
            if name.removeprefix("stacks.1.").removesuffix(".weight") not in names:
                assert id(p) == identity
                assert torch.equal(p, value)
            assert p.requires_grad == (trained and not inside)


class TestUse:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_cached_is_the_full_pass(self, kind, dtype):
        rack = make_rack(**KINDS[kind])
        for index in range(3):
            quantize_stack(rack, index, dtype)
        cache, full = rack.new_cache(2, 9), logits_of(rack)
        with torch.no_grad():
            pieces = [rack(part, cache=cache) for part in IDS.split([4, 1, 1, 3], dim=1)]
        torch.testing.assert_close(
            torch.cat(pieces, dim=1), full, rtol=1e-4, atol=1e-4 * full.abs().max().item()
        )

    def test_generates(self):
        rack = make_rack()
        quantize_stack(rack, 0)
        tokens = rack.generate(IDS, max_new_tokens=4)
        expected = IDS
        for _ in range(4):
            expected = torch.cat((expected, logits_of(rack, expected)[:, -1:].argmax(-1)), dim=1)
        assert torch.equal(tokens[:, -4:], expected[:, -4:])

    def test_int8_follows_a_cast(self):
        rack = make_rack()
        quantize_stack(rack, 1, "int8")
        expected = logits_of(rack)
        logits = logits_of(rack.bfloat16())
        assert logits.dtype == torch.bfloat16
        assert (logits - expected).norm() < 0.05 * expected.norm()

    @pytest.mark.parametrize("dtype", ["int4", "fp8"])
    def test_a_cast_that_the_format_does_not_follow(self, dtype):
        rack = make_rack()
        quantize_stack(rack, 1, dtype)
        expected = logits_of(rack)
        message = (
            r"input of a quantised layer: got torch.float64; allowed: torch.float32, .* cast the Rack, then"
        )
        with pytest.raises(ValueError, match=message):
            logits_of(rack.double())
        assert torch.equal(logits_of(rack.float()), expected)

    @pytest.mark.parametrize("dtype", ["int8", "fp8"])
    def test_gradients_pass_through(self, dtype):
        rack = make_rack()
        quantize_stack(rack, 1, dtype)
        twin = make_rack()
        for name, layer in linears(rack.get_stack(1)).items():
            with torch.no_grad():
                linears(twin.get_stack(1))[name].weight.copy_(matrix_of(layer))
        for each in (rack, twin):
            each(IDS).square().sum().backward()
        for index in (0, 2):
            parameters = zip(
                rack.get_stack(index).parameters(), twin.get_stack(index).parameters(), strict=True
            )
            for ours, theirs in parameters:
                torch.testing.assert_close(
                    ours.grad, theirs.grad, rtol=1e-4, atol=1e-4 * theirs.grad.abs().max().item()
                )
        assert all(p.grad is None for p in rack.get_stack(1).parameters())

    def test_gradients_do_not_pass_through_int4(self):
        rack = make_rack()
        quantize_stack(rack, 1, "int4")
        with pytest.raises(ValueError, match=r"input that requires grad.*int8 or fp8"):
            rack(IDS)
        rack.embedding.requires_grad_(False)
        rack.get_stack(0).freeze()
        rack(IDS).sum().backward()
        assert all(p.grad is not None for p in rack.get_stack(2).parameters())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_training_it_is_an_error(self, dtype):
        rack = make_rack()
        quantize_stack(rack, 0, dtype)
        rack.embedding.requires_grad_(False)
        rack(IDS)
        expected = logits_of(rack)
        rack.get_stack(0).unfreeze()
        with pytest.raises(ValueError, match=r"quantised weight: got .*frozen: call freeze\(\) of its Stack"):
            rack(IDS)
        assert torch.equal(logits_of(rack), expected)
        rack.get_stack(0).freeze()
        rack(IDS).sum().backward()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_autocast(self, kind, dtype):
        rack = make_rack(**KINDS[kind])
        rounding = []
        for _ in range(2):
            expected = logits_of(rack)
            with torch.autocast("cpu", torch.bfloat16):
                rounding.append(((logits_of(rack) - expected).norm() / expected.norm()).item())
            if len(rounding) == 1:
                quantize_stack(rack, 1, dtype)
        assert rounding[1] < 1.5 * rounding[0]

    @pytest.mark.slow
    def test_compiles_whole(self):
        rack = make_rack()
        for index, dtype in enumerate(DTYPES):
            quantize_stack(rack, index, dtype)
        compiled = torch.compile(rack, backend="eager", fullgraph=True)
        torch.testing.assert_close(logits_of(compiled), logits_of(rack))
        single = IDS[:1, :1]  # for which int8 has a product of its own
        torch.testing.assert_close(logits_of(compiled, single), logits_of(rack, single), rtol=1e-4, atol=1e-5)

    def test_copies_compute_the_same(self):
        rack = make_rack()
        for index, dtype in enumerate(DTYPES):
            quantize_stack(rack, index, dtype)
        assert torch.equal(logits_of(copy.deepcopy(rack)), logits_of(rack))
        other = make_rack(seed=1)
        for index, dtype in enumerate(DTYPES):
            quantize_stack(other, index, dtype)
        other.load_state_dict(rack.state_dict())
        assert torch.equal(logits_of(other), logits_of(rack))
        assert "weight=Int8Tensor" in repr(rack)

    def test_optimizer_forgets_the_stack(self):
        rack = make_rack()
        optimizer = torch.optim.AdamW(rack.parameters(), lr=1e-3)
        rack(IDS).sum().backward()
        optimizer.step()
        gone = {id(p) for p in rack.get_stack(1).parameters()}
        held = [p for p in optimizer.param_groups[0]["params"] if id(p) not in gone]
        quantize_stack(rack, 1, optimizer=optimizer)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in held]
        assert {id(p) for p in optimizer.state} == {id(p) for p in held}

    def test_what_another_stack_shares_trains_on(self):
        rack = make_rack().train()
        ours, theirs = (rack.get_stack(i).get_block(0) for i in (1, 2))
        theirs.feedforward.down.weight = ours.feedforward.down.weight
        theirs.attention_norm.weight = ours.attention_norm.weight
        shared = [theirs.feedforward.down.weight, theirs.attention_norm.weight]
        optimizer = torch.optim.AdamW(rack.parameters(), lr=1e-3)
        rack(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        quantize_stack(rack, 1, optimizer=optimizer)
        held = {id(p) for p in optimizer.param_groups[0]["params"]}
        assert (
            held == {id(p) for p in rack.parameters() if p.requires_grad} == {id(p) for p in optimizer.state}
        )
        before = [p.clone() for p in shared]
        assert all(id(p) in held for p in shared)
        assert isinstance(ours.feedforward.down, QuantizedLinear)
        rack(IDS).square().sum().backward()
        optimizer.step()
        assert not any(map(torch.equal, shared, before))

    def test_what_another_stack_shares_keeps_its_master(self):
        rack = make_rack().train()
        ours, theirs = (rack.get_stack(i).get_block(0) for i in (1, 2))
        theirs.attention_norm.weight = ours.attention_norm.weight
        optimizer = MasterAdamW(rack.parameters(), lr=1e-3)
        quantize_stack(rack, 1, optimizer=optimizer)
        rack(IDS).square().mean().backward()
        optimizer.step()
        assert theirs.attention_norm.weight in optimizer.state
        assert {p.dtype for p in rack.parameters() if p.dtype.is_floating_point} == {torch.bfloat16}
        optimizer.finish()
        assert theirs.attention_norm.weight.dtype == torch.float32

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_prefix_is_cached(self, dtype):
        rack, cache = make_rack(), StackCache(10**6)
        rack.freeze()
        plain = cache.prefix(rack, IDS, 2)
        quantize_stack(rack, 1, dtype)
        with torch.no_grad():
            for _ in range(2):
                expected = rack.forward_from_stack(rack.embed(IDS), 0, 2)
                assert torch.equal(cache.prefix(rack, IDS, 2), expected)
            assert not torch.equal(plain, expected)
            weight = linears(rack.get_stack(1))["blocks.0.attention.qkv"].weight
            for name in weight.__tensor_flatten__()[0]:
                inner = getattr(weight, name)
                inner.view(torch.uint8).view(-1)[0] ^= 1
                expected = rack.forward_from_stack(rack.embed(IDS), 0, 2)
                assert torch.equal(cache.prefix(rack, IDS, 2), expected)
        assert cache.statistics.hits == 1


class TestSurgery:
    def test_quantised_stacks_move_as_others_do(self):
        rack = make_rack()
        quantize_stack(rack, 1)
        expected = logits_of(rack)
        fuse_stacks(rack, 0, 2)
        assert torch.equal(logits_of(rack), expected)
        other = make_rack(4)
        moved = remove_stack(rack, 0)
        append_stack(other, moved)
        assert logits_of(other).isfinite().all()
        assert not any(p.requires_grad for p in moved.get_block(2).parameters())

    def test_new_stack_beside_a_quantised_one(self):
        rack = make_rack()
        optimizer = torch.optim.AdamW(rack.parameters(), lr=1e-3)
        quantize_stack(rack, 2, optimizer=optimizer)
        before = logits_of(rack)
        stack = create_stack_from_spec(0, 1, create_block_spec(WIDTH, 96, 4))
        append_stack(rack, stack, optimizer, identity=True)
        assert torch.equal(logits_of(rack), before)
        rack(IDS).sum().backward()
        optimizer.step()
        assert (stack.get_block(0).attention.out.weight != 0).any()

    @pytest.mark.parametrize("kind", KINDS)
    def test_beside_masters(self, kind):
        """What stays of the Stack is bfloat16 as the Rack is, and float32 again where the Rack is."""
        rack = make_rack(**KINDS[kind]).train()
        before = {name: p.detach().clone() for name, p in rack.get_stack(1).named_parameters()}
        optimizer = MasterAdamW(rack.parameters(), lr=0.0)
        report = quantize_stack(rack, 1, sample_ids=IDS, optimizer=optimizer)
        assert report.logits_error_rms < 0.1
        rack(IDS).sum().backward()
        optimizer.step()
        assert {p.dtype for p in rack.parameters() if p.dtype.is_floating_point} == {torch.bfloat16}
        with optimizer.full_precision(rack):
            assert logits_of(rack).isfinite().all()
        optimizer.finish()
        assert logits_of(rack).isfinite().all()
        for name, p in rack.get_stack(1).named_parameters():
            if type(p.data) is torch.Tensor:
                assert torch.equal(p, before[name]), name

    @pytest.mark.parametrize("dtype", ["int4", "fp8"])
    def test_masters_need_what_follows_casts(self, dtype):
        rack, other = make_rack(), make_rack().bfloat16()
        quantize_stack(other, 1, dtype)
        optimizer = MasterAdamW(rack.parameters(), lr=0.0)
        with pytest.raises(ValueError, match=f"dtype: got '{dtype}'; allowed: int8 beside masters"):
            quantize_stack(rack, 1, dtype, optimizer=optimizer)
        with pytest.raises(ValueError, match=r"stack: got 'quantised as .*allowed: quantised in int8"):
            append_stack(rack, remove_stack(other, 1), optimizer)
        assert len(rack.stacks) == 3 and logits_of(rack).isfinite().all()

    def test_what_needs_to_train_is_refused(self):
        rack = make_rack()
        quantize_stack(rack, 1)
        optimizer = torch.optim.AdamW(rack.parameters(), lr=1e-3)
        with pytest.raises(ValueError, match="layers that are not quantised"):
            set_identity(rack.get_stack(1))
        with pytest.raises(ValueError, match="a Stack that is not quantised"):
            unfreeze_stack(rack, 1, optimizer)
        assert not any(p.requires_grad for p in rack.get_stack(1).parameters())

    def test_is_not_initialised_again(self):
        rack = make_rack()
        quantize_stack(rack, 1)
        before = logits_of(rack)
        message = r"weights: got 'stacks\.1\.blocks\.0\.attention\.qkv quantised'; allowed: such as are init"
        with pytest.raises(ValueError, match=message):
            initialize_rack(rack, "small")
        with pytest.raises(ValueError, match=r"weights: got 'attention\.qkv quantised'; allowed"):
            initialize_block(rack.get_stack(1).get_block(0), 2)
        assert torch.equal(logits_of(rack), before)

    def test_stack_that_cannot_join_is_left_alone(self):
        rack, stack = make_rack(), make_rack()
        quantize_stack(stack, 1)
        stack = remove_stack(stack, 1).train()
        with pytest.raises(ValueError, match="layers that are not quantised"):
            append_stack(rack, stack, identity=True)
        with pytest.raises(
            ValueError, match=r"quantised from torch\.float32'; allowed: quantised from torch\.bfloat16"
        ):
            append_stack(make_rack().bfloat16(), stack)
        assert len(rack.stacks) == 3
        assert stack.stack_id == 1
        assert all(module.training for module in stack.get_block(0).children())
        append_stack(rack, stack)
        assert logits_of(rack).isfinite().all()


class TestRefusals:
    @pytest.mark.parametrize(
        "message, make, arguments",
        [
            ("index: got 3; allowed: 0 to 2", make_rack, {"index": 3}),
            ("index: got -1", make_rack, {"index": -1}),
            ("dtype: got 'int2'; allowed: 'int8', 'int4', 'fp8'", make_rack, {"dtype": "int2"}),
            ("group_size: got 48; allowed: 32, 64, 128, 256", make_rack, {"dtype": "int4", "group_size": 48}),
            (
                "dtype: got 'int8'; does not work for torch.float64 weights on cpu",
                lambda: make_rack().double(),
                {},
            ),
            (
                "dtype: got 'int4'; does not work for torch.float64 weights on cpu",
                lambda: make_rack().double(),
                {"dtype": "int4"},
            ),
            (
                "dtype: got 'int4'; allowed: one that fits",
                lambda: create_simple_rack(1, 1, 16, 24, 4, VOCAB),
                {"index": 0, "dtype": "int4"},
            ),
            ("input_ids: got shape", make_rack, {"sample_ids": IDS[0]}),
            ("sample_ids: got (0, 9", make_rack, {"sample_ids": IDS[:0]}),
            ("sample_ids: got (2, 0", make_rack, {"sample_ids": IDS[:, :0]}),
            (
                "optimizer: got 'AdamW'",
                make_rack,
                {"optimizer": torch.optim.AdamW(nn.Linear(2, 2).parameters())},
            ),
        ],
    )
    def test_refused_call_changes_nothing(self, message, make, arguments):
        rack = make()
        before = {name: (id(p), p.clone(), p.requires_grad) for name, p in rack.named_parameters()}
        modules = [id(module) for module in rack.modules()]
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            quantize_stack(rack, **{"index": 1, **arguments})
        assert [id(module) for module in rack.modules()] == modules
        for name, p in rack.named_parameters():
            assert (id(p), p.requires_grad) == (before[name][0], before[name][2])
            assert torch.equal(p, before[name][1])

    def test_twice(self):
        rack = make_rack()
        quantize_stack(rack, 1)
        with pytest.raises(ValueError, match="a Stack that is not quantised yet"):
            quantize_stack(rack, 1, "fp8")

    def test_without_torchao(self, monkeypatch):
        rack = make_rack()
        monkeypatch.setitem(sys.modules, "torchao.quantization", None)
        with pytest.raises(ImportError, match=r"pip install 'stackwise\[quant\]'"):
            quantize_stack(rack, 1)
        assert not any(isinstance(module, QuantizedLinear) for module in rack.modules())


def test_a_stack_on_its_own_can_be_built_of_a_quantised_one():
    rack = make_rack()
    quantize_stack(rack, 0)
    stack = Stack(rack.get_stack(0).blocks, 5)
    x = torch.randn(1, 4, WIDTH)
    with torch.no_grad():
        assert torch.equal(stack(x), rack.get_stack(0)(x))
