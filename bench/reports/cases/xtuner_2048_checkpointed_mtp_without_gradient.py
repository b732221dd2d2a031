"""xtuner#2048 (InternLM/xtuner): with recomputation the multi-token prediction layer gets no gradient at all.

Its inputs are detached on purpose, and a reentrant checkpoint without a differentiable input cuts the graph.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class DecoderLayer(nn.Module):
    """Causal attention and a gated feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, time, dim)."""
        qkv = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class MTPLayer(nn.Module):
    """Predicts one token further from a hidden state and the embedding of the next token."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.final_layernorm = (nn.RMSNorm(dim) for _ in range(3))
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        self.decoder_layer = DecoderLayer(dim, heads)

    def forward(self, hidden: torch.Tensor, future: torch.Tensor, *_entry: torch.Tensor) -> torch.Tensor:
        """Both are (batch, time, dim); an entry only carries the need for a gradient."""
        x = self.eh_proj(torch.cat((self.enorm(future), self.hnorm(hidden)), dim=-1))
        return self.final_layernorm(self.decoder_layer(x))


class CausalLM(nn.Module):
    """Decoder with an MTP layer that trains on its own; returns `loss`, `mtp_loss` and `logits`."""

    def __init__(self, vocab_size: int = 73, dim: int = 32, heads: int = 4, *, grad_entry: bool) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)
        self.mtp = MTPLayer(dim, heads)
        self.recompute, self.grad_entry = True, grad_entry

    def run(self, layer: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        """One layer, recomputed in the backward pass if wanted."""
        if not (self.recompute and torch.is_grad_enabled()):
            return layer(*inputs)
        if self.grad_entry and not any(x.requires_grad for x in inputs):
            inputs = (*inputs, inputs[0].new_empty(0, requires_grad=True))
        return checkpoint(layer, *inputs, use_reentrant=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        """`labels` are `input_ids` with -100 where nothing is to be learned."""
        x = self.embed_tokens(input_ids)
        x = x + self.embed_positions(torch.arange(input_ids.shape[1], device=x.device))
        for layer in self.layers:
            x = self.run(layer, x)
        x = self.norm(x)
        logits = self.lm_head(x)
        if labels is None:
            return SimpleNamespace(loss=None, mtp_loss=None, logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        future = self.embed_tokens(input_ids[:, 1:])
        ahead = self.run(self.mtp, x[:, :-1].detach(), future.detach())
        ahead = F.linear(ahead[:, :-1], self.lm_head.weight.detach())
        mtp_loss = F.cross_entropy(ahead.flatten(0, 1), labels[:, 2:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss + 0.3 * mtp_loss, mtp_loss=mtp_loss, logits=logits)


def buggy() -> nn.Module:
    """Hands the checkpoint detached inputs only."""
    return CausalLM(grad_entry=False)


def healthy() -> nn.Module:
    """Adds an empty input that needs a gradient."""
    return CausalLM(grad_entry=True)


def observe(model: nn.Module) -> torch.Tensor:
    """Gradients of the MTP layer with recomputation minus those without."""
    model.train()
    ids = torch.randint(0, 73, (2, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for model.recompute in (False, True):
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.mtp.parameters()])
    return torch.cat([(b - a).flatten() for a, b in zip(*found, strict=True)])
