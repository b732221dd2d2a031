"""Memory tests: the marker `max_memory` and the fixtures `peak_memory` and `no_memory_growth`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import markers, options, records

if TYPE_CHECKING:
    from stackwise.benchmark.memory.growth import MemoryGrowth
    from stackwise.benchmark.memory.peak import PeakMemory

__all__ = [
    "Load",
    "MemoryFixtures",
    "MemoryGrowthError",
    "MemoryLimitError",
    "PeakMeter",
    "limited",
    "loads_of",
    "require_within",
]

_PEAK = "max_memory"


class MemoryLimitError(AssertionError):
    """Peak memory above the limit of the marker max_memory."""


class MemoryGrowthError(AssertionError):
    """Memory that grows with each step. The message has the amount and the objects that grow.

    Attributes:
        growth: the complete result of the measurement.
    """

    def __init__(self, growth: MemoryGrowth) -> None:
        self.growth = growth
        super().__init__(str(growth))


class PeakMeter:
    """Value of the fixture `peak_memory`. It measures the peak memory of a call."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def __call__(self, call: Callable[[], object]) -> PeakMemory:
        """Return the peak memory during `call()`, see `stackwise.benchmark.memory.peak_memory`.

        Raises:
            MemoryLimitError: the peak is above the limit of the test's marker max_memory.
            TypeError: `call` is a model or a class of models, or returns a generator or a coroutine.
        """
        __tracebackhide__ = True
        from stackwise.benchmark.memory import peak_memory

        return self._kept(peak_memory(call, options.device_name(self._item.config)))

    def fresh(
        self, factory: Callable[..., Callable[[], object]] | str, *arguments: Any, seconds: float = 120.0
    ) -> PeakMemory:
        """Return the peak memory during `factory(*arguments)()` in a new interpreter that runs only this.

        See `stackwise.benchmark.memory.fresh_peak_memory`.

        Raises:
            MemoryLimitError: the peak is above the limit of the test's marker max_memory.
            FreshProcessError: the process did not complete the call.
        """
        __tracebackhide__ = True
        from stackwise.benchmark.memory.fresh_process import fresh_peak_memory

        device = options.device_name(self._item.config)
        return self._kept(fresh_peak_memory(factory, *arguments, device=device, seconds=seconds).peak)

    def _kept(self, peak: PeakMemory) -> PeakMemory:
        __tracebackhide__ = True
        records.pay(self._item, _PEAK)
        require_within(self._item, loads_of(peak, options.device_name(self._item.config)))
        return peak


