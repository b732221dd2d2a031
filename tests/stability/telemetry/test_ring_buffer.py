"""RingBuffer: every row comes back once, in order, as it was written; also where copies arrive late."""

import math
from collections import deque
from contextlib import nullcontext

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stackwise.stability.telemetry import GradientMonitor, LossTracker, StepBuffer
from stackwise.stability.telemetry.ring_buffer import RingBuffer
from tests.synchronization import synchronization_fails

CPU = torch.device("cpu")


def write(buffer, number):
    buffer.write(number, [torch.tensor(float(number))], torch.tensor([number + 0.25, number + 0.5]))


def expected(numbers):
    return [(number, [number, number + 0.25, number + 0.5]) for number in numbers]


@pytest.mark.parametrize("key, sizes", [("capacity", (0, 1)), ("width", (1, 0)), ("capacity", (2.0, 1))])
def test_sizes_that_are_none(key, sizes):
    with pytest.raises(ValueError, match=f"{key}: got .*; allowed: an integer >= 1"):
        RingBuffer(*sizes, CPU)


def test_nothing_was_written():
    buffer = RingBuffer(3, 3, CPU)
    assert (len(buffer), buffer.full, buffer.poll(), buffer.drain()) == (0, False, [], [])


def test_around_the_end():
    buffer, seen = RingBuffer(3, 3, CPU), []
    for first in range(0, 20, 2):
        write(buffer, first)
        write(buffer, first + 1)
        seen += buffer.poll()
    assert seen == expected(range(20))


def test_a_full_buffer_refuses():
    buffer = RingBuffer(2, 3, CPU)
    write(buffer, 0)
    write(buffer, 1)
    with pytest.raises(AssertionError, match="drain"):
        write(buffer, 2)
    assert buffer.drain() == expected([0, 1])


def test_rows_of_scalars_alone_and_of_a_vector_alone():
    buffer = RingBuffer(2, 2, CPU)
    buffer.write("scalars", [torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(True)])
    buffer.write("vector", [], torch.tensor([2.0, 3.0], dtype=torch.float64))
    assert buffer.poll() == [("scalars", [1.5, 1.0]), ("vector", [2.0, 3.0])]


class LateMemory:
    """Pinned memory and the events of a stream on which copies are made at the last moment."""

    def __init__(self, memory):
        self.memory, self.queue, self.events = memory, deque(), deque()

    def __getitem__(self, place):
        late = self

        class Place:
            def copy_(self, source, non_blocking):
                assert non_blocking
                late.queue.append((place, source))

            def tolist(self):
                return late.memory[place].tolist()

        return Place()

    def event(self):
        late = self

        class Event:
            def record(self, stream):
                self.copies = len(late.queue)
                self.done = False
                late.events.append(self)

            def query(self):
                return self.done

            def synchronize(self):
                while not self.done:
                    late.arrive()

        return Event()

    def arrive(self):
        event = self.events.popleft()
        event.done = True
        for _ in range(event.copies):
            place, source = self.queue.popleft()
            self.memory[place] = source
            for other in self.events:
                other.copies -= 1


