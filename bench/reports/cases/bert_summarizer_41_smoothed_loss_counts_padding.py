"""bert-summarizer#41 (k-tahiro/bert-summarizer): the label-smoothed loss of the decoder counts padding.

The loss is the mean over all target positions, and the decoder learns to write padding. It should only use
the positions whose label is a token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from stackwise import ModelSpec

PAD_TOKEN_ID = 0


@dataclass
class CausalLMOutput:
    """Logits, and loss if there are labels."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class LabelSmoothingLoss(nn.Module):
    """Mean cross-entropy with a smoothed target."""

    def __init__(self, classes: int, smoothing: float = 0.1) -> None:
        super().__init__()
        self.classes, self.smoothing = classes, smoothing

    def forward(self, pred: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean over rows; `pred` is (rows, classes)."""
        log_probs = pred.log_softmax(dim=-1)
        true_dist = torch.full_like(log_probs, self.smoothing / (self.classes - 1))
        true_dist = true_dist.scatter(1, target[:, None], 1.0 - self.smoothing)
        return -(true_dist * log_probs).sum(dim=-1).mean()


class BertSumAbs(nn.Module):
    """Encoder of an article, and decoder of its summary; both are padded on the right."""

    def __init__(self, *, valid_positions_only: bool, vocab_size: int = 56, hidden_size: int = 32) -> None:
        super().__init__()
        self.valid_positions_only = valid_positions_only
        self.embeddings = nn.Embedding(vocab_size, hidden_size, padding_idx=PAD_TOKEN_ID)
        self.positions = nn.Embedding(48, hidden_size)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(hidden_size, 4, 64, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(hidden_size, 4, 64, dropout=0.0, batch_first=True),
            2,
            nn.LayerNorm(hidden_size),
        )
        for stack in (self.encoder, self.decoder):
            for weight in stack.parameters():
                if weight.dim() > 1:  # the layers are copies of one; draw each anew
                    nn.init.xavier_uniform_(weight)
        self.generator = nn.Linear(hidden_size, vocab_size)
        self.loss = LabelSmoothingLoss(vocab_size)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings with positions."""
        return self.embeddings(ids) + self.positions.weight[: ids.shape[1]]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> CausalLMOutput:
        """Return logits of the decoder; `labels` are its tokens, with the padding id at padding."""
        padding = None if attention_mask is None else ~attention_mask.bool()
        target_padding = None if decoder_attention_mask is None else ~decoder_attention_mask.bool()
        memory = self.encoder(self.embed(input_ids), src_key_padding_mask=padding)
        t = decoder_input_ids.shape[1]
        output = self.decoder(
            self.embed(decoder_input_ids),
            memory,
            tgt_mask=torch.ones(t, t, dtype=torch.bool, device=input_ids.device).triu(1),
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=padding,
        )
        logits, loss = self.generator(output), None
        if labels is not None:
            pred, target = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            if self.valid_positions_only:
                valid_positions = target != PAD_TOKEN_ID
                pred, target = pred[valid_positions], target[valid_positions]
            loss = self.loss(pred, target)
        return CausalLMOutput(loss=loss, logits=logits)


def buggy() -> nn.Module:
    """Loss of all positions."""
    return BertSumAbs(valid_positions_only=False)


def healthy() -> nn.Module:
    """Loss of positions with a token."""
    return BertSumAbs(valid_positions_only=True)


def _source(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(3, 12, device=ids.device).expand(len(ids), -1)


def _make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, 56, (batch_size, seq_len), generator=generator)


def _masked(model: nn.Module, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return model(_source(ids), decoder_input_ids=ids, decoder_attention_mask=keep).logits


def _labelled_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = labels.masked_fill(labels == -100, PAD_TOKEN_ID)
    return model(_source(ids), decoder_input_ids=ids, labels=labels).loss


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the call of the decoder for a fixed article, its padding and its loss."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=56,
        causal=True,
        max_length=48,
        make_batch=_make_batch,
        forward=lambda model, ids: model(_source(ids), decoder_input_ids=ids).logits,
        padding_sides=("right",),
        masked=_masked,
        labelled_loss=_labelled_loss,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the loss of a padded summary minus its loss without padding."""
    summary = torch.tensor([[2, 9, 8, 7, 3]])
    padded = torch.nn.functional.pad(summary, (0, 6), value=PAD_TOKEN_ID)
    first, second = (
        model(_source(x), decoder_input_ids=x, decoder_attention_mask=x != PAD_TOKEN_ID, labels=x).loss
        for x in (padded, summary)
    )
    return first - second
