"""Throughput tests: measurements of stackwise, replayed into pytest-benchmark through its public API.

The loop of pytest-benchmark cannot wait for a GPU and does not warm up. `stackwise.benchmark` therefore takes
the samples. `benchmark.pedantic` then runs one round per sample, with a timer that advances by exactly this
sample. Saving, comparing, JSON, groups and --benchmark-only of pytest-benchmark work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import benchmark_settings, device, markers, memory, options, records

if TYPE_CHECKING:
    from stackwise.benchmark.generation import GenerationMeasurement
    from stackwise.benchmark.memory.peak import PeakMemory
    from stackwise.benchmark.timing.measurement import Measurement
    from stackwise.benchmark.workload import Workload
    from stackwise.subject.spec import ModelSpec

    Found = Measurement | GenerationMeasurement

__all__ = ["ThroughputError", "fixtures"]

_MACHINE = "stackwise"
_LONGEST = 128  # default sequence length
_NEW_TOKENS = 32  # default of `model_workload`
_ELSE = (
    "throughput also takes a TrainerSpec, and a Workload: stackwise.benchmark.callable_workload(function) "
    "makes one of any function"
)
# Keywords of `throughput` that are not keywords of `measure`.
_SHAPE = ("mode", "batch_size", "seq_len", "new_tokens", "dtype", "compile", "loop", "device")


class ThroughputError(AssertionError):
    """Throughput below the limit of the marker min_tokens_per_second."""


def fixtures(config: pytest.Config) -> object:
    """Return the fixtures for pytest-benchmark if it is loaded, otherwise the fixtures without it."""
    # Name of the entry point, or of the module after `-p pytest_benchmark.plugin`.
    names = ("benchmark", "pytest_benchmark.plugin")
    return WithBenchmark() if any(map(config.pluginmanager.hasplugin, names)) else Alone()


class ReplayClock:
    """Timer that advances only when a sample is replayed."""

    __name__ = "replayed_samples"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def replay(self, samples: Iterable[float], calls_per_sample: int) -> Callable[[], object]:
        """Return a function that replays one call each time.

        The first call of a sample advances the clock by the whole sample. The other calls of a sample run no
        Python code, because there may be millions. After the last sample, a call takes no time:
        pytest-benchmark makes one more call, for its result.
        """

        def begin(seconds: float) -> Iterable[None]:
            self.now += seconds * calls_per_sample
            return repeat(None, calls_per_sample)

        return partial(next, chain.from_iterable(map(begin, samples)), None)


class Gated:
    """Methods of the fixtures that the gate calls in a process of a side."""

    def workload_of(
        self, request: pytest.FixtureRequest, subject: Any, arguments: dict[str, Any]
    ) -> Workload:
        """Return the workload that the fixture would measure. The gate measures its time instead."""
        shape = _shape(request.node, request.getfixturevalue("seq_len"), dict(arguments))
        return _workload(request.node, subject, shape)[0]

    def found_once(self, workload: Workload) -> Found:
        """Return the result of the fixture under the gate: one timed call, as if benchmarks were disabled."""
        return _found_once(workload)


class WithBenchmark(Gated):
    """Fixtures that replay every sample into pytest-benchmark, and hooks that extend its files."""

    def __init__(self) -> None:
        self._measured: dict[str, str] = {}  # node id -> device

    @pytest.fixture
    def stackwise_clock(self, request: pytest.FixtureRequest) -> ReplayClock:
        """Clock that gives pytest-benchmark the times that the `throughput` fixture measured."""
        clock = ReplayClock()
        settings = benchmark_settings.replayed(request.node, clock)
        request.node.add_marker(pytest.mark.benchmark(**settings), append=False)
        return clock

    @pytest.fixture
    def throughput(
        self,
        request: pytest.FixtureRequest,
        stackwise_clock: ReplayClock,
        benchmark: Any,
        seq_len: int | None,
    ) -> Iterator[Callable[..., Found]]:
        """Measure the speed of a model, a training step or a Workload.

            @pytest.mark.min_tokens_per_second(20_000)
            @pytest.mark.throughput(mode="train", batch_size=4, seq_len=128)
            def test_training_speed(throughput):
                throughput(spec)

        Call it once per test, with anything that `ModelSpec.of` understands, a TrainerSpec or a Workload. The
        result is a Measurement or a GenerationMeasurement.

        - Mode and sizes are those of `stackwise.benchmark.model_workload`. They override those of the marker.
        - `peak` is that of `Workload.utilization`.
        - `against` is the old implementation, if a file has an old and a new one. The gate compares `subject`
          with it if --stackwise-against=callable is set. Otherwise it is ignored.
        - Further keyword arguments are those of `measure`, or with mode "generate" of `measure_generation`.

        If benchmarks are disabled (--benchmark-disable, xdist), one call is made and timed, without warm-up.
        The settings min_rounds, max_time and warmup of pytest-benchmark are used. Each other setting that the
        user chose is reported in a note. The marker max_latency raises the number of calls to the number that
        its percentiles need, unless the call of the fixture sets min_calls.
        """
        _owe(request.node)
        is_called = False

        def run(subject: Any, *, against: Any = None, **arguments: Any) -> Found:
            nonlocal is_called
            del against  # only the gate uses it
            __tracebackhide__ = True
            is_called = True
            settings: dict[str, Any] = {}
            notes: tuple[str, ...] = ()
            if not benchmark.disabled:
                settings, notes = benchmark_settings.followed(request.node, arguments)
            found, record, peak = _measure(
                request.node, subject, seq_len, benchmark.disabled, arguments, settings, notes
            )
            calls = record.get("calls_per_sample", 1)
            call = stackwise_clock.replay(found.seconds, calls)
            benchmark.extra_info.update(record)
            benchmark.pedantic(call, rounds=len(found.seconds), iterations=calls)
            if not benchmark.disabled:
                self._measured[request.node.nodeid] = record["device"]
            _hold_to_limits(request.node, found, peak, record["device"], arguments, benchmark.disabled)
            return found

        yield run
        if is_called:
            # If `run` raised before the replay, pytest-benchmark would warn that its fixture was not used.
            benchmark.skipped = True

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Add the percentiles of the samples to the `stats` of pytest-benchmark."""
        for entry in output_json["benchmarks"]:
            if entry["fullname"] not in self._measured:
                continue
            for name, found in entry["extra_info"]["percentiles"].items():
                entry["stats"][name] = found["value"]
                entry["stats"][f"{name}_interval"] = [found["low"], found["high"]]

    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Add the fingerprint of the machine if `throughput` measured something: this loads torch."""
        if self._measured:
            machine_info[_MACHINE] = self._fingerprint()

    @pytest.hookimpl(tryfirst=True)
    def pytest_benchmark_compare_machine_info(
        self, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
    ) -> None:
        """Compare the fingerprints of the machines if the saved run has one."""
        machine_info.pop(_MACHINE, None)
        if _MACHINE in compared_benchmark["machine_info"]:
            machine_info[_MACHINE] = self._fingerprint()

    def _fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the machine.

        It has no clocks, temperatures or load, because pytest-benchmark compares it as a whole.
        """
        from stackwise.support.device import fingerprint

        return fingerprint(max(self._measured.values(), default=None))  # prefer "cuda:N" to "cpu"


