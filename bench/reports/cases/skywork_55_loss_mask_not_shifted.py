"""Skywork#55 (SkyworkAI/Skywork): the evaluation loss counts the first padding token of each text.

Losses of the next token are multiplied by attention_mask[:, :-1], the mask of the present token, instead of
attention_mask[:, 1:], that of their targets. https://github.com/SkyworkAI/Skywork/issues/55
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class SkyworkDecoderLayer(nn.Module):
    """Attention with rotary embedding, then a gated MLP, each after its norm."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        linears = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = linears
        self.gate_proj, self.up_proj = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y, projections = self.input_layernorm(x), (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (w(y).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in projections)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class SkyworkForCausalLM(nn.Module):
    """Language model with the evaluation of eval_loss.py."""

    def __init__(self, *, shift_mask: bool, vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.shift_mask, self.config = shift_mask, SimpleNamespace(vocab_size=vocab_size)
        self.embed_tokens, self.norm = nn.Embedding(vocab_size, dim), nn.RMSNorm(dim)
        self.layers = nn.ModuleList(SkyworkDecoderLayer(dim, n_heads=4) for _ in range(2))
        self.lm_head, self.inv_freq = nn.Linear(dim, vocab_size, bias=False), [10**-i for i in range(4)]
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = (steps <= steps[:, None])[None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None].bool() | torch.eye(len(steps), device=mask.device).bool()
        x = self.embed_tokens(input_ids)
        angles = torch.outer(steps.to(x), x.new_tensor(self.inv_freq)).repeat(1, 2)
        for layer in self.layers:
            x = layer(x, mask[:, None], angles.cos(), angles.sin())
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))

    def compute_loss(self, tokenized_texts: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses of texts that are padded on the right, and their number."""
        logits, labels = self(tokenized_texts, attention_mask).logits[:, :-1], tokenized_texts[:, 1:]
        mask = attention_mask[:, 1:] if self.shift_mask else attention_mask[:, :-1]
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask
        return loss.sum(), attention_mask.sum() - len(attention_mask)


def buggy() -> nn.Module:
    """The mask of the present tokens."""
    return SkyworkForCausalLM(shift_mask=False)


def healthy() -> nn.Module:
    """The mask of the targets."""
    return SkyworkForCausalLM(shift_mask=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Loss of texts whose last quarter is padding."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        keep = (torch.arange(ids.shape[1], device=ids.device) < max(2, 3 * ids.shape[1] // 4)).long()
        return torch.div(*model.compute_loss(ids * keep, keep.expand_as(ids)))

    return ModelSpec.of(make, causal=True, loss=loss)


@torch.no_grad()
def observe(model: nn.Module) -> float:
    """Change of the summed loss of a text if padding is added."""
    ids = torch.tensor([[5, 9, 33, 21, 40, 7]])
    padded, mask = F.pad(ids, (0, 3)), F.pad(torch.ones_like(ids), (0, 3))
    return (model.compute_loss(padded, mask)[0] - model.compute_loss(ids, torch.ones_like(ids))[0]).item()
