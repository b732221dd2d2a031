"""Argument: a further required argument of `forward`, made from the inputs.

Shapes: B batch, T positions, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Literal

import torch
from torch import Tensor, nn

from stackwise.subject.output import cast

__all__ = ["LENGTHS", "MASKS", "Argument", "arguments_for"]

Kind = Literal["inputs", "mask", "bool mask", "padding", "lengths", "step", "time", "positions", "context"]

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

# Pattern of the name of an argument, and the kinds to try. Arguments that match no pattern, such as the
# target of an encoder-decoder, get no value.
_BY_NAME: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("pad", ("padding", "bool mask", "mask")),
    ("mask", ("mask", "bool mask", "padding")),
    (LENGTHS.pattern, ("lengths",)),
    ("pos(ition)?(_id)?s?$", ("positions",)),
    ("^t$|time|step|sigma|noise_level", ("step", "time")),
    ("encoder|context|cond|text|memory|prompt", ("context",)),
)
_STEP, _TIME, _CONTEXT = 3, 0.3, 7
# Combinations of arguments that are tried.
_MOST = 48


@dataclass(frozen=True)
class Argument:
    """Value of an argument.

    Attributes:
        name: name of the parameter of `forward`.
        kind: "inputs": the inputs, (B, T, ...). "mask" or "bool mask": ones (B, T). "padding": False (B, T).
            "lengths": T for each row (B,). "step": 3 for each row (B,), int64. "time": 0.3 for each row (B,).
            "positions": 0, 1, 2, ... (B, T). "context": 7 random vectors (B, 7, C), the same for each row.
        width: C of a context.
    """

    name: str
    kind: Kind = "inputs"
    width: int = 0

    def value(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the value for inputs (B, T, ...), on their device and in the dtype of the model."""
        n_rows, device = len(inputs), inputs.device
        columns = inputs.shape[:2]
        match self.kind:
            case "mask" | "bool mask":
                dtype = torch.long if self.kind == "mask" else torch.bool
                return torch.ones(columns, dtype=dtype, device=device)
            case "padding":
                return torch.zeros(columns, dtype=torch.bool, device=device)
            case "lengths":
                return torch.full((n_rows,), columns[-1], device=device)
            case "step":
                return torch.full((n_rows,), _STEP, device=device)
            case "time":
                return cast(torch.full((n_rows,), _TIME, device=device), model)
            case "positions":
                return torch.arange(columns[-1], device=device).expand(columns)
            case "context":
                vectors = torch.randn(_CONTEXT, self.width, generator=torch.Generator().manual_seed(0))
                return cast(vectors.to(device).expand(n_rows, -1, -1), model)
        return inputs

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
            "context": f"={_CONTEXT} fixed vectors of width {self.width}",
        }
        return self.name + texts[self.kind]


def arguments_for(names: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[Argument, ...]]:
    """Yield combinations of likely values for the required arguments of `forward`.

    Yield nothing if there are no names, or if a name is unknown.

    Args:
        names: their names.
        widths: possible widths of a context.
    """
    choices = [list(_choices(name, widths)) for name in names]
    yield from islice(product(*choices), _MOST if names else 0)


def _choices(name: str, widths: Sequence[int]) -> Iterator[Argument]:
    kinds = next((kinds for word, kinds in _BY_NAME if re.search(word, name)), ())
    for kind in kinds:
        if kind == "context":
            yield from (Argument(name, kind, width) for width in widths)
        else:
            yield Argument(name, kind)
