"""Markers of the plugin, and the validation of their arguments before a test runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import benchmark_items

if TYPE_CHECKING:
    from pytest_stackwise.latency import LatencyLimit
    from pytest_stackwise.quality import QualityMarker
    from stackwise.gate.limit import Limits
    from stackwise.stability import Fault

__all__ = [
    "are_used_in",
    "check_lengths",
    "fault_readers",
    "faults_of",
    "gate_of",
    "gated_metrics",
    "lengths_of",
    "max_latency_of",
    "max_memory_of",
    "min_tokens_per_second_of",
    "no_memory_growth_of",
    "quality_of",
    "recovery_of",
    "refuse_other_length",
    "register",
    "take_validated",
    "throughput_of",
    "wants_folder",
    "warn_of_labels",
]

_HELP = """\
gpu: the test needs a CUDA device; without --gpu it is skipped
stability: selects stability tests with -m stability; the plugin adds it to tests that use a fixture of \
faults or lengths
recovers(within, loss_tolerance): stability_run also trains without the fault; the test fails if a broken \
step has no alarm, or if from `within` steps after the fault on the losses of both runs differ by more than \
`loss_tolerance` nats
nan_injection(step, target='activation', kind='nan', seed=None, duration=1): write one 'nan' or 'inf'; \
target: loss, or activation, gradient, weight, optimizer_state or batch, each with or without [:PATTERN]
gradient_explosion(step, factor=10.0, target='*', duration=1): multiply the gradients of `target` by `factor`
gradient_scale(step, factor=0.1, target='*', duration=1): multiply the gradients of `target` by `factor`
loss_spike(step, factor=10.0, duration=1): multiply the loss by `factor`
logit_growth(step, factor=4.0, target=None, duration=1): multiply queries by `factor`, so that \
attention logits grow
embedding_explosion(step, factor=10.0, target='*', duration=1): multiply embedding tables by `factor`
label_corruption(step, fraction=1.0, seed=0, duration=1): replace a `fraction` of the labels by other labels
bit_flip(step, target='weight', bit=None, seed=None, duration=1): flip one bit of a value; \
target: as in nan_injection
half_overflow(step, target='activation', factor=2.0, seed=None, duration=1): scale values beyond \
the largest float16 number
corrupt_sample(step, seed=0, duration=1): replace one row of a batch by noise
unreadable_sample(step, seed=0, duration=1): raise an error in the data loader
worker_death(step, seed=0, duration=1): kill a worker process of a DataLoader
out_of_memory(step, target=None, moment='forward', duration=1): raise torch.OutOfMemoryError during a pass
slow_rank(step, rank=0, seconds=1.0, duration=1): one process of run_processes sleeps for `seconds`
dead_rank(step, rank=0, kind='kill', duration=1): end one process of run_processes; kind: 'kill' (SIGKILL) \
or 'exit'
process_signal(step, kind='SIGTERM', moment='forward', folder=None, operation=0, target=None, duration=1): \
send this process SIGTERM or SIGKILL; moment: 'forward', 'update', or 'save': at file operation number \
`operation` in `folder`
disk_full(step=0, folder='.', target='*', after=0, duration=1): writes to files in `folder` \
fail with ENOSPC (no space left)
short_write(step=0, folder='.', target='*', after=0, duration=1): writes to files in \
`folder` lose everything after `after` bytes
bit_rot(step=0, folder='.', target='*', kind='flip', seed=0, duration=1): flip a bit of a file \
in `folder`, or truncate it
seq_lengths(*lengths): run the test once per sequence length, for stability_run and throughput; length_sweep \
takes all lengths in one test
throughput(mode='forward', batch_size=1, seq_len=128, new_tokens=32, dtype=None, compile=False, \
loop='common'): settings of the throughput fixture; mode: forward, train, prefill, decode or generate
max_memory(limit): the test fails if its peak memory exceeds `limit`, such as "2 GiB": memory of CUDA \
tensors, and memory that the test adds on the host; without CUDA tensors, memory of the whole process
min_tokens_per_second(rate): the test fails if the throughput fixture measures fewer tokens per second
max_latency(p50=None, p95=None, p99=None, of=None): the test fails if the throughput fixture measures a \
higher latency, such as p95="20ms"; of, for generation: 'ttft' (time to first token), 'itl' (time between \
two tokens), 'tpot' (mean time per token after the first) or 'e2e' (whole generation)
gate(time="2%", memory="1%", ttft="5%", tpot="2%", floor=None, memory_floor="64 KiB"): with \
--stackwise-against, the test fails if head (the new version) needs more time or memory than base (the old \
version) by more than this share; \
None: no verdict; floor="50us": ignore smaller differences
quality(task, at_least=None, at_most=None, within_of_baseline=None, level=0.95, include=None, metric=None, \
shots=None, limit=None): settings of the quality fixture; task: a task of lm-evaluation-harness, a .yaml, \
.jsonl or .parquet file; the test fails if too few answers are right, or if the model is significantly \
worse than its baseline
no_memory_growth(steps=40, warmup=10, tolerance="1 KiB"): settings of the no_memory_growth fixture; \
`tolerance` is in bytes per step
"""
# Fixtures that use each fault. The names are those of `stackwise.stability.faults.KNOWN_FAULTS`, which is not
# imported here because that loads torch.
_IN_STEP = ("stability_run", "inject_faults", "run_processes")
_OUTSIDE = ("inject_faults", "run_processes")
_OF_RANKS = ("run_processes",)
_OF_STORAGE = ("broken_storage", "inject_faults", "run_processes")
_FAULTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("nan_injection", "gradient_explosion", "gradient_scale", "loss_spike"), _IN_STEP),
    **dict.fromkeys(("logit_growth", "embedding_explosion", "label_corruption", "bit_flip"), _IN_STEP),
    **dict.fromkeys(("half_overflow", "corrupt_sample", "out_of_memory"), _IN_STEP),
    **dict.fromkeys(("unreadable_sample", "worker_death", "process_signal"), _OUTSIDE),
    **dict.fromkeys(("slow_rank", "dead_rank"), _OF_RANKS),
    **dict.fromkeys(("disk_full", "short_write", "bit_rot"), _OF_STORAGE),
}
_NEEDS = {
    **_FAULTS,
    "recovers": ("stability_run",),
    "seq_lengths": ("stability_run", "throughput", "seq_len", "length_sweep"),
    "throughput": ("throughput",),
    "gate": ("benchmark", "throughput"),
    "min_tokens_per_second": ("throughput",),
    "max_latency": ("throughput",),
    "quality": ("quality",),
    "no_memory_growth": ("no_memory_growth",),
}
# Fixtures that inject faults, and fixtures that train at several lengths. Both add the marker `stability`.
_FAULT_READERS = ("stability_run", "inject_faults", "run_processes", "broken_storage")
_LENGTH_SWEEPS = ("length_sweep", "first_unstable_length")
_OF_OTHERS = ("benchmark",)
_OURS = {name for readers in _NEEDS.values() for name in readers if name not in _OF_OTHERS}
_OURS |= {"peak_memory", *_LENGTH_SWEEPS}
# A marker, an import, or a fixture among the arguments of a test.
_USE = re.compile(
    rf"\bmark\.({'|'.join([*_NEEDS, 'max_memory', 'stability'])})\b|^\s*(from|import) (pytest_)?stackwise\b"
    rf"|\bdef test\w*\(([^)]*\W)?({'|'.join(sorted(_OURS))})\b",
    re.MULTILINE,
)


def register(config: pytest.Config) -> None:
    """Register the markers, for --strict-markers and --markers."""
    for line in _HELP.splitlines():
        config.addinivalue_line("markers", line)


def are_used_in(path: Path) -> bool:
    """Return True if a test file has a marker or a fixture of the plugin, or imports stackwise."""
    return bool(_USE.search(path.read_text(encoding="utf-8", errors="replace")))


def take_validated(config: pytest.Config, items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the items with valid markers. Report a collection error for each other item.

    All errors are reported, as for collection errors of pytest itself. No test runs then, unless
    `--continue-on-collection-errors` is given. If all variants of a parametrized test have the same error, it
    is reported once.
    """
    sound, told = [], set()
    for item in items:
        try:
            validate(item)
        except pytest.UsageError as error:
            message = str(error)
            wrong = (item.nodeid.partition("[")[0], message.removeprefix(item.nodeid))
            if wrong not in told:
                told.add(wrong)
                report = pytest.CollectReport(item.nodeid, "failed", message, [])
                config.hook.pytest_collectreport(report=report)
        else:
            sound.append(item)
    return sound


