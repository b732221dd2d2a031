"""Architectures at the same work: whose ratio is which, what is None, and what is refused."""

import gc
import json
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stackwise.benchmark import comparison
from stackwise.benchmark.comparison import (
    ArchitectureBenchmark,
    Case,
    ComparisonConfig,
    compare_architectures,
)
from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.timing import interleaved
from stackwise.benchmark.timing.gpu_state import GpuState
from stackwise.benchmark.timing.interleaved import Interleaved
from stackwise.benchmark.timing.measurement import Measurement
from stackwise.benchmark.timing.warmup import WarmUp
from stackwise.benchmark.workload import workload
from stackwise.subject.spec import ModelSpec


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch):
    """A collection takes longer than all the rest of a test."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


QUICK = {"rounds": 6, "turn_seconds": 1e-4, "warmup_seconds": 0.0}
MiB = 2**20
SMALL = {"min_seconds": 0.0, "min_calls": 3, "warmup_seconds": 0.0}


def test_speed_up_is_the_ratio_of_times(subjects, virtual_time):
    def taking(seconds):
        class Model(subjects.GRULM):
            def forward(self, ids):
                virtual_time.take(seconds)
                return super().forward(ids)

        return Model

    models = {"slow": taking(0.02), "fast": taking(0.001)}
    config = {"cases": [{"mode": "forward", "batch_size": 1, "seq_len": 4}], **QUICK}
    slow, fast = compare_architectures(models, config, baseline="slow")
    assert (slow["architecture"], fast["architecture"]) == ("slow", "fast")
    assert slow["speed_up"] == slow["speed_up_low"] == slow["speed_up_high"] == 1.0
    assert [fast[key] for key in ("speed_up", "speed_up_low", "speed_up_high")] == pytest.approx([20.0] * 3)
    assert slow["tokens_per_second"] == pytest.approx(4 / 0.02)
    other_way = compare_architectures(models, config, baseline="fast")
    assert other_way.where(architecture="slow")["speed_up"][0] == pytest.approx(1 / 20)


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
            name: Measurement(workload.name, times[name], workload.tokens, warmup=warmup)
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


def test_one_that_reads_ahead_is_told(subjects, monkeypatch):
    """It does not compute the same."""
    found_by(monkeypatch)
    architectures = {"a": subjects.grouped_rack, "b": subjects.bidirectional_rack}
    for baseline, notes in (("a", [None, "not causal, unlike a"]), ("b", ["causal, unlike b", None])):
        assert compare_architectures(architectures, CASE, baseline=baseline)["note"] == notes


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
    peaks = iter([100 * MiB, 170 * MiB, 100 * MiB, 120 * MiB])
    monkeypatch.setattr(comparison, "peak_memory_bytes", lambda call, device: call() or next(peaks))
    a, b = compare_architectures({"a": subjects.gru, "b": subjects.gru}, CASE)
    assert (a["memory_bytes"], b["memory_bytes"]) == (70 * MiB, 20 * MiB)
    assert a["note"] is b["note"] is None


@pytest.mark.parametrize("rise", [-5, 0, 5])
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_memory_is_never_below_what_a_model_holds(subjects, monkeypatch, mode, rise):
    """Pages that were resident all the time hide a small model from its process."""
    found_by(monkeypatch)
    peaks = iter([MiB, MiB + rise])
    monkeypatch.setattr(comparison, "peak_memory_bytes", lambda call, device: call() or next(peaks))
    config = {"cases": [{"mode": mode, "batch_size": 1, "seq_len": 4}]}
    [row] = compare_architectures({"a": subjects.gru}, config)
    weights = list(subjects.gru().parameters())
    size = sum(p.nbytes for p in weights)
    # In training gradients, two means, and of each weight a count of steps.
    assert row["memory_bytes"] == (size if mode == "forward" else 4 * size + 4 * len(weights))
    assert "what is resident rose by less" in row["note"]


def test_memory_of_nothing_is_not_known(monkeypatch):
    """A model without weights, whose call nobody could see: None, never 0."""
    found_by(monkeypatch, memory=MiB)

    class OneHot(nn.Module):
        def forward(self, ids):
            return nn.functional.one_hot(ids, 7).float()

    spec = ModelSpec(OneHot, "one hot", "tokens", 7, causal=True)
    [row] = compare_architectures({"a": spec}, CASE)
    assert row["memory_bytes"] is None


class Ledger:
    """Every model that there is, and what a process keeps of the first call of any: a fake of its memory."""

    def __init__(self):
        self.models, self.most, self.kept = weakref.WeakSet(), 0, 0

    def peak(self, call, device):
        call()
        return 100 * MiB * len(self.models) + self.kept

    def architecture(self, subjects):
        ledger = self

        class Model(subjects.GRULM):
            def __init__(self):
                super().__init__()
                ledger.models.add(self)
                ledger.most = max(ledger.most, len(ledger.models))

            def forward(self, ids):
                ledger.kept = 7000  # a library, a workspace, a table: at the first call of a process
                return super().forward(ids)

        return Model


@pytest.mark.parametrize("mode", ["forward", "train", "decode"])
def test_nobody_pays_for_what_all_use(subjects, monkeypatch, mode):
    ledger = Ledger()
    monkeypatch.setattr(comparison, "peak_memory_bytes", ledger.peak)
    names = {name: ledger.architecture(subjects) for name in "ab"}
    config = {"cases": [{"mode": mode, "batch_size": 1, "seq_len": 4}], **QUICK}
    assert compare_architectures(names, config)["memory_bytes"] == [100 * MiB, 100 * MiB]


def test_memory_of_decoding_has_one_cache(subjects, monkeypatch):
    """What is kept to put the cache back is ours, and no model's."""
    caches = weakref.WeakSet()

    class Cache:
        def __init__(self, length):
            self.length = length
            caches.add(self)

        def __deepcopy__(self, memo):
            return Cache(self.length)

    def decode(model, inputs, cache):
        cache = Cache(0) if cache is None else cache
        cache.length += inputs.shape[1]
        return model(inputs), cache

    seen = []
    monkeypatch.setattr(
        comparison, "peak_memory_bytes", lambda call, device: call() or seen.append(len(caches)) or MiB
    )
    spec = ModelSpec.of(subjects.gru, decode=decode)
    compare_architectures({"a": spec}, {"cases": [{"mode": "decode", "seq_len": 4}], **QUICK})
    assert seen == [0, 1]


