"""What each fault makes of a tensor, by references of numpy and by hand; and what it refuses."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.stability.faults import (
    KNOWN_FAULTS,
    Anatomy,
    BitFlip,
    CorruptSample,
    EmbeddingExplosion,
    GradientScale,
    HalfOverflow,
    LabelCorruption,
    LogitGrowth,
    LossSpike,
    NanInjection,
    OutOfMemory,
)
from stackwise.stability.faults.place import place_of
from stackwise.stability.faults.tensors import parts_of, with_part


def never():
    raise AssertionError("it did not act")


def seen(model, name, ids):
    outputs = []
    handle = model.get_submodule(name).register_forward_hook(lambda _m, _a, output: outputs.append(output))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return outputs


# The places of elements.


@given(st.lists(st.integers(1, 7), max_size=4), st.integers(0, 2**31))
def test_an_element_is_within_its_tensor_and_a_function_of_its_seed(shape, seed):
    shape = torch.Size(shape)
    index = place_of(shape, seed)
    assert len(index) == len(shape)
    assert all(0 <= i < size for i, size in zip(index, shape, strict=True))
    assert index == place_of(shape, seed)
    assert place_of(shape, None) == (0,) * len(shape)


def test_seeds_reach_every_element():
    assert {place_of(torch.Size((2, 3)), seed) for seed in range(100)} == {
        (i, j) for i in (0, 1) for j in range(3)
    }


def test_each_step_has_another_seed():
    fault = NanInjection(step=4, duration=3, seed=10)
    assert [fault.at(step).seed for step in fault.steps] == [10, 11, 12]
    assert NanInjection(step=4).at(4) == NanInjection(step=4)
    assert [LabelCorruption(step=4, duration=2, seed=1).at(s).seed for s in (4, 5)] == [1, 2]


# Numbers.


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(0, 31))
def test_a_bit_of_float32(value, bit):
    [integer] = struct.unpack("<I", struct.pack("<f", value))
    expected = struct.pack("<I", integer ^ (1 << bit))
    changed = BitFlip(step=0, bit=bit).changed(torch.tensor([value, 1.0]))
    assert struct.pack("<f", changed[0].item()) == expected or changed[0].isnan()
    if changed[0].isnan():
        assert np.isnan(struct.unpack("<f", expected)[0])
    assert changed[1] == 1.0


@pytest.mark.parametrize("dtype, numpy", [(torch.float16, np.uint16), (torch.float64, np.uint64)])
@pytest.mark.parametrize("bit", [0, 5, None])
def test_a_bit_of_other_types(dtype, numpy, bit):
    value = torch.tensor([[0.37, -2.5], [1e-3, 7.0]], dtype=dtype)
    fault = BitFlip(step=0, bit=bit, seed=3)
    bits, index = 8 * value.element_size(), place_of(value.shape, 3)
    changed = fault.changed(value).numpy().view(numpy)
    expected = value.numpy().view(numpy).copy()
    expected[index] ^= numpy(1) << numpy(bits - 2 if bit is None else bit)
    assert (changed == expected).all()


def test_a_bit_of_bfloat16_and_the_sign():
    value = torch.tensor([1.5, 1.5], dtype=torch.bfloat16)
    assert BitFlip(step=0, bit=15).changed(value).tolist() == [-1.5, 1.5]
    with pytest.raises(
        ValueError, match=r"bit_flip: bit: got 16; allowed: at most 15, the sign of torch.bfloat16"
    ):
        BitFlip(step=0, bit=16).changed(value)


def test_a_flipped_bit_lets_the_other_gradients_through():
    x = torch.ones(3, requires_grad=True)
    BitFlip(step=0, bit=1).changed(x * 2).sum().backward()
    assert x.grad.tolist() == [0.0, 2.0, 2.0]


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8), st.floats(1.1, 8.0))
def test_what_is_above_the_largest_half_is_infinite(values, factor):
    tensor = torch.tensor(values)
    if not tensor.abs().max() > 1e-30:
        return
    changed = HalfOverflow(step=0, factor=factor).changed(tensor).numpy()
    # In float64, and rounded once.
    exact = np.float64(values) * (factor * 65504 / np.abs(np.float64(values)).max())
    assert np.isinf(changed[np.abs(values).argmax()])
    assert changed.dtype == np.float32
    clear = (np.abs(exact) > 65600) | (np.abs(exact) < 65400)
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float16).astype(np.float64)
    assert np.allclose(changed[clear], expected[clear], rtol=2e-3, atol=1e-4)


def test_half_overflow_of_zeros_is_zeros():
    assert HalfOverflow(step=0).changed(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_some_gradients(subjects):
    model = subjects.tiny()
    model(torch.arange(6)[None]).square().mean().backward()
    clean = {name: p.grad.clone() for name, p in model.named_parameters()}
    acted = []
    GradientScale(step=0, factor=0.5, target="layers.1.*").on_gradients(model, lambda: acted.append(1))
    assert acted == [1]
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, clean[name] * (0.5 if name.startswith("layers.1.") else 1.0)), name
    GradientScale(step=0, target="nope").on_gradients(model, never)


def test_the_loss_and_its_gradient():
    loss = torch.tensor(3.0, requires_grad=True)
    LossSpike(step=0, factor=7.0).on_loss(loss, lambda: None).backward()
    assert loss.grad == 7.0
    assert LossSpike(step=0, factor=7.0).on_loss(loss, lambda: None) == 21.0


# Attention.


@pytest.mark.parametrize(
    "name", ["tiny", "rack", "grouped_rack", "llama", "gpt2", "bert", "x_decoder", "encoder"]
)
def test_the_queries_alone_are_scaled(subjects, name):
    torch.manual_seed(0)
    model = getattr(subjects, name)().eval()
    ids = torch.randn(1, 5, 16) if name == "encoder" else torch.arange(6)[None]
    fault = LogitGrowth(step=0, factor=8.0).resolve(Anatomy.possible(model))
    n_layers = {"rack": 4, "grouped_rack": 4}.get(name, 2)
    assert len(fault.target) == n_layers
    if name == "encoder":  # of which the argument is scaled
        assert all(isinstance(model.get_submodule(name), nn.MultiheadAttention) for name in fault.target)
        return
    before = seen(model, fault.target[0], ids)[0]
    acted = []
    with fault.around_forward(model, lambda: acted.append(1)):
        after = seen(model, fault.target[0], ids)[0]
    assert len(acted) >= n_layers
    width = before.shape[-1]
    fused = {"tiny": 16, "rack": 32, "grouped_rack": 32, "gpt2": 32}.get(name, width)
    assert torch.equal(after[..., :fused], 8 * before[..., :fused])
    assert torch.equal(after[..., fused:], before[..., fused:])
    assert (fused < width) == (name in ("tiny", "rack", "grouped_rack", "gpt2"))
    assert torch.equal(seen(model, fault.target[0], ids)[0], before)


def test_multihead_attention_gets_larger_queries():
    torch.manual_seed(0)
    attention = nn.Sequential()
    attention.inner = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    fault = LogitGrowth(step=0, factor=3.0, target=("inner",))
    with torch.no_grad(), fault.around_forward(attention, lambda: None):
        by_place, by_name = attention.inner(x, x, x)[0], attention.inner(query=x, key=x, value=x)[0]
    with torch.no_grad():
        expected = attention.inner(3 * x, x, x)[0]
    assert torch.equal(by_place, expected)
    assert torch.equal(by_name, expected)


def test_normed_queries_are_scaled_behind_their_norm(subjects):
    model = subjects.rack(qk_norm="head")
    fault = LogitGrowth(step=0).resolve(Anatomy.possible(model))
    assert fault.target == tuple(f"stacks.{s}.blocks.{b}.attention.q_norm" for s in (0, 1) for b in (0, 1))


def test_logits_grow_from_step_to_step():
    fault = LogitGrowth(step=3, duration=3, factor=2.0)
    assert [fault.at(step).factor for step in fault.steps] == [2.0, 4.0, 8.0]


def test_models_without_attention(subjects):
    with pytest.raises(
        ValueError, match="logit_growth: target: got None, and no module that is called makes"
    ):
        LogitGrowth(step=0).resolve(Anatomy.possible(subjects.gru()))


def test_a_fused_projection_of_which_nothing_says_its_parts():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 7)

        def forward(self, x):
            return self.qkv(x)

    model = Odd()
    fault = LogitGrowth(step=0).resolve(Anatomy.possible(model))
    refused = pytest.raises(ValueError, match="qkv makes 7 features, and nothing says which are queries")
    with refused, fault.around_forward(model, lambda: None):
        model(torch.zeros(1, 4))
    assert not model.qkv._forward_hooks


def test_the_norm_of_a_table(subjects):
    model = subjects.gru()
    fault = EmbeddingExplosion(step=0, factor=4.0).resolve(Anatomy.possible(model))
    assert fault.target == "embedding"
    before = model.embedding.weight.detach().clone()
    fault.before_step(model, None, lambda: None)
    assert torch.equal(model.embedding.weight, 4 * before)
    with pytest.raises(ValueError, match="embeddings called: embedding"):
        EmbeddingExplosion(step=0, target="head").resolve(Anatomy.possible(model))


# Batches.


@given(st.floats(0.01, 1.0), st.integers(0, 1000), st.integers(1, 40))
def test_as_many_labels_as_said_are_others(fraction, seed, count):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=generator)
    labels[torch.rand(count, generator=generator) < 0.3] = -100
    # Ids of a vocabulary: a model of five classes fails at a label of 3000.
    batch = {"input_ids": torch.full((count,), 3000), "labels": labels.clone()}
    n_real = int((labels >= 0).sum())
    fault = LabelCorruption(step=0, fraction=fraction, seed=seed)
    if int(labels.max()) < 1:
        with pytest.raises(ValueError, match="got no label, or only 0"):
            fault.on_batch(batch, never)
        return
    acted = []
    changed = fault.on_batch(batch, lambda: acted.append(1))
    assert acted == [1]
    assert torch.equal(batch["labels"], labels), "the batch itself stays"
    other = changed["labels"]
    assert int((other != labels).sum()) == max(1, round(fraction * n_real))
    assert torch.equal(other[labels < 0], labels[labels < 0])
    assert bool(((other[labels >= 0] >= 0) & (other[labels >= 0] <= labels.max())).all())
    assert changed["input_ids"] is batch["input_ids"]


@pytest.mark.parametrize(
    "batch, name",
    [
        ({"x": torch.zeros(2), "target": torch.tensor([0, 1])}, "target"),
        ((torch.zeros(2, 3), torch.tensor([0, 1])), "1"),
        ([{"a": torch.zeros(1)}, {"y": torch.tensor([0, 1])}], "1.y"),
    ],
)
def test_labels_are_found(batch, name):
    changed = LabelCorruption(step=0).on_batch(batch, lambda: None)
    assert parts_of(changed)[name].tolist() == [1, 0]
    assert type(changed) is type(batch)


@pytest.mark.parametrize("batch", [{"labels": torch.zeros(3)}, torch.arange(3), {"labels": "words"}, None])
def test_batches_without_labels(batch):
    with pytest.raises(ValueError, match="label_corruption: needs a batch with labels"):
        LabelCorruption(step=0).on_batch(batch, never)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int64])
def test_labels_up_to_what_their_type_holds(dtype):
    top = min(torch.iinfo(dtype).max, 2**31 - 1)
    labels = torch.randint(top, (64,), generator=torch.Generator().manual_seed(0))
    labels[5], labels[6] = top, 0
    changed = LabelCorruption(step=0).on_batch({"labels": labels.to(dtype)}, lambda: None)["labels"]
    assert changed.dtype == dtype
    numbers = changed.to(torch.int64)
    assert not (numbers == labels).any()
    assert 0 <= int(numbers.min()) <= int(numbers.max()) <= top


def test_labels_of_one_value():
    with pytest.raises(ValueError, match="only 0; wanted one above 0"):
        LabelCorruption(step=0).on_batch({"labels": torch.zeros(3, dtype=torch.int64)}, never)


@pytest.mark.parametrize("seed", range(8))
def test_one_row_is_noise(seed):
    ids = torch.randint(3, 50, (6, 30), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "vectors": torch.full((6, 4), 2.0), "scale": torch.ones(())}
    acted = []
    changed = CorruptSample(step=0, seed=seed).on_batch(batch, lambda: acted.append(1))
    assert acted == [1]
    rows = (changed["input_ids"] != ids).any(dim=1).nonzero().flatten().tolist()
    assert len(rows) == 1
    assert (changed["vectors"] != 2.0).any(dim=1).nonzero().flatten().tolist() == rows
    assert int(changed["input_ids"].min()) >= int(ids.min())
    assert int(changed["input_ids"].max()) <= int(ids.max())
    assert changed["scale"] is batch["scale"]


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_of_numbers_that_occur(seed):
    """Of labels -100 is one, and -61 is not."""
    labels = torch.tensor([[-100, -100, 3, 9], [-100, 7, 7, 9], [-100, 3, 9, 250]])
    changed = CorruptSample(step=0, seed=seed).on_batch({"labels": labels}, lambda: None)["labels"]
    assert set(changed.flatten().tolist()) <= {-100, 3, 7, 9, 250}
    assert not torch.equal(changed, labels)


def test_noise_that_changes_nothing_has_not_acted():
    batch = torch.ones(3, 4, dtype=torch.int64)
    assert torch.equal(CorruptSample(step=0).on_batch(batch, never), batch)


def test_nan_in_a_batch():
    batch = {"ids": torch.arange(3), "vectors": torch.zeros(2, 3), "more": torch.zeros(1)}
    changed = NanInjection(step=0, target="batch", seed=0).on_batch(batch, lambda: None)
    assert int(changed["vectors"].isnan().sum()) == 1
    assert not batch["vectors"].isnan().any()
    changed = NanInjection(step=0, target="batch:more").on_batch(batch, lambda: None)
    assert changed["more"].isnan().all()
    with pytest.raises(
        ValueError, match=r"matches no floating-point tensor of the batch; it has ids \(int64\)"
    ):
        NanInjection(step=0, target="batch:ids").on_batch(batch, never)


def test_parts_of_a_batch():
    batch = {"a": torch.zeros(1), "b": (torch.ones(1), {"c": torch.ones(2)}), "d": 3}
    assert list(parts_of(batch)) == ["a", "b.0", "b.1.c"]
    changed = with_part(batch, "b.1.c", torch.zeros(2))
    assert changed["b"][1]["c"].tolist() == [0.0, 0.0]
    assert changed["a"] is batch["a"]
    assert batch["b"][1]["c"].tolist() == [1.0, 1.0]
    assert with_part(torch.ones(1), "", torch.zeros(1)) == 0


# Arguments.


@pytest.mark.parametrize(
    "make, key",
    [
        (lambda: LossSpike(step=0, factor=1.0), "loss_spike: factor"),
        (lambda: LogitGrowth(step=0, factor=0.5), "logit_growth: factor"),
        (lambda: LogitGrowth(step=0, target=""), "logit_growth: target"),
        (lambda: EmbeddingExplosion(step=0, factor=float("inf")), "embedding_explosion: factor"),
        (lambda: EmbeddingExplosion(step=0, target=None), "embedding_explosion: target"),
        (lambda: GradientScale(step=0, factor=1.0), "gradient_scale: factor"),
        (lambda: GradientScale(step=0, target=""), "gradient_scale: target"),
        (lambda: LabelCorruption(step=0, fraction=0.0), "label_corruption: fraction"),
        (lambda: LabelCorruption(step=0, fraction=1.5), "label_corruption: fraction"),
        (lambda: LabelCorruption(step=0, seed=-1), "label_corruption: seed"),
        (lambda: BitFlip(step=0, bit=-1), "bit_flip: bit"),
        (lambda: BitFlip(step=0, target="loss"), "bit_flip: target"),
        (lambda: BitFlip(step=0, seed=1.5), "bit_flip: seed"),
        (lambda: HalfOverflow(step=0, factor=1.0), "half_overflow: factor"),
        (lambda: HalfOverflow(step=0, target="weight"), "half_overflow: target"),
        (lambda: OutOfMemory(step=0, moment="never"), "out_of_memory: moment"),
        (lambda: OutOfMemory(step=0, target=""), "out_of_memory: target"),
        (lambda: NanInjection(step=0, target="batch:"), "nan_injection: target"),
        (lambda: NanInjection(step=0, target="optimizer"), "nan_injection: target"),
    ],
)
def test_arguments_that_are_refused(make, key):
    with pytest.raises(ValueError, match=rf"^{key}: got .*; allowed: "):
        make()


def test_every_fault_has_a_name_and_is_known():
    assert len(KNOWN_FAULTS) == 19
    for name, kind in KNOWN_FAULTS.items():
        assert kind.name == name
        assert (kind.__doc__ or "").strip()
