"""diffusers#13920 (huggingface/diffusers): Ideogram4 gets rotary angles from a matmul that autocast casts.

Image positions start at 65536, where bfloat16 has steps of 512, so under autocast every image token gets the
same rotary embedding although the code casts both operands to float32.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

IMAGE_POSITION_OFFSET = 65536
DECLARATION = "rotary angles are computed in float32, also inside torch.autocast"


class MRoPE(nn.Module):
    """Interleaved rotary embedding over (t, h, w)."""

    def __init__(self, head_dim: int, base: float, section: tuple[int, int, int], guard: bool) -> None:
        super().__init__()
        self.section, self.guard = section, guard
        inv_freq = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, (B, L, head_dim), of integer positions (B, L, 3)."""
        with torch.autocast(position_ids.device.type, enabled=False) if self.guard else nullcontext():
            return self._table(position_ids)

    def _table(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pos = position_ids.permute(2, 0, 1).float()
        inv_freq = self.inv_freq.float()[None, None, :, None].expand(3, pos.shape[1], -1, 1)
        freqs = (inv_freq @ pos.unsqueeze(2)).transpose(2, 3)
        mixed = freqs[0].clone()
        for axis in (1, 2):
            third = slice(axis, 3 * self.section[axis], 3)
            mixed[..., third] = freqs[axis][..., third]
        emb = torch.cat((mixed, mixed), dim=-1)
        return emb.cos(), emb.sin()


class Block(nn.Module):
    """Attention and MLP with a modulation from the time step."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.to_qkv, self.to_out = heads, nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.norm1, self.norm2, self.modulation = nn.RMSNorm(dim), nn.RMSNorm(dim), nn.Linear(dim, 4 * dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """One block over the packed sequence."""
        s1, g1, s2, g2 = self.modulation(c).unsqueeze(1).chunk(4, dim=-1)
        q, k, v = self.to_qkv(self.norm1(x) * (1 + s1)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        q, k, v = (t.to(x.dtype).transpose(1, 2) for t in (q, k, v))
        x = x + g1.tanh() * self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + g2.tanh() * self.ff(self.norm2(x) * (1 + s2))


class Transformer2DModel(nn.Module):
    """Flow-matching backbone over packed text and image tokens."""

    def __init__(self, guard: bool, dim: int = 32, heads: int = 2, channels: int = 8) -> None:
        super().__init__()
        self.input_proj, self.text_proj = nn.Linear(channels, dim), nn.Linear(12, dim)
        self.time_embed = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.rotary_emb = MRoPE(dim // heads, 10000.0, (4, 2, 2), guard)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(2))
        self.proj_out = nn.Linear(dim, channels)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Velocity of latents (B, N, channels) behind text (B, T, 12); positions are (B, T + N, 3)."""
        cos, sin = (t.unsqueeze(2) for t in self.rotary_emb(position_ids))
        x = torch.cat((self.text_proj(encoder_hidden_states), self.input_proj(hidden_states)), dim=1)
        for layer in self.layers:
            x = layer(x, cos, sin, self.time_embed(timestep[:, None]))
        return self.proj_out(x[:, encoder_hidden_states.shape[1] :])


def buggy() -> nn.Module:
    """As reported."""
    return Transformer2DModel(guard=False)


def healthy() -> nn.Module:
    """As fixed."""
    return Transformer2DModel(guard=True)


def _forward(model: nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Call the model with an image that is four tokens wide, and with a fixed time and text."""
    batch, length, _ = latents.shape
    i = torch.arange(length, device=latents.device)
    image = torch.stack((i * 0, i // 4, i % 4), dim=-1) + IMAGE_POSITION_OFFSET
    text_positions = torch.arange(3, device=latents.device)[:, None].expand(-1, 3)
    position_ids = torch.cat((text_positions, image)).expand(batch, -1, -1)
    text = torch.randn(1, 3, 12, generator=torch.Generator().manual_seed(0)).to(latents)
    time = torch.full((batch,), 0.4).to(latents)
    return model(latents, time, text.expand(batch, -1, -1), position_ids)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the call, with the positions of an image."""
    return ModelSpec.of(make, inputs="vectors", width=8, forward=_forward)


def observe(model: nn.Module) -> torch.Tensor:
    """Rotary table that a forward pass uses under autocast minus the one without."""
    tables: list[torch.Tensor] = []
    hook = model.rotary_emb.register_forward_hook(lambda _m, _i, out: tables.append(torch.cat(out, dim=-1)))
    g, i = torch.Generator().manual_seed(1), torch.arange(16)
    image = torch.stack((i * 0, i // 4, i % 4), dim=-1) + IMAGE_POSITION_OFFSET
    position_ids = torch.cat((torch.arange(3)[:, None].expand(-1, 3), image)).expand(2, -1, -1)
    latents, text = torch.randn(2, 16, 8, generator=g), torch.randn(2, 3, 12, generator=g)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(latents, torch.rand(2, generator=g), text, position_ids)
    hook.remove()
    return tables[1].float() - tables[0]
