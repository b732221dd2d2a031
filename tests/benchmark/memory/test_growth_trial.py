"""Memory growth: every kind of leak is caught and named, and sound loops of many kinds are not."""

import gc
import io
import json
import tracemalloc
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from stackwise.benchmark.memory import growth_trial
from stackwise.benchmark.memory.growth_trial import check_growth, memory_growth
from stackwise.benchmark.memory.live_memory import Bytes, bytes_now
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec

WIDTH, STEPS = 16, 24
needs_glibc = pytest.mark.skipif(
    bytes_now(torch.device("cpu")).host is None, reason="this C library does not tell what it gave out"
)


@pytest.fixture(autouse=True)
def _small_heap(request):
    """What was there before a test is set aside: to look at it each time would take most of the time."""
    if "whole_heap" not in request.fixturenames:
        gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def whole_heap():
    """Nothing is frozen, as in a process of a user."""
    gc.unfreeze()


def growth_of(step, **settings):
    """`memory_growth` of a step on a small heap: each look thaws what was frozen before."""
    gc.freeze()
    return memory_growth(step, **settings)


class Loop:
    """A sound training loop: a leaky or unusual one overrides the one method that differs."""

    def __init__(self, **kwargs):
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = self.create_optimizer()
        self.number = 0
        self.set_up()

    def set_up(self):
        pass

    def create_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def inputs(self):
        return torch.randn(8, WIDTH)

    def loss(self):
        return self.model(self.inputs()).square().mean()

    def backward(self, loss):
        loss.backward()

    def after(self, loss):
        pass

    def __call__(self):
        loss = self.loss()
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after(loss)
        self.number += 1
        return loss


class Momentum(Loop):
    def create_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class ZeroedGradients(Loop):
    def backward(self, loss):
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()


class Scheduled(Loop):
    def set_up(self):
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 7)

    def after(self, loss):
        self.scheduler.step()


class Accumulated(Loop):
    def backward(self, loss):
        for _ in range(3):
            (super().loss() / 3).backward()
        loss.backward()


class Clipped(Loop):
    def backward(self, loss):
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class Averaged(Loop):
    def set_up(self):
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def after(self, loss):
        self.average.update_parameters(self.model)


class Attention(Loop):
    def set_up(self):
        self.model = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.optimizer = self.create_optimizer()

    def inputs(self):
        return torch.randn(2, 6, WIDTH)


class Recurrent(Loop):
    def set_up(self):
        self.cell, self.state = nn.GRUCell(WIDTH, WIDTH), torch.zeros(8, WIDTH)

    def loss(self):
        self.state = self.cell(self.inputs(), self.state.detach())
        return self.model(self.state).square().mean()


class History(Loop):
    def set_up(self):
        self.losses = []

    def after(self, loss):
        self.losses.append(loss.item())


class RunningMean(Loop):
    def set_up(self):
        self.mean = 0.0

    def after(self, loss):
        self.mean += (loss.detach() - self.mean) / (self.number + 1)


class LastFew(Loop):
    """A window that fills up and stays full."""

    def set_up(self):
        self.losses = deque(maxlen=15)

    def after(self, loss):
        self.losses.append(loss.detach())


class ReadEveryTen(Loop):
    def set_up(self):
        self.losses = []

    def after(self, loss):
        self.losses.append(loss.detach())
        if len(self.losses) == 10:
            torch.stack(self.losses).mean().item()
            self.losses.clear()


class TablesThatFillUp(Loop):
    def set_up(self):
        self.table = lru_cache(maxsize=None)(lambda n: torch.arange(n * 100.0))

    def inputs(self):
        return super().inputs() + self.table(1 + self.number % 20)[:WIDTH]


class KeysAndValues(Loop):
    """A cache of generation that is begun anew every eight tokens."""

    def set_up(self):
        self.kept = torch.empty(0, WIDTH)

    def __call__(self):
        with torch.no_grad():
            if len(self.kept) == 8:
                self.kept = torch.empty(0, WIDTH)
            self.kept = torch.cat([self.kept, self.model(torch.randn(1, WIDTH))])


class Loaded(Loop):
    def set_up(self):
        self.loader = DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=8, shuffle=True)
        self.batches = iter(self.loader)

    def inputs(self):
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch[0]


class LowPrecision(Loop):
    def loss(self):
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss()


