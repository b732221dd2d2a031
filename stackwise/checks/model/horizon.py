"""Horizon: a sliding window reaches as far as it says, and no farther.

Shapes: R rows, T positions, C width.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS
from stackwise.checks.probe.difference import absolute_difference
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

_LONGEST = 1024  # T
Measured = TypeVar("Measured")
_ZERO = {torch.float64: 1e-9, torch.float32: 1e-5}  # an influence below this part of the largest is rounding

_ADVICE = (
    "Look for < where <= is meant (a window of W sees W positions, its own included), for a mask that the "
    "attention backend never gets, for W // 2 on one side of two, and for a window per layer type."
)


@dataclass(frozen=True)
class _Reach:
    """How many positions a layer sees before its own, and after it."""

    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.before} before and {self.after} after its own"


@check
def horizon(subject: Subject) -> CheckResult:
    """Does each layer read exactly as many positions as its window says?"""
    window: Any = subject.spec.window
    if window is None:
        return subject.not_applicable("needs the claim window=, how many positions each layer sees")
    if isinstance(window, int):
        claimed = _Reach(window - 1, 0 if subject.spec.causal else window - 1)
    else:
        claimed = _Reach(*window)
    widest = max(claimed.before, claimed.after)
    limit = min(subject.spec.max_length or _LONGEST, _LONGEST)
    if widest + 3 > limit:
        return subject.not_applicable(
            f"needs a window that ends within {limit} positions; this one reaches {widest}"
        )
    # Far enough to tell three windows in one layer from no window at all.
    T = min(limit, 3 * widest + 6 if claimed.after == 0 else 2 * (3 * widest + 4) + 1)
    token = 1 if claimed.after == 0 else T // 2
    layers = _layers(subject)
    found = _by_layer(subject, layers, T, token) if layers else {}
    reading = {name: reach for name, reach in found.items() if reach != _Reach(0, 0)}
    if reading:
        return _judge_layers(subject, reading, claimed, T - 1 - token)
    if stages := _by_stage(subject, T, token):
        return _judge_layers(subject, stages, claimed, T - 1 - token, one_each=True)
    return _judge_whole(subject, claimed, limit)


def _judge_layers(
    subject: Subject, reading: dict[str, _Reach], claimed: _Reach, room: int, *, one_each: bool = False
) -> CheckResult:
    """Each layer that holds no other layer that reads; the others are made of these.

    Args:
        room: positions that a layer can be seen to reach.
        one_each: there is one window in each, not several one after the other.
    """
    inner = {
        name: reach
        for name, reach in reading.items()
        if not any(other.startswith(name + ".") for other in reading)
    }
    wanted = float(claimed.before + claimed.after + 1)
    for name, reach in inner.items():
        if reach != claimed:
            value = float(reach.before + reach.after + 1)
            times = _times(reach, claimed)
            everything = max(reach.before, reach.after) >= room
            correct_if = None
            if times > 1 and not (everything or one_each):
                correct_if = f"{times} windows follow each other in this layer"
            elif everything and wanted >= subject.seq_len:
                correct_if = "the window stands for all positions of the checks; then do not declare it"
            return subject.failed_unless(
                correct_if,
                value,
                wanted,
                where=name,
                meaning=f"The layer reads {'all positions there are' if everything else reach}; "
                f"its window says {claimed}.",
                advice=_ADVICE,
            )
    return subject.passed(wanted, wanted, meaning=f"{len(inner)} layers, one by one")


def _judge_whole(subject: Subject, claimed: _Reach, limit: int) -> CheckResult:
    """All layers at once: n windows reach n times as far."""
    depths = {len(m) for m in subject.model().modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    widest, side = max(claimed.before, claimed.after), 1 if claimed.after == 0 else 2
    deepest = max(depths, default=4)
    T = min(limit, side * (deepest * widest + widest + 3) + 1)
    token = 1 if side == 1 else T // 2
    room = T - 1 - token
    reach = _whole_reach(subject, T, token)
    value, wanted = float(reach.before + reach.after), float(claimed.before + claimed.after)
    times = _times(reach, claimed)
    where, meaning = (
        f"{times or 'no whole number of'} windows",
        f"The whole reads {reach}; one window says {claimed}.",
    )
    if reach == _Reach(0, 0) and widest > 0:
        return subject.failed(value, wanted, where=where, meaning=meaning, advice=_ADVICE)
    if times in depths or reach == claimed == _Reach(0, 0):
        return subject.passed(value, wanted, where=where, meaning=meaning)
    if max(reach.before, reach.after) >= room and not (depths and deepest * widest < room):
        return subject.not_applicable(
            f"needs layers that can be asked one by one, or more than {T} positions: the whole reads them all"
        )
    several = times > 0 and max(reach.before, reach.after) < room
    if several and not depths:
        return subject.passed(value, wanted, where=where, meaning=meaning)
    exempt = f"{times} layers with a window follow each other" if several else None
    return subject.failed_unless(exempt, value, wanted, where=where, meaning=meaning, advice=_ADVICE)


def _times(reach: _Reach, claimed: _Reach) -> int:
    """How many claimed windows, one after the other, reach as far; 0: no number of them does."""
    pairs = [(reach.before, claimed.before), (reach.after, claimed.after)]
    if any(bool(far) != bool(one) for far, one in pairs):
        return 0
    times = {far // one if far % one == 0 else 0 for far, one in pairs if one}
    return times.pop() if len(times) == 1 else 0 if times else 1


def _layers(subject: Subject) -> list[str]:
    """Members of ModuleLists that are called once, with hidden states (R, T, C) first, and return such."""
    model, inputs = subject.model(), subject.inputs(2)
    calls: Counter[str] = Counter()
    fit: dict[str, bool] = {}
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def seen(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] += 1
            hidden, result = _hidden(args, kwargs), _first(output)
            shape = (*inputs.shape[:2],)
            fit[name] = all(
                h is not None and h.ndim == 3 and h.shape[:2] == shape and h.is_floating_point()
                for h in (hidden, result)
            )

        handles.append(module.register_forward_hook(seen, with_kwargs=True))

    for name, module in _members(model):
        watch(name, module)
    subject.logits(model, inputs)
    for handle in handles:
        handle.remove()
    return [name for name, times in calls.items() if times == 1 and fit[name]]


def _members(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            yield from ((f"{name}.{i}".lstrip("."), member) for i, member in enumerate(module))


def _hidden(args: Any, kwargs: Any) -> Tensor | None:
    for candidate in (*args[:1], kwargs.get("hidden_states"), kwargs.get("x")):
        if isinstance(candidate, Tensor):
            return candidate
    return None


def _first(output: Any) -> Tensor | None:
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def _by_layer(subject: Subject, layers: list[str], T: int, token: int) -> dict[str, _Reach]:
    """How far each layer reads: row i of one pass has one position changed where layer i begins."""

    def measure(model: nn.Module) -> dict[str, _Reach]:
        modules = dict(model.named_modules())
        found: dict[str, _Reach] = {}
        handles = []

        def listen(row: int, name: str) -> None:
            def change(_: nn.Module, args: Any, kwargs: Any) -> Any:
                hidden = _hidden(args, kwargs)
                assert hidden is not None
                changed = hidden.clone()
                generator = torch.Generator().manual_seed(subject.seed + row)
                noise = torch.randn(changed.shape[-1], generator=generator).to(changed)
                changed[row, token] += noise * hidden.std().clamp(min=1e-3)
                if args and args[0] is hidden:
                    return (changed, *args[1:]), kwargs
                return args, {k: changed if v is hidden else v for k, v in kwargs.items()}

            def compare(_: nn.Module, _args: Any, output: Any) -> None:
                result = _first(output)
                assert result is not None
                # The row before any change at this layer: its hidden states are those of the last row.
                found[name] = _reach_of(absolute_difference(result[row], result[-1]).amax(-1), token, result)

            handles.append(modules[name].register_forward_pre_hook(change, with_kwargs=True))
            handles.append(modules[name].register_forward_hook(compare))

        for row, name in enumerate(layers):
            listen(row, name)
        inputs = subject.inputs(1, T).repeat_interleave(len(layers) + 1, dim=0)
        try:
            subject.logits(model, inputs)
        finally:
            for handle in handles:
                handle.remove()
        return found

    return _exactly(subject, measure)


def _by_stage(subject: Subject, T: int, token: int) -> dict[str, _Reach]:
    """How far one position of what begins a stage is seen where the next stage begins.

    Where layers cannot be called by themselves, what a position reads still grows on the way through the
    modules, and by attention alone: a stage begins at a module that sees farther than all before it. Nothing
    where so few modules are between two stages that several windows may be.
    """
    one = subject.inputs(1, T)
    changed = one.clone()
    changed[:, token] = _another(subject, one)[:, token]

    def measure(model: nn.Module) -> dict[str, _Reach]:
        reached = _reached(subject, model, torch.cat((changed, one)), token)
        begins, farthest, names = [], _Reach(0, 0), list(reached)
        for name, reach in reached.items():
            if reach.before > farthest.before or reach.after > farthest.after:
                begins.append(name)
                farthest = reach
        places = [names.index(name) for name in begins]
        if not begins or any(after - before < 4 for before, after in itertools.pairwise([-1, *places])):
            return {}
        found = {begins[0]: reached[begins[0]]}
        for begin, end in itertools.pairwise(begins):
            found[end] = _reached(subject, model, torch.cat((one, one)), token, begin)[end]
        return found

    return _exactly(subject, measure)


def _reached(
    subject: Subject, model: nn.Module, inputs: Tensor, token: int, begin: str | None = None
) -> dict[str, _Reach]:
    """How far row 0 differs from row 1 after each module with a vector a position, in the order of calls.

    Args:
        begin: the module whose output is changed at `token` of row 0.
    """
    calls: Counter[str] = Counter()
    found: dict[str, _Reach] = {}

    def listen(name: str) -> Callable[..., Tensor | None]:
        def heard(_: nn.Module, _args: Any, output: Any) -> Tensor | None:
            if not isinstance(output, Tensor) or output.shape[:2] != inputs.shape[:2] or output.ndim < 3:
                return None
            calls[name] += 1
            replaced = None
            if name == begin:
                output = replaced = output.clone()
                noise = torch.randn(output.shape[2:], generator=torch.Generator().manual_seed(subject.seed))
                output[0, token] += noise.to(output) * output.std().clamp(min=1e-3)
            influence = absolute_difference(output[0], output[1]).flatten(1).amax(-1)
            found[name] = _reach_of(influence, token, output)
            return replaced

        return heard

    handles = [m.register_forward_hook(listen(name)) for name, m in model.named_modules() if name]
    try:
        subject.logits(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: reach for name, reach in found.items() if calls[name] == 1}


def _another(subject: Subject, inputs: Tensor) -> Tensor:
    """Inputs that differ from these (B, T) at each position."""
    other = subject.inputs(*inputs.shape[:2], shift=1)
    if subject.spec.inputs == "tokens":
        return torch.where(other == inputs, (other + 1) % subject.spec.width, other)
    return other


def _whole_reach(subject: Subject, T: int, token: int) -> _Reach:
    """How far a changed input is seen in the output."""
    one = subject.inputs(1, T)
    changed = one.clone()
    changed[:, token] = _another(subject, one)[:, token]

    def measure(model: nn.Module) -> _Reach:
        before, after = (subject.logits(model, inputs) for inputs in (one, changed))
        return _reach_of(absolute_difference(before, after)[0].amax(-1), token, before)

    return _exactly(subject, measure)


def _exactly(subject: Subject, measure: Callable[[nn.Module], Measured]) -> Measured:
    """In float64, where rounding is far from any influence; else in the model's own dtype."""
    fill_zeros = subject.starts_at_zero
    try:
        return measure(subject.model(dtype=torch.float64, fill_zeros=fill_zeros))
    except REFUSALS:
        return measure(subject.model(fill_zeros=fill_zeros))


def _reach_of(influence: Tensor, token: int, output: Tensor) -> _Reach:
    """From how strongly each output position (T,) is moved by one input: who sees it, on both sides.

    A position that sees one that is d before it is d after that one.
    """
    seen = influence > _ZERO.get(output.dtype, 1e-2) * influence.max()
    places = seen.nonzero().flatten()
    if not len(places):
        return _Reach(0, 0)
    return _Reach(max(0, int(places.max()) - token), max(0, token - int(places.min())))
