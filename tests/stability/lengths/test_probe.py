"""A look at one length: rows by tokens, seeds, memory that is measured and memory that ends."""

import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import nn

from stackwise.benchmark.memory import PeakMemory, peak_memory
from stackwise.stability import GuardPolicy, NanInjection
from stackwise.stability.lengths import length_sweep, probe
from stackwise.stability.lengths.probe import LengthProbe, seeds_of
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded


class Tiny(nn.Module):
    """Keeps the shapes that it is given, and raises from a length on."""

    def __init__(self, shapes, error=None, limit=math.inf):
        super().__init__()
        self.scale, self.shapes, self.error, self.limit = nn.Parameter(torch.ones(7)), shapes, error, limit

    def forward(self, ids):
        self.shapes.append((self.training, *ids.shape))
        if ids.shape[1] >= self.limit:
            raise self.error
        return self.scale.expand(*ids.shape, 7)


def tiny(shapes=None, **arguments):
    shapes = [] if shapes is None else shapes
    known = {"causal": True, "width": 7, "inputs": "tokens", "seq_len": 4}
    return ModelSpec.of(lambda: Tiny(shapes, **arguments), name="tiny", **known)


def test_rows_of_a_step_are_what_its_tokens_allow():
    shapes = []
    sweep = length_sweep(tiny(shapes), (4, 6, 12), tokens_per_step=12, steps=8)
    assert {shape for shape in shapes if shape[0]} == {(True, 3, 4), (True, 2, 6), (True, 1, 12)}
    # The untouched model reads one row at each length: those of the longest.
    assert {shape for shape in shapes if not shape[0]} == {(False, 1, 4), (False, 1, 6), (False, 1, 12)}
    assert [point.batch_size for point in sweep.points] == [3, 2, 1]
    assert sweep.notes == []


def test_tokens_that_a_length_does_not_divide_are_told():
    sweep = length_sweep(tiny(), (4, 5, 9), tokens_per_step=12, steps=8)
    assert [point.batch_size for point in sweep.points] == [3, 2, 1]
    assert sweep.notes == ["not 12 tokens a step, which they do not divide: 2 x 5 = 10, 1 x 9 = 9"]
    assert sweep.problems == []


def test_seeds_share_no_batches():
    assert seeds_of(1, 5) == (5,)
    chosen = seeds_of(3, 5)
    assert chosen[0] == 5
    assert min(b - a for a, b in itertools.pairwise(chosen)) > 10_000
    assert seeds_of([4, 2], 5) == (4, 2)


def test_each_seed_is_a_training_of_its_own():
    made = []

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7))
            made.append(self.weight[0].item())

        def forward(self, ids):
            return self.weight.expand(*ids.shape, 7)

    spec = ModelSpec.of(Drawn, name="drawn", causal=True, width=7, inputs="tokens")
    made.clear()
    [point] = length_sweep(spec, (4,), seeds=[3, 8], steps=2).points
    expected = []
    for seed in (3, 8):
        with seeded(seed):
            expected.append(float(torch.randn(7)[0]))
    # The untouched model is that of the first seed, and so is the one that warms up.
    assert made == [expected[0], expected[0], *expected]
    assert [each.seed for each in point.runs] == [3, 8]
    assert point.run is point.runs[0].run
    first, second = (each.run.records[0].loss for each in point.runs)
    assert first != second
    alone = length_sweep(spec, (4,), seed=8, steps=2).points[0]
    assert alone.run.records[0].loss == second


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["cuda", "python", "linux", "windows", "driver", "cublas"],
)
def test_sweep_ends_where_memory_does(error):
    sweep = length_sweep(tiny(error=error, limit=8), (4, 8, 16, 32), steps=2)
    assert [point.verdict for point in sweep.points] == ["stable", "out of memory", "not run", "not run"]
    assert sweep.points[0].loss == pytest.approx(math.log(7))
    assert sweep.problems == ["T=8: out of memory", "T=16: not run", "T=32: not run"]
    assert sweep.notes == ["divergence is not judged: it takes 8 steps, and got 2"]
    assert sweep.first_unstable is None
    assert sweep.to_dict()["points"][1]["verdict"] == "out of memory"
    assert "T=8      out of memory" in str(sweep)
    assert repr(sweep) == ("<LengthSweep of tiny: T=4 stable, T=8 out of memory, T=16 not run, T=32 not run>")


