"""Output: the logits in the output of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["LOGITS_NAME", "cast", "logit_places", "logits_of", "named_part", "part_of"]

LOGITS_NAME = re.compile("logit|score|pred|class|emission|prob")


def logits_of(output: Any) -> Tensor:
    """Return the logits of an output: itself, `.logits`, `["logits"]` or the first item of a tuple.

    A model without a head has hidden states in their place, `last_hidden_state`, and a denoiser has `sample`.
    A tensor with one number per row, (B,), becomes (B, 1).

    Raises:
        TypeError: none of these is a tensor.
    """
    found = output
    if not isinstance(found, Tensor):
        named = (part_of(output, name) for name in ("logits", "last_hidden_state", "sample"))
        by_name = next((each for each in named if isinstance(each, Tensor)), None)
        if by_name is not None or isinstance(output, Mapping):
            found = by_name
        elif isinstance(output, tuple | list) and output:  # a scalar in front is a loss
            found = next((each for each in output if not isinstance(each, Tensor) or each.ndim), output[0])
    if not isinstance(found, Tensor):
        keys = f" (keys: {', '.join(map(repr, output))})" if isinstance(output, Mapping) and output else ""
        raise TypeError(
            f"output: got {type(output).__name__}; wanted a tensor, or logits in an object or dict{keys}"
        )
    return found[:, None] if found.ndim == 1 else found


def cast(inputs: Tensor, model: nn.Module) -> Tensor:
    """Return floating-point inputs in the dtype of the model, and ids unchanged."""
    if not inputs.is_floating_point():
        return inputs
    return inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))


def part_of(output: Any, name: str) -> Any:
    """Return the item or attribute of an output with a name, or None."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def logit_places(output: Any, inputs: Tensor) -> list[int]:
    """Return the indices of a tuple without names that may be logits."""
    if not isinstance(output, tuple | list) or hasattr(output, "logits"):
        return []
    return [
        place
        for place, each in enumerate(output)
        if isinstance(each, Tensor)
        and each.ndim == 3
        and each.shape[:2] == inputs.shape[:2]
        and each.is_floating_point()
    ]


def named_part(output: Any, inputs: Tensor) -> str | None:
    """Return the name of the only output per position, or per row, in an object or a dict, or None.

    If there are several, return the name of the only one that is named like logits.
    """
    parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    rows = {
        str(name): part.ndim == 3 and part.shape[:2] == inputs.shape[:2]
        for name, part in parts.items()
        if isinstance(part, Tensor) and part.is_floating_point() and part.ndim and len(part) == len(inputs)
    }
    for names in ([name for name, is_per_position in rows.items() if is_per_position], [*rows]):
        for likely in ([name for name in names if LOGITS_NAME.search(name)], names):
            if len(likely) == 1:
                return likely[0]
    return None