class Recomputed(Loop):
    def loss(self):
        return checkpoint(self.model, self.inputs(), use_reentrant=False).square().mean()


class LooksAtTheLast(Loop):
    def set_up(self):
        self.model[1].register_forward_hook(self.keep)

    def keep(self, module, arguments, output):
        self.last = output


class SecondOrder(Loop):
    def loss(self):
        inputs = self.inputs().requires_grad_()
        loss = self.model(inputs).square().mean()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.square().sum()


class ManyLengths(Loop):
    def inputs(self):
        return torch.randn(1 + (7 * self.number) % 31, WIDTH)


class Cycles(Loop):
    """What only the garbage collector frees."""

    def after(self, loss):
        node = {"loss": loss.detach(), "inputs": torch.zeros(1000)}
        node["itself"] = node


class Errors(Loop):
    def after(self, loss):
        try:
            self.model(torch.randn(8, WIDTH + 1))
        except RuntimeError as error:
            self.error = error


class Saved(Loop):
    def after(self, loss):
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)


class Threads(Loop):
    def set_up(self):
        self.pool = ThreadPoolExecutor(1)

    def inputs(self):
        return self.pool.submit(super().inputs).result()


class NewModelEachTime(Loop):
    def loss(self):
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.optimizer = self.create_optimizer()
        return super().loss()


class CompiledEagerly(Loop):
    def set_up(self):
        self.model = torch.compile(self.model, backend="aot_eager")


SOUND = [
    Loop,
    Momentum,
    ZeroedGradients,
    Scheduled,
    Accumulated,
    Clipped,
    Averaged,
    Attention,
    Recurrent,
    History,
    RunningMean,
    LastFew,
    ReadEveryTen,
    TablesThatFillUp,
    KeysAndValues,
    Loaded,
    LowPrecision,
    Recomputed,
    LooksAtTheLast,
    SecondOrder,
    ManyLengths,
    Cycles,
    Errors,
    Saved,
    Threads,
    NewModelEachTime,
]
QUICK = (Loop, TablesThatFillUp, Cycles, NewModelEachTime)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow, id=kind.__name__) for kind in SOUND],
)
def test_silent_on_a_sound_loop(kind):
    # A kernel is made for each new length, and all lengths have been there after 31 steps.
    steps = 40 if kind is ManyLengths else STEPS
    found = memory_growth(kind(), steps=steps)
    assert found.verdict == "flat", str(found)
    assert found.reasons == []
    assert str(found).startswith(f"memory is flat over {steps} steps")
    assert not found.tensors.exceeds(0)


@pytest.mark.slow
def test_silent_on_a_compiled_loop():
    found = memory_growth(CompiledEagerly())
    assert found.verdict == "flat", str(found)


@pytest.mark.slow
def test_silent_on_generation_with_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(50, (1, 5))
    found = memory_growth(lambda: model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0))
    assert found.verdict == "flat", str(found)


class KeepsActivations(Loop):
    def set_up(self):
        self.kept = []

    def loss(self):
        outputs = self.model(self.inputs())
        self.kept.append(outputs)
        return outputs.square().mean()


class KeepsDetached(Loop):
    def set_up(self):
        self.kept = []

    def after(self, loss):
        self.kept.append(loss.detach())


class KeepsGraphInPlace(Loop):
    """`total += loss` with a tensor changes it where it is: no new Python object is ever made."""

    def set_up(self):
        self.total = torch.zeros(())

    def after(self, loss):
        self.total += loss


class KeepsGraph(Loop):
    def set_up(self):
        self.total = 0

    def after(self, loss):
        self.total = self.total + loss


class KeepsGraphBeforeBackward(Loop):
    """The activations are kept with it, since nothing frees them."""

    def set_up(self):
        self.total = 0

    def backward(self, loss):
        self.total = self.total + super().loss()
        loss.backward()


class HookAccumulates(Loop):
    def set_up(self):
        self.seen = {}
        self.model[1].register_forward_hook(self.keep)

    def keep(self, module, arguments, output):
        self.seen[len(self.seen)] = output.detach().clone()


class HookOfEachStep(Loop):
    def loss(self):
        self.model[0].register_forward_hook(lambda module, arguments, output: None)
        return super().loss()


class SameHookOfEachStep(Loop):
    """No new object is made: the same function is entered in a dict once more."""

    def loss(self):
        self.model[0].register_forward_hook(look_away)
        return super().loss()