def validate(item: pytest.Item) -> None:
    """Raise an error for invalid arguments of markers, and for markers that no fixture of the test uses.

    Tests with a fixture for faults or lengths get the marker `stability`.

    Raises:
        pytest.UsageError: the message names test, marker, key, value and the allowed values.
    """
    fixtures = getattr(item, "fixturenames", ())
    for marker in item.own_markers:  # a marker of a class or module may be unused by some tests
        if _is_unread(item, marker) and not _is_label(item, marker):
            raise pytest.UsageError(f"{item.nodeid}: {_does_nothing(marker)}")
    for read in (faults_of, lengths_of, recovery_of, throughput_of):
        read(item)
    limits = (max_memory_of, min_tokens_per_second_of, max_latency_of, no_memory_growth_of, quality_of)
    for read_limit in limits:
        read_limit(item)
    if item.get_closest_marker("gate"):
        from stackwise.gate.limit import Limits

        gate_of(item, Limits())
    is_of_stability = any(name in fixtures for name in (*_FAULT_READERS, *_LENGTH_SWEEPS))
    if is_of_stability and item.get_closest_marker("stability") is None:
        item.add_marker("stability")


def warn_of_labels(item: pytest.Item) -> None:
    """Warn about labels of a test that have the name of a marker of the plugin, which may be meant.

    There is no warning if the configuration file or another plugin registers the name too.
    """
    labels = [marker for marker in item.own_markers if _is_label(item, marker)]
    if not labels:
        return
    ours = _HELP.splitlines()
    registered = {
        line.partition(":")[0].partition("(")[0].strip()
        for line in item.config.getini("markers")
        if line not in ours
    }
    for marker in labels:
        if marker.name not in registered:
            hint = "a label of your own is silent where `markers` of the configuration file has it"
            item.warn(pytest.PytestWarning(f"{_does_nothing(marker)}; {hint}"))


