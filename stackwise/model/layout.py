"""Layout: positions and padding of a batch, shared by the Blocks of one forward pass.

Shapes: B batch, T positions of this pass, S positions with the cached ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stackwise.model.compilation import is_constant
from stackwise.model.mask import AttentionMask, Keys, document_runs, padding_mask
from stackwise.model.rotary import Rotary, constant_tables
from stackwise.support.arguments import require

__all__ = ["Layout"]


class Layout:
    """Positions, masks and rotary tables of a batch for one forward pass, each computed once.

    Blocks of one Rack may differ in head size, rotary base, causality and window. Tables and masks are cached
    per combination, for one pass only, so that they cannot be stale for another device, dtype or autograd
    mode.

    Args:
        x_BTC: hidden states of the pass; only shape, dtype and device are read.
        attention_mask: bool or integer (B, T), nonzero at real tokens, or None.
        document_ids: integer (B, T), equal within a document, or None. Tokens see only their own document,
            and positions restart in each.
        start: number of tokens in the cache before these: an integer, or a zero-dimensional int64 tensor if
            the pass must not depend on its value (graph capture).
        keep_BS: bool, True at real tokens, for the capacity of a cache including these tokens; replaces
            `attention_mask`.

    Raises:
        ValueError: a mask of another shape, or of floating-point numbers; documents together with a cache.
    """

    def __init__(
        self,
        x_BTC: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        start: int | Tensor = 0,
        keep_BS: Tensor | None = None,
    ) -> None:
        batch_size, self.seq_len, _ = x_BTC.shape
        self.device, self.start = x_BTC.device, start
        self._wide = torch.promote_types(x_BTC.dtype, torch.float32)
        self.keep_BS = padding_mask(attention_mask, batch_size, self.seq_len) if keep_BS is None else keep_BS
        alone = document_ids is None or (isinstance(start, int) and start == 0)
        require(alone, "document_ids", "some", "None beside a cache")
        self.documents_BT = document_runs(document_ids, batch_size, self.seq_len)
        self.time_T = torch.arange(self.seq_len, device=self.device) + start
        self.positions = self._positions()
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[bool, int | None, int | None], AttentionMask] = {}

    def _positions(self) -> Tensor:
        """Return the number of real tokens of its document before each token: int64 (T,) or (B, T).

        The shape is (B, T) if rows differ. Padding has no position of its own, so that the padding of a row
        does not change its result.
        """
        if self.keep_BS is not None:
            before: Tensor = self.keep_BS.cumsum(1) - self.keep_BS.long()
            positions = before[:, self.time_T] if before.shape[1] != self.seq_len else before
        else:
            positions = self.time_T
        if self.documents_BT is None:
            return positions
        begins = F.pad(self.documents_BT[:, 1:] != self.documents_BT[:, :-1], (1, 0), value=True)
        return positions - torch.where(begins, positions, 0).cummax(1).values

    @property
    def keep_BT(self) -> Tensor | None:
        """Mask of the real tokens of this pass: bool (B, T), or None."""
        if self.keep_BS is None or self.keep_BS.shape[1] == self.seq_len:
            return self.keep_BS
        return self.keep_BS[:, self.time_T]

    def rotary(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary embedding: each (T, D/2), or (B, 1, T, D/2) if rows differ.

        The dtype is float32, or float64 for float64 hidden states.
        """
        if rotary.key not in self._tables:
            plain = self.positions is self.time_T and isinstance(self.start, int) and self.start == 0
            if plain and torch.compiler.is_compiling() and is_constant(self.seq_len):
                tables = constant_tables(rotary.key, self.seq_len, self.device, self._wide)
            else:
                tables = rotary.tables(self.positions.to(self._wide))
            self._tables[rotary.key] = tables
        return self._tables[rotary.key]

    def mask(self, *, causal: bool, window: int | None, keys: Keys | None = None) -> AttentionMask:
        """Return the attention mask.

        Args:
            causal: hide later keys.
            window: see `AttentionMask`.
            keys: times of the keys, from `SlotCache.append`; None: the keys are the tokens of this pass.
        """
        key = (causal, window, None if keys is None else len(keys.time_S))
        if key not in self._masks:
            keep_BS = self.keep_BT if keys is None else self.keep_BS
            if keep_BS is not None and keys is not None:
                keep_BS = keep_BS[:, keys.time_S.clamp(min=0)]
            self._masks[key] = AttentionMask(
                self.time_T,
                keys or Keys(self.time_T, True),
                causal=causal,
                window=window,
                keep_BS=keep_BS,
                documents=None if self.documents_BT is None else (self.documents_BT, self.documents_BT),
            )
        return self._masks[key]
