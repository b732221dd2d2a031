"""sparseml#2290 (neuralmagic/sparseml): GPTQ rounds every block of columns with the first scales.

The group of a column is computed from its index in the block instead of its index in the weight.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, GROUP, BLOCK, QMAX = 64, 64, 4, 16, 32, 7


class SparseGptWrapper:
    """GPTQ of a linear layer with a scale for each row and group of columns."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.H = layer, torch.zeros(layer.in_features, layer.in_features)
        self.handle = layer.register_forward_pre_hook(self.add_batch)

    def add_batch(self, _layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.H += 2 * args[0].flatten(0, -2).T @ args[0].flatten(0, -2)

    def fasterprune(self, *, absolute: bool, percdamp: float = 0.01) -> None:
        self.handle.remove()
        W = self.layer.weight.detach().clone()
        scale = W.unflatten(1, (-1, GROUP)).abs().amax(dim=2).clamp(min=1e-8) / QMAX
        H = self.H + percdamp * self.H.diag().mean() * torch.eye(len(self.H))
        Hinv = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
        for i1 in range(0, W.shape[1], BLOCK):
            W1, Hinv1 = W[:, i1 : i1 + BLOCK], Hinv[i1 : i1 + BLOCK, i1 : i1 + BLOCK]
            Err1 = torch.zeros_like(W1)
            for i in range(W1.shape[1]):
                s = scale[:, (i1 + i if absolute else i) // GROUP]
                q = (W1[:, i] / s).round().clamp(-QMAX - 1, QMAX) * s
                Err1[:, i] = (W1[:, i] - q) / Hinv1[i, i]
                W1[:, i:] -= Err1[:, i, None] * Hinv1[i, i:]  # column i becomes q
            W[:, i1 + BLOCK :] -= Err1 @ Hinv[i1 : i1 + BLOCK, i1 + BLOCK :]
        self.layer.weight.data.copy_(W)
        self.layer.register_buffer("weight_scale", scale)


class DecoderLayer(nn.Module):
    """Causal attention and an MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv_proj, self.out_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.fc1, self.fc2 = nn.Linear(DIM, 96, bias=False), nn.Linear(96, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(self.self_attn_layer_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out_proj(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class OPTForCausalLM(nn.Module):
    """Language model with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.norm = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM), nn.LayerNorm(DIM)
        self.layers, self.lm_head = nn.Sequential(DecoderLayer(), DecoderLayer()), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        return self.lm_head(self.norm(self.layers(x)))


@torch.no_grad()
def quantize(model: OPTForCausalLM, *, absolute: bool) -> OPTForCausalLM:
    for layer in model.layers:
        wrappers = [SparseGptWrapper(each) for each in layer.children() if isinstance(each, nn.Linear)]
        model((torch.arange(512) ** 2 // 5 % VOCAB).view(16, 32))  # calibration
        for wrapper in wrappers:
            wrapper.fasterprune(absolute=absolute)
    return model


def buggy() -> nn.Module:
    return quantize(OPTForCausalLM(), absolute=False)


def healthy() -> nn.Module:
    return quantize(OPTForCausalLM(), absolute=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec.of(make, causal=True, trained=True, max_length=64)


def observe(model: nn.Module) -> Tensor:
    """Share of weights that are no multiple of the scale of their group, in each linear layer."""
    linears = [module for module in model.modules() if hasattr(module, "weight_scale")]
    levels = [each.weight.unflatten(1, (-1, GROUP)) / each.weight_scale[..., None] for each in linears]
    return torch.stack([((level - level.round()).abs() > 0.01).float().mean() for level in levels])
