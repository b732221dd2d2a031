"""Parameter groups: which optimizer trains which parameter of a Rack, changed while training goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from stackwise.model.attention import Attention
from stackwise.model.block import Block
from stackwise.model.rack import Rack
from stackwise.model.stack import Stack
from stackwise.support.arguments import require
from stackwise.support.optimizer_state import optimizers_in

__all__ = ["Optimizers", "ParameterGroups", "block_matrices"]

Optimizers = Optimizer | Sequence[Optimizer] | None


class ParameterGroups:
    """The groups of all optimizers that train one Rack.

    A parameter that joins gets into a group that exists, so that learning rate schedulers, which count
    groups, go on; one that leaves takes its state with it, and its group stays, even when empty. What any
    other parameter has in state (moments, steps) is not touched. A state dict counts parameters: within a
    group they stay in the order of the Rack, so that an optimizer made anew for the Rack can load it.

    Args:
        rack: whose parameters these are.
        optimizer: one, several (Muon beside AdamW), or None, with which every method does nothing. One may
            contain others, see `optimizers_in`.

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
        # Those inside a container last: their groups are the ones that train.
        self.rack = rack
        self.optimizers = [inner for each in several for inner in reversed(optimizers_in(each))]
        self._group_of = {id(p): group for group in self._groups() for p in group["params"]}
        self._names = {
            id(p): name
            for group in self._groups()
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def plan(self, stack: Stack, like: int) -> list[tuple[dict[str, Any], nn.Parameter]]:
        """The group that each trainable parameter of `stack` is to join; nothing changes yet.

        That of the same weight in the Stack at index `like`; where that one is not trained, of another
        weight there of the same kind (a matrix, or not); where that Stack is `stack` itself, a group with its
        `stack_id`, for weights of that kind as `matrices` says, and none that was made for another Stack.
        Then the same in the next nearest Stacks. If no Stack has such a group: that of the final norm, or of
        an untied head for matrices; for gains and biases that of an embedding which does not decay, where it
        has an `lr_multiplier`; at last, the only empty group, where weight decay says which kind it is for.
        Of these, only one with the `lr_multiplier` that the weight has in a `mup` Rack, or 1.

        A group of `Muon` that splits its matrices in other maps is none for this weight; nor is one that is
        for matrices of Blocks where this is none, or the reverse, unless it trains the same weight elsewhere.

        Parameters that are in a group already have no part in the plan.

        Raises:
            ValueError: no such group.
        """
        if not self.optimizers:
            return []
        maps = block_matrices(stack)
        return [
            (self._choose(stack, role, p, maps.get(id(p)), like), p)
            for role, p in _roles(stack)
            if p.requires_grad and id(p) not in self._group_of
        ]

    def add(self, plan: Iterable[tuple[dict[str, Any], nn.Parameter]]) -> None:
        """Carry a plan out, once the parameters are in the Rack."""
        place = {id(p): i for i, p in enumerate(self.rack.parameters())}
        for group, parameter in plan:
            params, own = group["params"], place[id(parameter)]
            behind = (i for i, p in enumerate(params) if place.get(id(p), -1) > own)
            params.insert(next(behind, len(params)), parameter)
        self.rename()

    @property
    def keeps_masters(self) -> bool:
        """Whether an optimizer keeps weights in another dtype than the model has."""
        return any(hasattr(each, "adopt") for each in self.optimizers)

    def adopt(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Hand parameters to the optimizer that `keeps_masters`, where there is one; whether there is."""
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
                getattr(optimizer, "state", {}).pop(parameter, None)
        self.rename()

    def rename(self) -> None:
        """Call parameters as the Rack now does, in optimizers that were made with names.

        And a group that was made for a Stack which is there no more is for none: its number may come again.
        """
        ids = {self.rack.get_stack(i).stack_id for i in range(len(self.rack.stacks))}
        for group in self._groups():
            if group.get("stack_id") not in ids and "stack_id" in group:
                group["stack_id"] = None
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

    def _choose(
        self, stack: Stack, role: str, parameter: nn.Parameter, rows: tuple[int, ...] | None, like: int
    ) -> dict[str, Any]:
        is_matrix = parameter.ndim >= 2
        is_own = self.rack.get_stack(like) is stack
        own = {id(p) for p in stack.parameters()}

        def is_of_another(group: dict[str, Any]) -> bool:
            named = group.get("stack_id", stack.stack_id) != stack.stack_id
            return is_own and named and not any(id(p) in own for p in group["params"])

        for index in sorted(range(len(self.rack.stacks)), key=lambda i: abs(i - like)):
            trained = [(r, p) for r, p in _roles(self.rack.get_stack(index)) if id(p) in self._group_of]
            same_kind = [(r, p) for r, p in trained if (p.ndim >= 2) == is_matrix]
            for r, p in [(r, p) for r, p in same_kind if r == role] + same_kind:
                group = self._group_of[id(p)]
                if _fits(group, rows, is_same=r == role) and not is_of_another(group):
                    return group
            if self.rack.get_stack(index) is stack:
                mark = (stack.stack_id, is_matrix)
                for group in self._groups():
                    if (group.get("stack_id"), group.get("matrices")) == mark and _fits(group, rows):
                        return group
        fits = [
            group
            for group in self._groups()
            if "stack_id" not in group and _fits(group, rows) and self._has_rate(group, rows)
        ]
        ends = [self._group_of.get(id(weight)) for weight in self._ends(is_matrix)]
        found = [end for end in ends if end is not None and any(end is group for group in fits)]
        if found:
            return found[0]
        empty = [
            group for group in fits if not group["params"] and (group.get("weight_decay", 0) > 0) == is_matrix
        ]
        if len(empty) == 1:
            return empty[0]
        raise ValueError(
            f"optimizer: got no group for {role}, as nothing of its kind is trained yet; allowed: all "
            "optimizers of the Rack, or none here and afterwards add_param_group of your own"
        )

    def _ends(self, is_matrix: bool) -> list[Tensor]:
        """Weights outside the Stacks that train as such a one of a Stack does, the likest first."""
        rack = self.rack
        if is_matrix:
            return [] if rack.tie_embeddings else [rack.lm_head.weight]
        of_embedding = self._group_of.get(id(rack.embedding.weight), {})
        alike = "lr_multiplier" in of_embedding and of_embedding.get("weight_decay", 0) == 0
        return [rack.final_norm.weight, *([rack.embedding.weight] if alike else [])]

    def _has_rate(self, group: Mapping[str, Any], rows: tuple[int, ...] | None) -> bool:
        """Whether a group of other weights has the learning rate that such a weight of a Stack has.

        One without `lr_multiplier` does not tell; and under `mup` head and final norm have other rates.
        """
        base, width = self.rack.mup_base_width, self.rack.d_model
        wanted = 1.0 if base is None or rows is None else base / width
        if "lr_multiplier" not in group:
            return base in (None, width)
        if group.get("kind") == "muon":
            wanted = math.sqrt(wanted)
        return math.isclose(group["lr_multiplier"], wanted)


def block_matrices(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """By id, the matrices of the Blocks of a model; and the rows of each of several maps that share one."""
    found: dict[int, tuple[int, ...]] = {}
    for block in model.modules():
        if isinstance(block, Block):
            found |= {id(m.weight): () for m in block.modules() if isinstance(m, nn.Linear)}
            if isinstance(attention := block.attention, Attention):
                heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
                found[id(attention.qkv.weight)] = tuple(n * attention.head_dim for n in heads)
    return found


def _fits(group: Mapping[str, Any], rows: tuple[int, ...] | None, *, is_same: bool = False) -> bool:
    """Whether a group is for such a weight: any of torch's own is, one of `Muon` says what it is for.

    Args:
        group: of an optimizer.
        rows: of `block_matrices`; None: it is none of them.
        is_same: whether it trains the same weight of another Stack: then it is right but for its rows.
    """
    if not group.keys() >= {"kind", "rows"}:
        return True
    if is_same and (group["kind"] == "adamw" or not group["rows"]):
        return True
    if group["kind"] == "adamw":
        return rows is None
    return rows is not None and tuple(group["rows"]) == rows


def _roles(stack: Stack) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, with its name within its Block."""
    for name, parameter in stack.named_parameters():
        yield name.split(".", 2)[2], parameter
