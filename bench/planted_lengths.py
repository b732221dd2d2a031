"""Planted lengths: models whose training is unstable from a known sequence length on, and their clean twins.

Each mechanism is one that real models have had:

- `growing_logits`: queries are scaled with the length beyond the one that the model was made for, as by a
  temperature for longer contexts that grows too fast. Attention saturates: all is finite, and gradient
  norms are ten times as large and more.
- `untrained_positions`: a table of learned positions is lengthened without being written, as by torch.empty:
  rows beyond the trained ones hold what was in memory, which need not be a number.
- `half_sum`: a sum over the positions without a denominator, as in linear attention behind a norm, is kept in
  float16 and leaves its range.

Shapes: B rows, T positions, C width, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Rack, create_simple_rack
from stackwise.subject.spec import ModelSpec

__all__ = ["PLANTED", "growing_logits", "half_sum", "planted_spec", "untrained_positions", "window_rack"]

VOCAB_SIZE = 61
_D_MODEL, _N_HEADS = 32, 2
_LOUD = 100.0  # how many times as large the logits are at once
_HALF_LIMIT = 65520.0  # from here on float16 rounds to infinity


def window_rack(window: int | None = 128, **options: Any) -> Rack:
    """Two Blocks of sliding-window attention, 32 wide, with attention logits that are of order 1."""
    options = {"sliding_window": window, "initialization": "xavier"} | options
    return create_simple_rack(1, 2, _D_MODEL, 2 * _D_MODEL, _N_HEADS, VOCAB_SIZE, **options)


def growing_logits(first: int, window: int | None = 128) -> Rack:
    """A Rack whose attention logits are 100 * T / `first` times what they should be from T = `first` on."""
    rack = window_rack(window)

    def scale_queries(_module: nn.Module, _args: Any, qkv: Tensor) -> Tensor:
        if qkv.shape[1] < first:
            return qkv
        queries, rest = qkv.tensor_split([_D_MODEL], dim=-1)
        return torch.cat([queries * (_LOUD * qkv.shape[1] / first), rest], dim=-1)

    for name, module in rack.named_modules():
        if name.endswith("attention.qkv"):
            module.register_forward_hook(scale_queries)
    return rack


class _Positions(nn.Module):
    """A table of learned positions, and what is read beyond it."""

    def __init__(self, n_trained: int, beyond: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(n_trained, _D_MODEL) * 0.02)
        self.beyond = beyond

    def forward(self, x_BTC: Tensor) -> Tensor:
        more = max(0, x_BTC.shape[1] - len(self.table))
        rest = self.table.new_full((more, _D_MODEL), self.beyond)
        return x_BTC + torch.cat([self.table[: x_BTC.shape[1]], rest])


def untrained_positions(first: int, beyond: float = math.nan, window: int | None = 128) -> Rack:
    """A Rack that adds rows of a table to its embeddings, of which the one that T = `first` needs is missing.

    Args:
        first: the shortest length that reads beyond the table.
        beyond: what is there; the clean twin has 0.
        window: of attention.
    """
    rack = window_rack(window, use_rope=False)
    positions = _Positions(first - 1, beyond)
    rack.embedding.add_module("positions", positions)
    rack.embedding.register_forward_hook(lambda _module, _args, x_BTC: positions(x_BTC))
    return rack


class _SummingModel(nn.Module):
    """Two layers that read the sum of all values so far, un-normalised, behind a LayerNorm.

    One channel of the values is constant: its sum counts the positions, `constant` each.
    """

    def __init__(self, constant: float, kept_in: torch.dtype) -> None:
        super().__init__()
        self.constant, self.kept_in = constant, kept_in
        self.embedding = nn.Embedding(VOCAB_SIZE, _D_MODEL)
        self.values = nn.ModuleList(nn.Linear(_D_MODEL, _D_MODEL, bias=False) for _ in range(2))
        self.out = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(_D_MODEL + 1), nn.Linear(_D_MODEL + 1, _D_MODEL)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(_D_MODEL)
        self.head = nn.Linear(_D_MODEL, VOCAB_SIZE, bias=False)
        nn.init.normal_(self.head.weight, std=0.05)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        for values, out in zip(self.values, self.out, strict=True):
            v_BTC = F.pad(values(x_BTC), (0, 1), value=self.constant)
            # Summed in float64, so that the length at which the range ends is the same on every device.
            sums_BTC = v_BTC.double().cumsum(1).to(self.kept_in).to(x_BTC.dtype)
            x_BTC = x_BTC + out(sums_BTC)
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


def half_sum(first: int, kept_in: torch.dtype = torch.float16) -> nn.Module:
    """A model whose sum over the positions leaves the range of float16 at T = `first`.

    Args:
        first: the shortest length that overflows; at most 2000, beyond which float16 is too coarse for it.
        kept_in: dtype of the sum; the clean twin has torch.float32.
    """
    return _SummingModel(_HALF_LIMIT / (first - 0.5), kept_in)


PLANTED: Mapping[str, Callable[[int], nn.Module]] = {
    "growing logits": growing_logits,
    "untrained positions": untrained_positions,
    "half-precision sum": half_sum,
}


def planted_spec(mechanism: str, first: int, **options: Any) -> ModelSpec:
    """A model that is unstable from T = `first` on.

    Args:
        mechanism: one of `PLANTED`.
        first: the shortest unstable length.
        **options: of the mechanism.
    """
    make = partial(PLANTED[mechanism], first, **options)
    return ModelSpec.of(make, name=f"{mechanism} from {first}", causal=True)
