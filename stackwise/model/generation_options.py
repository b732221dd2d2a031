"""GenerationOptions: what `generate` and `stream` are asked for beside the prompts.

Shapes: V vocabulary.
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
    """The fields of `GenerationOptions` as keywords, which editors complete and type checkers check."""

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
    """The options of `generate`, which says what each means.

    Raises:
        TypeError: an option that there is not, or no `max_new_tokens`.
        ValueError: a value outside its range; ids are judged where the vocabulary is known.
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
        self.sampler()  # refuses its own

    def sampler(self) -> Sampler:
        """What draws the tokens."""
        return Sampler(self.temperature, self.top_k, self.top_p)

    def generator(self, device: torch.device) -> torch.Generator | None:
        """What the draws start from; None: PyTorch's own."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

    def is_stop(self, vocab_size: int, device: torch.device) -> Tensor | None:
        """Which tokens end a row: bool (V,); None: none does.

        Raises:
            ValueError: `stop_token_ids` that are no ids of this vocabulary.
        """
        stops = _ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if not stops:
            return None
        is_stop_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        is_stop_V[stops] = True
        return is_stop_V

    def padding(self, vocab_size: int) -> int:
        """What follows in a row that has ended.

        Raises:
            ValueError: a `pad_token_id` that is no id of this vocabulary.
        """
        (pad_token_id,) = _ids("pad_token_id", [self.pad_token_id], vocab_size)
        return pad_token_id


def _integer(value: Any) -> Any:
    """An integer of any kind, of NumPy say, as Python's own; anything else as it is."""
    try:
        return value if isinstance(value, bool) else index(value)
    except TypeError:
        return value


def _number(value: Any) -> Any:
    """The same of a real number."""
    if isinstance(value, bool | int):
        return value
    return float(value) if isinstance(value, Real) else value


def _ids(key: str, given: Any, vocab_size: int) -> list[int]:
    """Token ids as plain integers, from one or several of whatever can be an index."""
    allowed = f"integers from 0 to {vocab_size - 1}"
    one = hasattr(given, "__index__") and not (isinstance(given, Tensor) and given.ndim)
    require(one or isinstance(given, Iterable), key, given, allowed)
    ids = []
    for token in [given] if one else given:
        require(hasattr(token, "__index__") and not isinstance(token, bool), key, token, allowed)
        ids.append(index(token))
        require(0 <= ids[-1] < vocab_size, key, token, allowed)
    return ids
