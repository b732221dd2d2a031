"""Run state: everything that a training run passes from one step to the next, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stackwise.checks.result import listed
from stackwise.subject.trainer_adapter import schedulers_of
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.optimizer_state import states_of
from stackwise.support.random_state import keep_random_states

__all__ = [
    "ROUNDING",
    "Trace",
    "WrongPositionError",
    "different",
    "is_close",
    "next_batches",
    "number_in",
    "save",
    "saved_tensors",
    "state_of",
    "wait_for",
]

State = dict[str, Any]
# Relative differences that other kernels cause, such as those for another layout in memory.
ROUNDING = 1e-5
# Allowed differences, in multiples of those that a change of the weights by rounding causes.
_ROUNDINGS = 100.0
_LISTS = (list, tuple)


class WrongPositionError(ValueError):
    """The position of a run names a batch that its epoch does not have."""


def state_of(run: TrainingRun) -> State:
    """Return a copy of the state: weights, shared memory, buffers, optimizer, schedule and position.

    Random states are in `random_states`. Buffers that the model's state_dict lacks are not included.
    """
    state: State = {}
    model = run.model
    places: dict[tuple[int, torch.Size], list[str]] = {}
    names: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        state[f"model.{name}"] = p.detach().clone()
        state[f"model.{name} takes gradients"] = p.requires_grad
        names.setdefault(id(p), name)
        if p.numel():
            places.setdefault((p.data_ptr(), p.shape), []).append(name)
    shared = sorted(sorted(group) for group in places.values() if len(group) > 1)
    state["model: weights that share memory"] = str(shared)
    for name, tensor in saved_tensors(model):
        state.setdefault(f"model.{name}", tensor.detach().clone())
    state |= _optimizer_state(run, names)
    for part, keeper in {**schedulers_of(run), "scaler": getattr(run, "scaler", None)}.items():
        if hasattr(keeper, "state_dict"):
            state |= _flat(keeper.state_dict(), part)
    if callable(position := getattr(run, "position", None)):
        state |= _flat(position(), "position()")
    return state


def _optimizer_state(run: TrainingRun, names: Mapping[int, str]) -> State:
    """Return the state of the optimizer. `names` has the name of each parameter by id."""
    state: State = {}
    saved = run.optimizer.state_dict()
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    indices = [index for group in saved.get("param_groups", []) for index in group.get("params", [])]
    owners = dict(zip(indices, (names.get(id(p)) for p in trained), strict=False))
    for index, values in saved.get("state", {}).items():
        state |= _flat(values, f"optimizer.{owners.get(index) or index}")
    if not saved.get("state"):  # a container of optimizers with another layout
        state |= _flat({key: value for key, value in saved.items() if key != "param_groups"}, "optimizer")
        for _, key, values in states_of(run.optimizer):
            owner = names.get(id(key)) if isinstance(key, Tensor) else key
            state |= _flat(values, f"optimizer.{owner or 'parameter without a name'}")
    for index, group in enumerate(saved.get("param_groups", [])):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        state |= _flat(options, f"optimizer.group {index}")
    return state


def different(
    wanted: Mapping[str, Any],
    got: Mapping[str, Any],
    near: Mapping[str, Any] = MappingProxyType({}),
    *,
    rounding: float = 0.0,
) -> list[str]:
    """Return the names whose values differ as in `is_close`, or that only one state has."""
    triples = {name: (wanted.get(name), got.get(name), near.get(name)) for name in [*wanted, *got]}
    return [name for name, values in triples.items() if not is_close(*values, rounding=rounding)]


def is_close(a: Any, b: Any, near: Any = None, *, rounding: float = 0.0) -> bool:
    """Return True if types, shapes and dtypes are equal, and values up to rounding. NaN is equal to NaN.

    Args:
        a: a value: a tensor, an array, a number, a text, or a mapping or sequence of these.
        b: another value.
        near: value of a run whose weights differ by rounding. The allowed difference grows with its
            difference from `a`.
        rounding: allowed difference, relative to the largest element. 0: equal bit by bit.
    """
    if any(isinstance(a, kinds) != isinstance(b, kinds) for kinds in (np.ndarray, Tensor, Mapping, _LISTS)):
        return False
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Tensor):
        return _tensors_are_close(a, b, near, rounding)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_close(a[key], b[key], rounding=rounding) for key in a)
    if isinstance(a, _LISTS):
        return len(a) == len(b) and all(is_close(*pair, rounding=rounding) for pair in zip(a, b, strict=True))
    return a == b or (a != a and b != b) or _floats_are_close(a, b, near, rounding)


def _floats_are_close(a: Any, b: Any, near: Any, rounding: float) -> bool:
    near = near if isinstance(near, float) else a
    is_float = isinstance(a, float) and isinstance(b, float)
    return is_float and abs(a - b) <= rounding * abs(a) + _ROUNDINGS * abs(near - a)


def _tensors_are_close(a: Tensor, b: Tensor, near: Any, rounding: float) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    b = b.to(a.device)
    if torch.equal(a, b) or not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    allowed = rounding * _largest(a)
    if isinstance(near, Tensor) and near.shape == a.shape:
        allowed += _ROUNDINGS * _largest(near.to(a) - a)
    return torch.allclose(a, b, rtol=0.0, atol=allowed, equal_nan=True)


def _largest(x: Tensor) -> float:
    return float(x.nan_to_num().abs().max()) if x.numel() else 0.0


def next_batches(run: TrainingRun) -> Iterator[Any] | None:
    """Return an iterator over the run's own training data, from its position on, over several epochs.

    Needs `epoch(number)` and a `position()` of two integers: the epoch, and the number of its next batch.
    None: the run has neither. Fetching a batch does not change the random state, because a loader may draw a
    seed when it starts.
    """
    can = all(callable(getattr(run, name, None)) for name in ("epoch", "position"))
    return _own_batches(run) if can and _is_place(run.position()) else None  # type: ignore[attr-defined]


def _own_batches(run: Any) -> Iterator[Any]:
    while True:
        place = run.position()
        assert _is_place(place)
        with keep_random_states():
            batches = iter(run.epoch(place[0]))
            batch = next(batches, None)

        def fetch(batches: Iterator[Any] = batches) -> Any:
            # Each fetch starts from the same random state as in a run that trains.
            with keep_random_states():
                return next(batches, None)

        for _ in range(place[1]):
            batch = fetch()
        if batch is None:
            raise WrongPositionError(f"position() is {place}, but epoch({place[0]}) has no batch {place[1]}")
        while batch is not None:
            yield batch
            batch = fetch()


def _is_place(place: Any) -> bool:
    return isinstance(place, Sequence) and len(place) == 2 and all(type(part) is int for part in place)


@dataclass
class Trace:
    """Record of some steps of a run.

    Attributes:
        losses: results of the steps. NaN for a step without a result.
        rates: learning rate of each group after each step.
        batches: batch of each step.
        state: state after the last step.
        averages: tensors of weight averages after the last step, by path.
        evaluation: result of evaluate(batches) after the last step. None: it was not evaluated.
        lost: state that a checkpoint did not restore: name -> value at the save and after the load.
    """

    losses: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    state: State = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float | None = None
    lost: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def drive(self, run: TrainingRun, batches: Iterable[Any], n_steps: int) -> None:
        """Run `n_steps` steps on the next batches, and record them."""
        for batch in islice(batches, n_steps):
            self.batches.append(batch)
            loss = number_in(run.step(batch))
            self.losses.append(math.nan if loss is None else loss)
            self.rates.append([float(group["lr"]) for group in run.optimizer.param_groups])

    def differs(self, other: Trace, near: Trace | None = None, *, rounding: float = 0.0) -> str:
        """Return the first difference in words, or "".

        Args:
            other: another record.
            near: record of a run whose weights differ by rounding, as in `is_close`.
            rounding: as in `is_close`.
        """
        for name, (saved, loaded) in other.lost.items():
            return f"{name} after loading: {_change(saved, loaded)}"
        near = self if near is None else near
        close = partial(is_close, rounding=rounding)
        for step, (ours, theirs) in enumerate(zip(self.batches, other.batches, strict=False)):
            if not close(ours, theirs):
                return f"batch {step}"
            if not close(self.losses[step], other.losses[step], near.losses[step]):
                return f"the loss of step {step}: {other.losses[step]!r} instead of {self.losses[step]!r}"
            rates, others = self.rates[step], other.rates[step]
            if not close(rates, others):
                return f"the learning rate after step {step}: {others} instead of {rates}"
        if len(self.batches) != len(other.batches):
            return f"batch {len(other.batches)}, which does not exist"
        if names := different(self.state, other.state, near.state, rounding=rounding):
            return f"{listed(names, 1)} after the last step"
        if names := different(self.averages, other.averages, near.averages, rounding=rounding):
            return f"the average {listed(names, 1)} after the last step"
        if not close(self.evaluation, other.evaluation, near.evaluation):
            return f"the result of evaluate(batches): {other.evaluation} instead of {self.evaluation}"
        return ""


def save(run: Any, folder: Path) -> None:
    """Save a run, and wait until the files are complete."""
    wait_for(run.save(folder))


def wait_for(saved: Any) -> None:
    """Wait for the future, or the list of futures, that an asynchronous `save` returns."""
    if isinstance(saved, _LISTS):
        for each in saved:
            wait_for(each)
        return
    saved = getattr(saved, "upload_completion", saved)  # of torch.distributed.checkpoint.async_save
    if callable(result := getattr(saved, "result", None)):
        result()


def number_in(returned: Any) -> float | None:
    """Return the loss in the result of a step, or None."""
    if isinstance(returned, Mapping):
        returned = returned.get("loss")
    if isinstance(returned, Tensor):
        return float(returned.detach()) if returned.numel() == 1 else None
    if isinstance(returned, int | float | np.number) and not isinstance(returned, bool):
        return float(returned)
    return None


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield persistent buffers, and each parameter under all of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), tensor


def _change(saved: Any, loaded: Any) -> str:
    """Return the difference of a saved value and a loaded one in words."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        if saved.dtype != loaded.dtype or saved.shape != loaded.shape:
            return f"{saved.dtype} {tuple(saved.shape)} became {loaded.dtype} {tuple(loaded.shape)}"
        share = (saved != loaded.to(saved.device)).double().mean().item()
        return f"{share:.0%} of its elements differ from the saved ones"
    texts = [
        f"a tensor {tuple(each.shape)}" if isinstance(each, Tensor) else str(each)[:200]
        for each in (saved, loaded)
    ]
    return f"it was {texts[0]}, and is {texts[1]}"


def _flat(value: Any, name: str) -> State:
    """Return tensors and plain values by their path, without values of other types."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        return {name: value.detach().clone()}
    if isinstance(value, bool | int | float | str | None):
        return {name: value}
    if isinstance(value, _LISTS):
        value = dict(enumerate(value))
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {path: leaf for key, part in pairs for path, leaf in _flat(part, f"{name}.{key}").items()}
