"""Throughput as tests: our own measurement, replayed into pytest-benchmark through its public face.

pytest-benchmark's loop cannot wait for a GPU and does not warm up. So the samples are taken by
`stackwise.benchmark`, and its `pedantic` then runs one round per sample on a clock that advances by just
that sample: saving, comparing, JSON, groups and --benchmark-only all work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
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
_LONGEST = 128  # default positions of a row
_NEW_TOKENS = 32  # that of `model_workload`
_ELSE = (
    "throughput also takes a TrainerSpec, and a Workload: stackwise.benchmark.callable_workload(function) "
    "makes one of any function"
)
# What is no keyword of `measure`.
_SHAPE = ("mode", "batch_size", "seq_len", "new_tokens", "dtype", "compile", "loop", "device")


class ThroughputError(AssertionError):
    """Fewer tokens per second were measured than the marker min_tokens_per_second wants."""


def fixtures(config: pytest.Config) -> object:
    """The fixtures: with pytest-benchmark where it is loaded, alone where it is not."""
    # By its entry point's name, or as `-p pytest_benchmark.plugin` has it.
    names = ("benchmark", "pytest_benchmark.plugin")
    return WithBenchmark() if any(map(config.pluginmanager.hasplugin, names)) else Alone()


class ReplayClock:
    """A timer that stands still until a replayed sample moves it."""

    __name__ = "replayed_samples"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def replay(self, samples: Iterable[float], calls_per_sample: int) -> Callable[[], object]:
        """What replays one call each time: the first of a sample moves the clock by all of it.

        The others, of which there may be millions, run no code of Python. After the last there are calls of
        no time: pytest-benchmark makes one more, for its result.
        """

        def begin(seconds: float) -> Iterable[None]:
            self.now += seconds * calls_per_sample
            return repeat(None, calls_per_sample)

        return partial(next, chain.from_iterable(map(begin, samples)), None)


class Gated:
    """What the gate asks of the fixtures, in a process of a side."""

    def workload_of(
        self, request: pytest.FixtureRequest, subject: Any, arguments: dict[str, Any]
    ) -> Workload:
        """What the fixture would measure here, for the gate, which takes the time by itself."""
        shape = _shape(request.node, request.getfixturevalue("seq_len"), dict(arguments))
        return _workload(request.node, subject, shape)[0]

    def found_once(self, workload: Workload) -> Found:
        """What the fixture hands to the test there: one call, timed, as where benchmarks are disabled."""
        return _found_once(workload)


class WithBenchmark(Gated):
    """Fixtures that hand every sample to pytest-benchmark, and what its files say beyond that."""

    def __init__(self) -> None:
        self._measured: dict[str, str] = {}  # the device, by the name of the test

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

        Call it once with anything that `ModelSpec.of` understands, a TrainerSpec or a Workload. The mode and
        sizes of `stackwise.benchmark.model_workload` given here win over the marker's; `peak` is that of
        `Workload.utilization`; further keyword arguments are those of `measure`, or `measure_generation` with
        mode "generate". `against` is the old one of two in a file: with --stackwise-against=callable the gate
        compares `subject` with it, else it is left alone. Returns the Measurement or GenerationMeasurement.
        Where benchmarks are disabled (--benchmark-disable, xdist) one call is made and timed, without
        warm-up. Of pytest-benchmark's own settings min_rounds, max_time and warmup are followed; each other
        one that was chosen is a note. max_latency takes as many calls as its percentiles do, where the call
        does not say min_calls.
        """
        _owe(request.node)
        is_called = False

        def run(subject: Any, *, against: Any = None, **arguments: Any) -> Found:
            nonlocal is_called
            del against  # what a gate compares with
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
            # What was refused never came to the replay, and pytest-benchmark would warn that nobody used it.
            benchmark.skipped = True

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Add the percentiles of our samples to those that pytest-benchmark has in `stats`."""
        for entry in output_json["benchmarks"]:
            if entry["fullname"] not in self._measured:
                continue
            for name, found in entry["extra_info"]["percentiles"].items():
                entry["stats"][name] = found["value"]
                entry["stats"][f"{name}_interval"] = [found["low"], found["high"]]

    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Add the fingerprint, if anything of ours is to be saved: others need not wait for torch."""
        if self._measured:
            machine_info[_MACHINE] = self._fingerprint()

    @pytest.hookimpl(tryfirst=True)
    def pytest_benchmark_compare_machine_info(
        self, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
    ) -> None:
        """Compare fingerprints where the saved run has one."""
        machine_info.pop(_MACHINE, None)
        if _MACHINE in compared_benchmark["machine_info"]:
            machine_info[_MACHINE] = self._fingerprint()

    def _fingerprint(self) -> dict[str, Any]:
        """What the machine is; no clock, no temperature and no load: files are compared as a whole."""
        from stackwise.support.device import fingerprint

        return fingerprint(max(self._measured.values(), default=None))  # of "cpu" and "cuda:N" a GPU


