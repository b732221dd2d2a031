"""TensorRT-LLM#1668 (NVIDIA/TensorRT-LLM): adapters that were trained with rsLoRA get the scale of LoRA.

The loader divides alpha by the rank. With `use_rslora` in the adapter's configuration the divisor is the root
of the rank. https://github.com/NVIDIA/TensorRT-LLM/issues/1668
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

ADAPTER_CONFIG = {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}


class LoraLinear(nn.Module):
    """Linear layer with a low-rank update."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        # Weights of a trained adapter: B is not zero.
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Base output plus the update."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer of attention."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class CausalLM(nn.Module):
    """Decoder for inference."""

    def __init__(self, vocab_size: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.attention = nn.ModuleList(Attention(dim, 4) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(5))
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def load_adapter(self, config: dict, reads_rslora: bool) -> "CausalLM":
        """Put an adapter on the target modules."""
        divisor = config["r"] ** (0.5 if reads_rslora and config["use_rslora"] else 1.0)
        for attention in self.attention:
            for name in config["target_modules"]:
                base = getattr(attention, name)
                setattr(attention, name, LoraLinear(base, config["r"], config["lora_alpha"] / divisor))
        return self

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.lm_head(self.norms[-1](x))


def buggy() -> nn.Module:
    """Divides by the rank."""
    return CausalLM().load_adapter(ADAPTER_CONFIG, reads_rslora=False)


def healthy() -> nn.Module:
    """Divides by the root of the rank."""
    return CausalLM().load_adapter(ADAPTER_CONFIG, reads_rslora=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A trained causal model."""
    return ModelSpec.of(make, causal=True, trained=True)


def observe(model: nn.Module) -> Tensor:
    """Output of an adapted layer, less that of the weight which peft merges for this configuration."""
    layer, x = model.attention[0].q_proj, torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    scale = ADAPTER_CONFIG["lora_alpha"] / ADAPTER_CONFIG["r"] ** 0.5
    with torch.no_grad():
        return layer(x) - x @ (layer.base.weight + scale * layer.lora_b @ layer.lora_a).T