def test_how_the_work_was_done_is_shown(subjects, monkeypatch):
    found_by(monkeypatch)

    def interleave(workloads, **how):
        measurements = {
            name: Measurement(
                name, (1.0,) * 10, 4, warmup=WarmUp(3, 1.0, True, None), execution=each.execution()
            )
            for name, each in workloads.items()
        }
        return Interleaved(measurements, dict.fromkeys(workloads, (1.0,) * 10), 10)

    monkeypatch.setattr(comparison, "interleave", interleave)
    config = {"cases": [{"mode": "decode", "seq_len": 4}]}
    alike = compare_architectures({"a": subjects.gru, "b": subjects.gru}, config)
    assert "execution" not in alike.to_markdown().splitlines()[0]
    assert alike["note"] == ["all tokens again: the model keeps no cache"] * 2
    unlike = compare_architectures({"a": subjects.gru, "b": subjects.llama}, config)
    assert "execution" in unlike.to_markdown().splitlines()[0]
    assert "decode: with a cache" in str(unlike)


class Unusable(nn.Module):
    """Generates, and takes a cache that nothing provides."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, ids, kv_cache=None):
        if kv_cache is not None:
            kv_cache.add(ids)
        return self.head(self.embedding(ids))

    def generate(self, ids, count):
        raise NotImplementedError


@pytest.mark.parametrize("mode", ["decode", "generate"])
@pytest.mark.parametrize("baseline", ["unusable", "llama"])
def test_cache_that_cannot_be_used_leaves_no_speed_up(subjects, mode, baseline):
    config = {"cases": [{"mode": mode, "seq_len": 4, "new_tokens": 2}], **QUICK}
    architectures = {"unusable": Unusable, "llama": subjects.llama}
    table = compare_architectures(architectures, config, baseline=baseline)
    handicapped = [row["architecture"] for row in table if row["speed_up"] is None]
    assert handicapped == (["unusable", "llama"] if baseline == "unusable" else ["unusable"])
    for row in table.where(architecture="unusable"):
        assert row["speed_up_low"] is row["speed_up_high"] is None
        assert (
            "no speed-up: unusable computes all tokens again (the model has generate(), kv_cache="
            in row["note"]
        )
        assert "all tokens again: no cache was found" in row["execution"]


@pytest.mark.parametrize("declared", [{"decode": None}, {}])
def test_cache_that_is_not_used_leaves_other_ratios(subjects, declared):
    config = {"cases": [{"mode": "decode" if declared else "forward", "seq_len": 4}], **QUICK}
    architectures = {"without": ModelSpec.of(Unusable, **declared), "llama": subjects.llama}
    assert None not in compare_architectures(architectures, config)["speed_up"]


def test_generation_that_is_not_compiled_is_told(subjects):
    config = ComparisonConfig((Case("generate", 1, 4, 2), Case("forward", 1, 4)), compile=True, **QUICK)
    note = "not compiled: the common loop grows by a token at each step"
    assert config.notes(config.cases[0]) == (note,)
    assert config.notes(config.cases[1]) == ()
    [row] = compare_architectures({"a": subjects.gru}, replace(config, cases=config.cases[:1]))
    assert note in row["note"]
    own = replace(config, loop="own")
    assert own.notes(own.cases[0]) == ()
    plain = replace(config, compile=False)
    assert plain.notes(plain.cases[0]) == ()


def test_training_that_breaks_its_weights_is_told(subjects):
    spec = ModelSpec.of(subjects.gru, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e38))
    config = {"cases": [{"mode": "train", "seq_len": 4}], **QUICK}
    [row] = compare_architectures({"a": spec}, config)
    assert "weights are not finite: embedding.weight and " in row["note"]


def test_models_of_one_case_are_gone_before_those_of_the_next(subjects):
    ledger = Ledger()
    names = {name: ledger.architecture(subjects) for name in "abc"}
    cases = [{"mode": "forward", "batch_size": 1, "seq_len": n} for n in (3, 4, 5)]
    compare_architectures(names, {"cases": cases, **QUICK})
    assert ledger.most == 3


def test_a_case_in_which_a_gpu_was_throttled_all_the_time_loses_no_other(subjects, monkeypatch):
    """Readings of the whole first case are throttled."""
    free, held = (GpuState(1980, 2619, 40, 300.0, reasons) for reasons in ((), ("power cap",)))
    sensors = iter([held, free])

    def sensor(device):
        state = next(sensors)
        return SimpleNamespace(note=None, read=lambda: state)

    monkeypatch.setattr(interleaved, "GpuSensor", sensor)
    cases = [{"mode": "forward", "batch_size": 1, "seq_len": n} for n in (3, 4)]
    first, second = compare_architectures({"a": subjects.gru}, {"cases": cases, **QUICK})
    assert first["speed_up"] is first["speed_up_low"] is None
    assert first["median_seconds"] > 0
    assert first["note"].startswith("6 of 6 rounds were throttled: inconclusive; ")
    assert "held down in each of 6 rounds (power cap)" in first["note"]
    assert second["speed_up"] == 1.0
    assert "throttled" not in (second["note"] or "")


def test_what_is_recomputed_and_the_floor_are_columns(subjects, monkeypatch):
    peak = PeakRate("here", "measured", {"float32": 1e12}, 1e9, {})
    monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: peak)

    def recomputing():
        model = subjects.llama()
        for layer in model.model.layers:  # as transformers' own switch does, whatever its name
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        return model

    cases = [{"mode": "train", "seq_len": 8}, {"mode": "decode", "seq_len": 8}]
    config = {"cases": cases, "peak": "measured", **QUICK}
    table = compare_architectures({"plain": subjects.llama, "again": recomputing}, config)
    plain, again, decode, _ = table
    assert plain["hfu"] == plain["mfu"] > 0
    # A second forward pass of the layers: of three parts a fourth, but for that of the head.
    assert 1.1 < again["hfu"] / again["mfu"] < 4 / 3
    assert (plain["floor_seconds"], plain["bound"]) == (None, None)
    assert decode["bound"] == "memory"
    assert decode["mbu"] == pytest.approx(decode["floor_seconds"] / decode["median_seconds"], rel=1e-9)
    header = table.to_markdown().splitlines()[0]
    assert all(f"| {name} |" in header for name in ("MFU", "HFU", "MBU", "floor ms", "bound"))


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
        ({"seed": 2**70}, f"seed: got {2**70}; allowed: an integer from 0 to"),
        ({"device": "tpu"}, "device: got 'tpu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings(subjects, config, text):
    with pytest.raises(ValueError, match=text):
        compare_architectures({"gru": subjects.gru}, config)


def test_other_architectures(subjects):
    with pytest.raises(ValueError, match="architectures: name: got 1; allowed: a string"):
        compare_architectures({1: subjects.gru})
    with pytest.raises(ValueError, match=r"architectures: got \{\}; allowed: one or more, by name"):
        compare_architectures({})
    with pytest.raises(ValueError, match="baseline: got 'llama'; allowed: 'gru'"):
        compare_architectures({"gru": subjects.gru}, baseline="llama")
    with pytest.raises(TypeError, match="architectures: got list; wanted a mapping of names to models"):
        compare_architectures([subjects.gru, subjects.llama])
    with pytest.raises(TypeError, match="config: got list; wanted a ComparisonConfig, a mapping"):
        compare_architectures({"gru": subjects.gru}, ["forward"])


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
