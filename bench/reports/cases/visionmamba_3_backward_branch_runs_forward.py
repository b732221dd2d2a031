"""VisionMamba#3 (kyegomez/VisionMamba): the backward branch of the bidirectional block also runs forward.

Both branches get the sequence in the same order. The second should read it from the end, so no state of a
patch contains the patches after it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

IMAGE, PATCH = 16, 4


class SSM(nn.Module):
    """Selective state space model from left to right."""

    def __init__(self, dim: int, dt_rank: int, d_state: int) -> None:
        super().__init__()
        self.dt_rank, self.d_state = dt_rank, d_state
        self.deltaBC = nn.Linear(dim, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, dim)
        nn.init.constant_(self.dt_proj.bias, -2.0)  # steps of about 0.1
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(dim, 1))
        self.D = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scan (batch, patches, dim)."""
        delta, b, c = self.deltaBC(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        decay = (delta[..., None] * -self.A_log.exp()).exp()
        update = (delta * x)[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(update[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + update[:, t]
            outputs.append((state * c[:, t, None]).sum(dim=-1))
        return torch.stack(outputs, dim=1) + self.D * x


class VisionEncoderMambaBlock(nn.Module):
    """Convolution and scan in two directions, with a gate."""

    def __init__(self, dim: int, dt_rank: int, d_state: int, *, reverse: bool) -> None:
        super().__init__()
        self.reverse = reverse
        self.norm, self.proj_x, self.proj_z = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.forward_conv1d = nn.Conv1d(dim, dim, 3, groups=dim)
        self.backward_conv1d = nn.Conv1d(dim, dim, 3, groups=dim)
        self.forward_ssm, self.backward_ssm = (SSM(dim, dt_rank, d_state) for _ in range(2))
        self.proj_out = nn.Linear(dim, dim)

    @staticmethod
    def process_direction(x: torch.Tensor, conv1d: nn.Conv1d, ssm: SSM) -> torch.Tensor:
        """Apply a causal convolution and the scan."""
        x = conv1d(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return ssm(F.silu(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to (batch, patches, dim)."""
        skip, x = x, self.norm(x)
        z, x = F.silu(self.proj_z(x)), self.proj_x(x)
        x1 = self.process_direction(x, self.forward_conv1d, self.forward_ssm)
        x2 = x.flip(1) if self.reverse else x
        x2 = self.process_direction(x2, self.backward_conv1d, self.backward_ssm)
        x2 = x2.flip(1) if self.reverse else x2
        return skip + self.proj_out(x1 * z + x2 * z)


class Vim(nn.Module):
    """Image classifier."""

    def __init__(self, *, reverse: bool, dim: int = 32, num_classes: int = 10) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Conv2d(3, dim, PATCH, stride=PATCH)
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, (IMAGE // PATCH) ** 2, dim))
        self.layers = nn.ModuleList(VisionEncoderMambaBlock(dim, 4, 4, reverse=reverse) for _ in range(2))
        self.norm, self.output_head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, classes) of images (batch, 3, 16, 16)."""
        x = self.to_patch_embedding(x).flatten(2).transpose(1, 2) + self.pos_embedding
        for layer in self.layers:
            x = layer(x)
        return self.output_head(self.norm(x.mean(dim=1)))


def buggy() -> nn.Module:
    """Scan forward twice."""
    return Vim(reverse=False)


def healthy() -> nn.Module:
    """Scan forward and backward."""
    return Vim(reverse=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)


def buggy_declared() -> ModelSpec:
    """State the size of the images."""
    return ModelSpec.of(buggy, make_batch=_make_batch, per_position=False)


def healthy_declared() -> ModelSpec:
    """State the size of the images."""
    return ModelSpec.of(healthy, make_batch=_make_batch, per_position=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the output for reversed patches, reversed, minus the output, with equal weights of branches."""
    block = model.layers[0]
    block.backward_conv1d.load_state_dict(block.forward_conv1d.state_dict())
    block.backward_ssm.load_state_dict(block.forward_ssm.state_dict())
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1))
    return (block(x.flip(1)).flip(1) - block(x)).abs().amax(dim=-1)
