"""The training objective: predict the next token.

Shapes: B batch, N tokens in a row, T = N - 1 predictions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.model.rack import Rack

__all__ = ["IGNORED", "next_token_loss", "next_token_total", "require_causal"]

IGNORED = -100  # label of a position that is not predicted, as in torch and Hugging Face


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy, in nats, of each token given those before it.

    Args:
        model: (input_ids (B, T), attention_mask (B, T) or None) -> logits (B, T, V).
        batch: `input_ids` (B, N); optionally `attention_mask` (B, N), zero at padding, which is
            neither seen nor predicted; optionally `labels` (B, N), not shifted, -100 where a token
            is not to be predicted (default: `input_ids`).

    Returns:
        A float32 scalar; 0 with zero gradient where nothing is to be predicted.
    """
    total, count = next_token_total(model, batch)
    return total / count.clamp(min=1)


def next_token_total(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats, and how many tokens it is over; see `next_token_loss`."""
    input_ids = batch["input_ids"]
    attention_mask = batch.get("attention_mask")
    labels = batch.get("labels", input_ids)[:, 1:].long()
    if attention_mask is not None:
        real = attention_mask != 0
        labels = labels.masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORED)
        attention_mask = attention_mask[:, :-1]
    logits_BTV = model(input_ids[:, :-1], attention_mask)
    total = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()


def require_causal(rack: Rack) -> None:
    """Refuse a Rack that can read the answer.

    Raises:
        ValueError: naming the Stacks whose attention is bidirectional.
    """
    seeing = [stack.stack_id for stack in map(rack.get_stack, range(len(rack.stacks))) if not stack.is_causal]
    if seeing:
        raise ValueError(
            f"attention_mode: stacks {seeing} are bidirectional; the next-token loss needs 'causal' in every "
            "stack, else each position reads the token it is asked to predict"
        )
