"""Horizon: each layer reads exactly the positions of its declared window.

Shapes: R rows, T positions, C width.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import REFUSALS, has_fixed_state
from stackwise.checks.probe.difference import absolute_difference
from stackwise.checks.probe.recorded_calls import recorded_calls
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.hooks import temporary_hooks

# Longest sequence, and the sequence that reveals a window in a model that declares the full past.
_LONGEST, _LONG = 1024, 512
Measured = TypeVar("Measured")
# An influence below this share of the largest one is rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}

_ADVICE = (
    "Look for < in place of <= (a window of W is W positions, its own included), for a mask that the "
    "attention backend does not get, for W // 2 on one side, and for a window per layer type."
)


@dataclass(frozen=True)
class _Reach:
    """Number of positions that a layer sees before its own and after it."""

    before: int
    after: int

    @property
    def farthest(self) -> int:
        """Return the larger number."""
        return max(self.before, self.after)

    def __str__(self) -> str:
        return f"{self.before} before and {self.after} after its own"


@check
def horizon(subject: Subject) -> CheckResult:
    """Does each layer read exactly the positions of its declared window?"""
    window: Any = subject.spec.window
    if window is None:
        return subject.not_applicable(
            "needs window=, the number of positions that each layer reads; "
            "ModelSpec.of(model, window=None): all"
        )
    limit = min(subject.spec.max_length or _LONGEST, _LONGEST)
    if window == "full":
        return _full(subject, min(limit, _LONG))
    if isinstance(window, int):
        claimed = _Reach(window - 1, 0 if subject.spec.causal else window - 1)
    else:
        claimed = _Reach(*window)
    widest = claimed.farthest
    if widest + 3 > limit:
        return subject.not_applicable(
            f"needs a window that ends within {limit} positions; this one reaches {widest}"
        )
    T, token = _frame(claimed, 3, limit)  # distinguishes three windows in one layer from no window
    if reading := _reading_layers(subject, T, token):
        return _judge_layers(subject, reading, claimed, T - 1 - token)
    if stages := _by_stage(subject, T, token):
        return _judge_layers(subject, stages, claimed, T - 1 - token, one_each=True)
    return _judge_whole(subject, claimed, limit)


def _full(subject: Subject, T: int) -> CheckResult:
    """Require that each layer, or the model if it has none, reads all T positions that causality allows."""
    token = 1 if subject.spec.causal else T // 2
    claimed = _Reach(T - 1 - token, 0 if subject.spec.causal else token)
    reading = _reading_layers(subject, T, token) or {"the model": _whole_reach(subject, T, token)}
    for name, reach in reading.items():
        if reach != claimed:
            forgets = has_fixed_state(subject, subject.inputs(1))
            return subject.failed_unless(
                "the layer is recurrent, and its memory fades" if forgets else None,
                float(reach.before + reach.after + 1),
                float(claimed.before + claimed.after + 1),
                where=name,
                meaning=f"The layer reads {reach} in a sequence of {T} positions. With window=None it must "
                "read all.",
                advice="Look for a window that is applied although it is switched off, and for a mask or a "
                "cache of a fixed size.",
            )
    return subject.passed(meaning=f"{len(reading)} layers read all {T} positions")


def _judge_layers(
    subject: Subject, reading: dict[str, _Reach], claimed: _Reach, room: int, *, one_each: bool = False
) -> CheckResult:
    """Compare the reach of each layer that mixes positions with its declared window.

    `room` is the largest reach that the sequence can show. With `one_each`, no layer has several windows.
    """
    wanted = float(claimed.before + claimed.after + 1)
    for name, reach in reading.items():
        if reach != claimed:
            times = _times(reach, claimed)
            everything = reach.farthest >= room
            correct_if = None
            if times > 1 and not (everything or one_each):
                correct_if = f"{times} windows follow each other in this layer"
            elif everything and wanted >= subject.seq_len:
                correct_if = "each layer reads all positions; then declare window=None"
            return subject.failed_unless(
                correct_if,
                float(reach.before + reach.after + 1),
                wanted,
                where=name,
                meaning=f"The layer reads {'all positions' if everything else reach}; its window is "
                f"{claimed}.",
                advice=_ADVICE,
            )
    return subject.passed(wanted, wanted, meaning=f"{len(reading)} layers, each alone")


def _judge_whole(subject: Subject, claimed: _Reach, limit: int) -> CheckResult:
    """Compare the reach of the model with n windows, one per layer."""
    # The list of the layers is one of these.
    depths = {len(m) for m in subject.model().modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    widest, deepest = claimed.farthest, max(depths, default=4)
    T, token = _frame(claimed, deepest + 1, limit)
    room = T - 1 - token
    reach = _whole_reach(subject, T, token)
    value, wanted = float(reach.before + reach.after), float(claimed.before + claimed.after)
    times = _times(reach, claimed)
    where = f"{times or 'no whole number of'} windows"
    meaning = f"The whole model reads {reach}; one window is {claimed}."
    if reach == _Reach(0, 0) and widest > 0:
        return subject.failed(value, wanted, where=where, meaning=meaning, advice=_ADVICE)
    if times in depths or reach == claimed == _Reach(0, 0):
        return subject.passed(value, wanted, where=where, meaning=meaning)
    if reach.farthest >= room and not (depths and deepest * widest < room):
        return subject.not_applicable(
            f"needs separate layers, or more than {T} positions, because the whole model reads all of them"
        )
    several = times > 0 and reach.farthest < room
    if several and not depths:
        return subject.passed(value, wanted, where=where, meaning=meaning)
    correct_if = f"the model has {times} consecutive layers with this window" if several else None
    return subject.failed_unless(correct_if, value, wanted, where=where, meaning=meaning, advice=_ADVICE)


def _frame(claimed: _Reach, n_windows: int, limit: int) -> tuple[int, int]:
    """Return a sequence length that is longer than `n_windows` windows, and the position to change."""
    sides = 2 if claimed.after else 1
    T = min(limit, sides * (n_windows * claimed.farthest + 3) + 1)
    return T, T // 2 if claimed.after else 1


def _times(reach: _Reach, claimed: _Reach) -> int:
    """Return the number of consecutive windows with this reach. 0: it is not an integer."""
    pairs = [(reach.before, claimed.before), (reach.after, claimed.after)]
    if any(bool(far) != bool(one) for far, one in pairs):
        return 0
    times = {far // one if far % one == 0 else 0 for far, one in pairs if one}
    return times.pop() if len(times) == 1 else 0 if times else 1


def _reading_layers(subject: Subject, T: int, token: int) -> dict[str, _Reach]:
    """Return the reach of each layer that reads other positions and contains no other such layer."""
    layers = _layers(subject)
    found = _by_layer(subject, layers, T, token) if layers else {}
    reading = {name: reach for name, reach in found.items() if reach != _Reach(0, 0)}
    return {
        name: reach
        for name, reach in reading.items()
        if not any(other.startswith(name + ".") for other in reading)
    }


def _layers(subject: Subject) -> list[str]:
    """Return the members of ModuleLists that are called once and map hidden states (R, T, C) to such."""
    model, inputs = subject.model(), subject.inputs(2)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    members = {f"{name}.{i}".lstrip(".") for name, module in lists for i in range(len(module))}
    calls = recorded_calls(model, lambda: subject.logits(model, inputs), lambda name, _: name in members)
    times = Counter(call.name for call in calls)

    def is_hidden(x: Tensor | None) -> bool:
        return x is not None and x.ndim == 3 and x.shape[:2] == inputs.shape[:2] and x.is_floating_point()

    return [
        call.name
        for call in calls
        if times[call.name] == 1
        and is_hidden(_hidden(call.args, call.named))
        and is_hidden(next(tensors_in(call.output), None))
    ]


def _hidden(args: Any, kwargs: Any) -> Tensor | None:
    for candidate in (*args[:1], kwargs.get("hidden_states"), kwargs.get("x")):
        if isinstance(candidate, Tensor):
            return candidate
    return None


def _by_layer(subject: Subject, layers: list[str], T: int, token: int) -> dict[str, _Reach]:
    """Return the reach of each layer. One pass has a row per layer, which is changed at the layer's input."""

    def measure(model: nn.Module) -> dict[str, _Reach]:
        modules = dict(model.named_modules())
        found: dict[str, _Reach] = {}

        def change(row: int) -> Callable[..., Any]:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
                hidden = _hidden(args, kwargs)
                assert hidden is not None
                changed = hidden.clone()
                _add_noise(changed[row, token], hidden, subject.seed + row)
                if args and args[0] is hidden:
                    return (changed, *args[1:]), kwargs
                return args, {k: changed if v is hidden else v for k, v in kwargs.items()}

            return hook

        def compare(row: int, name: str) -> Callable[..., None]:
            def hook(_: nn.Module, _args: Any, output: Any) -> None:
                result = next(tensors_in(output))
                # The last row is changed at no layer.
                found[name] = _reach_of(absolute_difference(result[row], result[-1]).amax(-1), token, result)

            return hook

        inputs = subject.inputs(1, T).repeat_interleave(len(layers) + 1, dim=0)
        handles = []
        for row, name in enumerate(layers):
            handles.append(modules[name].register_forward_pre_hook(change(row), with_kwargs=True))
            handles.append(modules[name].register_forward_hook(compare(row, name)))
        with temporary_hooks(handles):
            subject.logits(model, inputs)
        return found

    return _in_float64(subject, measure)


