"""Utilisation: published figures, arithmetic, and None with its reason where a part is not known."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from stackwise.benchmark.flops.closed_form import FlopCount, Flops, model_flops
from stackwise.benchmark.flops.decode_bytes import DecodeBytes, decode_bytes
from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.flops.transformer_shape import (
    ExpertsShape,
    FeedForwardShape,
    LayerShape,
    SoftmaxShape,
    TransformerShape,
)
from stackwise.benchmark.flops.utilization import Utilization, hfu, mbu, mfu, utilization

PEAK = PeakRate("a device", "published", {"bfloat16": 1e12, "tf32": 4e11}, 1e11, {})
SHAPE = TransformerShape.uniform(n_layers=2, d_model=16, n_heads=2, d_ff=24, vocab_size=31)


def count(weights=100, visible=10, all_pairs=30, again=7):
    return FlopCount(
        "train",
        1,
        1,
        1,
        Flops(weights, visible, all_pairs),
        Flops(2 * weights, 2 * visible, 2 * all_pairs),
        Flops(again, 0, 0),
    )


def test_palm():
    """Chowdhery et al. 2022, table 3: 46.2 % at 238.3e3 tokens per second on 6144 chips of 275e12."""
    # 118 layers of 48 heads of 256 with one key/value head; d_model 18432, two matrices with a gate of 4 d.
    attention = SoftmaxShape(48, 1, 256)
    layer = LayerShape((attention,), FeedForwardShape(4 * 18432))
    palm = TransformerShape(18432, (layer,) * 118, 256_000 * 18432, 0)
    assert palm.n_weights == pytest.approx(540.35e9, rel=2e-3)
    train = model_flops(palm, batch_size=1, seq_len=2048, mode="train")
    seconds = 2048 / 238.3e3
    assert mfu(train, seconds, 275e12, n_devices=6144) == pytest.approx(0.462, abs=0.002)


def test_arithmetic():
    assert mfu(count(), 2.0, 1000.0) == (300 + 90) / 2 / 1000
    assert mfu(count(), 2.0, 1000.0, pairs="visible") == (300 + 30) / 2 / 1000
    assert hfu(count(), 2.0, 1000.0) == (300 + 90 + 7) / 2 / 1000
    assert mfu(count(), 2.0, 1000.0, n_devices=4) == (300 + 90) / 2 / 4000
    assert mbu(DecodeBytes(100, 20, 3), 2.0, 1000.0) == 123 / 2 / 1000
    assert mbu(500, 2.0, 1000.0) == 0.25


def test_above_one_is_not_cut():
    assert mfu(count(), 1.0, 195.0) == 2.0


def test_none_where_a_part_is_not_known():
    assert mfu(None, 1.0, 1.0) is None
    assert mfu(count(), 1.0, None) is None
    assert hfu(None, 1.0, None) is None
    assert mbu(None, 1.0, 1.0) is None
    assert mbu(3, 1.0, None) is None


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: mfu(count(), 0.0, 1.0), "seconds: got 0.0"),
        (lambda: mfu(None, -1.0, None), "seconds: got -1.0"),
        (lambda: mfu(count(), float("nan"), 1.0), "seconds: got nan"),
        (lambda: mfu(count(), 1.0, 0.0), "peak: got 0.0"),
        (lambda: mfu(count(), 1.0, 1.0, n_devices=0), "n_devices: got 0"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def use(model=SHAPE, peak=PEAK, **options):
    defaults = {"mode": "train", "batch_size": 2, "seq_len": 8, "seconds": 1e-3, "dtype": torch.bfloat16}
    return utilization(model, peak=peak, **{**defaults, **options})


def test_a_training_step():
    found = use(recompute="blocks")
    train = model_flops(SHAPE, batch_size=2, seq_len=8, mode="train", recompute="blocks")
    assert found.mfu == train.model("all") / 1e-3 / 1e12
    assert found.mfu_visible == train.model("visible") / 1e-3 / 1e12 < found.mfu
    assert found.hfu == train.hardware() / 1e-3 / 1e12 > found.mfu
    assert found.mbu is None
    assert found.notes == ()


def test_a_prefill_that_computes_all_logits():
    last, every = use(mode="prefill"), use(mode="prefill", logits="all")
    assert every.mfu - last.mfu == pytest.approx(2 * 2 * 7 * 31 * 16 / 1e-3 / 1e12)


def test_decoding():
    found = use(mode="decode")
    moved = decode_bytes(SHAPE, batch_size=2, seq_len=8, dtype=torch.bfloat16)
    assert found.mbu == moved.total / 1e-3 / 1e11
    assert found.mfu == found.mfu_visible == found.hfu
    assert found.notes == ()
    assert found.to_dict()["notes"] == []


EXPERTS = replace(
    SHAPE, layers=(LayerShape((SoftmaxShape(2, 2, 8),), ExpertsShape(4, n_experts=4, n_routed=2)),)
)


@pytest.mark.parametrize(
    "options, known, note",
    [
        ({"model": nn.Linear(2, 2)}, [], "Linear is no Rack, no transformers model"),
        ({"peak": None}, [], "the peak rate in bfloat16 is not known"),
        ({"dtype": torch.float32}, [], "the peak rate in float32 is not known"),
        ({"peak": None, "dtype": torch.float32, "tf32": True}, [], "the peak rate in TF32 is not known"),
        ({"model": replace(SHAPE, n_frozen=None)}, [], "frozen weights"),
        ({"mode": "decode", "dtype": torch.float32}, ["mbu"], "the peak rate in float32 is not known"),
        (
            {"mode": "decode", "peak": replace(PEAK, bandwidth=None)},
            ["mfu", "mfu_visible", "hfu"],
            "the peak bandwidth is not known",
        ),
        ({"mode": "decode", "model": EXPERTS}, ["mfu", "mfu_visible", "hfu"], "which experts"),
    ],
)
def test_why_not(options, known, note):
    found = use(**options)
    names = ("mfu", "mfu_visible", "hfu", "mbu")
    assert [name for name in names if getattr(found, name) is not None] == known
    [said] = found.notes
    assert note in said


def test_tf32():
    found = use(dtype=torch.float32, tf32=True)
    assert found.mfu == pytest.approx(use().mfu * 1e12 / 4e11, rel=1e-12)
    assert isinstance(found, Utilization)
