"""dreamer4#2 (lucidrains/dreamer4): the attention of the video tokenizer has no mask at all.

Encoder and decoder should be causal over frames. In the encoder, latents see the patches but are not seen by
them, and the other way round in the decoder. The function that makes the mask is called without `causal=True`
and with 0 special tokens, so each frame is encoded with the frames after it.
https://github.com/lucidrains/dreamer4/issues/2
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

SIZE, PATCH, LATENTS, LATENT_DIM = 4, 2, 2, 6
PATCHES = (SIZE // PATCH) ** 2


def get_mask(
    time: int, causal: bool = False, num_special_tokens: int = 0, special_attend_only_itself: bool = False
) -> Tensor:
    """Return which key (column) a query (row) sees. Special tokens are the last ones of each frame."""
    per_frame = PATCHES + LATENTS
    token = torch.arange(time * per_frame)
    frame, is_special = token // per_frame, token % per_frame >= per_frame - num_special_tokens
    q_special, k_special = is_special[:, None], is_special[None, :]
    mask = ~(q_special & ~k_special) if special_attend_only_itself else ~(~q_special & k_special)
    return mask & (frame[:, None] >= frame[None, :]) if causal else mask


class Attention(nn.Module):
    """Attention with normed queries and keys, which are rotated by their frame."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(dim)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate (batch, heads, tokens, channels) by the number of the frame."""
        half = x.shape[-1] // 2
        frame = torch.arange(x.shape[-2], device=x.device) // (PATCHES + LATENTS)
        freqs = 100.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = frame[:, None] * freqs
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return what is added to (batch, tokens, dim)."""
        qkv = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
        q, k = self.rotate(self.q_norm(q)), self.rotate(self.k_norm(k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(x.device))
        return self.to_out(y.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """Attention and feed-forward layers."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.attns = nn.ModuleList(Attention(dim, 4) for _ in range(depth))
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )
        self.norm = nn.RMSNorm(dim)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """`frames` is (batch, time, tokens of a frame, dim)."""
        x = frames.flatten(1, 2)
        for attn, ff in zip(self.attns, self.ffs, strict=True):
            x = x + attn(x, mask)
            x = x + ff(x)
        return self.norm(x).view_as(frames)


class VideoTokenizer(nn.Module):
    """Encode each frame of a video to a few latents, and decode them."""

    def __init__(self, *, masked: bool, dim: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.mask_kwargs = {"causal": True, "num_special_tokens": LATENTS} if masked else {}
        self.patch_to_tokens, self.tokens_to_patch = nn.Linear(PATCH**2, dim), nn.Linear(dim, PATCH**2)
        self.spatial_pos = nn.Parameter(torch.randn(PATCHES, dim) * 0.5)
        self.decoder_pos = nn.Parameter(torch.randn(PATCHES, dim) * 0.5)
        self.latent_tokens = nn.Parameter(torch.randn(LATENTS, dim) * 0.5)
        self.encoder, self.decoder = Layers(dim, depth), Layers(dim, depth)
        self.encoded_to_latents = nn.Sequential(nn.Linear(dim, LATENT_DIM, bias=False), nn.Tanh())
        self.latents_to_decoder = nn.Linear(LATENT_DIM, dim)

    def encode(self, video: Tensor) -> Tensor:
        """Return latents (batch, time, LATENTS, LATENT_DIM) of a video (batch, time, SIZE, SIZE)."""
        patches = video.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).flatten(4).flatten(2, 3)
        tokens = self.patch_to_tokens(patches) + self.spatial_pos
        latents = self.latent_tokens.expand(*tokens.shape[:2], -1, -1)
        mask = get_mask(video.shape[1], special_attend_only_itself=False, **self.mask_kwargs)
        tokens = self.encoder(torch.cat([tokens, latents], dim=2), mask)
        return self.encoded_to_latents(tokens[:, :, PATCHES:])

    def decode(self, latents: Tensor) -> Tensor:
        """Return the video (batch, time, SIZE, SIZE) of latents."""
        batch, time = latents.shape[:2]
        queries = self.decoder_pos.expand(batch, time, -1, -1)
        mask = get_mask(time, special_attend_only_itself=True, **self.mask_kwargs)
        tokens = self.decoder(torch.cat([queries, self.latents_to_decoder(latents)], dim=2), mask)
        patches = self.tokens_to_patch(tokens[:, :, :PATCHES])
        patches = patches.unflatten(2, (SIZE // PATCH, -1)).unflatten(-1, (PATCH, PATCH))
        return patches.transpose(3, 4).reshape(batch, time, SIZE, SIZE)

    def forward(self, video: Tensor) -> Tensor:
        """Return the loss of the reconstruction."""
        return F.mse_loss(self.decode(self.encode(video)), video)


def buggy() -> nn.Module:
    """Ask for no mask."""
    return VideoTokenizer(masked=False)


def healthy() -> nn.Module:
    """Ask for a causal mask with special tokens."""
    return VideoTokenizer(masked=True)


def _frames(x: Tensor) -> Tensor:
    return x.unflatten(-1, (SIZE, SIZE))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal autoencoder of frames."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=SIZE**2,
        causal=True,
        forward=lambda model, x: model.decode(model.encode(_frames(x))).flatten(2),
        loss=lambda model, x: model(_frames(x)),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the change of the latents of the first frames by another last frame."""
    video = torch.randn(2, 5, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    other = torch.cat([video[:, :-1], -video[:, -1:]], dim=1)
    return (model.encode(video) - model.encode(other))[:, :-1]