class MemoryFixtures:
    """Fixtures that measure memory."""

    @pytest.fixture
    def peak_memory(self, request: pytest.FixtureRequest) -> PeakMeter:
        """Measure the peak memory of a call instead of the whole test.

            @pytest.mark.max_memory("2 GiB")
            def test_generation(peak_memory):
                model = load()
                peak_memory(lambda: model.generate(prompt))

        `peak_memory.fresh(factory)` measures in a new process, so that on the CPU only this call contributes.
        Both return a PeakMemory, and compare it with the limit of the marker max_memory if the test has one.
        """
        item = request.node
        if markers.max_memory_of(item) is not None:
            records.owe(item, _PEAK, "the test is marked max_memory but never called peak_memory")
        return PeakMeter(item)

    @pytest.fixture
    def no_memory_growth(self, request: pytest.FixtureRequest) -> Callable[..., MemoryGrowth]:
        """Run a step many times, and fail the test if memory grows with each step.

            @pytest.mark.no_memory_growth(steps=60)
            def test_training(no_memory_growth):
                no_memory_growth(lambda: train_step(model, batch))

        Call it with a function without arguments, or a TrainerSpec. `steps`, `warmup` and `tolerance` are
        those of `stackwise.benchmark.memory.memory_growth`, and override those of the marker. The result is a
        MemoryGrowth.

        If its verdict is not "flat", MemoryGrowthError is raised. If the step is a model or a class of
        models, or returns a model, a generator or a coroutine, TypeError is raised.
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
            from stackwise.benchmark.memory.growth_trial import memory_growth

            records.pay(item, "no_memory_growth")
            config = item.config
            how: dict[str, Any] = {"device": options.device_name(config), "seed": options.seed(config)}
            growth = memory_growth(step, **(how | marked | arguments))
            item.user_properties.append(("stackwise.bytes_per_step", round(growth.bytes_per_step)))
            told = {"test": item.nodeid, "kind": "growth", **growth.to_dict(), "reasons": growth.reasons}
            records.add(item, "memory", told)
            if growth.verdict != "flat":
                raise MemoryGrowthError(growth)
            return growth

        return run


@contextmanager
def limited(item: pytest.Item) -> Iterator[None]:
    """Fail a test if its peak memory is above its marker max_memory, unless a fixture of it measures memory.

    Memory that fixtures allocated before the call of the test is included.
    """
    measures = ("throughput", "peak_memory")
    used = any(name in getattr(item, "fixturenames", ()) for name in measures)
    if markers.max_memory_of(item) is None or used:
        yield
        return
    from stackwise.benchmark.memory.peak import watch_peak

    with watch_peak(options.device_name(item.config)) as watch:
        yield
    beyond = ""
    try:
        require_within(item, loads_of(watch.peak, options.device_name(item.config)))
    except MemoryLimitError as error:
        beyond = str(error)
    if beyond:  # outside of the handler, otherwise the message is shown twice: also as the context
        pytest.fail(beyond, pytrace=False)


@dataclass(frozen=True)
class Load:
    """Memory in one place, to compare with a limit.

    Attributes:
        where: description of the place for messages, such as "by this process".
        peak: largest number of bytes in use at one time.
        before: bytes in use when the measured call began. None: not known.
    """

    where: str
    peak: int
    before: int | None = None


def loads_of(peak: PeakMemory, device: str) -> list[Load]:
    """Return the parts of a peak that a limit applies to, or [] if this system does not report the peak.

    If tensors are on a CUDA device, the limit applies to them, and to the memory that the call added on the
    host. The memory of the process itself, with the libraries of CUDA, is not caused by the test. If no
    tensors are on a CUDA device, the test uses the CPU, whatever device is requested. The limit then applies
    to the whole process.
    """
    loads = []
    if peak.allocated:
        loads.append(Load(f"by tensors on {device}", peak.allocated, peak.before))
        if peak.host_added is not None:
            loads.append(Load("more in the memory of the host", peak.host_added))
    elif peak.resident is not None:
        loads.append(Load("by this process", peak.resident, peak.resident_before))
    elif peak.allocated is not None:
        loads.append(Load(f"by tensors on {device}", peak.allocated, peak.before))
    return loads


def require_within(item: pytest.Item, loads: Sequence[Load]) -> None:
    """Compare peak memory with the test's marker max_memory, if it has one, and record the peaks.

    Args:
        item: the test.
        loads: memory to judge, each place separately. Empty if it cannot be read: a test with the marker is
            then skipped, and does not pass.

    Raises:
        MemoryLimitError: the peak is above the limit. The message names the place.
    """
    __tracebackhide__ = True
    limit = markers.max_memory_of(item)
    if loads:
        item.user_properties.append(("stackwise.peak_memory_bytes", loads[0].peak))
    beyond = [] if limit is None else [load for load in loads if load.peak > limit]
    verdict = "beyond" if beyond else "read" if limit is None else "within"
    records.add(
        item,
        "memory",
        {
            "test": item.nodeid,
            "kind": "peak",
            "verdict": verdict if loads else "not told",
            "limit": limit,
            "peaks": {load.where: load.peak for load in loads},
        },
    )
    if limit is None:
        return
    if not loads:
        pytest.skip("max_memory: this system does not tell the most memory that a call used")
    if not beyond:
        return
    from stackwise.support.units import byte_text

    told = []
    for load in beyond:
        known = "" if load.before is None else f", {byte_text(load.before)} of that before the measured call"
        told.append(f"{byte_text(load.peak)} ({load.peak} bytes) were in use {load.where} at the peak{known}")
    raise MemoryLimitError(f"max_memory: {'; '.join(told)}; allowed: {byte_text(limit)} ({limit} bytes)")
