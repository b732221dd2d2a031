"""Question: sequences, their layout in a batch, and the arguments of a call.

Shapes: B rows, W columns, T positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["REST", "Call", "Operation", "Place", "Precision", "Question", "Segment", "Transform"]

# Dtype of the weights and inputs. "own": that of the model itself. "autocast": the same, under autocast.
Precision = torch.dtype | Literal["own", "autocast"]

# Size of a part that contains all columns that are left.
REST = 999

# Changes a cache before a part: (cache, call, columns of the part, decode) -> cache. `decode` takes inputs
# (B, W) and a cache, decodes these columns, and returns the output and the cache.
Operation = Callable[[Any, "Call", slice, Callable[[Tensor, Any], tuple[Any, Any]]], Any]

# Returns the arguments of one call of the model, by name, with some of them changed. Takes the arguments and
# the number of columns of this call.
Transform = Callable[[dict[str, Any], int], dict[str, Any]]


@dataclass(frozen=True)
class Segment:
    """Part of a row.

    Attributes:
        kind: "sequence" is compared with its answer. "padding" is hidden by the mask. "later" is real input
            after a sequence, which must not change its outputs.
        length: number of positions.
        number: number of the sequence. None: the next one, which no other row has.
    """

    kind: Literal["sequence", "padding", "later"]
    length: int
    number: int | None = None


@dataclass
class Question:
    """Question about sequences. Each variation of a composition changes it.

    Attributes:
        rows: segments of each row. All rows have the same width.
        mask: pass a padding mask.
        documents: pass the document of each position. Each sequence is one document.
        ignored: share of the labels that are ignored, if the own loss is asked. None: the outputs are asked.
        parts: sizes of the parts that are passed through the cache. The last one repeats. (): one call.
        first_cache: returns the cache of the first part for a model. None: the model creates it.
        in_turns: decode other rows in turns with these, with a cache of their own.
        operation: called before each part.
        turns_rows: pass the rows in another order in each part, rolled by one row from part to part.
        train: ask in train mode.
        dtype: dtype of the model. None: that of the examination.
        computes_in_float32: a variation computes a part in float32, which the plain call does not.
        gradients: also compare the gradients. They are those of train mode, if the model has one.
    """

    rows: list[list[Segment]]
    mask: bool = False
    documents: bool = False
    ignored: float | None = None
    parts: tuple[int, ...] = ()
    first_cache: Callable[[nn.Module], Any] | None = None
    in_turns: bool = False
    operation: Operation | None = None
    turns_rows: bool = False
    train: bool = False
    dtype: Precision | None = None
    computes_in_float32: bool = False
    gradients: bool = False

    @property
    def width(self) -> int:
        """Number of columns."""
        return max(sum(segment.length for segment in row) for row in self.rows)

    def prompt_and_tokens(self, least: int) -> tuple[int, ...]:
        """Return sizes of parts: a prompt of at least `least` tokens, then about four single tokens."""
        return max(least, self.width - 4), 1

    def cut_to_shortest(self) -> None:
        """Shorten the last sequence of each row, so that all rows have the same width."""
        widths = [sum(segment.length for segment in row) for row in self.rows]
        for row, width in zip(self.rows, widths, strict=True):
            sequences = [index for index, segment in enumerate(row) if segment.kind == "sequence"]
            last = sequences[-1] if sequences else 0  # a row of padding
            row[last] = replace(row[last], length=row[last].length - (width - min(widths)))


@dataclass(frozen=True)
class Place:
    """Place of a sequence in a batch: its row and its columns from `start` to `end`, and its number."""

    row: int
    start: int
    end: int
    number: int = 0

    @property
    def sequence(self) -> tuple[int, int]:
        """Return number and length of the sequence."""
        return self.number, self.end - self.start


@dataclass
class Call:
    """Tensors of a question.

    Attributes:
        inputs: ids (B, W), vectors (B, W, C) or other inputs with B rows. The model gets a contiguous copy.
        places: place of each sequence.
        keep: True at real positions (B, W). None: no mask is passed.
        documents: document of each position (B, W). None: not passed.
        labels: (B, W), not shifted, -100 ignored. None: the outputs are asked.
        question: the question, for its use of the cache.
        others: other inputs to decode, of the same shape. None: none are needed.
        order: column of `inputs` at each column of the call (B, W). None: the same one.
        arguments: further keyword arguments. Tensors have W columns.
        transforms: change the arguments of each call of the model.
        compared: True at columns (B, W) whose outputs are compared. None: all columns.
    """

    inputs: Tensor
    places: list[Place] = field(default_factory=list)
    keep: Tensor | None = None
    documents: Tensor | None = None
    labels: Tensor | None = None
    question: Question = field(default_factory=lambda: Question([]))
    others: Tensor | None = None
    order: Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    transforms: list[Transform] = field(default_factory=list)
    compared: Tensor | None = None

    @property
    def parts(self) -> list[int]:
        """Sizes of the parts that are passed through the cache, W in all. []: one call."""
        parts, sizes = list[int](), self.question.parts
        while sizes and (left := self.inputs.shape[1] - sum(parts)) > 0:
            parts.append(min(left, sizes[min(len(parts), len(sizes) - 1)]))
        return parts

    def compare_only(self, place: Place, positions: Tensor) -> None:
        """Restrict the comparison of a sequence to a mask of positions (T,), and to earlier masks."""
        if self.compared is None:
            self.compared = self.inputs.new_ones(self.inputs.shape[:2], dtype=torch.bool)
        self.compared[place.row, place.start : place.end] &= positions.to(self.inputs.device)

    def ordered(self) -> Call:
        """Return the call with its columns in the order of `order`."""
        if self.order is None:
            return self
        arguments = {
            name: _gathered(value, self.order) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        keep = None if self.keep is None else _gathered(self.keep, self.order)
        return replace(self, inputs=_gathered(self.inputs, self.order), keep=keep, arguments=arguments)

    def restored(self, output: Tensor) -> Tensor:
        """Return an output (B, W, ...) of the ordered call in the order of the columns of `inputs`."""
        return output if self.order is None else _gathered(output, self.order.argsort(dim=1))


def _gathered(x: Tensor, order: Tensor) -> Tensor:
    """Return the columns of (B, W, ...) in an order (B, W)."""
    return x[torch.arange(len(x), device=x.device)[:, None], order]