class LateRows(RuleBasedStateMachine):
    """A buffer whose copies take as long as may be: no row may be overwritten before it is copied."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.buffer = RingBuffer(4, 3, CPU)
        self.late = LateMemory(torch.full((4, 3), float("nan")))
        self.buffer._host_CW = self.late
        self.buffer._stream = type("Stream", (), {"wait_stream": lambda self, other: None})()
        self.patch.setattr(torch.cuda, "current_stream", lambda device: None)
        self.patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        self.patch.setattr(torch.cuda, "Event", self.late.event)
        self.written, self.seen = 0, []

    def teardown(self):
        self.seen += self.buffer.drain()
        assert self.seen == expected(range(self.written))
        self.patch.undo()

    @precondition(lambda self: not self.buffer.full)
    @rule(count=st.integers(1, 4))
    def write(self, count):
        for _ in range(min(count, 4 - len(self.buffer))):
            write(self.buffer, self.written)
            self.written += 1

    @rule()
    def poll(self):
        before = sum(not event.done for event in self.late.events)
        self.seen += self.buffer.poll()
        assert sum(not event.done for event in self.late.events) >= before  # it waited for none

    @rule()
    def previous(self):
        begun, before = sum(copy.count for copy in self.buffer._copies), len(self.seen)
        self.seen += self.buffer.previous()
        assert len(self.seen) - before == begun
        assert len(self.late.events) == (len(self.buffer) > 0)  # the others are on their way

    @rule(count=st.integers(0, 5))
    def drain_some(self, count):
        there, before, under_way = len(self.buffer), len(self.seen), len(self.late.events)
        self.seen += self.buffer.drain(count)
        assert len(self.seen) - before >= min(count, there)
        assert count or len(self.late.events) >= under_way

    @precondition(lambda self: self.late.events)
    @rule()
    def arrive(self):
        self.late.arrive()

    @rule()
    def drain(self):
        self.seen += self.buffer.drain()
        assert len(self.buffer) == 0

    @invariant()
    def all_in_order(self):
        assert self.seen == expected(range(len(self.seen)))
        assert len(self.seen) + len(self.buffer) == self.written


TestLateRows = LateRows.TestCase
TestLateRows.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Watched:
    """A model trained with all of the telemetry; its third step has a gradient that is not finite."""

    def __init__(self, device):
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.names = tuple(name for name, _ in self.model.named_parameters())
        self.monitor = GradientMonitor(self.model)
        self.monitor.guard(self.optimizer)
        self.tracker = LossTracker(window=3)
        self.buffer = StepBuffer(4, device, len(self.names))
        self.records = []
        self.inputs = torch.linspace(-1, 1, 32, device=device).view(4, 8)

    def step(self, number):
        loss = self.model(self.inputs * math.inf if number == 3 else self.inputs).square().mean()
        loss.backward()
        state = self.monitor.observe()
        self.tracker.observe(loss)
        scalars = {"loss": loss, "grad_norm": state.total_norm, "skipped": state.found_inf}
        self.buffer.write_step(number, 1e-2, **scalars, norms_P=state.norms_P, names=self.names)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def read(self):
        self.records += self.buffer.drain()
        return self.records, self.monitor.drain(), self.tracker.drain()


def test_all_of_it_together_on_the_cpu():
    watched = Watched(CPU)
    for number in range(4):
        watched.step(number)
    steps, gradients, losses = watched.read()
    assert [record.skipped for record in steps] == [False, False, False, True]
    assert [record.total_norm for record in gradients[:3]] == [record.grad_norm for record in steps[:3]]
    assert [record.loss for record in losses[:3]] == [record.loss for record in steps[:3]]
    assert steps[3].first_non_finite == gradients[3].first_non_finite == "0.weight"
    assert all(p.isfinite().all() for p in watched.model.parameters())


def numbers_of(record):
    """But for the z-score: of losses that hardly differ it is mostly rounding."""
    numbers = record.to_dict()
    numbers.pop("z_score", None)
    return numbers | numbers.pop("parameter_norms", {})


@pytest.mark.gpu
def test_no_step_waits_for_the_device():
    ours, reference = Watched(torch.device("cuda")), Watched(CPU)
    reference.model.load_state_dict({name: p.cpu() for name, p in ours.model.state_dict().items()})
    ours.step(0)  # what is set up once may wait
    reference.step(0)
    for number in range(1, 12):
        with synchronization_fails():
            ours.step(number)
            ours.records += ours.buffer.poll()
        reference.step(number)
        for watched in (ours, reference):
            if watched.buffer.full:
                watched.records += watched.buffer.drain()
    for seen, expected_of_it in zip(ours.read(), reference.read(), strict=True):
        assert [record.step for record in seen] == list(range(12))
        for record, other in zip(seen, expected_of_it, strict=True):
            if record.step != 3:
                assert numbers_of(record) == pytest.approx(numbers_of(other), rel=1e-3)
    assert [record.step for record in ours.records if record.skipped] == [3]
