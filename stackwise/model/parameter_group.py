"""Parameter groups: which optimizer trains which parameter of a Rack, changed while training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from stackwise.argument import require
from stackwise.model.rack import Rack
from stackwise.model.stack import Stack

__all__ = ["Optimizers", "ParameterGroups"]

Optimizers = Optimizer | Sequence[Optimizer] | None


class ParameterGroups:
    """The groups of all optimizers that train one Rack.

    A parameter that joins is appended to a group that exists, so that learning rate schedulers, which
    count groups, go on; one that leaves takes its state with it, and its group stays, even when empty.
    What any other parameter has in state (moments, steps) is not touched.

    Args:
        rack: whose parameters these are.
        optimizer: one, several (Muon beside AdamW), or None, with which every method does nothing.

    Raises:
        ValueError: no optimizer, one that holds parameters but none of this Rack, or LBFGS, whose state
            is one vector over all parameters.
    """

    def __init__(self, rack: Rack, optimizer: Optimizers) -> None:
        several = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        ours = {id(p) for p in rack.parameters()}
        for each in several:
            sound = isinstance(each, Optimizer) and not isinstance(each, LBFGS)
            require(sound, "optimizer", type(each).__name__, "a torch.optim.Optimizer other than LBFGS")
            held = [p for group in each.param_groups for p in group["params"]]
            require(
                not held or any(id(p) in ours for p in held),
                "optimizer",
                type(each).__name__,
                "one that trains this Rack; it holds other parameters only",
            )
        self.rack, self.optimizers = rack, several
        self._group_of = {id(p): group for group in self._groups() for p in group["params"]}
        self._names = {
            id(p): name
            for group in self._groups()
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def plan(self, stack: Stack, like: int) -> list[tuple[dict[str, Any], nn.Parameter]]:
        """The group that each trainable parameter of `stack` is to join; nothing changes yet.

        That of the same weight in the Stack at index `like`; where that one is not trained, of another
        weight there of the same kind (a matrix, or not); then the same in the next nearest Stacks. Where
        no Stack trains such a weight: the group of the final norm, or of an untied head for matrices;
        at last, the only empty group, where weight decay says which kind it is for.

        Parameters that are in a group already have no part in the plan.

        Raises:
            ValueError: no such group.
        """
        if not self.optimizers:
            return []
        return [
            (self._choose(role, p, like), p)
            for role, p in _roles(stack)
            if p.requires_grad and id(p) not in self._group_of
        ]

    def add(self, plan: Iterable[tuple[dict[str, Any], nn.Parameter]]) -> None:
        """Carry a plan out."""
        for group, parameter in plan:
            group["params"].append(parameter)
        self.rename()

    def adopt(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether an optimizer keeps weights in another dtype than the model has; it then takes these on."""
        keeper = next((each for each in self.optimizers if hasattr(each, "adopt")), None)
        if keeper is not None:
            keeper.adopt(parameters)
        return keeper is not None

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take parameters, and what is known of them, out of every optimizer."""
        gone = {id(p): p for p in parameters}
        for optimizer in self.optimizers:
            if hasattr(optimizer, "release"):
                optimizer.release(gone.values())
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in gone]
            for parameter in gone.values():
                optimizer.state.pop(parameter, None)
        self.rename()

    def rename(self) -> None:
        """Call parameters as the Rack now does, in optimizers that were made with names."""
        self._names |= {id(p): name for name, p in self.rack.named_parameters()}
        for group in self._groups():
            if "param_names" in group:
                group["param_names"] = [self._names[id(p)] for p in group["params"]]

    def refuse_held(self, stack: Stack) -> None:
        """Raises ValueError where a parameter of `stack` is in a group."""
        for name, parameter in stack.named_parameters():
            require(
                id(parameter) not in self._group_of, "stack", name, "parameters that no optimizer has yet"
            )

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _choose(self, role: str, parameter: nn.Parameter, like: int) -> dict[str, Any]:
        is_matrix = parameter.ndim >= 2
        for index in sorted(range(len(self.rack.stacks)), key=lambda i: abs(i - like)):
            trained = [(r, p) for r, p in _roles(self.rack.get_stack(index)) if id(p) in self._group_of]
            same_kind = [(r, p) for r, p in trained if (p.ndim >= 2) == is_matrix]
            for _, p in [(r, p) for r, p in same_kind if r == role] + same_kind:
                return self._group_of[id(p)]
        outside = self.rack.lm_head if is_matrix else self.rack.final_norm
        if id(outside.weight) in self._group_of and not (is_matrix and self.rack.tie_embeddings):
            return self._group_of[id(outside.weight)]
        empty = [
            group
            for group in self._groups()
            if not group["params"] and (group.get("weight_decay", 0) > 0) == is_matrix
        ]
        if len(empty) == 1:
            return empty[0]
        raise ValueError(
            f"optimizer: got no group for {role}, as nothing of its kind is trained yet; allowed: all "
            "optimizers of the Rack, or none here and afterwards add_param_group of your own"
        )


def _roles(stack: Stack) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, with its name within its Block."""
    for name, parameter in stack.named_parameters():
        yield name.split(".", 2)[2], parameter
