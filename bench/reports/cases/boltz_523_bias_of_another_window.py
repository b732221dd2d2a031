"""boltz#523 (jwohlwend/boltz): with several samples, atoms attend with the pair bias of another window.

The rows of a batch of atom windows are ordered by sample, then window. `repeat_interleave` repeats the bias
of each window next to itself, in the order window, then sample, so samples get biases of other windows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

WINDOW, ATOMS = 4, 16


class AttentionPairBias(nn.Module):
    """Attention within windows of atoms, biased by pairs."""

    def __init__(self, c_s: int, c_z: int, num_heads: int, *, interleaved: bool) -> None:
        super().__init__()
        self.num_heads, self.interleaved = num_heads, interleaved
        self.proj_q = nn.Linear(c_s, c_s)
        self.proj_k, self.proj_v = nn.Linear(c_s, c_s, bias=False), nn.Linear(c_s, c_s, bias=False)
        self.proj_g, self.proj_o = nn.Linear(c_s, c_s, bias=False), nn.Linear(c_s, c_s, bias=False)
        self.proj_z = nn.Sequential(nn.LayerNorm(c_z), nn.Linear(c_z, num_heads, bias=False))

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, multiplicity: int) -> Tensor:
        """`s` is (batch * samples * windows, W, c), `z` (batch, windows, W, W, c), `mask` (windows, W)."""
        q, k, v = (f(s).unflatten(-1, (self.num_heads, -1)) for f in (self.proj_q, self.proj_k, self.proj_v))
        bias = self.proj_z(z).movedim(-1, 2)
        if self.interleaved:
            bias = bias.flatten(0, 1).repeat_interleave(multiplicity, dim=0)
        else:
            bias = bias[:, None].expand(-1, multiplicity, -1, -1, -1, -1).flatten(0, 2)
        attn = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5 + bias
        attn = attn + (1 - mask.repeat(len(s) // len(mask), 1)[:, None, None]) * -1e6
        o = torch.einsum("bhij,bjhd->bihd", attn.softmax(dim=-1), v).flatten(2)
        return self.proj_o(self.proj_g(s).sigmoid() * o)


class DiffusionTransformerLayer(nn.Module):
    """Attention and a feed-forward network, each with a norm before it."""

    def __init__(self, dim: int, dim_pair: int, heads: int, *, interleaved: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.pair_bias_attn = AttentionPairBias(dim, dim_pair, heads, interleaved=interleaved)
        self.transition = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, multiplicity: int) -> Tensor:
        """Apply the layer to windows of atoms."""
        s = s + self.pair_bias_attn(self.norm1(s), z, mask, multiplicity)
        return s + self.transition(self.norm2(s))


class AtomDiffusion(nn.Module):
    """Noisy coordinates of several samples of a molecule -> their updates."""

    def __init__(self, *, interleaved: bool, dim: int = 32, dim_pair: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.atom_embed, self.coords_embed = nn.Linear(3, dim), nn.Linear(3, dim, bias=False)
        self.pair_embed = nn.Linear(4, dim_pair)
        self.layers = nn.ModuleList(
            DiffusionTransformerLayer(dim, dim_pair, heads, interleaved=interleaved) for _ in range(2)
        )
        self.to_update = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3, bias=False))

    def forward(self, ref_pos: Tensor, noisy: Tensor) -> Tensor:
        """`ref_pos` is (batch, atoms, 3) of the molecule, `noisy` is (batch, samples, atoms, 3)."""
        (samples, atoms), extra = noisy.shape[1:3], -noisy.shape[2] % WINDOW
        ref_pos, noisy = F.pad(ref_pos, (0, 0, 0, extra)), F.pad(noisy, (0, 0, 0, extra))
        mask = (torch.arange(atoms + extra, device=noisy.device) < atoms).to(noisy).view(-1, WINDOW)
        windows = ref_pos.unflatten(1, (-1, WINDOW))
        offsets = windows[:, :, :, None] - windows[:, :, None]
        distances = 1 / (1 + offsets.square().sum(dim=-1, keepdim=True))
        z = self.pair_embed(torch.cat([offsets, distances], dim=-1))
        s = self.atom_embed(ref_pos)[:, None] + self.coords_embed(noisy)
        s = s.unflatten(2, (-1, WINDOW)).flatten(0, 2)
        for layer in self.layers:
            s = layer(s, z, mask, samples)
        return self.to_update(s).view_as(noisy)[:, :, :atoms]


def buggy() -> nn.Module:
    """Repeat the bias of each window next to itself."""
    return AtomDiffusion(interleaved=True)


def healthy() -> nn.Module:
    """Repeat the biases of all windows of a molecule for each sample."""
    return AtomDiffusion(interleaved=False)


def _forward(model: nn.Module, ref_pos: Tensor) -> Tensor:
    at = torch.arange(3 * ref_pos.shape[1], device=ref_pos.device).to(ref_pos).view(-1, 3)
    noise = torch.stack([(5 * at).sin(), (7 * at).cos()])
    return model(ref_pos, ref_pos[:, None] + noise)[:, 1]


def _visible(ref_pos: Tensor) -> Tensor:
    window = torch.arange(ref_pos.shape[1], device=ref_pos.device) // WINDOW
    return window[:, None] == window


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State atoms that see their own window, and the second of two samples."""
    return ModelSpec.of(make, inputs="vectors", width=3, seq_len=ATOMS, forward=_forward, visible=_visible)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the updates of three samples at once minus those of one sample at a time."""
    generator = torch.Generator().manual_seed(1)
    ref_pos = 3 * torch.randn(2, ATOMS, 3, generator=generator)
    noisy = torch.randn(2, 3, ATOMS, 3, generator=generator)
    alone = torch.cat([model(ref_pos, noisy[:, i : i + 1]) for i in range(3)], dim=1)
    return model(ref_pos, noisy) - alone
