"""Memory as tests: `max_memory`, `peak_memory` and `no_memory_growth`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import markers, options, records

if TYPE_CHECKING:
    from stackwise.benchmark.memory.growth import MemoryGrowth
    from stackwise.benchmark.memory.peak import PeakMemory

__all__ = [
    "MemoryFixtures",
    "MemoryGrowthError",
    "MemoryLimitError",
    "PeakMeter",
    "limited",
    "require_within",
]

_PEAK = "max_memory"


class MemoryLimitError(AssertionError):
    """More memory was in use than the marker max_memory allows."""


class MemoryGrowthError(AssertionError):
    """A step leaves something behind each time. Its text says how much, and what.

    Attributes:
        growth: all that was seen.
    """

    def __init__(self, growth: MemoryGrowth) -> None:
        self.growth = growth
        super().__init__(str(growth))


class PeakMeter:
    """What the fixture `peak_memory` gives."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def __call__(self, call: Callable[[], object]) -> PeakMemory:
        """The most memory in use at any moment of `call()`; see `stackwise.benchmark.memory.peak_memory`.

        Raises:
            MemoryLimitError: more than the test's marker max_memory allows.
        """
        __tracebackhide__ = True
        from stackwise.benchmark.memory import peak_memory

        return self._kept(peak_memory(call, options.device_name(self._item.config)))

    def fresh(
        self, factory: Callable[..., Callable[[], object]] | str, *arguments: Any, seconds: float = 120.0
    ) -> PeakMemory:
        """The same of `factory(*arguments)()`, in a new interpreter that has done nothing else.

        See `stackwise.benchmark.memory.fresh_peak_memory`.

        Raises:
            MemoryLimitError: more than the test's marker max_memory allows.
            FreshProcessError: the process did not come to the end of the call.
        """
        __tracebackhide__ = True
        from stackwise.benchmark.memory.fresh_process import fresh_peak_memory

        device = options.device_name(self._item.config)
        return self._kept(fresh_peak_memory(factory, *arguments, device=device, seconds=seconds).peak)

    def _kept(self, peak: PeakMemory) -> PeakMemory:
        __tracebackhide__ = True
        records.pay(self._item, _PEAK)
        require_within(self._item, peak.in_use, peak.before)
        return peak


class MemoryFixtures:
    """Fixtures of tests that are about memory."""

    @pytest.fixture
    def peak_memory(self, request: pytest.FixtureRequest) -> PeakMeter:
        """The most memory in use during a call, rather than during the whole test.

            @pytest.mark.max_memory("2 GiB")
            def test_generation(peak_memory):
                model = load()
                peak_memory(lambda: model.generate(prompt))

        `peak_memory.fresh(factory)` measures in a process of its own, where on the CPU nothing but the call
        counts. Both return a PeakMemory, and hold it against the marker max_memory where the test has one.
        """
        item = request.node
        if markers.max_memory_of(item) is not None:
            records.owe(item, _PEAK, "the test is marked max_memory but never called peak_memory")
        return PeakMeter(item)

    @pytest.fixture
    def no_memory_growth(self, request: pytest.FixtureRequest) -> Callable[..., MemoryGrowth]:
        """Make a step many times, and fail where it leaves something behind each time.

            @pytest.mark.no_memory_growth(steps=60)
            def test_training(no_memory_growth):
                no_memory_growth(lambda: train_step(model, batch))

        Call it with a function without arguments, or a TrainerSpec. `steps`, `warmup`, `tolerance` given
        here, as `stackwise.benchmark.memory.memory_growth` takes them, win over the marker's. Returns its
        MemoryGrowth; raises MemoryGrowthError where that is not flat.
        """
        item = request.node
        marked = markers.no_memory_growth_of(item)
        if item.get_closest_marker("no_memory_growth"):
            records.owe(
                item,
                "no_memory_growth",
                "the test is marked no_memory_growth but never called no_memory_growth",
            )

        def run(step: Any, **arguments: Any) -> MemoryGrowth:
            __tracebackhide__ = True
            from stackwise.benchmark.memory.growth import memory_growth

            records.pay(item, "no_memory_growth")
            defaults: dict[str, Any] = {
                "device": options.device_name(item.config),
                "seed": options.seed(item.config),
            }
            growth = memory_growth(step, **(defaults | marked | arguments))
            item.user_properties.append(("stackwise.bytes_per_step", round(growth.bytes_per_step)))
            if growth.verdict != "flat":
                raise MemoryGrowthError(growth)
            return growth

        return run


@contextmanager
def limited(item: pytest.Item) -> Iterator[None]:
    """Watch the memory of a test that is marked max_memory and measures none by itself; fail it beyond.

    What fixtures made before is in use when the call begins, and counts.
    """
    measures = ("throughput", "peak_memory")
    if markers.max_memory_of(item) is None or any(name in _fixtures(item) for name in measures):
        yield
        return
    from stackwise.benchmark.memory.peak import watch_peak

    with watch_peak(options.device_name(item.config)) as watch:
        yield
    try:
        require_within(item, watch.peak.in_use, watch.peak.before)
    except MemoryLimitError as error:
        pytest.fail(str(error), pytrace=False)


def require_within(item: pytest.Item, in_use: int | None, before: int | None = None) -> None:
    """Hold the most bytes in use against the test's marker max_memory, where it has one.

    Args:
        item: the test.
        in_use: at the peak; None, where that cannot be read: the test is then skipped, never green.
        before: in use when the measured call began; None: not known.

    Raises:
        MemoryLimitError: more than allowed.
    """
    __tracebackhide__ = True
    limit = markers.max_memory_of(item)
    if in_use is not None:
        item.user_properties.append(("stackwise.peak_memory_bytes", in_use))
    if limit is None:
        return
    if in_use is None:
        pytest.skip("max_memory: this system does not tell the most memory that a call used")
    if in_use <= limit:
        return
    from pytest_stackwise.byte_size import byte_text

    device = options.device_name(item.config)
    whose = "this process" if device == "cpu" else f"tensors on {device}"
    known = "" if before is None else f", {byte_text(before)} of that before the measured call began"
    raise MemoryLimitError(
        f"max_memory: {byte_text(in_use)} ({in_use} bytes) were in use by {whose} at the peak{known}; "
        f"allowed: {byte_text(limit)} ({limit} bytes)"
    )


def _fixtures(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))
