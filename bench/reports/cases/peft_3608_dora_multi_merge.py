"""peft#3608 (huggingface/peft): merging two DoRA adapters of one layer gives another model than running them.

The forward pass takes each weight norm from the frozen base weight, but `merge` takes it from the live
weight, which already contains the adapters merged before.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

DECLARATION = "merging the active adapters does not change what the model computes in eval mode"


class DoraLinear(nn.Module):
    """Frozen linear layer with named DoRA adapters that are all active and change nothing yet."""

    def __init__(self, base_layer: nn.Linear, adapters: tuple[str, ...], norm_of_live_weight: bool) -> None:
        super().__init__()
        self.base_layer, self.norm_of_live_weight = base_layer.requires_grad_(False), norm_of_live_weight
        self.scaling, self.merged_adapters = 2.0, set()
        self.lora_A = nn.ModuleDict({a: nn.Linear(base_layer.in_features, 4, bias=False) for a in adapters})
        self.lora_B = nn.ModuleDict({a: nn.Linear(4, base_layer.out_features, bias=False) for a in adapters})
        self.lora_magnitude_vector = nn.ParameterDict({a: base_layer.weight.norm(dim=1) for a in adapters})
        for b in self.lora_B.values():
            nn.init.zeros_(b.weight)

    def _delta(self, name: str) -> torch.Tensor:
        return self.scaling * self.lora_B[name].weight @ self.lora_A[name].weight

    def _factor(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return self.lora_magnitude_vector[name] / (weight + self._delta(name)).norm(dim=1).detach()

    @torch.no_grad()
    def merge(self) -> None:
        """Fold the adapters into the base weight, one after the other."""
        live, before = self.base_layer.weight, self.base_layer.weight.clone()
        for name in self.lora_A:
            factor = self._factor(name, live if self.norm_of_live_weight else before)
            live.copy_(factor[:, None] * (live + self._delta(name)))
            self.merged_adapters.add(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Base result, extended and rescaled by each adapter that is not merged."""
        result = F.linear(x, self.base_layer.weight)
        for name in self.lora_A:
            if name not in self.merged_adapters:
                update = self.scaling * self.lora_B[name](self.lora_A[name](x))
                result = self._factor(name, self.base_layer.weight) * (result + update)
        return result + self.base_layer.bias


class PeftModel(nn.Module):
    """One decoder block whose query and value projections have two DoRA adapters."""

    def __init__(self, norm_of_live_weight: bool, dim: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.k_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.requires_grad_(False)
        self.q_proj = DoraLinear(nn.Linear(dim, dim), ("default", "b"), norm_of_live_weight)
        self.v_proj = DoraLinear(nn.Linear(dim, dim), ("default", "b"), norm_of_live_weight)

    def merge_adapter(self) -> None:
        """Merge the adapters everywhere."""
        self.q_proj.merge()
        self.v_proj.merge()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, vocab)."""
        x = self.embed(input_ids) + self.pos.weight[: input_ids.shape[1]]
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return self.lm_head(self.norm3(x + self.mlp(self.norm2(x))))


def buggy() -> nn.Module:
    """As reported."""
    return PeftModel(norm_of_live_weight=True)


def healthy() -> nn.Module:
    """As fixed."""
    return PeftModel(norm_of_live_weight=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logits after merging minus logits before, with adapters moved as training would."""
    g = torch.Generator().manual_seed(1)
    plain, ids = copy.deepcopy(model).eval(), torch.arange(24).view(2, 12)
    for p in plain.parameters():
        if p.requires_grad:
            p.add_(0.05 * torch.randn(p.shape, generator=g))
    merged = copy.deepcopy(plain)
    merged.merge_adapter()
    return merged(ids) - plain(ids)