class Alone(Gated):
    """The same without pytest-benchmark: measured and summarised, not saved."""

    @pytest.fixture
    def throughput(self, request: pytest.FixtureRequest, seq_len: int | None) -> Callable[..., Found]:
        """Measure a model at work, a training step, or a Workload; see the fixture of the same name above."""
        _owe(request.node)

        def run(subject: Any, *, against: Any = None, **arguments: Any) -> Found:
            del against  # what a gate compares with
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
    """What was measured, the record of it, and where the test has a limit of memory, the peak to judge.

    Args:
        item: the test.
        subject: what is measured.
        seq_len: that the test is parametrized with.
        disabled: whether one call is made, and timed.
        arguments: of the call; those that are left in it are keywords of the measurement.
        settings: more of those, over which a limit of the test and the call win.
        notes: to be kept with what was measured.
    """
    from stackwise.benchmark.generation import measure_generation
    from stackwise.benchmark.timing.measurement import measure
    from stackwise.benchmark.workload import Workload
    from stackwise.support.device import resolve_device

    if not records.first_time(item, "throughput"):
        raise RuntimeError("throughput: call it once in a test; parametrize the test for more")
    records.pay(item, "throughput")
    shape = _shape(item, seq_len, arguments)
    rates = arguments.pop("peak", "published")
    made = isinstance(subject, Workload)
    by_token = subject.each_token is not None if made else shape.get("mode") == "generate"
    take: Callable[..., Found] = measure_generation if by_token else measure
    _refuse_unknown(take, arguments)
    default = options.device_name(item.config)
    with ExitStack() as held:
        own = subject.device if isinstance(subject, Workload) else None
        expected = str(own or resolve_device(str(shape.get("device") or default)))
        if not disabled:  # one call is no measurement, which nobody can disturb
            held.enter_context(device.lock(expected))
        workload, shape = _workload(item, subject, shape)
        if not disabled and not device.same_device(expected, str(workload.device)):
            # A loop of others puts its model where it likes. Never two at once: who has them the other way
            # round would wait for ever.
            held.close()
            held.enter_context(device.lock(str(workload.device)))
        how = {**settings, **_needed(item, workload, settings), **arguments}
        found: Found = _found_once(workload) if disabled else take(workload, **how)
        limited = markers.max_memory_of(item) is not None
        peak = _peak_of(workload) if limited else None
        if peak is not None:
            found = replace(found, peak_memory_bytes=peak.in_use)
        found = replace(found, notes=(*found.notes, *notes))
        used = None if disabled else workload.utilization(found.median, rates)
        floor = None if disabled else workload.floor(rates)
        if used is not None and (used.mfu is not None or used.mbu is not None):
            found = replace(found, notes=(*found.notes, *used.notes))  # of what is shown
    record = {
        **shape,
        **found.to_dict(),
        "mfu": None if used is None else used.mfu,
        "hfu": None if used is None else used.hfu,
        "mbu": None if used is None else used.mbu,
        "floor_seconds": None if floor is None else floor.seconds,
        "bound": None if floor is None else floor.bound,
        "measured": not disabled,
    }
    records.add(item, "throughput", {"test": item.nodeid, **record})
    return found, record, peak


def _needed(item: pytest.Item, workload: Workload, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a measurement without which the test's limits of latency could not be judged."""
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
    """Mode, sizes and the like, of the marker and of the call, which wins and from which they are taken."""
    markers.refuse_other_length(seq_len, arguments)
    marked = markers.throughput_of(item) | ({"seq_len": seq_len} if seq_len else {})
    return marked | {key: arguments.pop(key) for key in tuple(arguments) if key in _SHAPE}


def _workload(item: pytest.Item, subject: Any, shape: dict[str, Any]) -> tuple[Workload, dict[str, Any]]:
    """What is to be measured, and what the record says that it is."""
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
    """Positions of a row where nobody says how many: what is to come has room behind them."""
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
    """Of the weights, of all kinds that there are; None where no model is known."""
    weights = () if workload.model is None else workload.model.parameters()
    dtypes = {str(each.dtype).removeprefix("torch.") for each in weights if each.is_floating_point()}
    return "/".join(sorted(dtypes)) or None


def _refuse_unknown(take: Callable[..., Found], arguments: Mapping[str, Any]) -> None:
    """Refuse what is a keyword of nothing here, before a model is built."""
    try:
        signature(take).bind(None, **arguments)
    except TypeError as error:
        _, *known = signature(take).parameters  # the workload is not for the test to say
        allowed = ", ".join((*_SHAPE, "peak", "against", *known))
        raise TypeError(f"throughput: {error}; allowed: {allowed}") from None


def _refuse(shape: dict[str, Any], allowed: tuple[str, ...], reason: str) -> None:
    for key, value in shape.items():
        if key not in allowed:
            raise ValueError(f"{key}: got {value!r}; allowed: none here, {reason}")


def _peak_of(workload: Workload) -> PeakMemory:
    """The peak of memory of one more call: a measurement keeps no more than a number of its own.

    It is no matter of time: it is judged even where none is taken.
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
    """Fail a test beyond the limits of its markers; skip it where it cannot be told.

    Args:
        item: the test.
        found: what was measured.
        peak: what max_memory is held against; None: the test has no such marker.
        device_name: where it was measured.
        said: keywords of the measurement that the test itself gave.
        disabled: whether that was one call.

    Raises:
        MemoryLimitError: more memory than max_memory allows.
        ThroughputError: fewer tokens per second than min_tokens_per_second wants.
        LatencyError: more time than max_latency allows.
    """
    __tracebackhide__ = True
    wanted, latencies = markers.min_tokens_per_second_of(item), markers.max_latency_of(item)
    if wanted is not None and not disabled:
        _require_speed(found, wanted)
    if latencies and not disabled:
        from pytest_stackwise.latency import require_within

        require_within(latencies, found, said)
    if peak is not None:
        # It skips where memory cannot be read, and with it what comes behind.
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
