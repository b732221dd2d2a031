"""Sampler: sampling of the next token from logits, on the device.

Shapes: B batch, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stackwise.support.arguments import check_number, require

__all__ = ["Sampler"]

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
