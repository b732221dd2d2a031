"""minimind#858 (jingyaogong/minimind): a top-1 router learns nothing from the language loss.

The weights of the chosen experts are divided by their sum. With one expert the result is the constant 1, and
the router trains by the balancing loss only. https://github.com/jingyaogong/minimind/issues/858
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class MOEFeedForward(nn.Module):
    """Experts with a softmax router."""

    def __init__(self, dim: int, experts: int, top_k: int, norm_topk_prob: bool, aux_coef: float) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob, self.aux_coef = top_k, norm_topk_prob, aux_coef
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )
        self.aux_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Output in the shape of the input; keeps the balancing loss."""
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(dim=-1)
        weight, index = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        if self.norm_topk_prob:
            weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = (index == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(flat[token]) * weight[token, slot, None])
        load = F.one_hot(index, scores.shape[-1]).to(x.dtype).sum(dim=1).mean(dim=0)
        self.aux_loss = (load * scores.mean(dim=0)).sum() * scores.shape[-1] * self.aux_coef
        return y.view_as(x)


class MiniMindBlock(nn.Module):
    """Attention and experts."""

    def __init__(self, dim: int, heads: int, norm_topk_prob: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.mlp = MOEFeedForward(dim, 4, 1, norm_topk_prob, aux_coef=5e-4)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        h = self.input_layernorm(x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class MiniMindForCausalLM(nn.Module):
    """Language model with a tied head."""

    def __init__(self, norm_topk_prob: bool, vocab_size: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.embed_tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(MiniMindBlock(dim, 4, norm_topk_prob) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        """Logits, balancing loss, and the language loss if there are labels."""
        x = self.embed_tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits, loss = self.lm_head(self.norm(x)), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits, aux_loss=sum(m.mlp.aux_loss for m in self.layers))


def buggy() -> nn.Module:
    """The default configuration."""
    return MiniMindForCausalLM(norm_topk_prob=True)


def healthy() -> nn.Module:
    """Probabilities as weights."""
    return MiniMindForCausalLM(norm_topk_prob=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The head is tied; training adds both losses."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        out = model(ids, labels=ids)
        return out.loss + out.aux_loss

    return ModelSpec.of(make, causal=True, tied=True, loss=loss)


def observe(model: nn.Module) -> Tensor:
    """1 if the gradient of the language loss in the router is nothing but rounding."""
    ids = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(1))
    gate, expert = model.layers[0].mlp.gate.weight, model.layers[0].mlp.experts[0][0].weight
    router, other = torch.autograd.grad(model(ids, labels=ids).loss, (gate, expert))
    return (router.norm() < 1e-6 * other.norm()).float()