def _by_stage(subject: Subject, T: int, token: int) -> dict[str, _Reach]:
    """Return the reach of each stage, for models without separate layers.

    The first module of a stage has a larger reach than all modules before it. Return {} if two stages are
    less than 4 modules apart, because a stage may then have several windows.
    """
    one = subject.inputs(1, T)
    changed = _changed_at(subject, one, token)

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

    return _in_float64(subject, measure)


def _reached(
    subject: Subject, model: nn.Module, inputs: Tensor, token: int, begin: str | None = None
) -> dict[str, _Reach]:
    """Return the reach of the difference of rows 0 and 1 after each module, in the order of calls.

    Only modules count that are called once and return a vector per position. The rows differ at `token`: in
    the inputs, or in the output of the module `begin`.
    """
    calls: Counter[str] = Counter()
    found: dict[str, _Reach] = {}

    def listen(name: str) -> Callable[..., Tensor | None]:
        def hook(_: nn.Module, _args: Any, output: Any) -> Tensor | None:
            if not isinstance(output, Tensor) or output.shape[:2] != inputs.shape[:2] or output.ndim < 3:
                return None
            calls[name] += 1
            if name == begin:
                output = output.clone()
                _add_noise(output[0, token], output, subject.seed)
            influence = absolute_difference(output[0], output[1]).flatten(1).amax(-1)
            found[name] = _reach_of(influence, token, output)
            return output if name == begin else None

        return hook

    with temporary_hooks(m.register_forward_hook(listen(name)) for name, m in model.named_modules() if name):
        subject.logits(model, inputs)
    return {name: reach for name, reach in found.items() if calls[name] == 1}


