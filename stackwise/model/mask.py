"""Attention masks: visibility of keys to queries.

Shapes: B batch, T query positions, S key positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["AttentionMask", "Keys", "document_runs", "padding_mask"]


class Keys(NamedTuple):
    """Times of the keys of a pass.

    Attributes:
        time_S: int64; negative for empty cache slots.
        aligned: True if the keys are consecutive in time and the queries are the last of them, so that T and
            S determine the visibility.
    """

    time_S: Tensor
    aligned: bool


class AttentionMask:
    """Attention mask as rules. A dense table is computed only on request.

    Each rule can only hide more: padding never reveals later keys. A query always sees itself, so that no row
    is empty. Real tokens never depend on the output of a padded query.

    Args:
        query_time_T: int64, time of each query.
        keys: times of the keys.
        causal: hide the keys after the query.
        window: W; hide keys at a distance of W or more from the query. None: no window.
        keep_BS: bool, False at padding; None: no padding.
        documents: integer (B, T) and (B, S): hide the keys of another document; None: one document.
    """

    def __init__(
        self,
        query_time_T: Tensor,
        keys: Keys,
        *,
        causal: bool = True,
        window: int | None = None,
        keep_BS: Tensor | None = None,
        documents: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.query_time_T, (self.key_time_S, self.aligned) = query_time_T, keys
        # Not len(), which is a constant for an exporter.
        self.n_queries, self.n_keys = query_time_T.shape[0], self.key_time_S.shape[0]
        self.causal = causal
        self.window = None if self.aligned and window is not None and window >= self.n_keys else window
        self.keep_BS, self.documents = keep_BS, documents
        self._dense: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if T, S, causality and window determine the mask."""
        return self.aligned and self.keep_BS is None and self.documents is None

    @property
    def hides_nothing(self) -> bool:
        """True if every query sees every key."""
        return self.is_plain and self.window is None and (not self.causal or self.n_queries == 1)

    @property
    def is_lower_triangle(self) -> bool:
        """True if causality, with equal numbers of queries and keys, is the only rule."""
        if self.n_queries != self.n_keys:  # a branch, so that a compiler can decide it for a symbolic length
            return False
        return self.is_plain and self.window is None and self.causal

    def key_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the first key, and one past the last, that queries `start` to `end` (exclusive) may see."""
        if not self.aligned:
            return 0, self.n_keys
        offset = self.n_keys - self.n_queries
        first = 0 if self.window is None else max(0, start + offset - self.window + 1)
        if self.causal:
            return first, end + offset
        return first, self.n_keys if self.window is None else min(self.n_keys, end + offset + self.window - 1)

    def visible(self, queries: slice, keys: slice) -> Tensor | None:
        """Return a part of the table: bool, broadcastable to (B, 1, t, s); None if all of it is visible."""
        query_T1, key_1S = self.query_time_T[queries, None], self.key_time_S[None, keys]
        visible: Tensor | None = None
        if self.causal and not self.hides_nothing:
            visible = key_1S <= query_T1
        if self.window is not None:
            near = (query_T1 - key_1S).abs() < self.window
            visible = near if visible is None else visible & near
        if not self.aligned:
            written = key_1S >= 0
            visible = written if visible is None else visible & written
        if visible is not None:
            visible = visible[None, None]
        for extra_BTS in self._extra(queries, keys):
            extra = (extra_BTS | (query_T1 == key_1S))[:, None]
            visible = extra if visible is None else visible & extra
        return visible

    def dense(self) -> Tensor | None:
        """Return the full table, computed once: bool, broadcastable to (B, 1, T, S); None: all visible."""
        if self._dense is None:
            self._dense = self.visible(slice(None), slice(None))
        return self._dense

    def _extra(self, queries: slice, keys: slice) -> list[Tensor]:
        extra = []
        if self.keep_BS is not None:
            extra.append(self.keep_BS[:, None, keys])
        if self.documents is not None:
            of_query_BT, of_key_BS = self.documents
            extra.append(of_query_BT[:, queries, None] == of_key_BS[:, None, keys])
        return extra


def padding_mask(attention_mask: Tensor | None, batch_size: int, seq_len: int) -> Tensor | None:
    """Return the user's mask as bool (B, S), True at real tokens.

    Args:
        attention_mask: bool or integer (B, S), nonzero at real tokens (the Hugging Face convention), or None.

    Raises:
        ValueError: another shape, or a floating-point mask, which is ambiguous (0/1 or additive).
    """
    if attention_mask is None:
        return None
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ValueError(
            f"attention_mask: got dtype {attention_mask.dtype}; allowed: bool or integer, nonzero at real "
            "tokens (an additive float mask is not accepted)"
        )
    _check_shape("attention_mask", attention_mask, batch_size, seq_len)
    return attention_mask != 0


def document_runs(document_ids: Tensor | None, batch_size: int, seq_len: int) -> Tensor | None:
    """Return documents numbered from 0 in each row: int64 (B, T). Each change of the id is a new document.

    Args:
        document_ids: integer (B, T), equal within a document, or None.

    Raises:
        ValueError: another shape, or not integers.
    """
    if document_ids is None:
        return None
    if document_ids.is_floating_point() or document_ids.is_complex() or document_ids.dtype == torch.bool:
        raise ValueError(f"document_ids: got dtype {document_ids.dtype}; allowed: an integer dtype")
    _check_shape("document_ids", document_ids, batch_size, seq_len)
    begins = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.nn.functional.pad(begins, (1, 0)).cumsum(1)


def _check_shape(key: str, mask: Tensor, batch_size: int, seq_len: int) -> None:
    if mask.shape != (batch_size, seq_len):
        raise ValueError(
            f"{key}: got shape {tuple(mask.shape)}; allowed: {(batch_size, seq_len)}, "
            "one entry per input token"
        )