class HookOfEachStepOnATensor(Loop):
    def loss(self):
        self.model[0].weight.register_hook(lambda gradient: None)
        return super().loss()


class HookOfEachStepOnAnOptimizer(Loop):
    def after(self, loss):
        self.optimizer.register_step_post_hook(self.nothing)

    def nothing(self, optimizer, arguments, settings):
        pass


class KeepsClosures(Loop):
    """Things to do at the end, of each step one."""

    def set_up(self):
        self.at_the_end = []

    def after(self, loss):
        value = loss.item()
        self.at_the_end.append(lambda: value)


def look_away(module, arguments, output):
    pass


class Note:
    """What a careless log keeps of a step."""

    def __init__(self, number):
        self.text = f"step {number} " * 200


class KeepsNotes(Loop):
    def set_up(self):
        self.notes = []

    def after(self, loss):
        self.notes.append(Note(self.number))


class GrowingBuffer(Loop):
    def set_up(self):
        self.seen = torch.empty(0, WIDTH)

    def after(self, loss):
        self.seen = torch.cat([self.seen, torch.zeros(50, WIDTH)])


class KeepsOptimizers(Loop):
    def set_up(self):
        self.all = []

    def after(self, loss):
        self.all.append(self.optimizer)
        self.optimizer = self.create_optimizer()


class KeepsEveryFifth(Loop):
    def set_up(self):
        self.kept = []

    def after(self, loss):
        if self.number % 5 == 0:
            self.kept.append(torch.zeros(5000))


class NeverDetachedState(Recurrent):
    def loss(self):
        self.state = self.cell(self.inputs(), self.state)
        return self.model(self.state).square().mean()

    def backward(self, loss):
        loss.backward(retain_graph=True)


LEAKS = [
    (KeepsActivations, "torch.Tensor", "outputs = self.model"),
    (KeepsDetached, "torch.Tensor", "loss.detach()"),
    (KeepsGraphInPlace, "autograd AddBackward0", None),
    (KeepsGraph, "autograd AddBackward0", None),
    (KeepsGraphBeforeBackward, "autograd AddBackward0", None),
    (HookAccumulates, "torch.Tensor", "output.detach().clone()"),
    (HookOfEachStep, "function", "register_forward_hook"),
    (HookOfEachStepOnATensor, "function", "register_hook"),
    (KeepsClosures, "function", "self.at_the_end.append"),
    (KeepsNotes, "Note", "self.notes.append(Note(self.number))"),
    (GrowingBuffer, "torch.Tensor", None),
    (KeepsOptimizers, "torch.optim.adamw.AdamW", "torch.optim.AdamW"),
    (KeepsEveryFifth, "torch.Tensor", None),
    (NeverDetachedState, "autograd", None),
]
# What others show already: a tensor, a graph, an object of a class in each step.
AGAIN = (KeepsDetached, KeepsGraph, HookAccumulates, KeepsOptimizers, NeverDetachedState)


@needs_glibc
@pytest.mark.parametrize(
    "kind, name, code",
    [
        pytest.param(*leak, marks=pytest.mark.slow if leak[0] in AGAIN else (), id=leak[0].__name__)
        for leak in LEAKS
    ],
)
def test_a_leak_is_caught_and_named(kind, name, code):
    found = memory_growth(kind(), steps=STEPS)
    assert found.verdict == "grows", str(found)
    assert "no tensor, node or object of Python" not in str(found)
    assert any(each.name.endswith(name) or each.name.startswith(name) for each in found.types), str(found)
    if code is not None:
        assert any(code in place.code for place in found.places), str(found)
        assert all(place.file == __file__ for place in found.places if code in place.code)


@pytest.mark.parametrize("kind", [HookOfEachStep, SameHookOfEachStep, HookOfEachStepOnAnOptimizer])
def test_a_hook_of_each_step_is_growth_however_small(kind):
    """It takes less than a history of losses may, and makes each step slower than the one before."""
    found = memory_growth(kind(), steps=STEPS)
    assert found.verdict == "grows", str(found)
    assert (found.hooks.per_step, found.hooks.least) == (1.0, 1.0)
    assert found.reasons[0].startswith("1 hooks more a step are registered: keep the handle")
    assert not any("no tensor, node or object" in reason for reason in found.reasons)