class Alone(Gated):
    """Fixtures without pytest-benchmark. Measurements appear in the summary and are not saved."""

    @pytest.fixture
    def throughput(self, request: pytest.FixtureRequest, seq_len: int | None) -> Callable[..., Found]:
        """Measure the speed of a model, a training step or a Workload, see `WithBenchmark.throughput`."""
        _owe(request.node)

        def run(subject: Any, *, against: Any = None, **arguments: Any) -> Found:
            del against  # only the gate uses it
            __tracebackhide__ = True
            found, record, peak = _measure(request.node, subject, seq_len, False, arguments, {})
            _hold_to_limits(request.node, found, peak, record["device"], arguments, False)
            return found

        return run


def _owe(item: pytest.Item) -> None:
    names = ["throughput", "min_tokens_per_second", "max_latency"]
    if "peak_memory" not in getattr(item, "fixturenames", ()):
        names.append("max_memory")
    for name in names:
        if item.get_closest_marker(name):
            records.owe(item, "throughput", f"the test is marked {name} but never called throughput")
            return


def _measure(
    item: pytest.Item,
    subject: Any,
    seq_len: int | None,
    disabled: bool,
    arguments: dict[str, Any],
    settings: Mapping[str, Any],
    notes: tuple[str, ...] = (),
) -> tuple[Found, dict[str, Any], PeakMemory | None]:
    """Return the measurement, its record, and the peak memory, which is None without a limit for memory.

    Args:
        item: the test.
        subject: model, training step or workload to measure.
        seq_len: sequence length of the test's parametrization, or None.
        disabled: True if benchmarks are disabled, so that only one call is made and timed.
        arguments: keyword arguments of the fixture's call. Mode, sizes and `peak` are removed from it, so
            that only keywords of the measurement remain.
        settings: more keywords of the measurement. Limits of the test and `arguments` override them.
        notes: notes to add to the measurement.
    """
    from stackwise.benchmark.generation import measure_generation
    from stackwise.benchmark.timing.measurement import measure
    from stackwise.benchmark.workload import Workload

    if not records.first_time(item, "throughput"):
        raise RuntimeError("throughput: call it once in a test; parametrize the test for more")
    records.pay(item, "throughput")
    shape = _shape(item, seq_len, arguments)
    rates = arguments.pop("peak", "published")
    made = isinstance(subject, Workload)
    by_token = subject.each_token is not None if made else shape.get("mode") == "generate"
    take: Callable[..., Found] = measure_generation if by_token else measure
    _refuse_unknown(take, arguments)
    with _locked_workload(item, subject, shape, disabled) as (workload, shape):
        how = {**settings, **_needed(item, workload, settings), **arguments}
        found: Found = _found_once(workload) if disabled else take(workload, **how)
        peak = None if markers.max_memory_of(item) is None else _peak_of(workload)
        if peak is not None:
            found = replace(found, peak_memory_bytes=peak.in_use)
        found = replace(found, notes=(*found.notes, *notes))
        used = None if disabled else workload.utilization(found.median, rates)
        floor = None if disabled else workload.floor(rates)
        if used is not None and (used.mfu is not None or used.mbu is not None):
            found = replace(found, notes=(*found.notes, *used.notes))  # the report shows them
    record = {
        **shape,
        **found.to_dict(),
        **{name: getattr(used, name, None) for name in ("mfu", "hfu", "mbu")},
        "floor_seconds": floor and floor.seconds,
        "bound": floor and floor.bound,
        "measured": not disabled,
    }
    records.add(item, "throughput", {"test": item.nodeid, **record})
    return found, record, peak


