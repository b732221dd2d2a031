"""transformers#40796 (huggingface/transformers): every Gemma RMSNorm of a new model starts with a gain of 2.

The norm multiplies by `1 + weight`, but the shared weight initialisation fills every RMSNorm weight with 1.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

DECLARATION = "a norm of a new model has a gain of 1"


class GemmaRMSNorm(nn.Module):
    """RMSNorm with a gain that is centred on 1."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last axis in float32."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class PreTrainedModel(nn.Module):
    """Base class that initialises whatever a model is made of."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif "RMSNorm" in type(module).__name__:
            nn.init.constant_(module.weight, self.norm_start)


class GemmaLayer(nn.Module):
    """Attention and a gated feed-forward layer, both pre-norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * dim, dim, bias=False)
        self.input_layernorm, self.pre_feedforward_layernorm = GemmaRMSNorm(dim), GemmaRMSNorm(dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The tables are (time, head_dim)."""
        h, projections = self.input_layernorm(x), (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections)
        q, k = (y * cos + y.roll(y.shape[-1] // 2, -1) * sin for y in (q, k))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(h.transpose(1, 2).flatten(2))
        h = self.pre_feedforward_layernorm(x)
        return x + self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))


class GemmaForCausalLM(PreTrainedModel):
    """Gemma in small, with tied embeddings; returns `logits`."""

    def __init__(self, vocab_size: int = 67, dim: int = 32, heads: int = 4, *, norm_start: float) -> None:
        super().__init__()
        self.norm_start = norm_start
        self.embed_tokens, self.norm = nn.Embedding(vocab_size, dim), GemmaRMSNorm(dim)
        self.layers = nn.ModuleList(GemmaLayer(dim, heads) for _ in range(2))
        self.head_dim, self.normalizer = dim // heads, dim**0.5
        self.apply(self._init_weights)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        """Token ids (batch, time)."""
        x = self.embed_tokens(input_ids) * self.normalizer
        rates = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        # The sine of a negative angle stands for the minus of the first half.
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * torch.cat((-rates, rates))
        for layer in self.layers:
            x = layer(x, angles.cos().to(x), angles.sin().to(x))
        return SimpleNamespace(logits=F.linear(self.norm(x), self.embed_tokens.weight))


def buggy() -> nn.Module:
    """What suits a norm that multiplies by its weight."""
    return GemmaForCausalLM(norm_start=1.0)


def healthy() -> nn.Module:
    """What suits a norm that adds 1."""
    return GemmaForCausalLM(norm_start=0.0)


def observe(model: nn.Module) -> torch.Tensor:
    """What each norm of a new model gives, minus plain `F.rms_norm` of what it was given."""
    errors = []

    def compare(norm: GemmaRMSNorm, args: tuple, out: torch.Tensor) -> None:
        errors.append(out - F.rms_norm(args[0], out.shape[-1:], eps=norm.eps))

    hooks = [m.register_forward_hook(compare) for m in model.modules() if isinstance(m, GemmaRMSNorm)]
    with torch.no_grad():
        model.eval()(torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1)))
    for hook in hooks:
        hook.remove()
    return torch.stack(errors)
