"""Averages: copies of the weights that a run has outside its model, such as an EMA or a target network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.trainer_adapter import JoinedRun
from stackwise.subject.trainer_spec import TrainingRun

__all__ = ["Move", "averages_in", "averages_of", "followers"]

# Depth of the search: attributes of attributes of the run.
_DEPTH = 3
# An average has the shapes of at least this fraction of the parameters of the model.
_SHARE = 0.5
# Largest rounding error of an average in one update, in multiples of the eps of its dtype.
_ROUNDINGS = 4.0
# Distance above which an average must change in an update, in multiples of the eps of its dtype.
_FAR = 16.0


def averages_of(run: TrainingRun) -> dict[str, Tensor]:
    """Return copies of the tensors of all averages, by path."""
    return {path: tensor.detach().clone() for path, tensor in averages_in(run).items()}


def followers(run: TrainingRun) -> dict[str, dict[str, str]]:
    """Return {path of an average: {parameter name: path of its averaged tensor}} for a new run.

    A tensor belongs to the parameter with the same value, because averages start at the weights. If several
    parameters have this value, the longest common ending of the names decides. Items of a list have no names,
    so their order decides. A tensor that equals no parameter belongs to the parameter with the same name.
    """
    parameters = dict(run.model.named_parameters(remove_duplicate=False))
    first_names = {name for name, _ in run.model.named_parameters()}
    buffers = tuple(f".{name}" for name, _ in run.model.named_buffers())
    averages: dict[str, dict[str, str]] = {}
    for path, tensor in averages_in(run).items():
        alike = {name: p for name, p in parameters.items() if p.shape == tensor.shape}
        equal = [name for name, p in alike.items() if torch.equal(tensor, p.detach().to(tensor))]
        names = equal or [name for name in alike if path.endswith(f".{name}")]
        parent, _, last = path.rpartition(".")
        if not last.isdigit():
            names = [name for name in names if _common_ending(path, name)]
        if not names or path.endswith(buffers):
            continue
        parts, taken = path.split("."), averages.get(parent, {})
        n_parts = {name: len(_common_ending(parts, name.split("."))) for name in names}
        name = max(names, key=lambda n: (n_parts[n], len(_common_ending(path, n)), n not in taken))
        prefix = ".".join(parts[: -n_parts[name]]) if n_parts[name] else parent
        if name in first_names:  # a tied weight has several names
            averages.setdefault(prefix, {}).setdefault(name, path)
    return averages


def _common_ending(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Return the common last items of two sequences in reverse order. Strings are compared without dots."""
    pairs = zip(*([part for part in reversed(each) if part != "."] for each in (a, b)), strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


@dataclass(frozen=True)
class Move:
    """Change of the tensors of one average in a step, as a fraction of the distance from the weights.

    Attributes:
        tensors: path -> (change, distance from the weight, rounding error of the change), in float64.
        stuck: fraction of the elements far from their weights that did not change.
    """

    tensors: dict[str, tuple[Tensor, Tensor, float]]
    stuck: float

    @classmethod
    def between(
        cls,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        paths: Mapping[str, str],
    ) -> Move:
        """Return the move of an average towards some weights.

        Args:
            before, after: tensors of the averages before and after the step, by path.
            weights: weights by name.
            paths: names of parameters with the paths of the tensors that average them.
        """
        tensors, n_far, n_stuck = {}, 0, 0
        for name, path in paths.items():
            if path not in before or path not in after:
                continue
            old, new = before[path].double(), after[path].double()
            eps = torch.finfo(after[path].dtype).eps
            distance = weights[name].to(old) - old
            # Weights may have larger rounding errors than their average, such as a float32 average.
            widest = max(eps, torch.finfo(weights[name].dtype).eps)
            rounding = _ROUNDINGS * widest * float(new.norm())
            far = distance.abs() > _FAR * eps * old.abs()
            n_far, n_stuck = n_far + int(far.sum()), n_stuck + int((far & (new == old)).sum())
            if float(distance.norm()) > rounding:
                tensors[path] = (new - old, distance, rounding)
        return cls(tensors, n_stuck / n_far if n_far else 0.0)

    @property
    def share(self) -> float:
        """Return the median fraction over the tensors that move. 0: the average does not move."""
        shares = [share for share in self.shares.values() if share]
        return median(shares) if shares else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Return the fraction of the distance by which each tensor moves, by path."""
        return {path: float((c * d).sum() / d.square().sum()) for path, (c, d, _) in self.tensors.items()}

    @property
    def rounding(self) -> float:
        """Return the median rounding error relative to the fraction. inf: the average does not move."""
        share = abs(self.share)
        errors = [r / (share * float(d.norm())) for _, d, r in self.tensors.values()] if share else []
        return median(errors) if errors else math.inf

    def gaps(self, shares: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the relative difference of each change from a fraction of the distance, without rounding.

        Args:
            shares: fraction for each tensor. None: the median fraction for all tensors.
        """
        gaps = {}
        for path, (change, distance, rounding) in self.tensors.items():
            wanted = (self.share if shares is None else shares[path]) * distance
            if size := float(wanted.norm()):
                gaps[path] = max(0.0, float((change - wanted).norm()) - rounding) / size
        return gaps


def averages_in(run: TrainingRun) -> dict[str, Tensor]:
    """Return the tensors of all averages, by path.

    An average is a module, or a list or dict of tensors, with the shapes of at least half of the parameters
    of the model, or of those that are trained, such as adapters. Tensors that share memory with the model or
    the optimizer are not part of an average.
    """
    seen = {id(each) for each in run.model.modules()}
    found: dict[str, Tensor] = {}
    parameters = list(run.model.parameters())
    groups = (parameters, [p for p in parameters if p.requires_grad])
    # The optimizer may update tensors outside the model, such as float32 master weights.
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    own = {p.data_ptr() for p in (*parameters, *trained)}

    def collect(value: Any, path: str, depth: int) -> None:
        if id(value) in seen or depth > _DEPTH:
            return
        seen.add(id(value))
        items = {f"{path}.{name}".removeprefix("."): each for name, each in _items_of(value)}
        # A module that averages often contains the model as well.
        tensors = {
            name: each
            for name, each in items.items()
            if isinstance(each, Tensor) and each.data_ptr() not in own
        }
        is_collection = isinstance(value, nn.Module | Mapping | list | tuple)
        if is_collection and any(_covers(tensors.values(), each) for each in groups):
            found.update(tensors)
        if not isinstance(value, nn.Module):
            for name, each in items.items():
                collect(each, name, depth + 1)

    collect(run.run if isinstance(run, JoinedRun) else run, "", 0)
    return found


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the tensors of a module, the items of a collection, or the attributes of another object."""
    if isinstance(value, nn.Module):
        saved: dict[str, Any] = value.state_dict(keep_vars=True)
        plain = (  # neither parameters nor buffers
            (f"{name}.{key}".removeprefix("."), each)
            for name, module in value.named_modules()
            for key, each in vars(module).items()
            if isinstance(each, Tensor)
        )
        return [*saved.items(), *plain]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    is_torch = type(value).__module__.partition(".")[0] == "torch"
    if is_torch or isinstance(value, torch.optim.Optimizer | type) or not hasattr(value, "__dict__"):
        return ()
    return [*vars(value).items()]


def _covers(tensors: Iterable[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Return True if tensors have at least half of the shapes of some parameters."""
    mine = Counter(each.shape for each in tensors if each.is_floating_point())
    shapes = Counter(p.shape for p in parameters)
    return bool(shapes) and (mine & shapes).total() >= max(1, _SHARE * shapes.total())
