"""Shards: which part of a tensor a process writes, and which part it needs.

A DTensor is written in parts, each by the first process that has it. What is read takes the arrangement of
what it is for, whatever it was written in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stackwise.checkpoint.tensor_file import Part, TensorIndex
from stackwise.checkpoint.tree import is_sharded
from stackwise.support.arguments import require

__all__ = ["Place", "own_parts", "part_of", "read_like"]

Place = tuple[str, tuple[int, ...]]  # a tensor, and where in it a part begins


def part_of(name: str, tensor: Tensor) -> Part | None:
    """What this process has of a tensor; None: nothing.

    Raises:
        ValueError: a DTensor of sums that are still to be added up.
    """
    if not is_sharded(tensor):
        return Part.whole(tensor)
    if tensor.numel() == 0:
        return Part.whole(torch.empty(tensor.shape, dtype=tensor.dtype))
    region = _region(name, tensor)
    if region is None:
        return None
    offsets, _ = region
    local = tensor.to_local()  # type: ignore[attr-defined]
    return Part(local.wait() if hasattr(local, "wait") else local, offsets)


def own_parts(parts: Mapping[str, Part], before: Iterable[Iterable[Place]]) -> dict[str, Part]:
    """Of the parts that a process has, those that no process before it has.

    Args:
        parts: of this process, by the name of the tensor.
        before: the places of the parts of each process before it.
    """
    others = {place for places in before for place in places}
    return {name: part for name, part in parts.items() if (name, part.offsets) not in others}


def read_like(index: TensorIndex, name: str, shape: tuple[int, ...], like: Tensor | None) -> Tensor:
    """A tensor of the files, in the arrangement of `like`; else whole, on the CPU.

    Raises:
        MalformedFileError: not all of it is there.
        ValueError: it is of another shape than `like`.
    """
    if like is None:
        return index.read(name, (0,) * len(shape), shape)
    from torch.distributed.tensor import DTensor

    require(tuple(like.shape) == shape, name, shape, f"{tuple(like.shape)}, as it is here")
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    region = _region(name, like)
    if region is None:
        mine = like.to_local()  # type: ignore[attr-defined]
        local = torch.empty_like(mine, dtype=index.dtype(name))
    else:
        local = index.read(name, *region)
    local = local.to(like.device)
    found: Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found


def _region(name: str, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where this process's part of a DTensor begins, and its shape; None: it has none."""
    partial = any(placement.is_partial() for placement in tensor.placements)
    require(not partial, name, tensor.placements, "a DTensor that is whole or in parts, not to be added up")
    if tensor.device_mesh.get_coordinate() is None:
        return None
    chunks = tensor.__create_chunk_list__()
    require(len(chunks) == 1, name, f"{len(chunks)} parts in one process", "one part in a process")
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    return None if 0 in sizes else (offsets, sizes)
