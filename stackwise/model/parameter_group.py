"""ParameterGroups: changes of optimizer parameter groups during training, for surgery on a Rack."""

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
    """Parameter groups of all optimizers that train one Rack.

    A new parameter joins an existing group, so that learning-rate schedulers, which count groups, continue to
    work. A removed parameter takes its state along; its group remains, even if it is empty. The state of
    other parameters (moments, steps) is unchanged. A state dict refers to parameters by index: within a group
    they stay in the order of the Rack, so that a new optimizer of the Rack can load it.

    Args:
        rack: Rack with the parameters.
        optimizer: one optimizer, several (such as Muon and AdamW), or None, with which every method does
            nothing. One may contain others, see `optimizers_in`.

    Raises:
        ValueError: not an optimizer, an optimizer with parameters but none of this Rack, or LBFGS, which has
            one state vector over all parameters.
    """

    def __init__(self, rack: Rack, optimizer: Optimizers) -> None:
        several = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        ours = {id(p) for p in rack.parameters()}
        for each in several:
            sound = isinstance(each, Optimizer) and not isinstance(each, LBFGS)
            require(sound, "optimizer", type(each).__name__, "a torch.optim.Optimizer other than LBFGS")
            held = {id(p) for group in each.param_groups for p in group["params"]}
            allowed = "one that trains this Rack; it holds other parameters only"
            require(not held or not held.isdisjoint(ours), "optimizer", type(each).__name__, allowed)
        # Optimizers inside a container last: their groups are used for training.
        self.rack = rack
        self.optimizers = [inner for each in several for inner in reversed(optimizers_in(each))]
        self._group_of = {id(p): group for group in self._groups() for p in group["params"]}
        self._names = {
            id(p): name
            for group in self._groups()
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def plan(self, stack: Stack, like: int) -> list[tuple[dict[str, Any], nn.Parameter]]:
        """Return the group that each trainable parameter of `stack` will join, without changing anything.

        The first match is used:

        1. In the Stack at index `like`, the group of the same weight, otherwise of another weight of the same
           kind (matrix or not).
        2. If that Stack is `stack` itself, a group with its `stack_id`, whose `matrices` has the right kind.
           Groups of other Stacks are excluded.
        3. The same in all other Stacks, nearest first.
        4. The group of the final norm; for matrices, of an untied head. For gains and biases also the group
           of the embedding, if it has an `lr_multiplier` and no weight decay.
        5. The only empty group with the right kind: weight decay for matrices, none for others.

        Groups of 4 and 5 need the `lr_multiplier` that the weight has in a `mup` Rack, or 1.

        A group of `Muon` with other `rows` does not match. A group for matrices of Blocks does not match
        another weight, and vice versa, unless it trains the same weight in another Stack.

        Parameters that already are in a group are not in the plan.

        Raises:
            ValueError: no group matches.
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
        """Apply a plan, after the parameters were added to the Rack."""
        place = {id(p): i for i, p in enumerate(self.rack.parameters())}
        for group, parameter in plan:
            params, own = group["params"], place[id(parameter)]
            behind = (i for i, p in enumerate(params) if place.get(id(p), -1) > own)
            params.insert(next(behind, len(params)), parameter)
        self.rename()

    @property
    def keeps_masters(self) -> bool:
        """True if an optimizer stores master weights in another dtype than the model's."""
        return any(hasattr(each, "adopt") for each in self.optimizers)

    def adopt(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Pass parameters to the optimizer with master weights. Return True if there is one."""
        keeper = next((each for each in self.optimizers if hasattr(each, "adopt")), None)
        if keeper is not None:
            keeper.adopt(parameters)
        return keeper is not None

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remove parameters and their state from every optimizer."""
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
        """Update parameter names from the Rack, in optimizers with named parameters.

        A group of a removed Stack loses its `stack_id`, because the number may be reused.
        """
        ids = {stack.stack_id for stack in self.rack.get_stacks()}
        for group in self._groups():
            if group.get("stack_id") not in ids and "stack_id" in group:
                group["stack_id"] = None
        self._names |= {id(p): name for name, p in self.rack.named_parameters()}
        for group in self._groups():
            if "param_names" in group:
                group["param_names"] = [self._names[id(p)] for p in group["params"]]

    def refuse_held(self, stack: Stack) -> None:
        """Raise ValueError if a parameter of `stack` is in a group."""
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

        for group, is_same in self._in_stacks(stack, role, is_matrix, like):
            if _fits(group, rows, is_same=is_same) and not is_of_another(group):
                return group
        outside = self._outside_stacks(rows, is_matrix)
        if not outside:
            raise ValueError(
                f"optimizer: got no group for {role}, as nothing of its kind is trained yet; allowed: all "
                "optimizers of the Rack, or none here and afterwards add_param_group of your own"
            )
        return outside[0]

    def _in_stacks(
        self, stack: Stack, role: str, is_matrix: bool, like: int
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield groups of all Stacks, best first, with True if the group trains the same weight."""
        for index in sorted(range(len(self.rack.stacks)), key=lambda i: abs(i - like)):
            other = self.rack.get_stack(index)
            alike = [
                (r, p) for r, p in _roles(other) if id(p) in self._group_of and (p.ndim >= 2) == is_matrix
            ]
            for r, p in sorted(alike, key=lambda each: each[0] != role):
                yield self._group_of[id(p)], r == role
            if other is stack:
                for group in self._groups():
                    if (group.get("stack_id"), group.get("matrices")) == (stack.stack_id, is_matrix):
                        yield group, False

    def _outside_stacks(self, rows: tuple[int, ...] | None, is_matrix: bool) -> list[dict[str, Any]]:
        """Return the groups outside the Stacks that fit, best first: of other weights, then an empty one."""

        def fits(group: dict[str, Any]) -> bool:
            return "stack_id" not in group and _fits(group, rows) and self._has_rate(group, rows)

        ends = [self._group_of[id(w)] for w in self._ends(is_matrix) if id(w) in self._group_of]
        empty = [
            group
            for group in self._groups()
            if not group["params"] and (group.get("weight_decay", 0) > 0) == is_matrix and fits(group)
        ]
        return [*filter(fits, ends), *(empty if len(empty) == 1 else [])]

    def _ends(self, is_matrix: bool) -> list[Tensor]:
        """Return weights outside the Stacks that train like a Stack's weight of this kind, best first."""
        rack = self.rack
        if is_matrix:
            return [] if rack.tie_embeddings else [rack.lm_head.weight]
        of_embedding = self._group_of.get(id(rack.embedding.weight), {})
        alike = "lr_multiplier" in of_embedding and of_embedding.get("weight_decay", 0) == 0
        return [rack.final_norm.weight, *([rack.embedding.weight] if alike else [])]

    def _has_rate(self, group: Mapping[str, Any], rows: tuple[int, ...] | None) -> bool:
        """Return True if a group of other weights has the learning rate of such a weight of a Stack.

        A group without `lr_multiplier` is accepted only if `mup` changes no rate. Under `mup`, head and final
        norm have other rates.
        """
        base, width = self.rack.mup_base_width, self.rack.d_model
        wanted = 1.0 if base is None or rows is None else base / width
        if "lr_multiplier" not in group:
            return base in (None, width)
        if group.get("kind") == "muon":
            wanted = math.sqrt(wanted)
        return math.isclose(group["lr_multiplier"], wanted)


def block_matrices(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return the matrices of a model's Blocks by id, with the rows of each map if one contains several."""
    found: dict[int, tuple[int, ...]] = {}
    for block in model.modules():
        if isinstance(block, Block):
            found |= {id(m.weight): () for m in block.modules() if isinstance(m, nn.Linear)}
            if isinstance(attention := block.attention, Attention):
                heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
                found[id(attention.qkv.weight)] = tuple(n * attention.head_dim for n in heads)
    return found


def _fits(group: Mapping[str, Any], rows: tuple[int, ...] | None, *, is_same: bool = False) -> bool:
    """Return True if a group fits such a weight. torch's groups always do; `Muon`'s depend on the weight.

    Args:
        group: group of an optimizer.
        rows: rows from `block_matrices`; None: not a matrix of a Block.
        is_same: True if the group trains the same weight of another Stack: then only its rows have to match.
    """
    if not group.keys() >= {"kind", "rows"}:
        return True
    if is_same and (group["kind"] == "adamw" or not group["rows"]):
        return True
    if group["kind"] == "adamw":
        return rows is None
    return rows is not None and tuple(group["rows"]) == rows


def _roles(stack: Stack) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, with its name in its Block."""
    for name, parameter in stack.named_parameters():
        yield name.split(".", 2)[2], parameter
