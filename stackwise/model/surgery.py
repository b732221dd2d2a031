"""Surgery: insertion, removal, fusion and splitting of Stacks of a Rack, also during training.

Each operation checks all arguments before it changes anything: a rejected call leaves Rack, Stack and
optimizers unchanged. Caches of `Rack.new_cache` from before an operation cannot be used after it.
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
    """Call `insert_stack` after the last Stack. The final norm is unchanged."""
    insert_stack(rack, len(rack.stacks), stack, optimizer, identity=identity, like=like)


def prepend_stack(
    rack: Rack, stack: Stack, optimizer: Optimizers = None, *, identity: bool = False, like: int | None = None
) -> None:
    """Call `insert_stack` before the first Stack."""
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
    """Insert a Stack into a Rack at `index`.

    The Stack is moved to the device and dtype of the Stack `like` and to the Rack's training mode, and its
    gradients are cleared. Its frozen parameters stay frozen, without an optimizer. Each other parameter joins
    the group of the same weight in the Stack `like` (see `ParameterGroups.plan`), without state. `stack_id`
    is a name: existing Stacks keep theirs, and a new Stack with an existing name gets the next free number.

    Args:
        rack: changed in place.
        index: 0 to the number of Stacks.
        stack: Stack with its own weights; attention of any kind, causal or not, as in `Rack`.
        optimizer: optimizers of the Rack: one, several, or None.
        identity: call `set_identity(stack)` first, so that the logits do not change.
        like: index, before the insertion, of the Stack that provides learning rate and weight decay; None:
            the previous Stack, or the next one for the first.

    Raises:
        ValueError: an index out of range; not a Stack, or one of another width, with weights on the meta
            device, quantised from another dtype, or quantised to int4 or fp8 with `MasterAdamW`; a Stack
            that already is in the Rack or an optimizer, or shares weights with them; `identity` with
            quantised weights; an optimizer without parameters of this Rack, or without a matching group.
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
        set_identity(stack)  # before an optimizer copies the weights

    stack.to(device=weight.device).train(rack.training)
    if not groups.adopt(stack.parameters()):
        stack.to(dtype=weight.dtype)
    stack.zero_grad(set_to_none=True)
    if stack.stack_id in _ids(rack):
        stack.stack_id = _free_id(rack)
    rack.stacks.insert(index, stack)
    groups.add(plan)


def remove_stack(rack: Rack, index: int, optimizer: Optimizers = None) -> Stack:
    """Remove a Stack from a Rack, and its parameters and their state from the optimizers.

    Parameters that the rest of the Rack shares stay in place. A group that becomes empty remains, for
    schedulers that count groups.

    Args:
        rack: changed in place.
        index: 0 to the number of Stacks - 1.
        optimizer: optimizers of the Rack: one, several, or None.

    Returns:
        The removed Stack.

    Raises:
        ValueError: an index out of range, the only Stack, or an optimizer without parameters of this Rack.
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
    """Fuse the Stacks `start` to `end` (exclusive) into one, with their Blocks in order.

    Logits do not change. The first Stack receives the Blocks of the other ones and keeps its name. Parameters
    and their state are unchanged. `optimizer` is needed only if it has named parameters, which are renamed.

    Returns:
        The fused Stack, at index `start`.

    Raises:
        ValueError: fewer than two Stacks, a range outside the Rack, or an optimizer without parameters of it.
    """
    count = len(rack.stacks)
    _check_index("start", start, count - 2)
    check_sizes(minimum=start + 2, end=end)
    require(end <= count, "end", end, f"{start + 2} to {count}")
    groups = ParameterGroups(rack, optimizer)
    first = rack.get_stack(start)
    for stack in rack.get_stacks()[start + 1 : end]:
        first.blocks.extend(stack.blocks)
    del rack.stacks[start + 1 : end]
    groups.rename()
    return first


def split_stack(rack: Rack, index: int, at: int, optimizer: Optimizers = None) -> tuple[Stack, Stack]:
    """Split one Stack into two: its Blocks before `at`, and its Blocks from `at` on. Logits do not change.

    The first Stack keeps the name, the second gets the next free number. `optimizer` as in `fuse_stacks`.

    Returns:
        The two Stacks, at `index` and `index + 1`.

    Raises:
        ValueError: an index out of range, a half without Blocks, or an optimizer without parameters of this
            Rack.
    """
    _check_index("index", index, len(rack.stacks) - 1)
    first = rack.get_stack(index)
    check_sizes(at=at)
    require(at < first.num_blocks, "at", at, f"1 to {first.num_blocks - 1}, as both halves need a Block")
    groups = ParameterGroups(rack, optimizer)
    second = Stack(first.get_blocks()[at:], _free_id(rack))
    second.training = second.blocks.training = first.training
    del first.blocks[at:]
    rack.stacks.insert(index + 1, second)
    groups.rename()
    return first, second


def unfreeze_stack(rack: Rack, index: int, optimizer: Optimizers = None, *, like: int | None = None) -> None:
    """Call `Stack.unfreeze`. Parameters without an optimizer join a group as in `insert_stack`.

    Args:
        rack: changed in place.
        index: index of the Stack.
        optimizer: optimizers of the Rack: one, several, or None.
        like: see `insert_stack`; None: the Stack itself, then its neighbours.

    Raises:
        ValueError: an index out of range, a quantised Stack, or an optimizer without parameters of this Rack,
            or without a matching group.
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
    """Make a Stack or Block an identity function that can train.

    The last layer of each branch is set to zero: the projections into the residual stream (`attention.out`,
    `feedforward.down`), or with `norm_position="post"` the weights of the branch's norm. These weights have
    ordinary gradients, so they become nonzero at the first step, and the rest of the branch trains from the
    second step on (like the zero of ReZero, Bachlechner et al. 2020, arXiv:2003.04887, but in existing
    weights). It has no lasting effect on weights with float32 masters, as in `MasterAdamW`: the next step
    restores them.

    Raises:
        ValueError: quantised weights.
    """
    for weight in residual_ends([part] if isinstance(part, Block) else part.get_blocks()):
        weight.zero_()


def residual_ends(blocks: Iterable[Block]) -> list[nn.Parameter]:
    """Return the last parameters of the Blocks' branches: if they are zero, the Blocks are the identity.

    See `set_identity`.

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
    widths = sorted({block.config.d_model for block in stack.get_blocks()})
    require(widths == [rack.d_model], "stack", f"width {widths}", f"the Rack's d_model={rack.d_model}")
    for block in stack.get_blocks():
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


def _ids(rack: Rack) -> list[int]:
    return [stack.stack_id for stack in rack.get_stacks()]


def _free_id(rack: Rack) -> int:
    return max((i for i in _ids(rack) if isinstance(i, int)), default=-1) + 1