def test_what_a_failed_attempt_held_is_given_back():
    held = []

    class Full(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7))
            held.append(weakref.ref(self.scale))

        def forward(self, ids):
            if self.training and ids.shape[1] > 4:
                raise torch.OutOfMemoryError("no room")
            return self.scale.expand(*ids.shape, 7)

    spec = ModelSpec.of(Full, name="full", causal=True, width=7, inputs="tokens")
    gc.collect()
    held.clear()
    probe = LengthProbe(spec, 8)
    assert probe.look(8, (0,)).verdict == "out of memory"
    assert held
    assert all(each() is None for each in held)


def test_another_error_is_no_lack_of_memory():
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        length_sweep(tiny(error=RuntimeError("shapes do not fit"), limit=8), (4, 8), steps=2)


class Hungry(nn.Module):
    """Holds 64 bytes a token and output for its backward pass, eight times over."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, ids):
        x = self.weight.expand(*ids.shape, 16)
        for _ in range(8):
            x = x.exp().log1p()
        return x


@pytest.mark.skipif(peak_memory(lambda: None).in_use is None, reason="this system does not tell peaks")
def test_memory_goes_with_the_tokens():
    spec = ModelSpec.of(Hungry, name="hungry", causal=True, width=16, inputs="tokens")
    sweep = length_sweep(spec, (4096, 65536), batch_size=4, steps=1)
    few, many = (point.peak_bytes for point in sweep.points)
    # 16 results of 16 float32 are kept for the backward pass.
    kept = 4 * 65536 * 16 * 16 * 4
    assert kept < many < 3 * kept
    assert few < many / 4
    fixed = length_sweep(spec, (4096, 65536), tokens_per_step=65536, steps=1)
    few, many = (point.peak_bytes for point in fixed.points)
    assert few == pytest.approx(many, rel=0.5)
    assert " MiB" in str(sweep)


def test_memory_is_that_of_the_host_of_the_first_seed(monkeypatch):
    asked = []

    def measure(call, device):
        call()
        asked.append(device)
        return PeakMemory(resident=19, resident_before=10, mapped=0, before=14)

    monkeypatch.setattr(probe, "peak_memory", measure)
    [point] = length_sweep(tiny(), (4,), seeds=2, steps=1).points
    assert (point.peak_bytes, len(point.runs), len(asked)) == (9, 2, 1)
    assert length_sweep(tiny(), (4,), steps=1, memory=False).points[0].peak_bytes is None
    assert len(asked) == 1


def test_memory_that_cannot_be_read_is_none(monkeypatch):
    def measure(call, device):
        call()
        return PeakMemory()

    monkeypatch.setattr(probe, "peak_memory", measure)
    [point] = length_sweep(tiny(), (4,), steps=1).points
    assert point.peak_bytes is None
    assert point.verdict == "stable"


class Broken(Tiny):
    def forward(self, ids):
        return super().forward(ids) * (math.nan if self.training else 1.0)


def test_training_that_breaks_ends_early_unless_a_policy_says_otherwise():
    broken = ModelSpec.of(lambda: Broken([]), name="broken", causal=True, width=7, inputs="tokens")
    early = length_sweep(broken, (4,), steps=8).points[0]
    assert len(early.run.alarms) == 2
    assert (early.verdict, early.run.stopped_at) == ("unstable", 1)
    policy = GuardPolicy(patience=5, rewinds=0)
    assert len(length_sweep(broken, (4,), steps=8, policy=policy).points[0].run.alarms) == 6


def test_faults_are_answered_as_in_any_run():
    fault = NanInjection(step=4, target="loss", duration=3)
    [point] = length_sweep(tiny(), (4,), steps=8, faults=[fault]).points
    assert (point.verdict, point.run.verdict) == ("stable", "caught")
    assert point.to_dict()["verdict"] == "caught"
