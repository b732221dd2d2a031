"""stablediffusion#226 (Stability-AI/stablediffusion): DDIM inversion calls the network with the wrong time.

DDIMSampler.encode passes the index of the step (0, 1, 2, ...), not its timestep (1, 101, 201, ...), although
the factors of the step are those of the timestep. https://github.com/Stability-AI/stablediffusion/pull/226
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def timestep_embedding(timesteps: Tensor, dim: int, max_period: int = 10000) -> Tensor:
    """Cosines and sines of the timesteps (B,)."""
    freqs = max_period ** -(torch.arange(dim // 2, device=timesteps.device) / (dim // 2))
    args = timesteps[:, None].float() * freqs
    return torch.cat([args.cos(), args.sin()], dim=-1)


class BasicTransformerBlock(nn.Module):
    """Self-attention, attention to the context, and MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.attn1, self.attn2 = (nn.MultiheadAttention(dim, 4, batch_first=True) for _ in range(2))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(4 * dim, dim))
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, emb: Tensor, context: Tensor) -> Tensor:
        x = x + self.emb_layers(emb)[:, None]
        y = self.norm1(x)
        x = x + self.attn1(y, y, y, need_weights=False)[0]
        x = x + self.attn2(self.norm2(x), context, context, need_weights=False)[0]
        return x + self.ff(self.norm3(x))


class LatentDiffusion(nn.Module):
    """Predicts the noise in latents (B, 4, 8, 8)."""

    def __init__(self, *, encode_with_timesteps: bool, dim: int = 32) -> None:
        super().__init__()
        self.encode_with_timesteps, self.dim = encode_with_timesteps, dim
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        self.register_buffer("alphas_cumprod", (1 - betas).cumprod(dim=0).float())
        self.time_embed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, 4 * dim))
        self.input_block = nn.Conv2d(4, dim, 2, stride=2)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(16, dim))
        self.blocks = nn.ModuleList(BasicTransformerBlock(dim) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, 16)

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        emb = self.time_embed(timestep_embedding(timesteps, self.dim).to(x.dtype))
        h = self.input_block(x).flatten(2).mT + self.pos_embed
        for block in self.blocks:
            h = block(h, emb, context)
        return F.pixel_shuffle(self.out(self.norm(h)).mT.unflatten(-1, (4, 4)), 2)


class DDIMSampler:
    """Deterministic steps between latents and noise."""

    def __init__(self, model: LatentDiffusion, ddim_num_steps: int) -> None:
        self.model = model
        self.ddim_timesteps = torch.arange(0, 1000, 1000 // ddim_num_steps) + 1
        self.ddim_alphas = model.alphas_cumprod[self.ddim_timesteps]
        self.ddim_alphas_prev = torch.cat([model.alphas_cumprod[:1], self.ddim_alphas[:-1]])

    @torch.no_grad()
    def encode(self, x0: Tensor, c: Tensor, t_enc: int) -> Tensor:
        """Add the predicted noise in t_enc steps."""
        x_next = x0
        for i in range(t_enc):
            t = int(self.ddim_timesteps[i]) if self.model.encode_with_timesteps else i
            noise_pred = self.model(x_next, torch.full((len(x0),), t, device=x0.device), c)
            now, after = self.ddim_alphas_prev[i], self.ddim_alphas[i]
            step = after.sqrt() * ((1 / after - 1).sqrt() - (1 / now - 1).sqrt())
            x_next = (after / now).sqrt() * x_next + step * noise_pred
        return x_next


def buggy() -> nn.Module:
    """The index of the step."""
    return LatentDiffusion(encode_with_timesteps=False)


def healthy() -> nn.Module:
    """The timestep."""
    return LatentDiffusion(encode_with_timesteps=True)


def observe(model: nn.Module) -> list[int]:
    """Times with which the inversion in 6 of 10 steps calls the network."""
    times: list[int] = []
    model.register_forward_pre_hook(lambda _, args: times.append(int(args[1][0])))
    latents, context = torch.ones(1, 4, 8, 8), torch.ones(1, 7, 32)
    DDIMSampler(model, ddim_num_steps=10).encode(latents, context, t_enc=6)
    return times
