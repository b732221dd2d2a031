"""Place: one tensor of a training step, named by a target, and the faults that change it."""

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

from stackwise.stability.faults.batch import described, parts_of, with_part
from stackwise.stability.faults.fault import Acted, Anatomy, Fault, matching, states_of
from stackwise.stability.faults.output import first_tensor, with_first
from stackwise.stability.recomputation import is_reference
from stackwise.support.arguments import check_sizes, require

__all__ = ["PlaceFault", "breaks", "local", "place_of"]

Batch = Any

_NOUNS = {
    "activation": "modules called",
    "gradient": "parameters with a gradient",
    "weight": "parameters with a gradient",
    "optimizer_state": "what the optimizer keeps",
}
# Read whole: no module has a name in it.
_WHOLE = ("loss",)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that is spread over many; else the tensor itself."""
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, Tensor) else tensor


def breaks(before: Tensor, after: Tensor) -> bool:
    """Whether a tensor is a broken one now: a bit of it is another, or it is not finite any more.

    What an earlier fault has left without a finite number cannot be changed further, and is broken.
    """
    if after.is_sparse:
        before, after = before.coalesce().values(), after.coalesce().values()
    if not bool(after.isfinite().all()):
        return True
    ours, theirs = (t.detach().resolve_conj().contiguous().flatten() for t in (before, after))
    return not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def place_of(shape: torch.Size, seed: int | None) -> tuple[int, ...]:
    """The index of one element: the first, or one that `seed` chooses."""
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
    """Base of the faults that change one tensor.

    Attributes:
        target: the place, with a pattern of names after a colon: of modules for "activation", of parameters
            for "gradient" and "weight", "PARAMETER.KEY" for "optimizer_state" ("*.exp_avg_sq"), of what is
            in a batch for "batch". Only modules that a step calls, and parameters that get a gradient, are
            meant; the first match is broken. Without a pattern it is the middle one of the called modules
            without children, or of those parameters, and the first tensor of numbers in a batch.
        seed: chooses the element, another one at each step; None: the first.
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
        """The tensor as the fault leaves it; a new one, through which gradients flow."""
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
            pattern = "*"  # which matches nothing, and says so
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
            return with_first(output, lambda _: changed)

        # First among the module's hooks, so that whatever watches the module sees the broken output.
        handle = model.get_submodule(self._name).register_forward_hook(change, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def on_gradients(self, model: nn.Module, acted: Acted) -> None:  # noqa: D102
        if self._place == "gradient":
            gradient = model.get_parameter(self._name).grad
            if gradient is not None:
                self._overwrite(gradient, acted)

    def _overwrite(self, tensor: Tensor, acted: Acted) -> None:
        """In place. What a rank has of a tensor may be nothing, or not change: another one's does."""
        mine = local(tensor)
        changed = self.changed(mine) if mine.numel() else mine
        if mine is not tensor or breaks(mine, changed):
            acted()
        mine.copy_(changed)
