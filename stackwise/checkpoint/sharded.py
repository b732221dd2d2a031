"""Shards: parts of a tensor that a process writes or reads.

A DTensor is written in parts, each by the first process that has it. A tensor is read in the sharding of its
target, independent of the sharding in which it was written.
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

Place = tuple[str, tuple[int, ...]]  # name of a tensor, and offsets of a part of it


def part_of(name: str, tensor: Tensor) -> Part | None:
    """Return the part of a tensor that this process has, or None.

    Raises:
        ValueError: a DTensor of partial sums.
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
    """Return the parts of a process that no process before it has.

    Args:
        parts: parts of this process, by the name of the tensor.
        before: places of the parts of each process before it.
    """
    others = {place for places in before for place in places}
    return {name: part for name, part in parts.items() if (name, part.offsets) not in others}


def read_like(index: TensorIndex, name: str, shape: tuple[int, ...], like: Tensor | None) -> Tensor:
    """Read a tensor from the files, in the sharding of `like`; without `like`, the full tensor on the CPU.

    Raises:
        MalformedFileError: the files do not have the full tensor.
        ValueError: its shape differs from the shape of `like`.
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
    """Return offsets and shape of this process's part of a DTensor; None: it has no part."""
    partial = any(placement.is_partial() for placement in tensor.placements)
    require(not partial, name, tensor.placements, "a DTensor that is whole or in parts, not to be added up")
    if tensor.device_mesh.get_coordinate() is None:
        return None
    chunks = tensor.__create_chunk_list__()
    require(len(chunks) == 1, name, f"{len(chunks)} parts in one process", "one part in a process")
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    return None if 0 in sizes else (offsets, sizes)
