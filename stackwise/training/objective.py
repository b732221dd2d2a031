"""Objective: targets of a batch, and the loss of a Rack's predictions.

Shapes: B batch, T positions, N tokens in a row, C model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from stackwise.config.training import ObjectiveConfig
from stackwise.model.rack import Rack
from stackwise.support.arguments import require
from stackwise.training.cross_entropy import chunked_cross_entropy, cross_entropy, plain_weight
from stackwise.training.masking import mask_diffusion_targets, masked_token_targets
from stackwise.training.targets import IGNORED, Targets, check_ids, next_token_targets

__all__ = ["IGNORED", "Objective", "Targets", "next_token_loss", "next_token_total", "require_causal"]


class Objective:
    """Training objective of `config`, for a vocabulary of `vocab_size` tokens."""

    def __init__(self, config: ObjectiveConfig, vocab_size: int) -> None:
        self.config, self.vocab_size = config, vocab_size

    head_weight = staticmethod(plain_weight)

    def row_length(self, seq_len: int) -> int:
        """Return the number of tokens per row of a batch if the model sees `seq_len` of them."""
        return seq_len + 1 if self.config.kind == "next_token" else seq_len

    def check(self, rack: Rack) -> None:
        """Raise if this objective cannot train the Rack.

        Raises:
            ValueError: not a Rack, attention in the wrong direction (causal or bidirectional), another
                vocabulary, or a `mask_token_id` outside it.
        """
        kind, mask_token_id = self.config.kind, self.config.mask_token_id
        plain = "a Rack as it is: compiling it is training.compile, and sharing it training.distributed"
        require(isinstance(rack, Rack), "rack", type(rack).__name__, plain)
        require(rack.vocab_size == self.vocab_size, "vocab_size", rack.vocab_size, str(self.vocab_size))
        if kind == "next_token":
            require_causal(rack)
            return
        _require_bidirectional(rack, kind)
        known = mask_token_id is not None and mask_token_id < self.vocab_size
        require(known, "mask_token_id", mask_token_id, f"0 to {self.vocab_size - 1}")

    def targets(self, batch: Mapping[str, Tensor], noise: tuple[int, ...]) -> Targets:
        """Return the model's inputs for `batch`, and its labels.

        Args:
            batch: `input_ids` (B, N), N = `row_length(T)`; optionally `attention_mask`, `document_ids` and
                `labels` of that shape, as in the objective's own function: `next_token_targets`,
                `masked_token_targets` or `mask_diffusion_targets`.
            noise: seed of random choices. The caller's random state is neither read nor changed. Equal
                integers give equal choices on every device.

        Raises:
            ValueError: parts of the batch are not tensors or differ in shape, or it contains the mask token
                or an id outside the vocabulary. Ids are checked only on the CPU.
        """
        match self.config.kind:
            case "next_token":
                targets = next_token_targets(batch)
            case "masked_token":
                targets = masked_token_targets(batch, self.config, self.vocab_size, noise)
            case "mask_diffusion":
                targets = mask_diffusion_targets(batch, self.config, noise)
        check_ids(batch, targets, self.vocab_size)
        return targets

    def total(
        self, final_norm: nn.Module, lm_head: nn.Module, hidden_BTC: Tensor, targets: Targets
    ) -> Tensor:
        """Return the summed loss in nats; the loss per token is this sum divided by `targets.count`.

        With `logits_chunk` the head's weight is used without its `forward`: hooks on the head do not run.

        Returns:
            A float32 scalar.

        Raises:
            ValueError: `logits_chunk` with a head that is not a plain linear layer, or in float16.
        """
        config = self.config
        labels_N = targets.labels.flatten()
        weights_N = None if targets.weights is None else targets.weights.flatten()
        normed_BTC = final_norm(hidden_BTC)
        if config.logits_chunk is None:
            return cross_entropy(lm_head(normed_BTC).flatten(0, 1), labels_N, weights_N, config.z_loss)
        weight_VC = self.head_weight(lm_head)
        return chunked_cross_entropy(
            normed_BTC.flatten(0, 1), weight_VC, labels_N, weights_N, config.z_loss, config.logits_chunk
        )


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy, in nats, of each token conditional on the tokens before it.

    Args:
        model: (input_ids (B, T), attention_mask (B, T) or None) -> logits (B, T, V); for a batch with
            documents it also takes `document_ids` (B, T).
        batch: see `next_token_targets`. Padding is neither an input nor a target.

    Returns:
        A float32 scalar; 0 with zero gradient if there is no target.
    """
    total, count = next_token_total(model, batch)
    return total / count.clamp(min=1)


def next_token_total(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats, and the number of targets; see `next_token_loss`."""
    targets = next_token_targets(batch)
    documents = {} if targets.document_ids is None else {"document_ids": targets.document_ids}
    logits_BTV = model(targets.input_ids, targets.attention_mask, **documents)
    return cross_entropy(logits_BTV.flatten(0, 1), targets.labels.flatten()), targets.count


def require_causal(rack: Rack) -> None:
    """Raise if the Rack has bidirectional attention, with which it can read the token to predict.

    Raises:
        ValueError: names the bidirectional Stacks.
    """
    seeing = [stack.stack_id for stack in rack.get_stacks() if not stack.is_causal]
    if seeing:
        raise ValueError(
            f"attention_mode: stacks {seeing} are bidirectional; the next-token loss needs 'causal' in every "
            "stack, else each position reads the token it is asked to predict"
        )


def _require_bidirectional(rack: Rack, kind: str) -> None:
    blind = [
        stack.stack_id for stack in rack.get_stacks() if any(block.is_causal for block in stack.get_blocks())
    ]
    if blind:
        raise ValueError(
            f"attention_mode: stacks {blind} are causal; kind={kind!r} needs 'bidirectional' in every stack, "
            "since a masked token is predicted from both sides"
        )
