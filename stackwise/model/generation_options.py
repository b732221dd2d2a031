"""GenerationOptions: options of `generate` and `stream`.

Shapes: V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, Required, TypedDict

import torch
from torch import Tensor

from stackwise.model.sampling import Sampler
from stackwise.support.arguments import check_sizes, require

__all__ = ["GenerationKeywords", "GenerationOptions"]


class GenerationKeywords(TypedDict, total=False):
    """Fields of `GenerationOptions` as keywords, for completion in editors and for type checkers."""

    max_new_tokens: Required[int]
    temperature: float
    top_k: int | None
    top_p: float
    stop_token_ids: int | Iterable[int]
    pad_token_id: int
    seed: int | None
    prefill_chunk: int | None
    compile: bool


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of `generate`, which documents each of them.

    Raises:
        TypeError: an unknown option, or no `max_new_tokens`.
        ValueError: a value outside its range. Token ids are checked later, with the vocabulary.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token_ids: int | Iterable[int] = ()
    pad_token_id: int = 0
    seed: int | None = None
    prefill_chunk: int | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        for key in ("max_new_tokens", "top_k", "seed", "prefill_chunk"):
            object.__setattr__(self, key, _integer(getattr(self, key)))
        for key in ("temperature", "top_p"):
            object.__setattr__(self, key, _number(getattr(self, key)))
        check_sizes(max_new_tokens=self.max_new_tokens)
        if self.prefill_chunk is not None:
            check_sizes(prefill_chunk=self.prefill_chunk)
        if self.seed is not None:
            check_sizes(0, seed=self.seed)
            require(self.seed < 2**64, "seed", self.seed, "an integer below 2**64")
        self.sampler()  # checks its own arguments

    def sampler(self) -> Sampler:
        """Return the sampler of the tokens."""
        return Sampler(self.temperature, self.top_k, self.top_p)

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Return the random generator of the sampling; None: PyTorch's global one."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

    def is_stop(self, vocab_size: int, device: torch.device) -> Tensor | None:
        """Return the stop tokens as a bool mask (V,); None: there are no stop tokens.

        Raises:
            ValueError: a `stop_token_ids` outside this vocabulary.
        """
        stops = _ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if not stops:
            return None
        is_stop_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        is_stop_V[stops] = True
        return is_stop_V

    def padding(self, vocab_size: int) -> int:
        """Return the padding token of stopped rows.

        Raises:
            ValueError: a `pad_token_id` outside this vocabulary.
        """
        (pad_token_id,) = _ids("pad_token_id", [self.pad_token_id], vocab_size)
        return pad_token_id


def _integer(value: Any) -> Any:
    """Return an integer of any type, such as NumPy's, as a Python int; other values unchanged."""
    try:
        return value if isinstance(value, bool) else index(value)
    except TypeError:
        return value


def _number(value: Any) -> Any:
    """Return a real number as a Python number; other values unchanged."""
    if isinstance(value, bool | int):
        return value
    return float(value) if isinstance(value, Real) else value


def _ids(key: str, given: Any, vocab_size: int) -> list[int]:
    """Return one or several token ids of any integer type as a list of Python integers."""
    allowed = f"integers from 0 to {vocab_size - 1}"
    one = hasattr(given, "__index__") and not (isinstance(given, Tensor) and given.ndim)
    require(one or isinstance(given, Iterable), key, given, allowed)
    ids = []
    for token in [given] if one else given:
        require(hasattr(token, "__index__") and not isinstance(token, bool), key, token, allowed)
        ids.append(index(token))
        require(0 <= ids[-1] < vocab_size, key, token, allowed)
    return ids
