"""Speech#8194 (NVIDIA-NeMo/Speech): the repetition penalty divides negative logits, which raises them.

A used token with a logit below 0 becomes more likely with a penalty above 1. Logits below 0 have to be
multiplied by the penalty.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class ParallelTransformerLayer(nn.Module):
    """Pre-norm layer with causal attention."""

    def __init__(self, hidden_size: int, num_attention_heads: int) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.dense_h_to_4h = nn.Linear(hidden_size, 4 * hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, hidden_size)."""
        mixed = self.query_key_value(self.input_layernorm(hidden_states))
        q, k, v = (
            x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, -1)
        )
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden_states = hidden_states + self.dense(context.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(y)))


class MegatronGPTModel(nn.Module):
    """Language model with learned positions and a tied head."""

    def __init__(self, *, by_sign: bool, vocab_size: int = 64, hidden_size: int = 32) -> None:
        super().__init__()
        self.by_sign = by_sign
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(64, hidden_size)
        self.layers = nn.ModuleList(ParallelTransformerLayer(hidden_size, 4) for _ in range(2))
        self.final_layernorm = nn.LayerNorm(hidden_size)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 0.5 if name.endswith(("dense.weight", "4h_to_h.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits, or the mean loss if there are labels, which are the next tokens already."""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        hidden_states = self.word_embeddings(tokens) + self.position_embeddings(position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        logits = F.linear(self.final_layernorm(hidden_states), self.word_embeddings.weight)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def repetition_penalty(
        self, logits: torch.Tensor, penalty: float, used_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Make used tokens less likely."""
        update = logits.gather(1, used_tokens)
        lowered = torch.where(update < 0, update * penalty, update / penalty)
        return logits.scatter(1, used_tokens, lowered if self.by_sign else update / penalty)

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        repetition_penalty: float = 1.0,
    ) -> torch.Tensor:
        """Return the tokens with `max_new_tokens` more. A temperature of 0 takes the most likely one."""
        start = tokens.shape[1]
        for _ in range(max_new_tokens):
            logits = self(tokens)[:, -1]
            if repetition_penalty != 1.0 and tokens.shape[1] > start:
                logits = self.repetition_penalty(logits, repetition_penalty, tokens[:, start:])
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)
            else:
                if top_k is not None:
                    lowest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
                    logits = logits.masked_fill(logits < lowest, -torch.inf)
                new = torch.multinomial((logits / temperature).softmax(dim=-1), 1)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens


def buggy() -> nn.Module:
    """Divide each logit."""
    return MegatronGPTModel(by_sign=False)


def healthy() -> nn.Module:
    """Divide logits above 0, and multiply the others."""
    return MegatronGPTModel(by_sign=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with a tied head, and its loss of labels that are shifted before."""
    return ModelSpec.of(
        make,
        causal=True,
        max_length=64,
        tied=True,
        labelled_loss=lambda model, ids, labels: model(ids[:, :-1], labels=labels[:, 1:]),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the rise of the logits of used tokens by a penalty of 1.5."""
    logits = model(torch.randint(0, 64, (4, 6), generator=torch.Generator().manual_seed(1)))[:, -1]
    used = torch.arange(12).expand(4, -1)
    return (model.repetition_penalty(logits, 1.5, used) - logits)[:, :12].clamp(min=0)
