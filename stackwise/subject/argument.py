"""Argument: a further required argument of `forward`, made from the inputs.

Shapes: B batch, T positions, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

from stackwise.subject.output import cast

__all__ = ["CONTEXT", "LENGTHS", "MASKS", "Argument", "Read", "arguments_for", "known_kinds"]

Kind = Literal[
    "inputs",
    "mask",
    "bool mask",
    "padding",
    "lengths",
    "step",
    "time",
    "positions",
    "pairs",
    "context",
    "context ids",
    "vectors",
    "ids",
    "row",
    "row id",
    "images",
]

# Names of padding masks, and whether True means a real token. If a name is ambiguous, both are tried.
MASKS: dict[str, tuple[bool, ...]] = {
    "attention_mask": (True,),
    "src_key_padding_mask": (False,),
    "key_padding_mask": (False, True),
    "padding_mask": (False, True),
    "mask": (True, False),
}
# Names of the lengths of the rows of the inputs.
LENGTHS = re.compile(r"^(?!.*(label|target|prompt|max|cu_|out)).*(lengths|lens)$")

# Pattern of the name of an argument, and the kinds to try. An argument that matches no pattern gets a value
# if an operation with weights reads it.
_BY_NAME: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("pad", ("padding", "bool mask", "mask")),
    ("mask", ("mask", "bool mask", "padding")),
    (LENGTHS.pattern, ("lengths",)),
    ("pos(ition)?(_id)?s?$", ("positions",)),
    ("^t$|time|step|sigma|noise|snr|guidance", ("step", "time")),
    ("^adj", ("pairs",)),
    ("encoder|context|cond|text|memory|prompt", ("context",)),
)
# Kinds to try for an argument that an operation with weights reads. A context is first: it fits only
# if this argument may have another number of positions.
_BY_READ: dict[str, tuple[Kind, ...]] = {
    "ids": ("context ids", "ids", "row id"),
    "vectors": ("context", "vectors", "row"),
    "images": ("images",),
    "labels": ("inputs",),
}
_STEP, _TIME, CONTEXT = 3, 0.3, 7
# Combinations of arguments that are tried.
_MOST = 100


@dataclass(frozen=True)
class Read:
    """Kind of an argument, from the operation that reads it.

    Attributes:
        kind: "ids" of an embedding, "vectors", "images" or "labels".
        width: number of ids, width of the vectors, or channels.
        sizes: likely heights and widths of images.
    """

    kind: Literal["ids", "vectors", "images", "labels"]
    width: int = 0
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Argument:
    """Value of an argument. It is the same for each row, so that a row gives the same output in any batch.

    A value per position is the same for each position, so that it fits each part of a sequence.

    Attributes:
        name: name of the parameter of `forward`.
        kind: "inputs": the inputs, (B, T, ...). "mask" or "bool mask": ones (B, T). "padding": False (B, T).
            "lengths": T for each row (B,). "step": 3 for each row (B,), int64. "time": 0.3 for each row (B,).
            "positions": 0, 1, 2, ... (B, T). "pairs": ones (B, T, T). "context": 7 random vectors (B, 7, C).
            "context ids": 7 ids (B, 7). "vectors": a vector per position (B, T, C). "ids": an id per position
            (B, T). "row": a vector per row (B, C). "row id": an id per row (B,). "images": (B, C, H, W).
        width: C, or the number of ids. For masks and lengths: T, if it is the length of a context.
        size: H and W.
    """

    name: str
    kind: Kind = "inputs"
    width: int = 0
    size: tuple[int, ...] = ()

    @classmethod
    def of_read(cls, name: str, read: Read) -> Argument:
        """Return the first argument to try for the operation that reads it."""
        return Argument(name, _BY_READ[read.kind][0], read.width, (read.sizes or ((),))[0])

    def value(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the value for inputs (B, T, ...), on their device and in the dtype of the model."""
        if self.kind == "inputs":
            return inputs
        if self.kind in ("ids", "vectors") and inputs.ndim > 3:
            raise ValueError(f"{self.name}: inputs {tuple(inputs.shape)} have no positions")
        n_rows, row = len(inputs), self._row(inputs.shape[1])
        return cast(row.to(inputs.device), model).expand(n_rows, *row.shape).contiguous()

    def _row(self, n_positions: int) -> Tensor:
        """Return the value for one row."""
        vectors = torch.randn(CONTEXT, *(self.width, *self.size), generator=torch.Generator().manual_seed(0))
        length = self.width or n_positions
        match self.kind:
            case "mask":
                return torch.ones(length, dtype=torch.long)
            case "bool mask" | "padding":
                return torch.full((length,), self.kind == "bool mask")
            case "lengths":
                return torch.tensor(length)
            case "step":
                return torch.tensor(_STEP)
            case "time":
                return torch.tensor(_TIME)
            case "positions":
                return torch.arange(n_positions)
            case "pairs":
                return torch.ones(n_positions, n_positions)
            case "context":
                return vectors
            case "context ids":
                return (3 * torch.arange(CONTEXT) + 1) % self.width
            case "vectors":
                return vectors[0].expand(n_positions, -1)
            case "ids":
                return torch.full((n_positions,), min(1, self.width - 1))
            case "row id":
                return torch.tensor(min(1, self.width - 1))
        return vectors[0]

    def __str__(self) -> str:
        if (self.name, self.kind) == ("targets", "inputs"):
            return "targets=inputs, for all logits"
        texts: dict[Kind, str] = {
            "inputs": "=inputs",
            "mask": "= of ones",
            "bool mask": "= of ones",
            "padding": "= of zeros",
            "lengths": "=lengths of the rows",
            "step": f"={_STEP}",
            "time": f"={_TIME}",
            "positions": "=0, 1, 2, ...",
            "pairs": "=ones for each pair of positions",
            "context": f"={CONTEXT} fixed vectors of width {self.width}",
            "context ids": f"={CONTEXT} fixed ids",
            "vectors": f"=the same vector of width {self.width} at each position",
            "ids": "=the same id at each position",
            "row": f"=a fixed vector of width {self.width}",
            "row id": "=a fixed id",
            "images": f"=a fixed image {(self.width, *self.size)}",
        }
        of_context = f" of length {self.width}" if self.width and self.kind in _WITH_LENGTH else ""
        return self.name + texts[self.kind] + of_context


