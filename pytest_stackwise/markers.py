"""The markers: what each takes, validated before a test runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stackwise.stability import Fault

__all__ = ["faults_of", "lengths_of", "register", "throughput_of", "validate"]

_HELP = """\
gpu: needs a CUDA device; skipped with a reason unless --gpu is given
stability: a stability test; set by the plugin on each test that uses stability_run
nan_injection(step, target='activation', kind='nan', duration=1): stability_run writes one 'nan' or 'inf'; \
target: loss, or activation, gradient, weight, optimizer_state, batch, each with or without [:PATTERN]
gradient_explosion(step, factor=10.0, duration=1): stability_run multiplies all gradients by `factor`
gradient_scale(step, factor=0.1, target='*', duration=1): stability_run multiplies the gradients of `target`
loss_spike(step, factor=10.0, duration=1): stability_run multiplies the loss by `factor`
logit_growth(step, factor=4.0, target=None, duration=1): stability_run scales queries, so logits grow
embedding_explosion(step, factor=10.0, target='*', duration=1): stability_run scales embedding tables
bit_flip(step, target='weight', bit=None, duration=1): stability_run flips one bit
half_overflow(step, target='activation', factor=2.0, duration=1): stability_run goes beyond float16
seq_lengths(*lengths): one test per sequence length, for stability_run and throughput
throughput(mode='forward', batch_size=1, seq_len=128): what the throughput fixture measures
"""
# Those of `stackwise.stability.faults.KNOWN_FAULTS` that break a model in a step, by name: to look them up
# there would load torch.
_FAULTS = (
    "nan_injection",
    "gradient_explosion",
    "gradient_scale",
    "loss_spike",
    "logit_growth",
    "embedding_explosion",
    "bit_flip",
    "half_overflow",
)
_NEEDS = {
    **dict.fromkeys(_FAULTS, ("stability_run",)),
    "seq_lengths": ("stability_run", "throughput", "seq_len"),
    "throughput": ("throughput",),
}


def register(config: pytest.Config) -> None:
    """Make the markers known, for --strict-markers and --markers."""
    for line in _HELP.splitlines():
        config.addinivalue_line("markers", line)


def validate(item: pytest.Item) -> None:
    """Refuse marker arguments that are not understood, and markers that nothing on the test reads.

    Raises:
        pytest.UsageError: naming test, marker, key, value and what is allowed.
    """
    fixtures = getattr(item, "fixturenames", ())
    for marker in item.own_markers:  # one on a class or module is for those of its tests that read it
        needed = _NEEDS.get(marker.name)
        if needed and not any(name in fixtures for name in needed):
            raise pytest.UsageError(
                f"{item.nodeid}: marker {marker.name} does nothing here: the test does not use "
                f"{' or '.join(needed)}"
            )
    faults_of(item)
    lengths_of(item)
    throughput_of(item)
    if "stability_run" in fixtures and item.get_closest_marker("stability") is None:
        item.add_marker("stability")


def faults_of(item: pytest.Item) -> list[Fault]:
    """The faults that the markers of a test declare, the farthest first."""
    found = [m for m in item.iter_markers() if m.name in _FAULTS]
    if not found:
        return []
    from stackwise.stability.faults import KNOWN_FAULTS

    return [_call(item, marker, KNOWN_FAULTS[marker.name]) for marker in reversed(found)]


def lengths_of(item: pytest.Item) -> tuple[int, ...]:
    """The lengths of the marker seq_lengths, or ()."""
    marker = item.get_closest_marker("seq_lengths")
    return check_lengths(item.nodeid, marker) if marker else ()


def check_lengths(nodeid: str, marker: pytest.Mark) -> tuple[int, ...]:
    """The lengths of `marker`; UsageError where they are no positive integers."""
    sound = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in marker.args)
    if marker.kwargs or not marker.args or not sound:
        given = ", ".join([*map(repr, marker.args), *(f"{k}={v!r}" for k, v in marker.kwargs.items())])
        raise pytest.UsageError(f"{nodeid}: seq_lengths({given}); allowed: one or more integers >= 1")
    return marker.args


def refuse_other_length(seq_len: int | None, arguments: Mapping[str, Any]) -> None:
    """Refuse a call whose `seq_len` is not the one that the test is parametrized with.

    Raises:
        ValueError: naming both.
    """
    if seq_len is not None and arguments.get("seq_len", seq_len) != seq_len:
        raise ValueError(f"seq_len: got {arguments['seq_len']}; the test is parametrized with {seq_len}")


def throughput_of(item: pytest.Item) -> dict[str, Any]:
    """The arguments of the marker throughput, or {}."""
    marker = item.get_closest_marker("throughput")
    if marker is None:
        return {}
    from stackwise.benchmark.workload import check_shape

    _call(item, marker, check_shape)
    return dict(marker.kwargs)


def _call(item: pytest.Item, marker: pytest.Mark, function: Callable[..., Any]) -> Any:
    if marker.args:
        raise pytest.UsageError(f"{item.nodeid}: marker {marker.name} takes keyword arguments only")
    try:
        return function(**marker.kwargs)
    except (TypeError, ValueError) as error:
        message = str(error).rpartition("() ")[2].removeprefix(f"{marker.name}: ")
        raise pytest.UsageError(f"{item.nodeid}: marker {marker.name}: {message}") from None