def _is_label(item: pytest.Item, marker: pytest.Mark) -> bool:
    """Return True if a marker of the user has the same name as one of the plugin.

    It is treated as such if it has no arguments and the test uses no fixture of the plugin.
    """
    bare = not marker.args and not marker.kwargs
    return bare and _is_unread(item, marker) and not _uses_ours(item)


def _uses_ours(item: pytest.Item) -> bool:
    """Return True if a test uses sequence lengths or a fixture of the plugin.

    A third-party fixture or a parameter with the same name is not a fixture of the plugin.
    """
    fixtures = getattr(item, "_fixtureinfo", None)
    definitions = fixtures.name2fixturedefs if fixtures else {}
    if "seq_len" in definitions and any(marker.args for marker in item.iter_markers("seq_lengths")):
        return True
    # pytest uses the last definition of a name. If it is a parameter of the test, its function is pytest's.
    used = (definitions[name][-1].func for name in _OURS & definitions.keys())
    return any(function.__module__.startswith("pytest_stackwise.") for function in used)


def _is_unread(item: pytest.Item, marker: pytest.Mark) -> bool:
    """Return True if the marker is for certain fixtures and the test uses none of them."""
    readers = _NEEDS.get(marker.name, ())
    if marker.name == "gate" and benchmark_items.requests_benchmark(item):
        return False
    return bool(readers) and not any(name in getattr(item, "fixturenames", ()) for name in readers)


def _does_nothing(marker: pytest.Mark) -> str:
    readers = " or ".join(_NEEDS[marker.name])
    return f"marker {marker.name} does nothing here: the test does not use {readers}"


def _closest(item: pytest.Item, name: str) -> pytest.Mark | None:
    """Return the closest marker of a name that is not a label, or None."""
    if item.get_closest_marker(name) is None:  # the gate hides max_memory of its tests
        return None
    return next(iter(_closest_first(item, name)), None)