def test_hooks_that_are_removed_or_come_now_and_then_are_no_growth():
    handles = deque()
    layer = nn.Linear(2, 2)

    def step():
        handles.append(layer.register_forward_hook(look_away))
        layer(torch.ones(2))
        while len(handles) > 3:
            handles.popleft().remove()

    assert memory_growth(step, steps=STEPS).verdict == "flat"


def test_run_records_are_not_counted_as_callbacks():
    """What a run notes of itself may grow by an object in each step, below the tolerance."""
    history = []
    found = memory_growth(lambda: history.append(Place(len(history))), steps=STEPS)
    assert found.verdict == "flat", str(found)
    assert found.objects.per_step == 1.0
    assert not found.callables.each_step  # one may come from elsewhere in this process


class Place:
    def __init__(self, number):
        self.number = number


@needs_glibc
def test_bytes_are_those_that_the_step_keeps():
    kept = []
    found = memory_growth(lambda: kept.append(torch.zeros(25_000)))
    assert found.bytes_per_step == pytest.approx(100_000, rel=0.03)
    assert found.host.low <= found.bytes_per_step <= found.host.high
    assert found.tensors_per_step == 1.0
    assert found.objects_per_step == pytest.approx(1.0, abs=0.1)
    [tensors] = [each for each in found.types if each.name == "torch.Tensor"]
    assert tensors.count_per_step == 1.0
    assert tensors.bytes_per_step == 100_000
    assert found.nodes.per_step == 0
    assert found.device is found.device_free is None


@needs_glibc
def test_activation_graph_without_python_objects_is_measured():
    class Held(KeepsGraphBeforeBackward):
        def inputs(self):
            return torch.randn(2000, WIDTH)

    found = memory_growth(Held(), steps=12)
    # Two outputs of 2000 x 16 float32 and the inputs, that GELU, square and the matrix products need.
    assert found.bytes_per_step > 3 * 2000 * WIDTH * 4


@needs_glibc
def test_growth_outside_python_objects_is_reported_separately():
    import ctypes

    allocate = ctypes.CDLL(None).malloc
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    found = memory_growth(lambda: allocate(5000) and None, steps=STEPS)
    assert found.host.per_step == pytest.approx(5000, rel=0.05)
    assert found.verdict == "grows"
    assert found.reasons[-1].startswith("no tensor, node or object of Python grows with it")


def test_text_of_a_leak_says_what_to_do():
    lines = str(memory_growth(KeepsGraph(), steps=9, warmup=3)).splitlines()
    assert lines[0] == "memory grows over 9 steps, after 3 of warm-up"
    assert any("`total += loss`" in line and "loss.detach()" in line for line in lines)
    assert "types that grow:" in lines
    assert any(line.startswith("  autograd AddBackward0: +1 a step") for line in lines)


def test_python_objects_alone_are_growth_of_python():
    notes = []
    found = memory_growth(lambda: notes.extend(str(i) * 10 for i in range(1000, 1040)), tolerance=500)
    assert found.verdict == "grows"
    assert found.python.exceeds(500)
    # 40 strings of 40 characters and 49 bytes of their own, in blocks of 96; 8 bytes each in the list.
    assert found.python.per_step == pytest.approx(40 * (89 + 8), rel=0.15)
    assert any("notes.extend" in place.code for place in found.places)


class TestWhereTheCLibraryDoesNotTell:
    """As on macOS: large objects of Python are seen where others of Python come with them."""

    @pytest.fixture(autouse=True)
    def _silent(self, monkeypatch):
        monkeypatch.setattr(growth_trial, "bytes_now", lambda device: Bytes(None, None, None, None))

    def test_arrays_that_stay(self):
        kept = []
        found = growth_of(lambda: kept.append(np.zeros(12_500)), steps=12)
        assert found.verdict == "grows"
        assert found.host is None
        assert found.bytes_per_step == pytest.approx(100_000, rel=0.2)
        assert "more a step are in use by Python" in found.reasons[0]

    @pytest.mark.parametrize("make", [lambda: np.zeros(1250), lambda: bytes(10_000)])
    def test_silent_on_a_window_that_was_full_before(self, make):
        """Each step replaces what was not traced by what is."""
        window = deque((make() for _ in range(4 * STEPS)), maxlen=4 * STEPS)
        found = growth_of(lambda: window.append(make()), steps=STEPS)
        assert found.python.exceeds(found.tolerance)
        assert found.reasons == []

    @pytest.mark.parametrize("kind", [Loop, History])
    def test_silent_on_a_sound_loop(self, kind):
        assert growth_of(kind(), steps=STEPS).reasons == []


