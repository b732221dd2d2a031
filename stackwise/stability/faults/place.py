"""PlaceFault: base class of the faults that change one tensor of a training step, selected by a target."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from stackwise.stability.faults.fault import Acted, Anatomy, Fault, matching, states_of
from stackwise.stability.faults.tensors import described, first_tensor, parts_of, with_first, with_part
from stackwise.stability.recomputation import is_reference
from stackwise.support.arguments import check_sizes, require

__all__ = ["PlaceFault", "breaks", "local", "place_of"]

Batch = Any

_NOUNS = {
    "activation": "modules called",
    "gradient": "parameters with a gradient",
    "weight": "parameters with a gradient",
    "optimizer_state": "states of the optimizer",
}
# Targets without a pattern, because they contain no named modules.
_WHOLE = ("loss",)


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a distributed tensor. Return any other tensor unchanged."""
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, Tensor) else tensor


def breaks(before: Tensor, after: Tensor) -> bool:
    """Return True if `after` is broken: a bit differs from `before`, or an element is not finite.

    A tensor that an earlier fault has filled with non-finite values cannot be changed further. It is broken
    too.
    """
    if after.is_sparse:
        before, after = before.coalesce().values(), after.coalesce().values()
    if not bool(after.isfinite().all()):
        return True
    ours, theirs = (t.detach().resolve_conj().contiguous().flatten() for t in (before, after))
    return not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def place_of(shape: torch.Size, seed: int | None) -> tuple[int, ...]:
    """Return the index of one element: the first one, or a random one drawn with `seed`."""
    if seed is None:
        return (0,) * len(shape)
    generator = torch.Generator().manual_seed(seed)
    number = int(torch.randint(max(math.prod(shape), 1), (), generator=generator))
    index: list[int] = []
    for size in reversed(shape):
        number, here = divmod(number, size)
        index.insert(0, here)
    return tuple(index)


@dataclass(frozen=True)
class PlaceFault(Fault):
    """Base class of the faults that change one tensor.

    Attributes:
        target: a place, or a place, a colon and a pattern of names. The pattern matches module names for
            "activation", parameter names for "gradient" and "weight", "PARAMETER.KEY" for "optimizer_state"
            ("*.exp_avg_sq"), and names of tensors for "batch". Only modules that a step calls and parameters
            that receive a gradient are candidates. The first match is broken. Without a pattern, it is the
            middle one of the called modules without children, or of the parameters, and the first
            floating-point tensor of a batch.
        seed: seed of the random choice of an element, which differs from step to step. None: first element.
    """

    places: ClassVar[tuple[str, ...]]

    target: str = "activation"
    seed: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sound = isinstance(self.target, str) and any(
            re.fullmatch(place if place in _WHOLE else f"{place}(:.+)?", self.target) for place in self.places
        )
        shown = [repr(place if place in _WHOLE else f"{place}[:PATTERN]") for place in self.places]
        allowed = f"{', '.join(shown[:-1])} or {shown[-1]}"
        require(bool(sound), f"{self.name}: target", self.target, allowed)
        if self.seed is not None:
            check_sizes(0, **{f"{self.name}: seed": self.seed})

    def changed(self, tensor: Tensor) -> Tensor:
        """Return the tensor after the fault, as a new tensor through which gradients flow."""
        raise NotImplementedError

    @property
    def damages(self) -> bool:  # noqa: D102
        return self._place in ("weight", "optimizer_state")

    @property
    def _place(self) -> str:
        return self.target.partition(":")[0]

    @property
    def _name(self) -> str:
        return self.target.partition(":")[2]

    def at(self, step: int) -> Self:  # noqa: D102
        return self if self.seed is None else replace(self, seed=self.seed + step - self.step)

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: D102
        place, pattern = self._place, self._name
        known = {
            "activation": anatomy.modules,
            "gradient": anatomy.parameters,
            "weight": anatomy.parameters,
            "optimizer_state": anatomy.states,
        }
        if (names := known.get(place)) is None:
            return self
        default = anatomy.leaves if place == "activation" else names
        if not pattern and not default:
            pattern = "*"  # matches no name, so an error is raised
        found = (
            matching(self, "target", pattern, names, _NOUNS[place])
            if pattern
            else list(default[len(default) // 2 :])
        )
        return replace(self, target=f"{place}:{found[0]}")

    @torch.no_grad()
    def before_step(  # noqa: D102
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, acted: Acted
    ) -> None:
        if self._place == "weight":
            self._overwrite(model.get_parameter(self._name), acted)
        elif self._place == "optimizer_state":
            states = {} if optimizer is None else states_of(model, optimizer)
            names = list(states)
            default = names[len(names) // 2 :] or ["*"]
            found = matching(self, "target", self._name or default[0], names, _NOUNS["optimizer_state"])
            self._overwrite(states[found[0]], acted)

    def on_batch(self, batch: Batch, acted: Acted) -> Batch:  # noqa: D102
        if self._place != "batch":
            return batch
        parts = {n: t for n, t in parts_of(batch).items() if t.is_floating_point() and t.numel()}
        found = fnmatch.filter(parts, self._name or "*")
        if not found:
            raise ValueError(
                f"{self.name}: target: got {self.target!r}, which matches no floating-point tensor of the "
                f"batch; it has {described(batch)}"
            )
        changed = self.changed(parts[found[0]])
        if breaks(parts[found[0]], changed):
            acted()
        return with_part(batch, found[0], changed)

    @contextmanager
    def around_forward(self, model: nn.Module, acted: Acted) -> Iterator[None]:  # noqa: D102
        if self._place != "activation":
            yield
            return

        def change(_module: nn.Module, _args: Any, output: Any) -> Any:
            if is_reference() or (before := first_tensor(output)) is None:
                return output
            changed = self.changed(before)
            if breaks(before, changed):
                acted()
            return with_first(output, changed)

        # The hook is the module's first, so that every later hook sees the broken output.
        with model.get_submodule(self._name).register_forward_hook(change, prepend=True):
            yield

    @torch.no_grad()
    def on_gradients(self, model: nn.Module, acted: Acted) -> None:  # noqa: D102
        if self._place == "gradient":
            gradient = model.get_parameter(self._name).grad
            if gradient is not None:
                self._overwrite(gradient, acted)

    def _overwrite(self, tensor: Tensor, acted: Acted) -> None:
        """Change a tensor in place.

        The shard of a rank may be empty or unaffected because the element is on another rank.
        """
        mine = local(tensor)
        changed = self.changed(mine) if mine.numel() else mine
        if mine is not tensor or breaks(mine, changed):
            acted()
        mine.copy_(changed)