def faults_of(item: pytest.Item, folder: Path | None = None) -> list[Fault]:
    """Return the faults that the markers of a test declare. The closest marker is last.

    Args:
        item: the test.
        folder: base of relative folders in the markers. None: the working directory.
    """
    found = [m for m in item.iter_markers() if m.name in _FAULTS and not _is_label(item, m)]
    if not found:
        return []
    from stackwise.stability.faults import KNOWN_FAULTS

    return [
        _call(item, marker, KNOWN_FAULTS[marker.name], _in_folder(marker, folder or Path()))
        for marker in reversed(found)
    ]


def _in_folder(marker: pytest.Mark, folder: Path) -> dict[str, Any]:
    """Return the arguments of a marker, with the path of its folder. Storage faults default to step 0."""
    given = dict(marker.kwargs)
    of_storage = _FAULTS[marker.name] is _OF_STORAGE
    saves = marker.name == "process_signal" and given.get("moment") == "save"
    if of_storage:
        given.setdefault("step", 0)
    if of_storage or saves:
        named = given.get("folder", "")
        if isinstance(named, str | Path):
            given["folder"] = folder / named
    return given


def wants_folder(item: pytest.Item) -> bool:
    """Return True if a marker of the test names a folder, or uses the folder of the test by default."""
    found = [marker for marker in item.iter_markers() if marker.name in _FAULTS]
    return any("folder" in _in_folder(marker, Path()) for marker in found)


def fault_readers(item: pytest.Item) -> list[str]:
    """Return the names of the test's fixtures that inject its faults."""
    fixtures = getattr(item, "fixturenames", ())
    wanted = {name for marker in item.iter_markers() for name in _FAULTS.get(marker.name, ())}
    return [name for name in _FAULT_READERS if name in wanted and name in fixtures]


def recovery_of(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of the marker recovers, or {}."""
    marker = _closest(item, "recovers")
    if marker is None:
        return {}
    from stackwise.stability.recovery import check_recovery

    _call(item, marker, check_recovery)
    return dict(marker.kwargs)


def lengths_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the lengths of the marker seq_lengths, or ()."""
    marker = _closest(item, "seq_lengths")
    return check_lengths(item.nodeid, marker) if marker else ()


def check_lengths(nodeid: str, marker: pytest.Mark) -> tuple[int, ...]:
    """Return the lengths of a marker seq_lengths.

    Raises:
        pytest.UsageError: a length is not a positive integer, or there is none.
    """
    sound = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in marker.args)
    if marker.kwargs or not marker.args or not sound:
        raise pytest.UsageError(f"{nodeid}: {_written(marker)}; allowed: one or more integers >= 1")
    return marker.args


def refuse_other_length(seq_len: int | None, arguments: Mapping[str, Any]) -> None:
    """Raise an error if the `seq_len` of a call differs from that of the test's parametrization.

    Raises:
        ValueError: the message names both lengths.
    """
    if seq_len is not None and arguments.get("seq_len", seq_len) != seq_len:
        raise ValueError(f"seq_len: got {arguments['seq_len']}; the test is parametrized with {seq_len}")


