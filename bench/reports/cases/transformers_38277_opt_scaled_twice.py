"""transformers#38277 (huggingface/transformers): OPT divides attention scores twice by the root of the width.

The queries are scaled after their projection. The attention function gets no scale, and scales the scores by
its default again. https://github.com/huggingface/transformers/pull/38290
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec

OFFSET, DIM, HEADS = 2, 32, 4
Cache = tuple[tuple[Tensor, Tensor], ...]


class OPTAttention(nn.Module):
    """Attention whose queries are scaled."""

    def __init__(self, *, scale_of_scores: float | None) -> None:
        super().__init__()
        self.head_dim = DIM // HEADS
        self.scaling, self.scale_of_scores = self.head_dim**-0.5, scale_of_scores
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(
        self, hidden_states: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Output, and the keys and values of all tokens."""
        q, k, v = (
            states.unflatten(-1, (HEADS, self.head_dim)).transpose(1, 2)
            for states in (
                self.q_proj(hidden_states) * self.scaling,
                self.k_proj(hidden_states),
                self.v_proj(hidden_states),
            )
        )
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale_of_scores)
        return self.out_proj(y.transpose(1, 2).flatten(2)), (k, v)


class OPTDecoderLayer(nn.Module):
    """Attention, then an MLP with ReLU, each after its norm."""

    def __init__(self, *, scale_of_scores: float | None) -> None:
        super().__init__()
        self.self_attn = OPTAttention(scale_of_scores=scale_of_scores)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(
        self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Output, and the keys and values of all tokens."""
        y, present = self.self_attn(self.self_attn_layer_norm(x), mask, past)
        x = x + y
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x)))), present


class OPTForCausalLM(nn.Module):
    """Language model with learned positions and a tied head."""

    def __init__(self, *, scale_of_scores: float | None, vocab_size: int = 60, max_length: int = 64) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, DIM)
        self.embed_positions = nn.Embedding(max_length + OFFSET, DIM)
        for embedding in (self.embed_tokens, self.embed_positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.layers = nn.ModuleList(OPTDecoderLayer(scale_of_scores=scale_of_scores) for _ in range(2))
        self.final_layer_norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> SimpleNamespace:
        """Logits, loss of the next tokens, and cache. The mask covers the cached tokens, too."""
        past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        rows, length = input_ids.shape
        if attention_mask is None:
            attention_mask = input_ids.new_ones(rows, past + length)
        attention_mask = attention_mask.long()
        if position_ids is None:  # -1 at padding tokens
            position_ids = (attention_mask.cumsum(dim=1) * attention_mask - 1)[:, past:]
        x = self.embed_tokens(input_ids) + self.embed_positions(position_ids + OFFSET)
        key = torch.arange(past + length, device=input_ids.device)
        query = key[past:, None]
        mask = (key <= query) & attention_mask[:, None, None].bool() | (key == query)
        present = []
        for i, layer in enumerate(self.layers):
            x, states = layer(x, mask, None if past_key_values is None else past_key_values[i])
            present.append(states)
        logits, loss = self.lm_head(self.final_layer_norm(x)), None
        if labels is not None:
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits, past_key_values=tuple(present))


def buggy() -> nn.Module:
    """The default scale of the attention function."""
    return OPTForCausalLM(scale_of_scores=None)


def healthy() -> nn.Module:
    """A scale of 1, as the queries are scaled."""
    return OPTForCausalLM(scale_of_scores=1.0)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The scale of the attention, the offset of the positions and the tied head of OPT."""
    facts = Facts(attention_scale=(DIM // HEADS) ** -0.5, position_offset=OFFSET)
    return ModelSpec.of(
        make, causal=True, tied=True, max_length=64, padding_sides=("left", "right"), facts=facts
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Output of an attention layer minus a softmax of scores that are divided once."""
    layer = model.double().eval().layers[0].self_attn
    x = torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    q, k, v = (
        proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    scores = (q @ k.mT / (DIM // HEADS) ** 0.5).masked_fill(~mask, -torch.inf)
    expected = layer.out_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
    return layer(x, mask, None)[0] - expected
