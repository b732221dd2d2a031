"""Targets: inputs of a model for a batch, and the labels to predict.

Shapes: B batch, N tokens in a row, T tokens of a row that the model sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

from stackwise.data.batches import IGNORED
from stackwise.support.arguments import require

__all__ = ["IGNORED", "Targets", "next_token_targets"]

_KEYS = ("input_ids", "labels", "attention_mask", "document_ids")


@dataclass(frozen=True)
class Targets:
    """Inputs and labels of one batch, position by position.

    Attributes:
        input_ids: int64 (B, T), input of the model.
        labels: int64 (B, T), token to predict at each position; -100 at positions without a prediction.
        count: float32 scalar, number of tokens that the total is divided by.
        weights: float32 (B, T), loss weight of each position; None: 1.
        attention_mask: (B, T), nonzero at real tokens; None: all are real.
        document_ids: (B, T), equal within a document; None: one document per row.
    """

    input_ids: Tensor
    labels: Tensor
    count: Tensor
    weights: Tensor | None = None
    attention_mask: Tensor | None = None
    document_ids: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Targets:
        """Return a copy on `device`."""
        moved: Targets = tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), self)
        return moved

    def sent(self, device: torch.device) -> Targets:
        """Return a copy on `device`. A copy to CUDA uses pinned memory: the host does not wait."""
        if device.type != "cuda" or self.input_ids.is_cuda:
            return self.to(device)
        pinned: Targets = tree_map_only(Tensor, Tensor.pin_memory, self)
        return pinned.to(device, non_blocking=True)


register_dataclass(Targets)


def next_token_targets(batch: Mapping[str, Tensor]) -> Targets:
    """Return targets in which each token is the label of the position before it, T = N - 1.

    A token is predicted if it and the token before it are real and belong to the same document.

    Args:
        batch: `input_ids` (B, N); optionally `attention_mask` (B, N), nonzero at real tokens,
            `document_ids` (B, N), equal within a document, and `labels` (B, N), not shifted, -100 at tokens
            that are not predicted (default: `input_ids`).

    Raises:
        ValueError: parts of the batch differ in shape.
    """
    check_shapes(batch)
    input_ids = batch["input_ids"]
    attention_mask, document_ids = batch.get("attention_mask"), batch.get("document_ids")
    labels = batch.get("labels", input_ids)[:, 1:].long()
    if attention_mask is not None:
        real = attention_mask != 0
        labels = labels.masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORED)
        attention_mask = attention_mask[:, :-1]
    if document_ids is not None:
        labels = labels.masked_fill(document_ids[:, 1:] != document_ids[:, :-1], IGNORED)
        document_ids = document_ids[:, :-1]
    return Targets(
        input_ids[:, :-1].long(),
        labels,
        (labels != IGNORED).sum().float(),
        attention_mask=attention_mask,
        document_ids=document_ids,
    )


def check_shapes(batch: Mapping[str, Tensor]) -> None:
    """Raise for unknown keys, parts that are not tensors or differ in shape, and ids that are not integers.

    Raises:
        ValueError: names the part.
    """
    # Written out: torch 2.11 cannot trace a difference of `batch.keys()` and a tuple.
    unknown = sorted(key for key in batch if key not in _KEYS)
    require(not unknown, "batch", unknown, ", ".join(_KEYS))
    for key, part in batch.items():
        require(isinstance(part, Tensor), key, type(part).__name__, "a tensor")
    expected = tuple(batch["input_ids"].shape)
    require(len(expected) == 2, "input_ids", expected, "a shape (batch, positions)")
    for key in ("labels", "attention_mask", "document_ids"):
        if key in batch:
            seen = tuple(batch[key].shape)
            require(seen == expected, key, seen, f"{expected}, the shape of input_ids")
    for key in ("input_ids", "labels"):
        if key in batch:
            dtype = batch[key].dtype
            known = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
            require(known, key, dtype, "integers")


def check_ids(batch: Mapping[str, Tensor], targets: Targets, vocab_size: int) -> None:
    """Raise if the inputs or labels of a batch contain an id outside the vocabulary.

    Ids are checked only on the CPU; on another device the check would synchronise the host.

    Raises:
        ValueError: names the part and the position.
    """
    shown, asked = targets.input_ids, targets.labels
    if asked.device.type != "cpu" or not asked.numel():
        return
    _refuse_outside("input_ids", shown, vocab_size)
    if asked.amin() < 0:
        asked = asked.masked_fill(asked == IGNORED, 0)
    first = batch["input_ids"].shape[1] - asked.shape[1]
    _refuse_outside("labels" if "labels" in batch else "input_ids", asked, vocab_size, first)


def _refuse_outside(key: str, ids: Tensor, vocab_size: int, first: int = 0) -> None:
    low, high = ids.aminmax()
    if low < 0 or high >= vocab_size:
        outside = (ids < 0) | (ids >= vocab_size)
        row, position = outside.nonzero()[0].tolist()
        place = f"in row {row} at position {first + position}"
        allowed = f"0 to {vocab_size - 1}, with vocab_size={vocab_size}"
        raise ValueError(f"{key}: got {int(ids[row, position])} {place}; allowed: {allowed}")
