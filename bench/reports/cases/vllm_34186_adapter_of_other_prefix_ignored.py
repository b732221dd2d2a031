"""vllm#34186 (vllm-project/vllm): an adapter with another prefix of module names has no effect.

Its names lack the `language_model.` of the served model. The lookup by the full name finds nothing, silently.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, RANK, ALPHA = 64, 32, 4, 4, 8
_DRAWS = torch.randn(2, 2, RANK, DIM, generator=torch.Generator().manual_seed(1)) / 5
LORAS = {f"layers.{i}.o_proj.weight": (a, b.T) for i, (a, b) in enumerate(_DRAWS)}  # of the trained adapter


class DecoderLayer(nn.Module):
    """Causal attention and an MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        self.qkv_proj, self.o_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up_proj, self.down_proj = nn.Linear(DIM, 64, bias=False), nn.Linear(64, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.o_proj(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down_proj(F.silu(self.up_proj(self.post_attention_layernorm(x))))


class ForCausalLM(nn.Module):
    """The text model, on which the adapter was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.layers, self.norm = nn.ModuleList(DecoderLayer() for _ in range(2)), nn.RMSNorm(DIM, 1e-6)

    def forward(self, input_ids: Tensor, *images: Tensor) -> Tensor:
        x = torch.cat([*images, self.embed_tokens(input_ids)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))[:, -input_ids.shape[1] :]


class LinearWithLoRA(nn.Module):
    """Linear layer with a slot for an adapter."""

    def __init__(self, base_layer: nn.Linear, lora_a: Tensor, lora_b: Tensor) -> None:
        super().__init__()
        self.base_layer, self.lora_a = base_layer, nn.Buffer(lora_a.clone(), persistent=False)
        self.lora_b = nn.Buffer(lora_b.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + ALPHA / RANK * (x @ self.lora_a.T) @ self.lora_b.T


class ForConditionalGeneration(nn.Module):
    """Model of text and images, with an adapter."""

    def __init__(self, *, maps_prefix: bool) -> None:
        super().__init__()
        self.visual, self.language_model = nn.Linear(12, DIM), ForCausalLM()
        empty = torch.zeros(RANK, DIM), torch.zeros(DIM, RANK)
        for i, layer in enumerate(self.language_model.layers):
            name = f"layers.{i}.o_proj.weight" if maps_prefix else f"language_model.layers.{i}.o_proj.weight"
            layer.o_proj = LinearWithLoRA(layer.o_proj, *LORAS.get(name, empty))

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        return self.language_model(input_ids, *([] if pixel_values is None else [self.visual(pixel_values)]))


def buggy() -> nn.Module:
    return ForConditionalGeneration(maps_prefix=False)


def healthy() -> nn.Module:
    return ForConditionalGeneration(maps_prefix=True)


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:  # as by PEFT
    weights = {n[15:].replace(".base_layer", ""): w for n, w in state.items() if n[:6] != "visual"}
    for name, (a, b) in LORAS.items():
        weights[name] = weights[name] + ALPHA / RANK * b.to(weights[name]) @ a.to(weights[name])
    return weights


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    given = {"causal": True, "trained": True, "unused": ("visual",)}
    return ModelSpec.of(make, reference=ForCausalLM, to_reference=merged, **given)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits, less those of the text model with the merged adapter (first entries)."""
    ids, weights = torch.arange(3, 15)[None], merged(model.state_dict())
    return (model(ids) - torch.func.functional_call(ForCausalLM(), weights, (ids,)))[0, -3:, :4]