_WITH_LENGTH = ("mask", "bool mask", "padding", "lengths")


def known_kinds(name: str) -> tuple[Kind, ...]:
    """Return the kinds that the name of an argument suggests."""
    return next((kinds for word, kinds in _BY_NAME if re.search(word, name)), ())


def arguments_for(
    names: Sequence[str], widths: Sequence[int], reads: Mapping[str, Read] | None = None
) -> Iterator[tuple[tuple[Argument, ...], int]]:
    """Yield combinations of likely values for the required arguments of `forward`, and their rank.

    The likeliest have the lowest rank. Yield nothing if there are no names, or if one has no likely value.

    Args:
        names: their names.
        widths: possible widths of a context.
        reads: the kinds of arguments that an operation with weights reads.
    """
    choices = [list(enumerate(_choices(name, widths, (reads or {}).get(name)))) for name in names]
    ranked = []
    for combination in product(*choices) if names else ():
        arguments = tuple(argument for _, argument in combination)
        ranked.append((arguments, sum(rank for rank, _ in combination) + _penalty(arguments)))
    yield from sorted(ranked, key=lambda each: each[1])[:_MOST]


def _penalty(arguments: Sequence[Argument]) -> int:
    """Return a rank for values per position, and for masks that have another length than their context."""
    contexts = [each.name for each in arguments if each.kind.startswith("context")]
    of_context = [any(n.startswith(each.name.split("_")[0]) for n in contexts) for each in arguments]
    pairs = zip(arguments, of_context, strict=True)
    unfit = sum(belongs and each.kind in _WITH_LENGTH and not each.width for each, belongs in pairs)
    return 4 * unfit + sum(each.kind in ("ids", "vectors") for each in arguments)


def _choices(name: str, widths: Sequence[int], read: Read | None) -> Iterator[Argument]:
    for kind in known_kinds(name):
        if kind != "context":
            yield Argument(name, kind)
        elif read is None:
            yield from (Argument(name, kind, width) for width in widths)
        if kind in _WITH_LENGTH:
            yield Argument(name, kind, CONTEXT)
    if read is not None:
        for kind in _BY_READ[read.kind]:
            yield from (Argument(name, kind, read.width, size) for size in read.sizes or ((),))
        if read == Read("vectors", 1):
            yield Argument(name, "time")
