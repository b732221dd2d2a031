"""Architectures at the same work: whose ratio is which, what is None, and what is refused."""

import gc
import json
import time

import pytest
import torch

from stackwise.benchmark import comparison, workload
from stackwise.benchmark.comparison import (
    ArchitectureBenchmark,
    Case,
    ComparisonConfig,
    compare_architectures,
)
from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.timing.interleaved import Interleaved
from stackwise.benchmark.timing.measurement import Measurement
from stackwise.benchmark.timing.warmup import WarmUp
from stackwise.spec import ModelSpec


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch):
    """A collection takes longer than all the rest of a test."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


QUICK = {"rounds": 6, "turn_seconds": 1e-4, "warmup_seconds": 0.0}
SMALL = {"min_seconds": 0.0, "min_calls": 3, "warmup_seconds": 0.0}


def test_slower_by_what_is_known(subjects):
    """A model that sleeps for 20 ms: the ratio is that of the times, above 1 for the faster one."""

    class Sleeping(subjects.GRULM):
        def forward(self, ids):
            time.sleep(0.02)
            return super().forward(ids)

    config = {"cases": [{"mode": "forward", "batch_size": 1, "seq_len": 4}], **QUICK}
    table = compare_architectures({"slow": Sleeping, "fast": subjects.gru}, config, baseline="slow")
    slow, fast = table
    assert (slow["architecture"], fast["architecture"]) == ("slow", "fast")
    assert slow["speed_up"] == slow["speed_up_low"] == slow["speed_up_high"] == 1.0
    assert fast["speed_up"] > 5
    assert fast["speed_up_low"] <= fast["speed_up"] <= fast["speed_up_high"]
    assert slow["tokens_per_second"] < 4 / 0.02
    other_way = compare_architectures({"slow": Sleeping, "fast": subjects.gru}, config, baseline="fast")
    assert other_way.where(architecture="slow")["speed_up"][0] < 0.2


def test_every_kind_of_work(subjects):
    cases = [Case(mode, 2, 6, 3) for mode in ("forward", "train", "prefill", "decode", "generate")]
    config = ComparisonConfig(tuple(cases), **QUICK)
    table = compare_architectures({"gru": subjects.gru, "llama": subjects.llama}, config)
    assert (table.baseline, len(table)) == ("gru", 10)
    json.loads(table.to_json())
    assert table["workload"][::2] == [
        "forward 2 x 6",
        "train 2 x 6",
        "prefill 2 x 6",
        "decode 2 x 6",
        "generate 2 x 6 + 3",
    ]
    counts = {
        name: sum(p.numel() for p in getattr(subjects, name)().parameters()) for name in ("gru", "llama")
    }
    for row in table:
        assert row["parameters"] == counts[row["architecture"]]
        assert row["tokens_per_second"] > 0
        # Nobody publishes a peak of a CPU; a rate that is not known is not 0.
        assert row["mfu"] is row["mbu"] is None
        assert (row["ttft_seconds"] is None) == (row["mode"] != "generate")
        assert row["p99_seconds"] is None, "of so few samples"
        assert row["memory_bytes"] is None or row["memory_bytes"] >= 0
    llama = table.where(architecture="llama", mode="decode")
    assert "with a cache" in llama["execution"][0]
    gru = table.where(architecture="gru", mode="decode")
    assert "the model keeps no cache" in gru["execution"][0]


def test_a_measured_peak(subjects, monkeypatch):
    peak = PeakRate("here", "measured", {"float32": 1e12}, 1e12, {})
    monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: peak)
    config = {"cases": [{"mode": "decode", "seq_len": 8}], "peak": "measured", **QUICK}
    [row] = compare_architectures({"llama": subjects.llama}, config)
    assert row["mfu"] > 0
    assert row["mbu"] > 0


def found_by(monkeypatch, **changes):
    """What `interleave` finds, made up."""

    def interleave(workloads, **how):
        warmup = WarmUp(
            3, 1.0, changes.get("steady", True), None if changes.get("steady", True) else "it drifted"
        )
        times = {"a": (2.0,) * 10, "b": (1.0,) * 10}
        measurements = {
            name: Measurement(workload.name, times[name], workload.tokens, warmup)
            for name, workload in workloads.items()
        }
        return Interleaved(measurements, times, 10, tuple(range(changes.get("discarded", 0))))

    monkeypatch.setattr(comparison, "interleave", interleave)
    monkeypatch.setattr(comparison, "peak_memory_bytes", lambda call, device: call() or changes.get("memory"))


CASE = {"cases": [{"mode": "forward", "batch_size": 2, "seq_len": 4}]}


def test_arithmetic(subjects, monkeypatch):
    found_by(monkeypatch)
    a, b = compare_architectures({"a": subjects.gru, "b": subjects.gru}, CASE)
    assert (a["speed_up"], b["speed_up"]) == (1.0, 2.0)
    assert (a["tokens_per_second"], b["tokens_per_second"]) == (4.0, 8.0)
    assert a["memory_bytes"] is None
    assert a["note"] is None


def test_throttled_rounds_give_no_ratio(subjects, monkeypatch):
    found_by(monkeypatch, discarded=3)
    _, b = compare_architectures({"a": subjects.gru, "b": subjects.gru}, CASE)
    assert b["speed_up"] is b["speed_up_low"] is b["speed_up_high"] is None
    assert b["note"] == "3 of 10 rounds were throttled: inconclusive"


def test_what_was_not_steady_is_told(subjects, monkeypatch):
    found_by(monkeypatch, steady=False)
    a, _ = compare_architectures({"a": subjects.gru, "b": subjects.gru}, CASE)
    assert a["note"] == "not steady: it drifted"


def test_memory_is_that_of_each_alone(subjects, monkeypatch):
    """What the process held before is none of it, nor what a first call makes."""
    found_by(monkeypatch)
    peaks = iter([100, 190, 170, 100, 130, 120])
    monkeypatch.setattr(comparison, "peak_memory_bytes", lambda call, device: call() or next(peaks))
    a, b = compare_architectures({"a": subjects.gru, "b": subjects.gru}, CASE)
    assert (a["memory_bytes"], b["memory_bytes"]) == (70, 20)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"case": []}, "config: key: got 'case'; allowed: 'cases', 'device'"),
        ({"cases": []}, "cases: got .*; allowed: one or more"),
        ({"cases": ["train"]}, "cases: got .*; allowed: a list of mappings"),
        ({"cases": [{"batch": 1}]}, r"cases\[0\]: key: got 'batch'; allowed: 'mode', 'batch_size'"),
        ({"cases": [{"mode": "serve"}]}, "mode: got 'serve'"),
        ({"cases": [{"batch_size": 0}]}, "batch_size: got 0"),
        ({"rounds": 0}, "rounds: got 0"),
        ({"turn_seconds": 0}, "turn_seconds: got 0"),
        ({"warmup_seconds": -1}, "warmup_seconds: got -1"),
        ({"dtype": "half"}, "dtype: got 'half'"),
        ({"compile": "fast"}, "compile: got 'fast'"),
        ({"loop": "mine"}, "loop: got 'mine'"),
        ({"clock": "sun"}, "clock: got 'sun'"),
        ({"cache": "hot"}, "cache: got 'hot'"),
        ({"peak": "best"}, "peak: got 'best'"),
        ({"seed": -1}, "seed: got -1"),
        ({"device": "tpu"}, "device: got 'tpu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings(subjects, config, text):
    with pytest.raises(ValueError, match=text):
        compare_architectures({"gru": subjects.gru}, config)


def test_other_architectures(subjects):
    with pytest.raises(ValueError, match=r"architectures: got \{\}; allowed: one or more, by name"):
        compare_architectures({})
    with pytest.raises(ValueError, match="baseline: got 'llama'; allowed: 'gru'"):
        compare_architectures({"gru": subjects.gru}, baseline="llama")


class TestArchitectureBenchmark:
    def test_what_can_be_measured(self, subjects):
        benchmark = ArchitectureBenchmark(subjects.llama)
        assert benchmark.spec.name == "llama"
        assert benchmark.n_parameters == sum(p.numel() for p in subjects.llama().parameters())
        assert benchmark.benchmark_batch_throughput(2, 5, **SMALL).tokens == 10
        assert benchmark.benchmark_training(2, 5, **SMALL).tokens == 10
        assert benchmark.benchmark_prefill(2, 5, **SMALL).tokens == 10
        assert benchmark.benchmark_decode(2, 5, **SMALL).tokens == 2
        found = benchmark.benchmark_generation(5, 3, batch_size=2, **SMALL)
        assert (found.prompt_tokens, found.new_tokens, found.tokens) == (5, 3, 6)

    def test_settings_reach_the_model(self, subjects):
        benchmark = ArchitectureBenchmark(ModelSpec.of(subjects.llama), dtype="bfloat16")
        made = benchmark.workload("forward", batch_size=1, seq_len=4)
        assert next(made.model.parameters()).dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("key", "value"),
        [("dtype", "half"), ("compile", "fast"), ("device", "tpu")],
        ids=["dtype", "compile", "device"],
    )
    def test_other_settings(self, subjects, key, value):
        with pytest.raises(ValueError, match=f"{key}: got {value!r}"):
            ArchitectureBenchmark(subjects.gru, **{key: value})