@needs_glibc
def test_tolerance_decides():
    notes = []
    step = lambda: notes.append(bytes(4000))  # noqa: E731
    assert growth_of(step, steps=STEPS, tolerance=6000).verdict == "flat"
    assert growth_of(step, steps=STEPS).verdict == "grows"


def test_memory_held_by_reference_cycles_is_reported():
    found = growth_of(Cycles(), steps=12)
    if found.host is not None:
        assert found.cyclic_bytes == pytest.approx(4000, rel=0.5)
    assert growth_of(Loop(), steps=12).cyclic_bytes < 1000


def test_fewest_steps():
    kept = []
    found = memory_growth(lambda: kept.append(torch.zeros(1000)), steps=8, warmup=1)
    assert found.verdict == "grows"
    assert (found.steps, found.warmup, len(kept)) == (8, 1, 17)


def test_a_training_step_that_is_described():
    def model():
        return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def step(model, optimizer, batch):
        seen.append(batch["input_ids"].clone())
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    seen = deque(maxlen=2)
    spec = TrainerSpec.from_function(step, model, name="two layers")
    assert growth_of(spec, steps=12, seed=3).verdict == "flat"
    # Ten steps of warm-up, and twelve twice.
    assert torch.equal(seen[-1], spec.batch(seed=33)["input_ids"])
    assert not torch.equal(seen[0], seen[1])

    kept = []
    leaky = TrainerSpec.from_function(
        lambda *parts: kept.append(step(*parts)) or kept[-1], model, name="leaky"
    )
    assert growth_of(leaky, steps=12).verdict == "grows"


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("tracing", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_collection_and_tracing_state_is_restored(enabled, tracing, fails, whole_heap):
    calls = []

    def step():
        calls.append(1)
        if fails and len(calls) == 15:
            raise ZeroDivisionError

    (gc.enable if enabled else gc.disable)()
    if tracing:
        tracemalloc.start()
    try:
        if fails:
            with pytest.raises(ZeroDivisionError):
                memory_growth(step, steps=8)
        else:
            memory_growth(step, steps=8)
        assert gc.isenabled() == enabled
        assert tracemalloc.is_tracing() == tracing
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Loop, KeepsGraphInPlace, KeepsActivations], ids=lambda kind: kind.__name__)
def test_in_a_process_where_nothing_is_frozen(kind, whole_heap):
    assert memory_growth(kind(), steps=STEPS).verdict == ("flat" if kind is Loop else "grows")
    assert gc.get_freeze_count() == 0


def test_previously_frozen_objects_are_unfrozen(whole_heap):
    gc.freeze()
    kept = []
    assert memory_growth(lambda: kept.append(torch.zeros(1000)), steps=8).tensors_per_step == 1.0
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"steps": 7}, "steps: got 7; allowed: an integer >= 8"),
        ({"steps": 1001}, "steps: got 1001; allowed: an integer from 8 to 1000"),
        ({"steps": 10.0}, "steps: got 10.0"),
        ({"steps": True}, "steps: got True"),
        ({"warmup": 0}, "warmup: got 0; allowed: an integer >= 1"),
        ({"tolerance": -1}, "tolerance: got -1; allowed: a finite number >= 0, of bytes per step"),
        ({"tolerance": "1 KiB"}, "tolerance: got '1 KiB'"),
        ({"tolerance": float("nan")}, "tolerance: got nan"),
    ],
)
def test_numbers_out_of_range(arguments, text):
    def step():
        raise AssertionError("no step is made")

    for function in (lambda: check_growth(**arguments), lambda: memory_growth(step, **arguments)):
        with pytest.raises(ValueError) as error:
            function()
        assert str(error.value).startswith(text)


def test_plain_values():
    found = memory_growth(KeepsActivations(), steps=8, warmup=2)
    stored = json.loads(json.dumps(found.to_dict()))
    assert stored["verdict"] == "grows"
    assert stored["bytes_per_step"] == found.bytes_per_step
    assert stored["tensors"]["per_step"] == 1.0
    assert stored["device"] is None
    assert {"name", "count_per_step", "bytes_per_step"} == set(stored["types"][0])
    assert stored["places"][0]["file"] == __file__