@contextmanager
def _locked_workload(
    item: pytest.Item, subject: Any, shape: dict[str, Any], disabled: bool
) -> Iterator[tuple[Workload, dict[str, Any]]]:
    """Yield the workload and its description. Hold the lock of its device unless benchmarks are disabled."""
    from stackwise.benchmark.workload import Workload
    from stackwise.support.device import resolve_device

    own = subject.device if isinstance(subject, Workload) else None
    expected = str(own or resolve_device(str(shape.get("device") or options.device_name(item.config))))
    if disabled:  # a single call needs no lock, as it is not a measurement
        yield _workload(item, subject, shape)
        return
    with ExitStack() as held:
        held.enter_context(device.lock(expected))
        workload, shape = _workload(item, subject, shape)
        if not device.same_device(expected, str(workload.device)):
            # A third-party loop may use another device. The first lock is released before the second is
            # acquired: processes that hold both in a different order would deadlock.
            held.close()
            held.enter_context(device.lock(str(workload.device)))
        yield workload, shape


def _needed(item: pytest.Item, workload: Workload, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of the measurement that are needed to judge the latency limits of the test."""
    latencies = markers.max_latency_of(item)
    if not latencies:
        return {}
    from pytest_stackwise.latency import least_arguments

    needed = least_arguments(latencies, workload)
    return needed | {"min_calls": max(needed["min_calls"], settings.get("min_calls", 0))}


def _found_once(workload: Workload) -> Found:
    from stackwise.benchmark.generation import generate_once
    from stackwise.benchmark.timing.measurement import call_once

    return call_once(workload) if workload.each_token is None else generate_once(workload)


def _shape(item: pytest.Item, seq_len: int | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return mode, sizes and similar settings of the marker and of `arguments`, from which they are removed.

    `arguments` override the marker.
    """
    markers.refuse_other_length(seq_len, arguments)
    marked = markers.throughput_of(item) | ({"seq_len": seq_len} if seq_len else {})
    return marked | {key: arguments.pop(key) for key in tuple(arguments) if key in _SHAPE}


def _workload(item: pytest.Item, subject: Any, shape: dict[str, Any]) -> tuple[Workload, dict[str, Any]]:
    """Return the workload to measure, and its description for the record."""
    from stackwise.benchmark.workload import Workload, check_shape, model_workload, trainer_workload
    from stackwise.subject.spec import ModelSpec
    from stackwise.subject.trainer_spec import TrainerSpec

    seed = options.seed(item.config)
    if isinstance(subject, Workload):
        _refuse(shape, (), "a Workload has its own")
        return subject, _record(subject, subject.name, {})
    if isinstance(subject, TrainerSpec):
        _refuse(shape, ("batch_size", "seq_len"), "a TrainerSpec has its own, batch_size and seq_len apart")
        return (made := trainer_workload(subject, seed=seed, **shape)), _record(made, subject.name, {})
    check_shape(**{key: value for key, value in shape.items() if key != "device"})
    try:
        spec = ModelSpec.of(subject)
    except TypeError as error:
        error.add_note(_ELSE)
        raise
    defaults = {"mode": "forward", "batch_size": 1, "device": options.device_name(item.config)}
    shape = {**defaults, **shape}
    if "seq_len" not in shape:
        shape["seq_len"] = _default_length(spec, shape)
    made = model_workload(spec, seed=seed, **shape)
    return made, _record(made, spec.name, shape)


def _default_length(spec: ModelSpec, shape: dict[str, Any]) -> int:
    """Return the default sequence length. It leaves room for the tokens that the call generates."""
    if spec.max_length is None:
        return _LONGEST
    to_come: int = {"decode": 1, "generate": shape.get("new_tokens", _NEW_TOKENS)}.get(shape["mode"], 0)
    if shape["mode"] == "generate" and to_come >= spec.max_length:
        given = "" if "new_tokens" in shape else " (the default)"
        raise ValueError(
            f"new_tokens: got {to_come}{given}; allowed: 1 to {spec.max_length - 1}, since {spec.name} takes "
            f"{spec.max_length} positions, of which the prompt has one at least"
        )
    return min(_LONGEST, spec.max_length - to_come)


def _record(workload: Workload, name: str, shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": name,
        "mode": workload.mode or "call",
        "batch_size": workload.batch_size or None,
        "seq_len": workload.seq_len or None,
        "new_tokens": workload.new_tokens or None,
        "device": str(workload.device),
        "dtype": shape.get("dtype") or _dtype_of(workload),
        "compile": shape.get("compile", False),
    }


def _dtype_of(workload: Workload) -> str | None:
    """Return the floating-point dtypes of the weights, separated by "/", or None for an unknown model."""
    weights = () if workload.model is None else workload.model.parameters()
    dtypes = {str(each.dtype).removeprefix("torch.") for each in weights if each.is_floating_point()}
    return "/".join(sorted(dtypes)) or None


def _refuse_unknown(take: Callable[..., Found], arguments: Mapping[str, Any]) -> None:
    """Raise an error for an unknown keyword, before a model is built."""
    try:
        signature(take).bind(None, **arguments)
    except TypeError as error:
        _, *known = signature(take).parameters  # the first parameter is the workload
        allowed = ", ".join((*_SHAPE, "peak", "against", *known))
        raise TypeError(f"throughput: {error}; allowed: {allowed}") from None


def _refuse(shape: dict[str, Any], allowed: tuple[str, ...], reason: str) -> None:
    for key, value in shape.items():
        if key not in allowed:
            raise ValueError(f"{key}: got {value!r}; allowed: none here, {reason}")


def _peak_of(workload: Workload) -> PeakMemory:
    """Return the peak memory of one additional call. A measurement contains only one number for its peak.

    Memory does not depend on time, so this also applies if benchmarks are disabled. The result is empty if
    the workload replays a CUDA graph, whose memory cannot be measured.
    """
    from stackwise.benchmark.memory.peak import PeakMemory, watch_peak

    if workload.replays is not None:
        return PeakMemory()
    prepare = workload.prepare_alone or workload.prepare
    if prepare is not None:
        prepare()
    with watch_peak(workload.device) as watch:
        workload.call()
    return watch.peak


def _hold_to_limits(
    item: pytest.Item,
    found: Found,
    peak: PeakMemory | None,
    device_name: str,
    said: Mapping[str, Any],
    disabled: bool,
) -> None:
    """Fail a test if a limit of its markers is not met. Skip the test if a limit cannot be judged.

    Args:
        item: the test.
        found: the measurement.
        peak: peak memory to compare with the marker max_memory. None: the test has no such marker.
        device_name: device of the measurement.
        said: keyword arguments of the measurement that the test set.
        disabled: True if benchmarks are disabled, so that only one call was made.

    Raises:
        MemoryLimitError: the peak memory is above the limit of max_memory.
        ThroughputError: the throughput is below the limit of min_tokens_per_second.
        LatencyError: a latency is above the limit of max_latency, or there are too few samples to decide.
    """
    __tracebackhide__ = True
    wanted, latencies = markers.min_tokens_per_second_of(item), markers.max_latency_of(item)
    if wanted is not None and not disabled:
        _require_speed(found, wanted)
    if latencies and not disabled:
        from pytest_stackwise.latency import require_within

        require_within(latencies, found, said)
    if peak is not None:
        # If memory cannot be read, this skips the test, and the code below does not run.
        memory.require_within(item, memory.loads_of(peak, device_name))
    elif found.peak_memory_bytes is not None:
        item.user_properties.append(("stackwise.peak_memory_bytes", found.peak_memory_bytes))
    for name, asked in (("min_tokens_per_second", wanted is not None), ("max_latency", bool(latencies))):
        if asked and disabled:
            pytest.skip(f"{name}: benchmarks are disabled, and one call is no measurement")


def _require_speed(found: Found, wanted: float) -> None:
    __tracebackhide__ = True
    rate = found.tokens_per_second
    if rate is None:
        raise ThroughputError(
            f"min_tokens_per_second: {found.workload} does not say how many tokens it handles"
        )
    if rate < wanted:
        steady = "" if found.steady else f" (not steady: {found.warmup.reason})"
        raise ThroughputError(
            f"min_tokens_per_second: {rate:,.0f} tokens/s were measured{steady}; "
            f"wanted: at least {wanted:,.0f}"
        )
