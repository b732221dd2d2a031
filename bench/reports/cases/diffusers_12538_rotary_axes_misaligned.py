"""diffusers#12538 (huggingface/diffusers): Wan cuts its 3-D rotary table at the wrong channels.

The time, height and width parts are built as 8 + 4 + 4 channels and cut as 6 + 5 + 5, so axes and pairs mix.
"""

from collections.abc import Callable
from types import SimpleNamespace as Output

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec, RotaryClaim

DECLARATION = "each channel pair of a head turns with one axis: first time, then height, then width"


class WanRotaryPosEmbed(nn.Module):
    """Cosines and sines of a video grid."""

    def __init__(self, head_dim: int, max_seq_len: int = 32, *, cut_by_thirds: bool) -> None:
        super().__init__()
        h_dim = w_dim = 2 * (head_dim // 6)
        self.split_sizes = [head_dim - h_dim - w_dim, h_dim, w_dim]
        at = torch.arange(max_seq_len).double()[:, None]
        angles = [at * 10000.0 ** (-torch.arange(0, dim, 2) / dim) for dim in self.split_sizes]
        angles = torch.cat(angles, dim=1).repeat_interleave(2, dim=1)
        if cut_by_thirds:
            self.split_sizes = [head_dim - 2 * (head_dim // 3), head_dim // 3, head_dim // 3]
        self.register_buffer("freqs", torch.stack((angles.cos(), angles.sin())).float(), persistent=False)

    def forward(self, frames: int, height: int, width: int) -> Tensor:
        """(2, 1, frames * height * width, 1, head_dim), cosines first."""
        t, h, w = self.freqs.split(self.split_sizes, dim=-1)
        t = t[:, :frames, None, None].expand(-1, -1, height, width, -1)
        h = h[:, None, :height, None].expand(-1, frames, -1, width, -1)
        w = w[:, None, None, :width].expand(-1, frames, height, -1, -1)
        return torch.cat([t, h, w], dim=-1).flatten(1, 3)[:, None, :, None]


class WanTransformerBlock(nn.Module):
    """Self-attention over the video, cross-attention to the text, feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn2 = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU("tanh"), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, text: Tensor, temb: Tensor, rotary: Tensor) -> Tensor:
        """`temb` scales and shifts what the self-attention sees."""
        scale, shift = temb.unsqueeze(1).chunk(2, dim=-1)
        y = self.norm1(x) * (1 + scale) + shift
        q, k, v = self.norm_q(self.to_q(y)), self.norm_k(self.to_k(y)), self.to_v(y)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        cos, sin = rotary
        q, k = (y * cos + torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2) * sin for y in (q, k))
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))
        x = x + self.to_out(y.transpose(1, 2).flatten(2))
        x = x + self.attn2(self.norm2(x), text, text, need_weights=False)[0]
        return x + self.ffn(self.norm3(x))


class WanTransformer3DModel(nn.Module):
    """Denoises video latents (batch, channels, frames, height, width); returns `sample`."""

    def __init__(self, channels: int = 4, dim: int = 32, text_dim: int = 12, *, cut_by_thirds: bool) -> None:
        super().__init__()
        self.rope = WanRotaryPosEmbed(dim // 2, cut_by_thirds=cut_by_thirds)
        self.patch_embedding = nn.Conv3d(channels, dim, (1, 2, 2), stride=(1, 2, 2))
        self.time_embedder, self.text_embedder = nn.Linear(1, 2 * dim), nn.Linear(text_dim, dim)
        self.blocks = nn.ModuleList(WanTransformerBlock(dim, 2) for _ in range(2))
        self.proj_out = nn.ConvTranspose3d(dim, channels, (1, 2, 2), stride=(1, 2, 2))

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Output:
        """`timestep` is (batch,), the text is (batch, length, text_dim)."""
        x = self.patch_embedding(hidden_states)
        grid = x.shape[2:]
        rotary, temb = self.rope(*grid), self.time_embedder(timestep.to(x)[:, None] / 1000)
        x, text = x.flatten(2).transpose(1, 2), self.text_embedder(encoder_hidden_states)
        for block in self.blocks:
            x = block(x, text, temb, rotary)
        return Output(sample=self.proj_out(x.transpose(1, 2).unflatten(2, grid)))


def buggy() -> nn.Module:
    """Cuts the table by thirds."""
    return WanTransformer3DModel(cut_by_thirds=True)


def healthy() -> nn.Module:
    """Cuts the table as it was built."""
    return WanTransformer3DModel(cut_by_thirds=False)


def _forward(model: nn.Module, frames: Tensor) -> Tensor:
    """Take and return videos (batch, frames, 16) whose frames are single patches of 2x2."""
    video = frames.unflatten(-1, (4, 2, 2)).transpose(1, 2)
    text = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(0)).to(frames)
    time = torch.full((len(frames),), 400, device=frames.device)
    sample = model(video, time, text.expand(len(frames), -1, -1)).sample
    return sample.transpose(1, 2).flatten(2)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the call for frames of one patch, and that time turns the first 8 of 16 channels."""
    time_axis = RotaryClaim(theta=10000.0, dim=8, layout="interleaved")
    return ModelSpec.of(make, inputs="vectors", width=16, max_length=32, forward=_forward, rotary=time_axis)


def observe(model: nn.Module) -> Tensor:
    """Output minus the output with 4 + 2 + 2 channel pairs turned by time, row and column."""
    gen = torch.Generator().manual_seed(1)
    video, text = torch.randn(1, 4, 3, 8, 6, generator=gen), torch.randn(1, 5, 12, generator=gen)
    inputs = video, torch.tensor([400.0]), text
    at = torch.cartesian_prod(*(torch.arange(float(n)) for n in (3, 4, 3)))
    angles = [at[:, axis, None] * 10000.0 ** (-torch.arange(n) / n) for axis, n in enumerate((4, 2, 2))]
    angles = torch.cat(angles, dim=1).repeat_interleave(2, dim=1)[None, :, None]
    with torch.no_grad():
        plain = model.eval()(*inputs).sample
        hook = model.rope.register_forward_hook(lambda *_: torch.stack((angles.cos(), angles.sin())))
        expected = model(*inputs).sample
    hook.remove()
    return plain - expected
