"""espnet#5722 (espnet/espnet): a LoRA model saved in eval mode gets its adapters twice after loading.

eval() merges the adapters into the weights and the checkpoint does not say so; the loaded model is in train
mode, so its eval() merges them once more.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class LoRALinear(nn.Linear):
    """nn.Linear that holds its adapter and merges it while in eval mode, in the way of loralib."""

    def __init__(self, size_in: int, size_out: int, *, saves_merged: bool, r: int = 4) -> None:
        super().__init__(size_in, size_out)
        self.lora_A = nn.Parameter(torch.empty(r, size_in))
        self.lora_B = nn.Parameter(torch.randn(size_out, r) * 0.1)  # as after some training
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = 8 / r
        self.weight.requires_grad_(False)
        self.register_buffer("merged", torch.tensor(False), persistent=saves_merged)

    def train(self, mode: bool = True) -> "LoRALinear":
        """Merge for evaluation, take out again for training."""
        super().train(mode)
        if bool(self.merged) == mode:
            update = self.scaling * (self.lora_B @ self.lora_A).data
            self.weight.data += -update if mode else update
            self.merged.fill_(not mode)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer, and the adapter if it is not in the weight."""
        y = F.linear(x, self.weight, self.bias)
        return y if self.merged else y + self.scaling * (x @ self.lora_A.T @ self.lora_B.T)


class SelfAttention(nn.Module):
    """Attention with adapters on query and value."""

    def __init__(self, size: int, heads: int, *, saves_merged: bool) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q = LoRALinear(size, size, saves_merged=saves_merged)
        self.linear_k = nn.Linear(size, size)
        self.linear_v = LoRALinear(size, size, saves_merged=saves_merged)
        self.linear_out = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend to the frames that `mask` (B, 1, T) keeps."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.linear_q, self.linear_k, self.linear_v)
        )
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~mask[:, None], -torch.inf)
        return self.linear_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TransformerEncoder(nn.Module):
    """Speech encoder: two frames become one, sine positions, two layers."""

    def __init__(self, *, saves_merged: bool, features: int = 20, size: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.saves_merged = saves_merged
        self.embed = nn.Linear(2 * features, size)
        self.attns = nn.ModuleList(SelfAttention(size, 4, saves_merged=saves_merged) for _ in range(layers))
        self.ffns = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, size)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2 * layers + 1))

    def forward(
        self, speech: torch.Tensor, speech_lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode (B, T, features); returns the encoding and its lengths."""
        b, t, _ = speech.shape
        x = self.embed(speech[:, : t - t % 2].reshape(b, t // 2, -1))
        rates = 1e4 ** (-torch.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1])
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * rates
        x = x + torch.cat([angles.sin(), angles.cos()], -1)
        lengths = speech_lengths // 2
        mask = (torch.arange(x.shape[1]) < lengths[:, None])[:, None]
        for i, (attn, ffn) in enumerate(zip(self.attns, self.ffns, strict=True)):
            x = x + attn(self.norms[2 * i](x), mask)
            x = x + ffn(self.norms[2 * i + 1](x))
        return self.norms[-1](x), lengths


def buggy() -> nn.Module:
    """The checkpoint does not know whether the adapters are merged."""
    return TransformerEncoder(saves_merged=False)


def healthy() -> nn.Module:
    """The checkpoint says whether the adapters are merged."""
    return TransformerEncoder(saves_merged=True)


def buggy_declared() -> ModelSpec:
    """Two frames of 20 features are one input of the encoder."""
    return ModelSpec.of(buggy, inputs="vectors", width=20)


def healthy_declared() -> ModelSpec:
    """Two frames of 20 features are one input of the encoder."""
    return ModelSpec.of(healthy, inputs="vectors", width=20)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Difference between an evaluated model and a new one that loads its state_dict, then eval()."""
    model = model.double().eval()
    speech = torch.randn(2, 16, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([16, 10])
    loaded = TransformerEncoder(saves_merged=model.saves_merged).double()
    loaded.load_state_dict(model.state_dict())
    return model(speech, lengths)[0] - loaded.eval()(speech, lengths)[0]
