"""Location: the place where a step broke first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from stackwise.stability.locate.module_scales import ModuleScales
from stackwise.stability.locate.reading import Reading
from stackwise.stability.locate.trace import Call, Operation, Trace
from stackwise.support.arguments import check_number

__all__ = ["Location", "locate"]

Direction = Literal["forward", "backward", "parameter", "input", "loss"]
_LOSS = "the loss"


@dataclass(frozen=True)
class Location:
    """The place where a step broke first. str(): "stacks.0.blocks.1.attention (forward)".

    Attributes:
        module: name of the module, "(outside the submodules)" for the root; for "parameter" the name of the
            parameter or buffer; for "loss" "the loss".
        direction: "forward": sound inputs, broken output. "backward": sound gradient of the output, broken
            gradient of an input or a parameter. "parameter": a weight or buffer that was broken before the
            step. "input": what the module was given from outside was broken. "loss": the model's outputs
            are sound, and what is computed from them outside of its modules is not.
        call: which call of the module in `run`, from 1; 0 where no call is meant.
        kind: "non-finite", or "exploding" against the reference of `ModuleScales`.
        value: the value found (nan, inf, -inf); of "exploding" how many times its reference.
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
    """Run a broken step again under hooks and find the place where it broke first.

    The innermost module is named whose inputs are sound and whose output is not; where the forward pass
    is sound, the one whose gradients come in sound and leave broken. What the hooks of a module do counts
    as its own doing. Compiled modules run as they were written.

    Each process looks at what it computes itself; where parameters are spread over processes, all of them
    have to call this together.

    Args:
        model: whose modules are watched.
        run: computes the loss of the broken batch and calls backward() on it, once, with the random states
            of the broken step. It is called exactly once. The caller puts gradients, buffers and random
            states back.
        scales: references of sound steps; without them only what is non-finite is found, and an
            infinity or NaN that is usual in the model may be taken for the cause.
        factor: explodes what has grown, over its reference, by more than this more than what it was
            computed from.

    Returns:
        The place, or None where nothing is broken.

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


# What is non-finite


def _non_finite(trace: Trace, scales: ModuleScales | None) -> Iterator[Location]:
    """Places, the likeliest first."""
    forward = _Forward(trace, scales)
    losses = trace.of(trace.losses)
    fails = not all(reading.is_finite for reading in losses)
    fails |= any(call.parent is None and forward.breaks(call, "output") for call in forward.calls)
    reaching = [call for call in forward.culprits() if forward.reaches_the_end(call)]
    # What was put right again is not the cause of what broke later by itself, beside it.
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
    """The forward passes of a trace, judged."""

    def __init__(self, trace: Trace, scales: ModuleScales | None) -> None:
        self.trace = trace
        self.calls = [call for call in trace.calls if not call.recomputes]
        self.expected = scales.expected if scales else frozenset()

    def readings(self, call: Call, what: str) -> list[Reading]:
        places = call.inputs if what == "input" else call.outputs
        return [
            self.trace.readings[place]
            for index, place in enumerate(places)
            if (what, call.module, call.number, index) not in self.expected
        ]

    def breaks(self, call: Call, what: str) -> bool:
        return any(reading.is_broken for reading in self.readings(call, what))

    def has_negative_infinity(self, call: Call, what: str) -> bool:
        return any(r.has_negative_infinity and not r.is_mask for r in self.readings(call, what))

    def culprits(self) -> Iterator[Call]:
        """Calls with sound inputs and a broken output, or the call whose -inf is the cause of that."""
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
        """Calls whose output has a -inf that is no mask, and whose inputs have none."""
        for call in self.calls:
            sound = not self.has_negative_infinity(call, "input") and not self.breaks(call, "input")
            if sound and self.has_negative_infinity(call, "output") and not self.breaks(call, "output"):
                yield call

    def behind(self, call: Call | None) -> Iterator[Call]:
        """Calls whose broken output did not show in what the model gave, but was what `call` computed with.

        Some operations hide a NaN on their way forward only.
        """
        if call is not None:
            given = self.breaks(call, "input") or self.has_negative_infinity(call, "input")
            for culprit in (*self.culprits(), *self.overflows()):
                if given or call in culprit.chain():
                    yield culprit

    def reaches_the_end(self, call: Call) -> bool:
        """Whether no module around it returned without what it broke, as far as that can be seen."""
        around = list(call.chain())[1:]
        returned = (self.readings(each, "output") for each in around)
        return all(not readings or not all(r.is_finite for r in readings) for readings in returned)

    def is_absorbed(self, call: Call) -> bool:
        """Whether a later call beside it was given something broken and returned something sound."""
        beside = (each for each in self.calls if each.parent is call.parent and each.started > call.ended)
        return any(self.breaks(each, "input") and not self.breaks(each, "output") for each in beside)

    def is_followed(self, call: Call, culprits: list[Call]) -> bool:
        """Whether one of `culprits` came after, and not as a module around it."""
        return any(other.ended > call.ended and other not in call.chain() for other in culprits)

    def broken_inputs(self) -> Iterator[Location]:
        """Calls from outside of the model with a broken input, in the order in which they began."""
        for call in sorted(self.calls, key=lambda call: call.started):
            if call.parent is None and self.breaks(call, "input"):
                worst = next(r.worst for r in self.readings(call, "input") if r.is_broken)
                yield Location(call.module, "input", call.number, "non-finite", worst)

    def explained(self, call: Call) -> Location:
        """The call's place, or that of its own parameter or buffer that was broken before."""
        for name, reading in _own(self.trace, call.module, self.trace.parameters | self.trace.buffers):
            if reading.is_broken or (reading.has_negative_infinity and name in self.trace.parameters):
                return Location(name, "parameter", 0, "non-finite", reading.worst)
        worst = next(r.worst for r in self.readings(call, "output") if not r.is_finite)
        return Location(call.module, "forward", call.number, "non-finite", worst)


