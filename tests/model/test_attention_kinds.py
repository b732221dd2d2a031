"""Every kind of attention, of any shape: causal, finite, and the same in a batch, cached, padded or packed.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stackwise.config import BlockConfig
from stackwise.model import kernel
from stackwise.model.block import create_attention
from stackwise.model.cache import RackCache
from stackwise.model.layout import Layout

C = 12
SOFTMAX = ["mha", "gqa", "mqa", "mla"]
KERNELS = ["favor", "gaussian", "laplacian", "elu"]
# Of the largest output. Cauchy frequencies have no bound, and magnify what is rounded off.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
CAUCHY_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 0.05,
    torch.bfloat16: float("inf"),
    torch.float16: float("inf"),
}
MODES = ["causal", "bidirectional"]

properties = settings(max_examples=2 * settings.default.max_examples, derandomize=True)


@dataclass(frozen=True)
class Case:
    """An attention and its input, both drawn from a seed."""

    keys: dict[str, Any]
    dtype: torch.dtype
    n_rows: int
    seq_len: int
    chunk: int
    seed: int

    def build(self):
        torch.manual_seed(self.seed)
        attention = create_attention(BlockConfig.from_dict(self.keys))
        for name, weight in attention.named_parameters():
            torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.4)
        x_BTC = torch.randn(self.n_rows, self.seq_len, C, dtype=torch.float64)
        return attention.to(self.dtype).eval(), x_BTC.to(self.dtype)

    @torch.no_grad()
    def run(self, attention, x_BTC, mask_BT=None, documents_BT=None):
        with patch.object(kernel, "CHUNK", self.chunk):
            return attention(x_BTC, Layout(x_BTC, mask_BT, documents_BT))

    @torch.no_grad()
    def run_cached(self, attention, x_BTC, sizes, mask_BT=None):
        n_rows, seq_len, _ = x_BTC.shape
        new_cache = attention.new_cache(n_rows, seq_len, self.dtype, x_BTC.device)
        cache = RackCache([[new_cache]], n_rows, seq_len, x_BTC.device)
        outputs = []
        for size in sizes:
            part = slice(cache.length, cache.length + size)
            layout = cache.layout(x_BTC[:, part], None if mask_BT is None else mask_BT[:, part])
            with patch.object(kernel, "CHUNK", self.chunk):
                outputs.append(attention(x_BTC[:, part], layout, new_cache))
            cache.advance(size)
        return torch.cat(outputs, dim=1)

    @property
    def window(self):
        return self.keys["sliding_window"]

    @property
    def is_bidirectional_kernel(self):
        return self.keys["attention_type"] == "kernel" and self.keys["attention_mode"] == "bidirectional"

    def check(self, actual, expected):
        assert actual.dtype == expected.dtype == self.dtype and actual.shape == expected.shape
        assert actual.isfinite().all()
        is_laplacian = self.keys.get("kernel", {}).get("feature_map") == "laplacian"
        tolerance = (CAUCHY_TOLERANCE if is_laplacian else TOLERANCE)[self.dtype]
        error = (actual.double() - expected.double()).abs()
        assert error.max() <= tolerance * expected.double().abs().max()


@st.composite
def cases(draw, modes=MODES, dtypes=tuple(TOLERANCE), min_len=1):
    kind = draw(st.sampled_from(SOFTMAX + KERNELS))
    seq_len = draw(st.integers(min_len, 40))
    n_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    keys: dict[str, Any] = {
        "d_model": C,
        "d_ff": 1,
        "n_heads": n_heads,
        "attention_type": "kernel" if kind in KERNELS else kind,
        "attention_mode": draw(st.sampled_from(modes)),
        "use_rope": draw(st.booleans()),
        "sliding_window": None,
    }
    if kind == "mla":
        keys["latent"] = {
            "kv_lora_rank": draw(st.integers(1, 9)),
            "q_lora_rank": draw(st.none() | st.integers(1, 9)),
            "qk_nope_head_dim": draw(st.integers(1, 6)),
            "qk_rope_head_dim": 2 * draw(st.integers(1, 3)),
            "v_head_dim": draw(st.integers(1, 6)),
        }
    else:
        keys["head_dim"] = draw(st.sampled_from([2, 4, 8]))
        keys["qk_norm"] = draw(st.sampled_from([None, "head", "width"]))
        keys["qkv_bias"] = draw(st.booleans())
    if kind in ("gqa", *KERNELS):
        keys["n_kv_heads"] = draw(st.sampled_from(divisors))
    if kind in KERNELS:
        keys["kernel"] = {"feature_map": kind}
        if kind != "elu":
            keys["kernel"]["n_features"] = draw(st.sampled_from([2, 8, 32]))
        if kind in ("gaussian", "laplacian"):
            keys["kernel"]["bandwidth"] = draw(st.sampled_from([1.0, 3.0]))
    else:
        keys["softcap"] = draw(st.sampled_from([None, 1.5]))
        keys["sliding_window"] = draw(st.none() | st.integers(1, seq_len + 1))
    return Case(
        keys=keys,
        dtype=draw(st.sampled_from(dtypes)),
        n_rows=draw(st.integers(1, 3)),
        seq_len=seq_len,
        chunk=draw(st.sampled_from([3, 8, 128])),
        seed=draw(st.integers(0, 2**32)),
    )


def split(draw, total):
    """Sizes >= 1 that add up to `total`."""
    cuts = draw(st.sets(st.integers(1, max(1, total - 1))))
    edges = [0, *sorted(cut for cut in cuts if cut < total), total]
    return [end - start for start, end in pairwise(edges)]


def masked(case, side, n_padding):
    """Rows of T tokens, of which each has this many fewer real ones on a side: bool (B, T)."""
    time_T, n_padding_B1 = torch.arange(case.seq_len), torch.tensor(n_padding)[:, None]
    return time_T >= n_padding_B1 if side == "left" else time_T < case.seq_len - n_padding_B1


@properties
@given(case=cases(modes=["causal"], min_len=2), data=st.data())
def test_causal(case, data):
    attention, x = case.build()
    first = data.draw(st.integers(1, case.seq_len - 1))
    other = x.clone()
    other[:, first:] = torch.randn_like(other[:, first:]) * 3
    before, after = case.run(attention, x), case.run(attention, other)
    # Hidden tokens are not even rounding.
    assert torch.equal(after[:, :first], before[:, :first])
    assert (after[:, first:] != before[:, first:]).any()


@properties
@given(case=cases(), data=st.data())
def test_a_row_alone_is_the_row_in_its_batch(case, data):
    attention, x = case.build()
    sides = st.sampled_from([None, "left", "right"])
    side = data.draw(sides)
    n_padding = [data.draw(st.integers(0, case.seq_len - 1)) for _ in range(case.n_rows)]
    mask = masked(case, side, n_padding) if side else None
    together = case.run(attention, x, mask)
    for row in range(case.n_rows):
        part = slice(row, row + 1)
        alone = case.run(attention, x[part], None if mask is None else mask[part])
        real = slice(None) if mask is None else mask[row]
        case.check(alone[0, real], together[row, real])


@properties
@given(case=cases(modes=["causal"]), data=st.data())
def test_through_a_cache(case, data):
    attention, x = case.build()
    n_padding = [data.draw(st.integers(0, case.seq_len - 1)) for _ in range(case.n_rows)]
    mask = data.draw(st.sampled_from([None, masked(case, "left", n_padding)]))
    actual = case.run_cached(attention, x, split(data.draw, case.seq_len), mask)
    expected = case.run(attention, x, mask)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    case.check(actual[real], expected[real])


@properties
@given(case=cases(), side=st.sampled_from(["left", "right"]), data=st.data())
def test_padded_is_alone(case, side, data):
    attention, x = case.build()
    n_padding = [data.draw(st.integers(0, case.seq_len - 1)) for _ in range(case.n_rows)]
    mask = masked(case, side, n_padding)
    x[~mask] *= 5
    padded = case.run(attention, x, mask)
    for row in range(case.n_rows):
        case.check(padded[row, mask[row]], case.run(attention, x[row, mask[row]][None])[0])


@properties
@given(case=cases(), data=st.data())
def test_packed_is_separate(case, data):
    assume(not case.is_bidirectional_kernel)  # refused
    attention, x = case.build()
    rows = [split(data.draw, case.seq_len) for _ in range(case.n_rows)]
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    packed = case.run(attention, x, None, documents)
    for row, (of_row, y_TC) in enumerate(zip(rows, packed, strict=True)):
        pieces = zip(x[row].split(of_row), y_TC.split(of_row), strict=True)
        for x_TC, found in pieces:
            case.check(found, case.run(attention, x_TC[None])[0])


@properties
@given(case=cases(), size=st.sampled_from([0.0, 1e-3, 1.0, 50.0]), padded=st.booleans(), data=st.data())
def test_finite(case, size, padded, data):
    # Logits of such inputs, and the squares of their weights' gradients, end beyond float16.
    assume(case.dtype != torch.float16 or size <= 1)
    attention, x = case.build()
    x = (x * size).requires_grad_()
    # A row may be padding altogether.
    n_padding = [data.draw(st.integers(0, case.seq_len)) for _ in range(case.n_rows)]
    mask = masked(case, "left", n_padding) if padded else None
    with patch.object(kernel, "CHUNK", case.chunk):
        y = attention(x, Layout(x, mask))
    y.float().square().mean().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    for name, weight in attention.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name


@properties
@given(case=cases(modes=["bidirectional"], dtypes=[torch.float64], min_len=2))
def test_bidirectional_looks_ahead(case):
    attention, x = case.build()
    other = x.clone()
    other[:, -1] += 1
    changed = (case.run(attention, other) != case.run(attention, x)).any(-1)
    reach = case.seq_len if case.window is None else case.window
    first = max(0, case.seq_len - reach)
    assert changed[:, first:].all() and not changed[:, :first].any()
