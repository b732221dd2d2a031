"""Megatron-LM#1984 (NVIDIA/Megatron-LM): the load-balancing loss of the router counts padding tokens.

The language-model loss leaves padding out, the auxiliary loss does not, so the total loss of the same text
depends on how far (and with what) it was padded.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TopKRouter(nn.Module):
    """Softmax router with the Switch load-balancing loss."""

    def __init__(self, hidden: int, num_experts: int, topk: int, skip_padding: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, hidden) * 0.3)
        self.num_experts, self.topk, self.skip_padding = num_experts, topk, skip_padding

    def forward(self, hidden: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, ...]:
        """Weights (tokens, experts), zero where not routed, and the auxiliary loss."""
        probs = F.linear(hidden, self.weight).softmax(-1)
        chosen = torch.zeros_like(probs).scatter_(1, probs.topk(self.topk, dim=-1).indices, 1.0)
        weights = probs * chosen
        if self.skip_padding and padding_mask is not None:
            keep = ~padding_mask.flatten()
            probs, chosen = probs[keep], chosen[keep]
        return weights, self.num_experts / self.topk * (chosen.mean(0) * probs.mean(0)).sum()


class TransformerLayer(nn.Module):
    """Causal attention and experts."""

    def __init__(self, hidden: int, heads: int, experts: int, skip_padding: bool) -> None:
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.linear_qkv, self.linear_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.router = TopKRouter(hidden, experts, 2, skip_padding)
        self.linear_fc1 = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * hidden**-0.5)
        self.linear_fc2 = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) * hidden**-0.5)

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, ...]:
        """Hidden states and auxiliary loss."""
        B, S, _ = x.shape
        qkv = self.linear_qkv(self.input_layernorm(x)).view(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        visible = torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S)
        if padding_mask is not None:
            # a position always sees itself, so that padding rows are no NaN
            visible = visible & ~padding_mask[:, None, None, :] | torch.eye(S, dtype=torch.bool)
        context = F.scaled_dot_product_attention(*qkv, attn_mask=visible)
        x = x + self.linear_proj(context.transpose(1, 2).flatten(2))
        tokens = self.pre_mlp_layernorm(x).flatten(0, 1)
        weights, aux_loss = self.router(tokens, padding_mask)
        inner = F.gelu(torch.einsum("th,ehf->etf", tokens, self.linear_fc1))
        out = torch.einsum("etf,efh,te->th", inner, self.linear_fc2, weights)
        return x + out.view_as(x), aux_loss


class GPTModel(nn.Module):
    """Decoder with experts that adds the routers' losses to its own."""

    def __init__(self, hidden: int = 32, vocab: int = 48, skip_padding: bool = True) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(vocab, hidden), nn.Embedding(64, hidden)
        self.layers = nn.ModuleList(TransformerLayer(hidden, 4, 4, skip_padding) for _ in range(2))
        self.final_layernorm, self.output_layer = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SimpleNamespace:
        """Logits, and the loss with the routers' share of it."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        padding_mask = None if attention_mask is None else attention_mask == 0
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        aux_loss = x.new_zeros(())
        for layer in self.layers:
            x, layer_loss = layer(x, padding_mask)
            aux_loss = aux_loss + 0.1 * layer_loss
        logits = self.output_layer(self.final_layernorm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + aux_loss
        return SimpleNamespace(loss=loss, logits=logits, aux_loss=aux_loss)


def buggy() -> nn.Module:
    """Padding is counted."""
    return GPTModel(skip_padding=False)


def healthy() -> nn.Module:
    """Padding is left out."""
    return GPTModel(skip_padding=True)


def observe(model: nn.Module) -> Tensor:
    """Loss of a right-padded row, less that of the row without its padding."""
    ids = torch.randint(1, 48, (1, 9), generator=torch.Generator().manual_seed(1))
    padded, mask = F.pad(ids, (0, 20)), F.pad(torch.ones_like(ids), (0, 20))
    labels = padded.masked_fill(mask == 0, -100)
    with torch.no_grad():
        return model(padded, attention_mask=mask, labels=labels).loss - model(ids, labels=ids).loss