@pytest.fixture
def allocator(monkeypatch):
    """A device whose allocator says what the test has it say after so many steps: allocator(in_use, kept)."""

    def install(in_use, kept, where="device"):
        calls = []

        def step():
            calls.append(1)

        def said(device):
            told = (in_use(len(calls)), kept(len(calls)))
            return Bytes(0, 0, *told) if where == "device" else Bytes(*told, None, None)

        monkeypatch.setattr(growth_trial, "bytes_now", said)
        return growth_of(step)

    return install


MIB = 2**20


def test_growth_of_reserved_memory_alone_is_fragmentation(allocator):
    found = allocator(lambda n: 50 * MIB, lambda n: 60 * MIB + 2 * MIB * (n // 2))
    assert found.verdict == "fragments"
    assert found.device_free.per_step == pytest.approx(MIB, rel=0.05)
    assert found.device.per_step == 0
    [reason] = found.reasons
    assert reason.startswith(
        "1 MiB more a step are reserved on the device and not in use: that memory is in pieces"
    )
    assert str(found).startswith("memory fragments over 40 steps")


def test_fragments_of_the_host(allocator):
    found = allocator(lambda n: 50 * MIB, lambda n: 60 * MIB + n * MIB // 4, "host")
    assert (found.verdict, found.device) == ("fragments", None)
    [reason] = found.reasons
    assert reason.startswith("256 KiB more a step are kept by the C library and not in use")
    # Whole pages come and go while blocks of many sizes do.
    assert allocator(lambda n: 50 * MIB, lambda n: 60 * MIB + 4096 * n, "host").verdict == "flat"


def test_reserved_memory_of_live_tensors_is_a_leak_not_fragmentation(allocator):
    found = allocator(lambda n: MIB * n, lambda n: MIB * n + MIB)
    assert found.verdict == "grows"
    reason, _ = found.reasons
    assert reason.startswith("1 MiB more a step are in use by the device")
    assert found.bytes_per_step == MIB


def test_both_at_once_are_a_leak(allocator):
    assert allocator(lambda n: MIB * n, lambda n: 3 * MIB * n).verdict == "grows"


def test_allocator_with_a_stable_reservation_is_flat(allocator):
    assert allocator(lambda n: 50 * MIB, lambda n: 60 * MIB + 20 * MIB * min(n // 4, 5)).verdict == "flat"


@pytest.mark.gpu
def test_leak_on_a_gpu():
    kept = []
    found = memory_growth(lambda: kept.append(torch.zeros(25_000, device="cuda")), device="cuda")
    assert found.verdict == "grows"
    assert found.device.per_step == pytest.approx(100_000, rel=0.05)
    assert memory_growth(lambda: torch.zeros(25_000, device="cuda"), device="cuda").verdict == "flat"


class Tiny(nn.Linear):
    """A model that needs no arguments: called without any, the class itself looks like a step."""

    made = 0

    def __init__(self):
        super().__init__(2, 2)
        type(self).made += 1


class Driven:
    """A training: its class makes one, and no step."""

    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch):
        return self.model(batch).sum()


@pytest.mark.parametrize(
    ("step", "got"),
    [
        (Tiny, "got Tiny, a class of nn.Module"),
        (Tiny(), "got Tiny(), an nn.Module"),
        (ModelSpec(Tiny, "tiny", "vectors", 2), "got ModelSpec"),
        (lambda: Tiny(), "its first call returned Tiny(), an nn.Module"),
        (lambda: ModelSpec(Tiny, "tiny", "vectors", 2), "its first call returned ModelSpec"),
        (Driven, "its first call returned Driven, a TrainingRun"),
        (None, "got NoneType"),
    ],
    ids=["class", "model", "spec", "factory", "factory of a spec", "factory of a run", "nothing"],
)
def test_a_model_is_no_step(step, got):
    made = Tiny.made
    with pytest.raises(TypeError) as raised:
        memory_growth(step, steps=8, warmup=2)
    wanted = "wanted a function that makes one step, or a TrainerSpec"
    assert str(raised.value) == f"step: {got}; {wanted}"
    assert Tiny.made <= made + 1


def test_a_class_that_is_no_model_may_be_a_step():
    assert memory_growth(dict, steps=8, warmup=2).verdict == "flat"
