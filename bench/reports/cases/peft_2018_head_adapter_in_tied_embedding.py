"""peft#2018 (huggingface/peft): merging an adapter of a tied head changes the embedding as well.

The update is added in place to the weight of `lm_head`, which is the weight of `embed_tokens`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class LoraLinear(nn.Module):
    """Frozen linear layer with a low-rank update."""

    def __init__(self, base_layer: nn.Linear, r: int = 4, lora_alpha: float = 8.0, *, unties: bool) -> None:
        super().__init__()
        self.base_layer, self.unties, self.merged = base_layer.requires_grad_(False), unties, False
        self.lora_A = nn.Linear(base_layer.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base_layer.out_features, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.1)  # as after some training
        self.scaling = lora_alpha / r

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output with the update."""
        y = self.base_layer(x)
        return y if self.merged else y + self.scaling * self.lora_B(self.lora_A(x))

    @torch.no_grad()
    def merge(self) -> None:
        """Add the update to the weight."""
        if self.merged:
            return
        delta, weight = self.scaling * self.lora_B.weight @ self.lora_A.weight, self.base_layer.weight
        if self.unties:
            self.base_layer.weight = nn.Parameter(weight + delta, requires_grad=False)
        else:
            weight.add_(delta)
        self.merged = True


class DecoderLayer(nn.Module):
    """Causal attention and gated MLP."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.input_layernorm, self.pre_feedforward_layernorm = (
            nn.RMSNorm(hidden_size),
            nn.RMSNorm(hidden_size),
        )
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_up_proj = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, time, hidden_size)."""
        qkv = self.qkv_proj(self.input_layernorm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        gate, up = self.gate_up_proj(self.pre_feedforward_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Gemma2ForCausalLM(nn.Module):
    """Frozen language model with tied embeddings and an adapter of its head."""

    def __init__(self, *, unties: bool, vocab_size: int = 64, hidden_size: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed_positions = nn.Embedding(64, hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        nn.init.normal_(self.embed_positions.weight, std=0.1)
        self.layers = nn.ModuleList(DecoderLayer(hidden_size, 4) for _ in range(2))
        self.norm, lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)
        lm_head.weight = self.embed_tokens.weight
        self.requires_grad_(False)
        self.lm_head = LoraLinear(lm_head, unties=unties)

    def merge_adapter(self) -> None:
        """Merge the adapter into the weights."""
        self.lm_head.merge()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed_tokens(input_ids) * self.norm.weight.numel() ** 0.5 + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Merges in place."""
    return Gemma2ForCausalLM(unties=False)


def healthy() -> nn.Module:
    """Gives the head a weight of its own."""
    return Gemma2ForCausalLM(unties=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The model is causal, and its weights are trained."""
    return ModelSpec.of(make, causal=True, max_length=64, trained=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logits after the merge minus those before it."""
    model = model.double().eval()
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    before = model(ids)
    model.merge_adapter()
    return model(ids) - before
