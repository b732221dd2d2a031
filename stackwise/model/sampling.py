"""Sampling of the next token from logits, on the device, and the options of `generate`.

Shapes: B batch, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any

import torch
from torch import Tensor

from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["GenerationOptions", "Sampler"]

_COLDEST = 1e-6  # below it, logits divided by the temperature overflow float32


@dataclass(frozen=True)
class Sampler:
    """Sampling rules of the next token. They apply in the order of the attributes.

    Attributes:
        temperature: divisor of the logits; 0: the most likely token.
        top_k: only the k most likely tokens, and tokens that tie with the last of them; None: all.
        top_p: only the most likely tokens with a total probability of p, including the one that crosses p
            (Holtzman et al. 2020, arXiv:1904.09751); 1: all.

    Raises:
        ValueError: a value outside its range, or `top_k` or `top_p` without sampling (temperature 0).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_number(
            "temperature",
            self.temperature,
            f"0, or a finite number >= {_COLDEST}",
            lambda t: t == 0 or t >= _COLDEST,
        )
        check_number("top_p", self.top_p, "0 < top_p <= 1", lambda p: 0 < p <= 1)
        counts = isinstance(self.top_k, int) and not isinstance(self.top_k, bool) and self.top_k >= 1
        require(self.top_k is None or counts, "top_k", self.top_k, "an integer >= 1, or None for all")
        if self.temperature == 0:
            nothing = "at temperature=0, which draws nothing; give a temperature"
            require(self.top_k is None, "top_k", self.top_k, f"None {nothing}")
            require(self.top_p == 1, "top_p", self.top_p, f"1 {nothing}")

    def __call__(self, logits_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return token ids (B,), int64, without host synchronisation."""
        return self.draw(logits_BV, generator)[1]

    def draw(self, logits_BV: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the scores (B,) of the selected tokens, and their ids (B,).

        A score is not finite if a logit is NaN or +inf, or if all are -inf.
        """
        if self.temperature == 0:
            return logits_BV.max(-1)
        logits_BV = self.filter(logits_BV)
        # argmax of p / Exp(1) is distributed as p, without a cumulative sum or host synchronisation. Some
        # devices occasionally draw a zero, and 0 / 0 would be selected.
        noise_BV = torch.empty_like(logits_BV).exponential_(generator=generator)
        noise_BV.clamp_(min=torch.finfo(noise_BV.dtype).tiny)
        return (logits_BV.softmax(-1) / noise_BV).max(-1)

    def filter(self, logits_BV: Tensor) -> Tensor:
        """Return the logits divided by the temperature, float32, with -inf at excluded tokens."""
        logits_BV = logits_BV.float() / self.temperature
        if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
            least = logits_BV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
        if self.top_p < 1:
            descending, order = logits_BV.sort(dim=-1, descending=True)
            probability = descending.softmax(-1)
            before = probability.cumsum(-1) - probability
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            logits_BV = logits_BV.masked_fill(dropped, float("-inf"))
        return logits_BV


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Sampler):
    """Options of `Rack.generate` and `Rack.stream`, with those of `Sampler`.

    Attributes:
        max_new_tokens: maximum number of new tokens; fewer if every row has stopped.
        stop_token_ids: one id or several: a row stops after one of these tokens.
        pad_token_id: token of a stopped row until all rows have stopped.
        seed: seed of the sampling, which then does not use PyTorch's global generator; None: use that
            generator.
        prefill_chunk: process the prompt in chunks of this many tokens, to bound the memory; None: at once.
        compile: compile the decoding step, which takes a minute the first time; see `DecodeStep`.

    Raises:
        TypeError: an unknown option, or no `max_new_tokens`.
        ValueError: a value outside its range. Token ids are checked later, with the vocabulary.
    """

    max_new_tokens: int
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
        super().__post_init__()

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