def _own(trace: Trace, module: str, readings: dict[str, Reading]) -> Iterable[tuple[str, Reading]]:
    """Of the tensors that a module has, itself or in modules that were not called."""
    names = trace.tensors_of(module)
    return [(name, readings[name]) for name in names if name in readings]


def _broken_gradients(trace: Trace) -> Iterator[tuple[Operation, Reading]]:
    """Operations that were handed sound gradients and saw or handed on a broken one, in their order."""
    handed: dict[Operation, list[Reading]] = {}
    for _, target, place in trace.delivered():
        handed.setdefault(target, []).append(trace.readings[place])
    for operation in trace.operations:
        before = handed.get(operation, [])
        if not all(reading.is_finite for reading in before) or not (before or operation.is_root):
            continue
        if operation.leaf is not None and trace.owner(operation.leaf) is None:
            continue  # recomputation has leaves of its own
        readings = trace.of(operation.given + [place for _, place in operation.gave])
        broken = next((reading for reading in readings if not reading.is_finite), None)
        if broken is not None:
            yield operation, broken


def _backward(trace: Trace, operation: Operation, gradient: Reading) -> Location:
    owner = trace.owner(operation.leaf)
    if owner is not None:  # a hook of the parameter itself
        return Location(owner, "backward", 1, "non-finite", gradient.worst)
    if operation.call is None:
        return Location(_LOSS, "loss", 0, "non-finite", gradient.worst)
    return Location(operation.call.module, "backward", operation.call.number, "non-finite", gradient.worst)


# What explodes


def _exploding(trace: Trace, scales: ModuleScales, factor: float) -> Iterator[Location]:
    """Places, the likeliest first."""
    sizes = trace.sizes()

    def ratio(what: str, name: str, number: int, index: int = 0) -> float | None:
        key = (what, name, number, index)
        return scales.ratio(key, sizes.get(key))

    def largest(what: str, call: Call, places: list[int]) -> float | None:
        ratios = (ratio(what, call.module, call.number, index) for index in range(len(places)))
        return max((each for each in ratios if each is not None), default=None)

    def gradients(call: Call) -> tuple[float | None, float | None]:
        name, number = call.module, call.number
        came = ratio("incoming", name, number)
        left = [r for what in ("outgoing", "weights") if (r := ratio(what, name, number)) is not None]
        if came is None and not left and (name, number) in scales.calls:
            # It passed on what it was given, at sound steps, without an operation of its own.
            key = name, number, 0
            came_in, went_out = sizes.get(("incoming", *key)), sizes.get(("outgoing", *key))
            return 1.0, went_out / came_in if came_in and went_out is not None else None
        return came, max(left, default=None)

    calls = [call for call in trace.calls if not call.recomputes]
    forward = [
        (call, largest("input", call, call.inputs), largest("output", call, call.outputs)) for call in calls
    ]
    backward = [(call, *gradients(call)) for call in _as_gradients_left(trace, calls)]
    ways: tuple[tuple[Direction, list[tuple[Call, float | None, float | None]]], ...] = (
        ("forward", forward),
        ("backward", backward),
    )
    for direction, each in ways:
        known = [(call, 1.0 if i is None else i, o) for call, i, o in each if o is not None]
        came_broken = list(_from_outside(direction, each, factor))
        # What comes into the outermost call of the first one was there before all of them. Those behind a
        # large fault may grow some times more by chance.
        most = max((out / max(1.0, came_in) for _, came_in, out in known), default=1.0)
        first = list(each[0][0].chain())[-1] if each else None
        yield from (location for call, location in came_broken if call is first and location.value**2 > most)
        by_itself = [(call, out) for call, came_in, out in known if out > factor * max(1.0, came_in)]
        crossing = [(call, out) for call, came_in, out in known if out > factor >= came_in]
        for call, out in by_itself + crossing:
            if direction == "forward":
                for name, _ in _own(trace, call.module, trace.parameters):
                    grew = ratio("parameter", name, 0)
                    if grew is not None and grew > factor:
                        yield Location(name, "parameter", 0, "exploding", grew)
            yield Location(call.module, direction, call.number, "exploding", out)
        yield from (location for _, location in came_broken)
    grew = ratio("loss", "", 0)
    if grew is not None and grew > factor:
        yield Location(_LOSS, "loss", 0, "exploding", grew)


def _from_outside(
    direction: Direction, calls: list[tuple[Call, float | None, float | None]], factor: float
) -> Iterator[tuple[Call, Location]]:
    """What came into a call that none is around, exploding: its input, or a gradient of its output."""
    for call, came_in, _ in calls:
        if call.parent is None and came_in is not None and came_in > factor:
            if direction == "backward":
                yield call, Location(_LOSS, "loss", 0, "exploding", came_in)
            else:
                yield call, Location(call.module, "input", call.number, "exploding", came_in)


def _as_gradients_left(trace: Trace, calls: list[Call]) -> list[Call]:
    """The calls in the order in which the last gradient left them; of equals the inner ones first."""
    left: dict[tuple[str, int], int] = {}
    for source, target, _ in trace.delivered():
        within = set(target.call.chain()) if target.call else set()
        for call in source.call.chain() if source.call else ():
            if call not in within:
                key = (call.module, call.number)
                left[key] = max(left.get(key, -1), source.ran)
    depth = {call: sum(1 for _ in call.chain()) for call in calls}
    return sorted(calls, key=lambda call: (left.get((call.module, call.number), math.inf), -depth[call]))