def _add_noise(vector: Tensor, hidden: Tensor, seed: int) -> None:
    """Add noise to a view of hidden states, as large as these."""
    noise = torch.randn(vector.shape, generator=torch.Generator().manual_seed(seed))
    vector += noise.to(vector) * hidden.std().clamp(min=1e-3)


def _changed_at(subject: Subject, inputs: Tensor, token: int) -> Tensor:
    """Return inputs (R, T) with other values at one position."""
    other = subject.inputs(*inputs.shape[:2], shift=1)
    if subject.spec.inputs == "tokens":
        other = torch.where(other == inputs, (other + 1) % subject.spec.width, other)
    changed = inputs.clone()
    changed[:, token] = other[:, token]
    return changed


def _whole_reach(subject: Subject, T: int, token: int) -> _Reach:
    """Return the reach of a changed input in the output."""
    one = subject.inputs(1, T)
    changed = _changed_at(subject, one, token)

    def measure(model: nn.Module) -> _Reach:
        before, after = (subject.logits(model, inputs) for inputs in (one, changed))
        return _reach_of(absolute_difference(before, after)[0].amax(-1), token, before)

    return _in_float64(subject, measure)


def _in_float64(subject: Subject, measure: Callable[[nn.Module], Measured]) -> Measured:
    """Measure in float64, or in the model's own dtype if it does not run in float64."""
    fill_zeros = subject.starts_at_zero
    try:
        return measure(subject.model(dtype=torch.float64, fill_zeros=fill_zeros))
    except REFUSALS:
        return measure(subject.model(fill_zeros=fill_zeros))


def _reach_of(influence: Tensor, token: int, output: Tensor) -> _Reach:
    """Return the reach for the influence (T,) of one input on each output position.

    If the output at token + d is changed, a position sees d positions before its own.
    """
    is_real = influence > _ROUNDING.get(output.dtype, 1e-2) * influence.max()
    places = is_real.nonzero().flatten()
    if not len(places):
        return _Reach(0, 0)
    return _Reach(max(0, int(places.max()) - token), max(0, token - int(places.min())))
