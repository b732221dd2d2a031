"""Attention masks: who may look at whom.

Shapes: B batch, T query positions, S key positions (here T == S).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AttentionMask", "padding_mask"]


@dataclass(frozen=True)
class AttentionMask:
    """What `scaled_dot_product_attention` needs to know about visibility.

    Attributes:
        bias_BTS: bool, broadcastable to (B, 1, T, S), True where the query may see the key; None
            where `is_causal` alone says everything.
        is_causal: whether the kernel itself must hide the future.
    """

    bias_BTS: Tensor | None
    is_causal: bool

    @classmethod
    def build(
        cls, seq_len: int, *, causal: bool, window: int | None, keep_BS: Tensor | None, device: torch.device
    ) -> AttentionMask:
        """Combine the rules. Each one only ever hides more: padding never reveals the future.

        Args:
            seq_len: T.
            causal: hide the positions after the query.
            window: a query sees at most the `window` positions ending at itself (causal), or those
                closer than `window` on both sides (bidirectional), itself included. None: all.
            keep_BS: bool (B, S), False at padding. A padded *query* keeps sight of itself, so that
                no row is empty; what it computes is not part of any real token.
            device: where to build.
        """
        if window is not None and window >= seq_len:
            window = None
        if window is None and keep_BS is None:
            return cls(None, causal)
        query_T1 = torch.arange(seq_len, device=device)[:, None]
        key_1S = torch.arange(seq_len, device=device)[None, :]
        visible = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device)
        if causal:
            visible &= key_1S <= query_T1
        if window is not None:
            visible &= (query_T1 - key_1S).abs() < window
        if keep_BS is None:
            return cls(visible[None, None], False)
        visible_BTS = (visible & keep_BS[:, None, :]) | (query_T1 == key_1S)
        return cls(visible_BTS[:, None], False)


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
    if attention_mask.shape != (batch_size, seq_len):
        raise ValueError(
            f"attention_mask: got shape {tuple(attention_mask.shape)}; allowed: {(batch_size, seq_len)}, "
            "one entry per input token"
        )
    return attention_mask != 0
