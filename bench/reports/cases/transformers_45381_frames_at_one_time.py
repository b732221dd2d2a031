"""transformers#45381 (huggingface/transformers): all frames of a Qwen2.5-VL video get the same time position.

The interval between frames multiplies the position where the video starts, instead of the index of the frame.
https://github.com/huggingface/transformers/issues/45381
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

DIM, HEADS, PATCH, VIDEO_TOKEN, TOKENS_PER_SECOND = 48, 4, 10, 63, 2
SECTIONS = (2, 2, 2)  # frequencies of time, height and width


def apply_multimodal_rotary(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by three positions (3, batch, time), one for each section."""
    half = x.shape[-1] // 2
    inv_freq = 1e4 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = position_ids[:, :, None, :, None].double() * inv_freq
    angles = torch.cat([each[i] for i, each in enumerate(angles.split(SECTIONS, dim=-1))], dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class DecoderLayer(nn.Module):
    """Attention and MLP of the text model."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """One layer; `mask` is True for visible keys."""
        normed = self.input_layernorm(x)
        q, k, v = (
            proj(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_multimodal_rotary(q, position_ids), apply_multimodal_rotary(k, position_ids)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen25VLForConditionalGeneration(nn.Module):
    """Causal language model that reads at most one video in each row."""

    def __init__(self, *, interval_of_index: bool, vocab_size: int = 64) -> None:
        super().__init__()
        self.interval_of_index = interval_of_index
        self.visual = nn.Sequential(nn.Linear(PATCH, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.embed_tokens = nn.Embedding(vocab_size, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(DIM), nn.Linear(DIM, vocab_size, bias=False)

    def get_vision_position_ids(self, start: int, grid: list[int], interval: int) -> Tensor:
        """Return positions (3, tokens) of a video of `grid` (frames, height, width)."""
        t, h, w = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
        time = t * interval + start if self.interval_of_index else torch.full_like(t, start) * interval
        return torch.stack([time, h + start, w + start]).flatten(1)

    def get_rope_index(
        self, input_ids: Tensor, mask: Tensor, grids: Tensor | None, seconds: Tensor | None
    ) -> Tensor:
        """Return positions (3, batch, time). Text after a video continues after its last position."""
        positions = torch.ones(3, *input_ids.shape, dtype=torch.long)
        for row, (ids, keep) in enumerate(zip(input_ids.cpu(), mask.bool().cpu(), strict=True)):
            ids = ids[keep]
            spans = torch.arange(len(ids)).expand(3, -1)
            video = (ids == VIDEO_TOKEN).nonzero().flatten()
            if len(video) and grids is not None:
                start, grid = int(video[0]), grids[row].tolist()
                interval = int(TOKENS_PER_SECOND * (1.0 if seconds is None else float(seconds[row])))
                last = start + max((grid[0] - 1) * interval, grid[1] - 1, grid[2] - 1)
                frames = self.get_vision_position_ids(start, grid, interval)
                rest = torch.arange(len(ids) - start - frames.shape[1]).expand(3, -1) + last + 1
                spans = torch.cat([spans[:, :start], frames, rest], dim=1)
            positions[:, row, keep] = spans
        return positions.to(input_ids.device)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | None = None,
    ) -> SimpleNamespace:
        """Logits. The patches (tokens of all videos, PATCH) replace the video tokens."""
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        x = self.embed_tokens(input_ids)
        if pixel_values_videos is not None:
            features = self.visual(pixel_values_videos.to(x.dtype))
            x = x.masked_scatter((input_ids == VIDEO_TOKEN)[..., None], features)
        if position_ids is None:
            position_ids = self.get_rope_index(input_ids, keep, video_grid_thw, second_per_grid_ts)
        key = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = (key <= key[:, None]) & keep[:, None, None].bool() | (key == key[:, None])
        for layer in self.layers:
            x = layer(x, mask, position_ids)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))


def buggy() -> nn.Module:
    """The interval multiplies the start."""
    return Qwen25VLForConditionalGeneration(interval_of_index=False)


def healthy() -> nn.Module:
    """The interval multiplies the index of the frame."""
    return Qwen25VLForConditionalGeneration(interval_of_index=True)


def _video(model: nn.Module, ids: Tensor, **options: Tensor) -> SimpleNamespace:
    """Call with two frames of 3 x 3 patches, one second apart, between three tokens and `ids`."""
    start = torch.tensor([1, 2, 3, *[VIDEO_TOKEN] * 18], device=ids.device).expand(len(ids), -1)
    patches = torch.linspace(-2, 2, 18 * PATCH, device=ids.device).sin().view(18, PATCH)
    return model(
        torch.cat([start, ids], dim=1),
        pixel_values_videos=patches.repeat(len(ids), 1),
        video_grid_thw=torch.tensor([[2, 3, 3]] * len(ids), device=ids.device),
        second_per_grid_ts=torch.ones(len(ids), device=ids.device),
        **options,
    )


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A text after a fixed video; the vocabulary of the text is without the video token."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VIDEO_TOKEN,
        causal=True,
        forward=lambda model, ids: _video(model, ids).logits[:, 21:],
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits after a video minus those with the positions of the definition."""
    model = model.double().eval()
    frame = [(h, w) for h in range(3) for w in range(3)]
    places = [(i, i, i) for i in range(3)] + [(3 + 2 * t, 3 + h, 3 + w) for t in (0, 1) for h, w in frame]
    places += [(6 + i, 6 + i, 6 + i) for i in range(4)]
    ids = torch.tensor([[5, 6, 7, 8]])
    return _video(model, ids).logits - _video(model, ids, position_ids=torch.tensor(places).T[:, None]).logits
