"""CSSM#4 (Elman295/CSSM): both images are scanned with the step size of the second image.

The step size of the image before the change has the same name as that of the image after it, and is
overwritten. The input matrix of the first image is discretised with the step size of the second one.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

PATCH = 6


class MambaBlockCD(nn.Module):
    """State space layer of two images, whose state sums up the differences of their inputs."""

    def __init__(self, d_model: int, d_conv: int, d_state: int, *, own_steps: bool) -> None:
        super().__init__()
        self.own_steps, self.dt_rank, self.d_inner = own_steps, d_model // 16, 2 * d_model
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(self.d_inner, 1))
        self.D, self.D_p = nn.Parameter(torch.ones(self.d_inner)), nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model)

    def features(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the scan and its gate, each (batch, length, inner)."""
        x, gate = self.in_proj(self.norm(t)).chunk(2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return F.silu(x), F.silu(gate)

    def parameters_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return step size, input matrix and output matrix of an image."""
        n = self.A_log.shape[1]
        delta, B, C = self.x_proj(x).split([self.dt_rank, n, n], dim=-1)
        return F.softplus(self.dt_proj(delta)), B, C

    def cssm(self, t1: Tensor, t2: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of both images."""
        delta_prim, B_prim, C_prim = self.parameters_of(t2)
        delta, B, C = self.parameters_of(t1)
        delta = delta if self.own_steps else delta_prim
        delta_b_u = (delta * t1)[..., None] * B[:, :, None]
        delta_b_u_prim = (delta_prim * t2)[..., None] * B_prim[:, :, None]
        change = (delta_b_u - delta_b_u_prim).abs()
        return self.scan(delta, change, C) + t1 * self.D, self.scan(
            delta_prim, change, C_prim
        ) + t2 * self.D_p

    def scan(self, delta: Tensor, change: Tensor, C: Tensor) -> Tensor:
        """Return the outputs (batch, length, inner) of the states."""
        decay = (-delta[..., None] * self.A_log.exp()).exp()
        state, ys = torch.zeros_like(change[:, 0]), []
        for i in range(change.shape[1]):
            state = decay[:, i] * state + change[:, i]
            ys.append((state * C[:, i, None]).sum(dim=-1))
        return torch.stack(ys, dim=1)

    def forward(self, t1: Tensor, t2: Tensor) -> tuple[Tensor, Tensor]:
        """`t1` and `t2` are (batch, length, d_model)."""
        (x1, gate1), (x2, gate2) = self.features(t1), self.features(t2)
        y1, y2 = self.cssm(x1, x2)
        return t1 + self.out_proj(y1 * gate1), t2 + self.out_proj(y2 * gate2)


class ChangeDetector(nn.Module):
    """Two images as rows of patches -> logits of a change at each patch."""

    def __init__(self, *, own_steps: bool, d_model: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, d_model)
        self.layers = nn.ModuleList(MambaBlockCD(d_model, 4, 8, own_steps=own_steps) for _ in range(2))
        self.head = nn.Linear(2 * d_model, 2)

    def forward(self, t1: Tensor, t2: Tensor) -> Tensor:
        """`t1` (before) and `t2` (after) are (batch, length, PATCH)."""
        t1, t2 = self.embed(t1), self.embed(t2)
        for layer in self.layers:
            t1, t2 = layer(t1, t2)
        return self.head(torch.cat([t1, t2], dim=-1))


def buggy() -> nn.Module:
    """Overwrite the step size of the first image."""
    return ChangeDetector(own_steps=False)


def healthy() -> nn.Module:
    """Keep a step size for each image."""
    return ChangeDetector(own_steps=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the patches of both images, side by side, scanned in one direction."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=2 * PATCH,
        causal=True,
        forward=lambda model, images: model(*images.chunk(2, dim=-1)),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the output of the first image minus that of the second one if both are passed in reverse."""
    first, second = torch.randn(2, 1, 6, 32, generator=torch.Generator().manual_seed(1))
    layer = model.layers[0]
    return layer(first, second)[0] - layer(second, first)[1]