def throughput_of(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of the marker throughput, or {}."""
    marker = _closest(item, "throughput")
    if marker is None:
        return {}
    from stackwise.benchmark.workload import check_shape

    # The seed is that of the run, so the marker does not take one.
    _call(item, marker, check_shape, without=("seed",))
    return dict(marker.kwargs)


def max_memory_of(item: pytest.Item) -> int | None:
    """Return the limit of the marker max_memory in bytes, or None without the marker."""
    marker = _closest(item, "max_memory")
    if marker is None:
        return None
    from stackwise.support.units import parse_bytes

    with _refused(item, marker):
        return parse_bytes("limit", _only_argument(item, marker, "a size such as '2 GiB'"))


def min_tokens_per_second_of(item: pytest.Item) -> float | None:
    """Return the limit of the marker min_tokens_per_second, or None without the marker."""
    marker = _closest(item, "min_tokens_per_second")
    if marker is None:
        return None
    from stackwise.support.arguments import check_number

    rate = _only_argument(item, marker, "a number of tokens per second")
    with _refused(item, marker):
        check_number("rate", rate, "a finite number > 0", lambda value: value > 0)
    return float(rate)


def max_latency_of(item: pytest.Item) -> list[LatencyLimit]:
    """Return the limits of the markers max_latency, the closest first.

    If several markers limit the same latency and percentile, the closest one applies.
    """
    markers = _closest_first(item, "max_latency")
    if not markers:
        return []
    from pytest_stackwise.latency import LatencyLimit

    return [_call(item, marker, LatencyLimit.read) for marker in markers]


def no_memory_growth_of(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of the marker no_memory_growth, with `tolerance` in bytes, or {}."""
    marker = _closest(item, "no_memory_growth")
    if marker is None:
        return {}
    from stackwise.benchmark.memory.growth_trial import check_growth
    from stackwise.support.units import parse_bytes

    arguments = dict(marker.kwargs)
    with _refused(item, marker):
        if "tolerance" in arguments:
            arguments["tolerance"] = parse_bytes("tolerance", arguments["tolerance"])
    _call(item, marker, check_growth, arguments)
    return arguments


def quality_of(item: pytest.Item) -> QualityMarker | None:
    """Return the validated marker quality, or None without the marker."""
    marker = _closest(item, "quality")
    if marker is None:
        return None
    from pytest_stackwise.quality import QualityMarker

    found: QualityMarker = _call(item, marker, QualityMarker.read)
    return found


def gate_of(item: pytest.Item, limits: Limits) -> Limits:
    """Return `limits`, changed by the markers gate of a test. For each key, the closest marker applies."""
    for marker in reversed(_closest_first(item, "gate")):
        limits = _call(item, marker, limits.changed)
    return limits


def gated_metrics(item: pytest.Item) -> tuple[str, ...]:
    """Return the metrics that markers gate of a test itself name.

    Markers of a class or module are ignored, because they apply to several tests.
    """
    from stackwise.gate.limit import METRICS

    named = {key for marker in item.own_markers if marker.name == "gate" for key in marker.kwargs}
    return tuple(metric for metric in METRICS if metric in named)


def _closest_first(item: pytest.Item, name: str) -> list[pytest.Mark]:
    """Return the markers of a name, the closest first, and labels excluded.

    Markers of the test's parameters are the closest. pytest returns them last.
    """
    of_parameters = getattr(getattr(item, "callspec", None), "marks", ())
    found = (marker for marker in item.iter_markers(name) if not _is_label(item, marker))
    return sorted(found, key=lambda marker: not any(marker is each for each in of_parameters))


def _only_argument(item: pytest.Item, marker: pytest.Mark, wanted: str) -> Any:
    """Return the argument of a marker that takes exactly one positional argument."""
    if len(marker.args) != 1 or marker.kwargs:
        raise pytest.UsageError(f"{item.nodeid}: {_written(marker)}; allowed: {wanted}, alone")
    return marker.args[0]


def _written(marker: pytest.Mark) -> str:
    """Return a marker as it is written in a test."""
    arguments = [*map(repr, marker.args), *(f"{key}={value!r}" for key, value in marker.kwargs.items())]
    return f"{marker.name}({', '.join(arguments)})"


@contextmanager
def _refused(item: pytest.Item, marker: pytest.Mark) -> Iterator[None]:
    """Turn a ValueError inside the block into a UsageError that names test and marker."""
    try:
        yield
    except ValueError as error:
        raise pytest.UsageError(f"{item.nodeid}: marker {marker.name}: {error}") from None


def _call(
    item: pytest.Item,
    marker: pytest.Mark,
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    without: Iterable[str] = (),
) -> Any:
    if marker.args:
        raise pytest.UsageError(f"{item.nodeid}: marker {marker.name} takes keyword arguments only")
    given = marker.kwargs if arguments is None else arguments
    try:
        _check_keys(given, function, without)
        return function(**given)
    except (TypeError, ValueError) as error:
        message = str(error).rpartition("() ")[2].removeprefix(f"{marker.name}: ")
        raise pytest.UsageError(f"{item.nodeid}: marker {marker.name}: {message}") from None


def _check_keys(given: Mapping[str, Any], function: Callable[..., Any], without: Iterable[str]) -> None:
    """Raise an error for keywords that the function does not take, or that are in `without`.

    A function with `**` keywords validates them itself.
    """
    from stackwise.support.arguments import check_choice

    parameters = signature(function).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    allowed = [name for name in parameters if name not in without]
    for key in given:
        check_choice("key", key, allowed)
