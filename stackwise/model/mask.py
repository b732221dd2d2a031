"""Attention masks: who may look at whom.

Shapes: B batch, T query positions, S key positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["AttentionMask", "Keys", "document_runs", "padding_mask"]


class Keys(NamedTuple):
    """When the keys of a pass happened.

    Attributes:
        time_S: int64; negative where a cache has no key yet.
        aligned: the keys are consecutive in time and the queries are the last of them, so that who
            sees whom can be read off T and S alone.
    """

    time_S: Tensor
    aligned: bool


class AttentionMask:
    """Visibility as rules, and as a table only where one is asked for.

    Each rule only ever hides more: padding never reveals the future. A query always keeps sight of
    itself, so that no row is empty; what a padded query computes is not part of any real token.

    Args:
        query_time_T: int64, when each query happened.
        keys: when each key happened.
        causal: hide the keys after the query.
        window: W; hide keys W or more away from the query. None: no such rule.
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
        # Not len(), which for an exporter is a constant.
        self.n_queries, self.n_keys = query_time_T.shape[0], self.key_time_S.shape[0]
        self.causal = causal
        self.window = None if self.aligned and window is not None and window >= self.n_keys else window
        self.keep_BS, self.documents = keep_BS, documents
        self._dense: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether T and S, causality and window say everything."""
        return self.aligned and self.keep_BS is None and self.documents is None

    @property
    def hides_nothing(self) -> bool:
        """Whether every query sees every key."""
        return self.is_plain and self.window is None and (not self.causal or self.n_queries == 1)

    @property
    def is_lower_triangle(self) -> bool:
        """Whether causality over equally many queries and keys is the only rule."""
        if self.n_queries != self.n_keys:  # a branch: of a length left open a compiler decides only there
            return False
        return self.is_plain and self.window is None and self.causal

    def key_range(self, start: int, end: int) -> tuple[int, int]:
        """The first and one past the last key that queries `start` to `end` (exclusive) may see."""
        if not self.aligned:
            return 0, self.n_keys
        offset = self.n_keys - self.n_queries
        first = 0 if self.window is None else max(0, start + offset - self.window + 1)
        if self.causal:
            return first, end + offset
        return first, self.n_keys if self.window is None else min(self.n_keys, end + offset + self.window - 1)

    def visible(self, queries: slice, keys: slice) -> Tensor | None:
        """The table of a part: bool, broadcastable to (B, 1, t, s); None where all of it is visible."""
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
        """The whole table, computed once: bool, broadcastable to (B, 1, T, S); None: all visible."""
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
    """The user's mask as bool (B, S), True at real tokens.

    Args:
        attention_mask: bool or integer (B, S), nonzero at real tokens (the Hugging Face
            convention), or None.

    Raises:
        ValueError: another shape, or a floating-point mask, whose meaning (0/1 or additive) could
            only be guessed.
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
    """Documents numbered from 0 in each row: int64 (B, T). Where the id changes, a new one begins.

    Args:
        document_ids: integer (B, T), equal within a document, or None.

    Raises:
        ValueError: another shape, or no integers.
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
