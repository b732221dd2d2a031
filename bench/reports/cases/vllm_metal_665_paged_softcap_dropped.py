"""vllm-metal#665 (vllm-project/vllm-metal): the paged attention of Gemma 2 never soft-caps the scores.

The engine's attention wrapper passes softcap 0.0 to the kernel whatever attn_logit_softcapping the model has.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec

DECLARATION = "attention scores are soft-capped at 50 with tanh (attn_logit_softcapping=50.0)"


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """The kernel: causal, grouped heads, softcap 0 means none."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    """Projections and settings of one Gemma 2 attention."""

    def __init__(self, dim: int = 32, n_heads: int = 4, n_kv_heads: int = 2, head_dim: int = 8) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.attn_logit_softcapping = 50.0
        self.q_proj = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, dim, bias=False)
        for proj in (self.q_proj, self.k_proj):
            nn.init.normal_(proj.weight, std=0.3)  # scores of a few units, as in trained checkpoints


class PagedAttentionWrapper(nn.Module):
    """What the engine puts in place of `self_attn`."""

    def __init__(self, inner: Attention, fixed: bool) -> None:
        super().__init__()
        self.inner, self.fixed = inner, fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the kernel on the inner projections."""
        inner, (b, t, _) = self.inner, x.shape
        q = inner.q_proj(x).view(b, t, inner.n_heads, inner.head_dim).transpose(1, 2)
        k = inner.k_proj(x).view(b, t, inner.n_kv_heads, inner.head_dim).transpose(1, 2)
        v = inner.v_proj(x).view(b, t, inner.n_kv_heads, inner.head_dim).transpose(1, 2)
        softcap = inner.attn_logit_softcapping if self.fixed else 0.0
        out = paged_attention(q, k, v, inner.scale, softcap)
        return inner.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class Gemma2(nn.Module):
    """Two sandwich-normed attention layers, tied head; positions are left out, they do not matter here."""

    def __init__(self, fixed: bool, vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.attentions = nn.ModuleList(PagedAttentionWrapper(Attention(dim), fixed) for _ in range(2))
        self.pre_norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.post_norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.final_logit_softcapping = 30.0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        h = self.embed_tokens(input_ids) * self.embed_tokens.embedding_dim**0.5
        for pre, attention, post in zip(self.pre_norms, self.attentions, self.post_norms, strict=True):
            h = h + post(attention(pre(h)))
        logits = F.linear(self.norm(h), self.embed_tokens.weight)
        return self.final_logit_softcapping * torch.tanh(logits / self.final_logit_softcapping)


def buggy() -> nn.Module:
    """Softcap dropped."""
    return Gemma2(fixed=False)


def healthy() -> nn.Module:
    """Softcap honoured."""
    return Gemma2(fixed=True)


def buggy_declared() -> ModelSpec:
    """State a cap of 50 for attention scores."""
    return ModelSpec.of(buggy, causal=True, facts=Facts(attention_cap=50.0))


def healthy_declared() -> ModelSpec:
    """State a cap of 50 for attention scores."""
    return ModelSpec.of(healthy, causal=True, facts=Facts(attention_cap=50.0))


def observe(model: nn.Module) -> torch.Tensor:
    """First attention's output minus the same computed here head by head with the cap; 0 is right."""
    model = model.double().eval()
    seen: list[torch.Tensor] = []
    handle = model.attentions[0].register_forward_hook(lambda _m, args, out: seen.extend((args[0], out)))
    with torch.no_grad():
        model(torch.arange(12)[None] * 5 % 64)
        handle.remove()
        inner, x, heads = model.attentions[0].inner, seen[0][0], []
        for h in range(4):
            q = (x @ inner.q_proj.weight.T)[:, 8 * h : 8 * h + 8]
            k, v = ((x @ p.weight.T).split(8, -1)[h // 2] for p in (inner.k_proj, inner.v_proj))
            weights = (50 * (q @ k.T / 8**0.5 / 50).tanh()).exp().tril()
            heads.append(weights / weights.sum(-1, keepdim=True) @ v)
        return seen[1][0] - torch.cat(heads, -1) @ inner.o_proj.weight.T
