"""Surgery: Stacks put into a Rack, taken out, joined and split while training goes on.

Each operation checks everything first and changes something only then: a call that is refused leaves
Rack, Stack and optimizers as they were. Caches of `Rack.new_cache` made before an operation do not fit
the Rack after it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stackwise.model.block import Block
from stackwise.model.parameter_group import Optimizers, ParameterGroups
from stackwise.model.quantization import QuantizedLinear
from stackwise.model.rack import Rack
from stackwise.model.stack import Stack
from stackwise.support.arguments import check_sizes, require

__all__ = [
    "append_stack",
    "fuse_stacks",
    "insert_stack",
    "prepend_stack",
    "remove_stack",
    "residual_ends",
    "set_identity",
    "split_stack",
    "unfreeze_stack",
]


def append_stack(
    rack: Rack, stack: Stack, optimizer: Optimizers = None, *, identity: bool = False, like: int | None = None
) -> None:
    """`insert_stack` behind the last Stack. The final norm stays the one that the Rack has."""
    insert_stack(rack, len(rack.stacks), stack, optimizer, identity=identity, like=like)


def prepend_stack(
    rack: Rack, stack: Stack, optimizer: Optimizers = None, *, identity: bool = False, like: int | None = None
) -> None:
    """`insert_stack` before the first Stack."""
    insert_stack(rack, 0, stack, optimizer, identity=identity, like=like)


def insert_stack(
    rack: Rack,
    index: int,
    stack: Stack,
    optimizer: Optimizers = None,
    *,
    identity: bool = False,
    like: int | None = None,
) -> None:
    """Put a Stack into a Rack, so that it is the one at `index`.

    It is moved to the device and dtype of the Stack `like` and into the Rack's training mode, and loses
    gradients of an earlier life. Its frozen parameters stay frozen and in no optimizer; each other one
    joins the group that trains the same weight in the Stack `like` (see `ParameterGroups.plan`), with no
    state yet. `stack_id` is a name: Stacks keep theirs, and a new one whose name is taken gets the next
    free number.

    Args:
        rack: changed in place.
        index: 0 to the number of Stacks.
        stack: with weights of its own; of any kind of attention, causal or not, as in `Rack`.
        optimizer: what trains the Rack: one, several, or None.
        identity: first `set_identity(stack)`, so that the logits stay what they are.
        like: index, before the insertion, of the Stack whose learning rate and weight decay it gets;
            None: the one before it, for the first the one after it.

    Raises:
        ValueError: an index out of range; no Stack, of another width, with weights on the meta device,
            quantised from another dtype, or to int4 or fp8 beside `MasterAdamW`; one that is in the Rack or
            an optimizer already or shares weights with these; `identity` for quantised weights; an
            optimizer that has no part in this Rack or no fitting group.
    """
    count = len(rack.stacks)
    _check_index("index", index, count)
    like = max(0, index - 1) if like is None else like
    _check_index("like", like, count - 1)
    weight = rack.get_stack(like).get_block(0).attention_norm.weight
    _check_joins(rack, stack, weight)
    groups = ParameterGroups(rack, optimizer)
    groups.refuse_held(stack)
    if groups.keeps_masters:
        _check_follows_casts(stack)
    plan = groups.plan(stack, like)
    if identity:
        set_identity(stack)  # before an optimizer keeps what the weights are

    stack.to(device=weight.device).train(rack.training)
    if not groups.adopt(stack.parameters()):
        stack.to(dtype=weight.dtype)
    stack.zero_grad(set_to_none=True)
    if stack.stack_id in _ids(rack):
        stack.stack_id = _free_id(rack)
    rack.stacks.insert(index, stack)
    groups.add(plan)


def remove_stack(rack: Rack, index: int, optimizer: Optimizers = None) -> Stack:
    """Take a Stack out of a Rack, and its parameters with their state out of the optimizers.

    Parameters that it shares with what stays are left where they are. A group that it empties remains,
    for schedulers that count groups.

    Args:
        rack: changed in place.
        index: 0 to the number of Stacks - 1.
        optimizer: what trains the Rack: one, several, or None.

    Returns:
        The Stack, whole.

    Raises:
        ValueError: an index out of range, the only Stack, or an optimizer that has no part in this Rack.
    """
    count = len(rack.stacks)
    _check_index("index", index, count - 1)
    require(count > 1, "index", index, "a Rack with another Stack beside it; this is the only one")
    groups = ParameterGroups(rack, optimizer)
    stack = rack.get_stack(index)
    del rack.stacks[index]
    kept = {id(p) for p in rack.parameters()}
    groups.drop(p for p in stack.parameters() if id(p) not in kept)
    return stack


def fuse_stacks(rack: Rack, start: int, end: int, optimizer: Optimizers = None) -> Stack:
    """Make the Stacks `start` to `end` (exclusive) one, their Blocks in order. Logits do not change.

    The first of them takes the Blocks of the others and keeps its name. Parameters and their state stay
    what they are; `optimizer` is of use only where it was made with named parameters, which get new names.

    Returns:
        The Stack, now at `start`.

    Raises:
        ValueError: fewer than two Stacks, a range out of the Rack, or an optimizer that has no part in it.
    """
    count = len(rack.stacks)
    _check_index("start", start, count - 2)
    check_sizes(minimum=start + 2, end=end)
    require(end <= count, "end", end, f"{start + 2} to {count}")
    groups = ParameterGroups(rack, optimizer)
    first = rack.get_stack(start)
    for stack in map(rack.get_stack, range(start + 1, end)):
        first.blocks.extend(stack.blocks)
    del rack.stacks[start + 1 : end]
    groups.rename()
    return first


def split_stack(rack: Rack, index: int, at: int, optimizer: Optimizers = None) -> tuple[Stack, Stack]:
    """Make one Stack two: its Blocks before `at`, and those from `at` on. Logits do not change.

    The first keeps the name, the second gets the next free number. `optimizer` as in `fuse_stacks`.

    Returns:
        The two Stacks, now at `index` and `index + 1`.

    Raises:
        ValueError: an index out of range, a half without Blocks, or an optimizer that has no part in
            this Rack.
    """
    _check_index("index", index, len(rack.stacks) - 1)
    first = rack.get_stack(index)
    check_sizes(at=at)
    require(at < first.num_blocks, "at", at, f"1 to {first.num_blocks - 1}, as both halves need a Block")
    groups = ParameterGroups(rack, optimizer)
    second = Stack(_blocks(first)[at:], _free_id(rack))
    second.training = second.blocks.training = first.training
    del first.blocks[at:]
    rack.stacks.insert(index + 1, second)
    groups.rename()
    return first, second


def unfreeze_stack(rack: Rack, index: int, optimizer: Optimizers = None, *, like: int | None = None) -> None:
    """`Stack.unfreeze`, and what no optimizer trained so far joins a group as in `insert_stack`.

    Args:
        rack: changed in place.
        index: of the Stack.
        optimizer: what trains the Rack: one, several, or None.
        like: as in `insert_stack`; None: the Stack itself, then its neighbours.

    Raises:
        ValueError: an index out of range, a quantised Stack, or an optimizer that has no part in this Rack
            or no fitting group.
    """
    _check_index("index", index, len(rack.stacks) - 1)
    like = index if like is None else like
    _check_index("like", like, len(rack.stacks) - 1)
    groups = ParameterGroups(rack, optimizer)
    stack = rack.get_stack(index)
    quantised = any(isinstance(module, QuantizedLinear) for module in stack.modules())
    require(not quantised, "index", index, "a Stack that is not quantised")
    before = [(p, p.requires_grad) for p in stack.parameters()]
    stack.unfreeze()
    try:
        plan = groups.plan(stack, like)
    except ValueError:
        for parameter, trained in before:
            parameter.requires_grad_(trained)
        raise
    groups.add(plan)


@torch.no_grad()
def set_identity(part: Stack | Block) -> None:
    """Make a Stack or Block hand on what it gets, and learn from there.

    What ends each branch is set to zero: the projections into the residual stream
    (`attention.out`, `feedforward.down`), with `norm_position="post"` the weights of the branch's norm. Their
    gradients are those of an ordinary layer, so that they leave zero at the first step and the rest of
    the branch follows at the second (the zero of ReZero, Bachlechner et al. 2020, arXiv:2003.04887, in
    the weights that are there). For weights of which an optimizer keeps masters, as `MasterAdamW` does, it
    is too late: they come back with the next step.

    Raises:
        ValueError: quantised weights.
    """
    for weight in residual_ends([part] if isinstance(part, Block) else _blocks(part)):
        weight.zero_()


def residual_ends(blocks: Iterable[Block]) -> list[nn.Parameter]:
    """What ends the branches of Blocks: at zero they hand on what they get, see `set_identity`.

    Raises:
        ValueError: quantised weights.
    """
    ends: list[nn.Module] = []
    for block in blocks:
        if block.norm_first:
            ends += [block.attention.out, block.feedforward.down]
        else:
            ends += [block.attention_norm, block.feedforward_norm]
    for module in ends:
        quantised = isinstance(module, QuantizedLinear)
        require(not quantised, "identity", module, "layers that are not quantised")
    return [p for module in ends for p in module.parameters(recurse=False)]


def _check_index(key: str, value: int, last: int) -> None:
    check_sizes(minimum=0, **{key: value})
    require(value <= last, key, value, f"0 to {last}")


def _check_joins(rack: Rack, stack: Stack, like: Tensor) -> None:
    require(isinstance(stack, Stack), "stack", type(stack).__name__, "a Stack")
    widths = sorted({block.config.d_model for block in _blocks(stack)})
    require(widths == [rack.d_model], "stack", f"width {widths}", f"the Rack's d_model={rack.d_model}")
    for block in _blocks(stack):
        base = block.config.mup_base_width
        require(base == rack.mup_base_width, "mup_base_width", base, f"{rack.mup_base_width}, as in the Rack")
    ours = {id(p) for p in rack.parameters()}
    for name, parameter in stack.named_parameters():
        require(id(parameter) not in ours, "stack", name, "weights of its own; the Rack has this one")
        require(not parameter.is_meta, "stack", f"{name} on meta", "weights on a device")
    for module in stack.modules():
        if isinstance(module, QuantizedLinear):
            dtype = module.weight.dtype
            require(dtype == like.dtype, "stack", f"quantised from {dtype}", f"quantised from {like.dtype}")


def _check_follows_casts(stack: Stack) -> None:
    for module in stack.modules():
        if isinstance(module, QuantizedLinear):
            allowed = "quantised in int8, as masters make the Rack float32 to save and evaluate it"
            require(module.takes_float32, "stack", f"quantised as {module}", allowed)


def _blocks(stack: Stack) -> list[Block]:
    return [stack.get_block(i) for i in range(stack.num_blocks)]


def _ids(rack: Rack) -> list[int]:
    return [rack.get_stack(i).stack_id for i in range(len(rack.stacks))]


def _free_id(rack: Rack) -> int:
    return max((i for i in _ids(rack) if isinstance(i, int)), default=-1) + 1
