"""Location: the place at which a step first became bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from stackwise.stability.locate.module_scales import ModuleScales
from stackwise.stability.locate.reading import Reading
from stackwise.stability.locate.trace import Call, Operation, SizeKey, Trace
from stackwise.support.arguments import check_number

__all__ = ["Location", "locate"]

Direction = Literal["forward", "backward", "parameter", "input", "loss"]
_LOSS = "the loss"


@dataclass(frozen=True)
class Location:
    """Place at which a step first became bad. str(): "stacks.0.blocks.1.attention (forward)".

    Attributes:
        module: name of the module, "(outside the submodules)" for the root; for "parameter" the name of the
            parameter or buffer; for "loss" "the loss".
        direction: "forward": healthy inputs, bad output. "backward": healthy gradient of the output, bad
            gradient of an input or a parameter. "parameter": a weight or buffer that was bad before the step.
            "input": an input from outside the model was bad. "loss": the model's outputs are healthy, and the
            loss that is computed from them is not.
        call: number of the module's call in `run`, from 1; 0 for a parameter or the loss.
        kind: "non-finite", or "exploding" relative to the reference of `ModuleScales`.
        value: bad value (nan, inf, -inf); for "exploding" its multiple of the reference.
    """

    module: str
    direction: Direction
    call: int
    kind: Literal["non-finite", "exploding"]
    value: float

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call > 1 else ""
        if self.kind == "exploding":
            return f"{self.module} ({self.direction}{call}, {self.value:.3g} times its usual size)"
        match self.direction:
            case "parameter":
                return f"parameter {self.module} is non-finite already"
            case "input":
                return f"the input of {self.module}{call} is non-finite already"
            case "loss":
                return f"{self.module} is non-finite"
            case _:
                return f"{self.module} ({self.direction}{call})"


def locate(
    model: nn.Module,
    run: Callable[[], object],
    *,
    scales: ModuleScales | None = None,
    factor: float = 4.0,
) -> Location | None:
    """Run a bad step under hooks and find the place at which it first became bad.

    The result is the innermost module with healthy inputs and a bad output. If the forward pass is healthy,
    it is the module with healthy incoming gradients and a bad outgoing one. Effects of a module's hooks are
    attributed to the module. Compiled modules run eagerly.

    Each process observes its own computation. If parameters are sharded, all processes must call this
    together.

    Args:
        model: model whose modules are observed.
        run: function that computes the loss of the bad batch and calls backward() on it, once, with the
            random states of the bad step. It is called exactly once. The caller restores gradients, buffers
            and random states.
        scales: references of healthy steps. Without them, only non-finite values are found, and an infinity
            or NaN that is normal in the model may be taken for the cause.
        factor: a value is exploding if it grew more than this factor times as much as its inputs, relative to
            the references.

    Returns:
        The place, or None if all values are healthy.

    Raises:
        ValueError: a factor that is not above 1.
    """
    check_number("factor", factor, "a finite number > 1", lambda value: value > 1)
    with Trace(model) as trace:
        run()
    broken = next(_non_finite(trace, scales), None)
    if broken is None and scales is not None:
        broken = next(_exploding(trace, scales, factor), None)
    return broken


# Non-finite values


def _non_finite(trace: Trace, scales: ModuleScales | None) -> Iterator[Location]:
    """Yield candidate locations, the likeliest first."""
    forward = _Forward(trace, scales)
    losses = trace.of(trace.losses)
    fails = not all(reading.is_finite for reading in losses)
    fails |= any(call.parent is None and forward.breaks(call, "output") for call in forward.calls)
    reaching = [call for call in forward.culprits() if forward.reaches_the_end(call)]
    # A bad value that a later call absorbed is not the cause of a later, independent fault.
    reaching = sorted(
        reaching, key=lambda call: forward.is_absorbed(call) and forward.is_followed(call, reaching)
    )
    if fails:
        yield from map(forward.explained, reaching)
        yield from forward.broken_inputs()
        if not all(reading.is_finite for reading in losses):
            yield from map(forward.explained, forward.overflows())
            yield from map(forward.explained, forward.culprits())
            worst = next(reading.worst for reading in losses if not reading.is_finite)
            yield Location(_LOSS, "loss", 0, "non-finite", worst)
    for operation, gradient in _broken_gradients(trace):
        yield from map(forward.explained, forward.behind(operation.call))
        yield _backward(trace, operation, gradient)
    yield from map(forward.explained, forward.culprits())
    if fails:
        yield from map(forward.explained, forward.overflows())
    for name, reading in trace.parameters.items():
        if not reading.is_finite:
            yield Location(name, "parameter", 0, "non-finite", reading.worst)


class _Forward:
    """Judgement of the forward passes of a trace."""

    def __init__(self, trace: Trace, scales: ModuleScales | None) -> None:
        self.trace = trace
        self.calls = [call for call in trace.calls if not call.recomputes]
        self.expected = scales.expected if scales else frozenset()

    def readings(self, call: Call, what: str) -> list[Reading]:
        known = (place for key, place in call.places() if key[0] == what and key not in self.expected)
        return [self.trace.readings[place] for place in known]

    def breaks(self, call: Call, what: str) -> bool:
        return any(reading.is_broken for reading in self.readings(call, what))

    def has_negative_infinity(self, call: Call, what: str) -> bool:
        return any(r.has_negative_infinity and not r.is_mask for r in self.readings(call, what))

    def culprits(self) -> Iterator[Call]:
        """Yield the calls with healthy inputs and a bad output.

        If an earlier -inf, which is not from a mask, is the cause, the call that produced it is yielded
        instead.
        """
        for call in self.calls:
            if self.breaks(call, "output") and not self.breaks(call, "input"):
                given = self.has_negative_infinity(call, "input")
                earlier = (
                    other
                    for other in self.overflows()
                    if other.ended < call.ended and (given or call in other.chain())
                )
                yield next(earlier, call)

    def overflows(self) -> Iterator[Call]:
        """Yield the calls with a -inf in the output that is no mask, and with healthy inputs."""
        for call in self.calls:
            sound = not self.has_negative_infinity(call, "input") and not self.breaks(call, "input")
            if sound and self.has_negative_infinity(call, "output") and not self.breaks(call, "output"):
                yield call

    def behind(self, call: Call | None) -> Iterator[Call]:
        """Yield the calls in the forward pass that may explain a bad gradient of `call`.

        If `call` had a bad input, these are all culprits; otherwise only the culprits inside it. Some
        operations hide a NaN in the forward pass, but not in the backward pass.
        """
        if call is not None:
            given = self.breaks(call, "input") or self.has_negative_infinity(call, "input")
            for culprit in (*self.culprits(), *self.overflows()):
                if given or call in culprit.chain():
                    yield culprit

    def reaches_the_end(self, call: Call) -> bool:
        """Return True if no enclosing call returned only finite values."""
        around = list(call.chain())[1:]
        returned = (self.readings(each, "output") for each in around)
        return all(not readings or not all(r.is_finite for r in readings) for readings in returned)

    def is_absorbed(self, call: Call) -> bool:
        """Return True if a later call in the same parent had a bad input and returned a healthy output."""
        beside = (each for each in self.calls if each.parent is call.parent and each.started > call.ended)
        return any(self.breaks(each, "input") and not self.breaks(each, "output") for each in beside)

    def is_followed(self, call: Call, culprits: list[Call]) -> bool:
        """Return True if one of `culprits` returned later and does not enclose `call`."""
        return any(other.ended > call.ended and other not in call.chain() for other in culprits)

    def broken_inputs(self) -> Iterator[Location]:
        """Yield the locations of bad inputs of top-level calls, in the order of their start."""
        for call in sorted(self.calls, key=lambda call: call.started):
            if call.parent is None and self.breaks(call, "input"):
                worst = next(r.worst for r in self.readings(call, "input") if r.is_broken)
                yield Location(call.module, "input", call.number, "non-finite", worst)

    def explained(self, call: Call) -> Location:
        """Return the location of the call, or of its parameter or buffer that was bad before."""
        for name, reading in _own(self.trace, call.module, self.trace.parameters | self.trace.buffers):
            if reading.is_broken or (reading.has_negative_infinity and name in self.trace.parameters):
                return Location(name, "parameter", 0, "non-finite", reading.worst)
        worst = next(r.worst for r in self.readings(call, "output") if not r.is_finite)
        return Location(call.module, "forward", call.number, "non-finite", worst)


def _own(trace: Trace, module: str, readings: dict[str, Reading]) -> Iterable[tuple[str, Reading]]:
    """Return the tensors of a module, including those of submodules that were not called, with readings."""
    names = trace.tensors_of(module)
    return [(name, readings[name]) for name in names if name in readings]


def _broken_gradients(trace: Trace) -> Iterator[tuple[Operation, Reading]]:
    """Yield the operations that received healthy gradients and have a bad one, in execution order."""
    handed: dict[Operation, list[Reading]] = {}
    for _, target, place in trace.delivered():
        handed.setdefault(target, []).append(trace.readings[place])
    for operation in trace.operations:
        before = handed.get(operation, [])
        if not all(reading.is_finite for reading in before) or not (before or operation.is_root):
            continue
        if operation.leaf is not None and trace.owner(operation.leaf) is None:
            continue  # recomputation creates further leaves
        readings = trace.of(operation.given + [place for _, place in operation.gave])
        broken = next((reading for reading in readings if not reading.is_finite), None)
        if broken is not None:
            yield operation, broken


def _backward(trace: Trace, operation: Operation, gradient: Reading) -> Location:
    owner = trace.owner(operation.leaf)
    if owner is not None:  # a hook of the parameter
        return Location(owner, "backward", 1, "non-finite", gradient.worst)
    if operation.call is None:
        return Location(_LOSS, "loss", 0, "non-finite", gradient.worst)
    return Location(operation.call.module, "backward", operation.call.number, "non-finite", gradient.worst)


# Exploding values


def _exploding(trace: Trace, scales: ModuleScales, factor: float) -> Iterator[Location]:
    """Yield candidate locations, the likeliest first."""
    ratios = _Ratios(trace, scales)
    calls = [call for call in trace.calls if not call.recomputes]
    for location in _grown("forward", [ratios.forward(call) for call in calls], factor):
        if location.direction == "forward":
            for name, _ in _own(trace, location.module, trace.parameters):
                yield from ratios.too_large("parameter", name, factor)
        yield location
    returning = [ratios.backward(call) for call in _as_gradients_left(trace, calls)]
    yield from _grown("backward", returning, factor)
    yield from ratios.too_large("loss", "", factor)


class _Growth(NamedTuple):
    """Call with the ratios of its inputs and outputs, or of its gradients, to their references."""

    call: Call
    came_in: float | None
    went_out: float | None


class _Ratios:
    """Sizes of a trace as multiples of their references."""

    def __init__(self, trace: Trace, scales: ModuleScales) -> None:
        self.sizes, self.scales = trace.sizes(), scales

    def largest(self, *keys: SizeKey) -> float | None:
        ratios = (self.scales.ratio(key, self.sizes.get(key)) for key in keys)
        return max((each for each in ratios if each is not None), default=None)

    def forward(self, call: Call) -> _Growth:
        inputs, outputs = ([k for k, _ in call.places() if k[0] == what] for what in ("input", "output"))
        return _Growth(call, self.largest(*inputs), self.largest(*outputs))

    def backward(self, call: Call) -> _Growth:
        key = call.module, call.number, 0
        came_in = self.largest(("incoming", *key))
        went_out = self.largest(("outgoing", *key), ("weights", *key))
        if came_in is None and went_out is None and key[:2] in self.scales.calls:
            # At healthy steps, the call passed its gradients on without an operation.
            before, after = self.sizes.get(("incoming", *key)), self.sizes.get(("outgoing", *key))
            return _Growth(call, 1.0, after / before if before and after is not None else None)
        return _Growth(call, came_in, went_out)

    def too_large(self, what: Literal["parameter", "loss"], name: str, factor: float) -> Iterator[Location]:
        ratio = self.largest((what, name, 0, 0))
        if ratio is not None and ratio > factor:
            yield Location(name or _LOSS, what, 0, "exploding", ratio)


def _grown(direction: Direction, growths: list[_Growth], factor: float) -> Iterator[Location]:
    """Yield the locations of calls that grew their inputs, and of top-level calls with a large input."""
    known = [(call, 1.0 if i is None else i, out) for call, i, out in growths if out is not None]
    came_broken = list(_from_outside(direction, growths, factor))
    # The input of the first top-level call precedes all calls. After a large fault, a call may grow some
    # times more by chance, so the input is the cause unless a call grew by the square of its rise.
    most = max((out / max(1.0, came_in) for _, came_in, out in known), default=1.0)
    first = list(growths[0].call.chain())[-1] if growths else None
    yield from (location for call, location in came_broken if call is first and location.value**2 > most)
    by_itself = [(call, out) for call, came_in, out in known if out > factor * max(1.0, came_in)]
    crossing = [(call, out) for call, came_in, out in known if out > factor >= came_in]
    for call, out in by_itself + crossing:
        yield Location(call.module, direction, call.number, "exploding", out)
    yield from (location for _, location in came_broken)


def _from_outside(
    direction: Direction, growths: list[_Growth], factor: float
) -> Iterator[tuple[Call, Location]]:
    """Yield the top-level calls with an exploding input, or backward with an exploding output gradient."""
    for call, came_in, _ in growths:
        if call.parent is None and came_in is not None and came_in > factor:
            if direction == "backward":
                yield call, Location(_LOSS, "loss", 0, "exploding", came_in)
            else:
                yield call, Location(call.module, "input", call.number, "exploding", came_in)


def _as_gradients_left(trace: Trace, calls: list[Call]) -> list[Call]:
    """Return the calls in the order in which their last gradient left. On a tie, inner calls are first."""
    left: dict[tuple[str, int], int] = {}
    for source, target, _ in trace.delivered():
        for call in set(source.calls()).difference(target.calls()):
            key = (call.module, call.number)
            left[key] = max(left.get(key, -1), source.ran)
    depth = {call: sum(1 for _ in call.chain()) for call in calls}
    return sorted(calls, key=lambda call: (left.get((call.module, call.number), math.inf), -depth[call]))
