"""peft#2489 (huggingface/peft): merging a LoRA adapter with `lora_bias` adds the bias without its scale.

In a forward pass, `lora_B` and its bias are multiplied by alpha / r. Merging scales the weight, but adds the
bias as it is, so the merged model differs unless alpha equals r.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class LoraLinear(nn.Module):
    """Frozen linear layer with a low-rank adapter, which can be merged into it."""

    def __init__(self, base_layer: nn.Linear, r: int, lora_alpha: int, *, scale_bias: bool) -> None:
        super().__init__()
        self.base_layer, self.scale_bias, self.merged = base_layer.requires_grad_(False), scale_bias, False
        self.lora_A = nn.Linear(base_layer.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base_layer.out_features, bias=True)  # lora_bias=True
        self.scaling = lora_alpha / r
        nn.init.normal_(self.lora_B.weight, std=0.1)  # an adapter after some training
        nn.init.normal_(self.lora_B.bias, std=0.1)

    def get_delta(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the changes of weight and bias by the adapter."""
        weight = self.scaling * self.lora_B.weight @ self.lora_A.weight
        return weight, self.lora_B.bias * (self.scaling if self.scale_bias else 1.0)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the base layer."""
        if not self.merged:
            weight, bias = self.get_delta()
            self.base_layer.weight += weight
            self.base_layer.bias += bias
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract the adapter from the base layer."""
        if self.merged:
            weight, bias = self.get_delta()
            self.base_layer.weight -= weight
            self.base_layer.bias -= bias
            self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply base layer and adapter."""
        y = self.base_layer(x)
        return y if self.merged else y + self.lora_B(self.lora_A(x)) * self.scaling


class GPT2Block(nn.Module):
    """Causal attention and feed-forward network."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.c_fc, self.mlp_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to (batch, time, n_embd)."""
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class PeftModelForCausalLM(nn.Module):
    """Language model with adapters in attention; everything else is frozen."""

    def __init__(self, *, scale_bias: bool, vocab_size: int = 64, n_embd: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(64, n_embd)
        self.h = nn.ModuleList(GPT2Block(n_embd) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.requires_grad_(False)
        for block in self.h:
            for name in ("c_attn", "c_proj"):
                layer = LoraLinear(getattr(block, name), r=4, lora_alpha=16, scale_bias=scale_bias)
                setattr(block, name, layer)

    def merge_adapter(self) -> None:
        """Merge all adapters."""
        for block in self.h:
            block.c_attn.merge()
            block.c_proj.merge()

    def unmerge_adapter(self) -> None:
        """Undo the merge of all adapters."""
        for block in self.h:
            block.c_attn.unmerge()
            block.c_proj.unmerge()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def buggy() -> nn.Module:
    """Merge the bias without scale."""
    return PeftModelForCausalLM(scale_bias=False)


def healthy() -> nn.Module:
    """Merge the bias with the scale."""
    return PeftModelForCausalLM(scale_bias=True)


_FROZEN_IN_LAYERS = ("ln_1", "ln_2", "c_fc", "mlp_proj", "c_attn.base_layer", "c_proj.base_layer")
FROZEN = (
    *("wte", "wpe", "ln_f", "lm_head"),
    *(f"h.{i}.{name}" for i in range(2) for name in _FROZEN_IN_LAYERS),
)


def buggy_declared() -> ModelSpec:
    """State a causal model whose base is trained and frozen."""
    return ModelSpec.of(buggy, causal=True, max_length=64, frozen=FROZEN, trained=True)


def healthy_declared() -> ModelSpec:
    """State a causal model whose base is trained and frozen."""
    return ModelSpec.of(healthy, causal=True, max_length=64, frozen=FROZEN, trained=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the change of logits by merging."""
    ids = torch.randint(0, 64, (1, 6), generator=torch.Generator().manual_seed(1))
    before = model(ids)
    model.merge_adapter()
    return (model(ids) - before).abs().amax(dim=-1)
