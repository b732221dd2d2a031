"""mlx-vlm#845 (Blaizzy/mlx-vlm): the update of a LoRA layer is multiplied by alpha instead of alpha / rank.

With the default rank of 8 and alpha of 16, the update is 8 times as large as that of other libraries. The
function that merges the update into the weight uses the same factor.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, MAX_LENGTH, RANK, ALPHA = 72, 32, 4, 64, 8, 16.0
# All weights of the base model. Only the adapters are trained.
FROZEN = (
    "embed_tokens",
    "positions",
    *(f"layers.{i}.{norm}" for i in range(2) for norm in ("input_norm", "mlp_norm")),
    *(f"layers.{i}.{name}.original_layer" for i in range(2) for name in ("qkv_proj", "o_proj", "up", "down")),
    "norm",
    "lm_head",
)


class LoRaLayer(nn.Module):
    """Linear layer with a low-rank update."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, *, by_rank: bool) -> None:
        super().__init__()
        self.original_layer = linear.requires_grad_(False)
        self.scale = alpha / rank if by_rank else alpha
        bound = rank**-0.5
        self.A = nn.Parameter(torch.empty(linear.in_features, rank).uniform_(-bound, bound))
        self.B = nn.Parameter(0.05 * torch.randn(rank, linear.out_features))  # as after some training

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (..., in_features)."""
        return self.original_layer(x) + self.scale * ((x @ self.A) @ self.B)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The linear layer with the update in its weight."""
        layer = copy.deepcopy(self.original_layer)
        layer.weight += self.scale * (self.A @ self.B).T
        return layer


class DecoderLayer(nn.Module):
    """Causal attention and feed-forward network, with norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.qkv_proj, self.o_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, DIM)."""
        q, k, v = self.qkv_proj(self.input_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(out)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """Language model that is adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX_LENGTH, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits of (batch, time)."""
        x = self.embed_tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def get_peft_model(model: LanguageModel, rank: int, alpha: float, *, by_rank: bool) -> LanguageModel:
    """Freeze a model, and put adapters on the linear layers of its blocks."""
    model.requires_grad_(False)
    for layer in model.layers:
        for name, linear in [*layer.named_children()]:
            if isinstance(linear, nn.Linear):
                setattr(layer, name, LoRaLayer(linear, rank, alpha, by_rank=by_rank))
    return model


def replace_lora_with_linear(model: LanguageModel) -> LanguageModel:
    """Merge all adapters."""
    for layer in model.layers:
        for name, lora in [*layer.named_children()]:
            if isinstance(lora, LoRaLayer):
                setattr(layer, name, lora.merged())
    return model


def buggy() -> nn.Module:
    """The factor is alpha."""
    return get_peft_model(LanguageModel(), RANK, ALPHA, by_rank=False)


def healthy() -> nn.Module:
    """The factor is alpha / rank."""
    return get_peft_model(LanguageModel(), RANK, ALPHA, by_rank=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A pretrained causal model, of which the adapters are trained."""
    return ModelSpec.of(make, causal=True, max_length=MAX_LENGTH, trained=True, frozen=FROZEN)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Output of adapted layers, less that of W + alpha / rank * A B, where A and B are 1 as in the report."""
    model = model.double()
    differences = []
    for lora in (model.layers[0].o_proj, model.layers[1].up):
        lora.A.fill_(1.0)
        lora.B.fill_(1.0)
        x = torch.ones(1, DIM, dtype=torch.float64)
        differences.append((lora(x) - lora.original_layer(x) - ALPHA / RANK * DIM * RANK).flatten())
    return torch.cat(differences)
