"""SimpleTuner#904 (bghira/SimpleTuner): Flux's attention mask has the order image, text, not text, image.

Queries and keys are in the order text, image. The mask for padded text hides image tokens and leaves padded
text visible. https://github.com/bghira/SimpleTuner/issues/904
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class FluxBlock(nn.Module):
    """Joint attention of text and image tokens with separate projections."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv, self.add_qkv = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.to_out, self.to_add_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.ff_context = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(4))
        self.modulation = nn.Linear(dim, 2 * dim)

    def forward(
        self, image: Tensor, text: Tensor, temb: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One block."""
        shift, scale = self.modulation(F.silu(temb))[:, None].chunk(2, dim=-1)
        joint = torch.cat(
            (self.add_qkv(self.norms[0](text)), self.to_qkv(self.norms[1](image) * (1 + scale) + shift)),
            dim=1,
        )
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in joint.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        text = text + self.to_add_out(attended[:, : text.shape[1]])
        image = image + self.to_out(attended[:, text.shape[1] :])
        return image + self.ff(self.norms[2](image)), text + self.ff_context(self.norms[3](text))


class FluxTransformer2DModel(nn.Module):
    """Velocity of packed latents under a text."""

    def __init__(self, text_first: bool, channels: int = 8, text_dim: int = 12, dim: int = 32) -> None:
        super().__init__()
        self.text_first = text_first
        self.x_embedder, self.context_embedder = nn.Linear(channels, dim), nn.Linear(text_dim, dim)
        self.image_positions = nn.Parameter(0.1 * torch.randn(16, dim))
        self.time_embed = nn.Sequential(nn.Linear(8, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.transformer_blocks = nn.ModuleList(FluxBlock(dim, 4) for _ in range(2))
        self.norm_out, self.proj_out = nn.LayerNorm(dim), nn.Linear(dim, channels)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Takes image tokens (batch, 16, channels); `attention_mask` is that of the text."""
        image = self.x_embedder(hidden_states) + self.image_positions
        text = self.context_embedder(encoder_hidden_states)
        angles = timestep[:, None].to(image.dtype) * 10.0 ** torch.arange(4, device=image.device)
        temb = self.time_embed(torch.cat((angles.cos(), angles.sin()), dim=-1).to(image.dtype))
        mask = None
        if attention_mask is not None:
            ones = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
            parts = (attention_mask.bool(), ones) if self.text_first else (ones, attention_mask.bool())
            mask = torch.cat(parts, dim=1)[:, None, None]
        for block in self.transformer_blocks:
            image, text = block(image, text, temb, mask)
        return self.proj_out(self.norm_out(image))


def buggy() -> nn.Module:
    """Mask of image and text."""
    return FluxTransformer2DModel(text_first=False)


def healthy() -> nn.Module:
    """Mask of text and image."""
    return FluxTransformer2DModel(text_first=True)


def _called(model: nn.Module, text: Tensor, keep: Tensor | None = None) -> Tensor:
    latents = (
        torch.arange(128, device=text.device).view(1, 16, 8).to(text.dtype).sin().expand(len(text), -1, -1)
    )
    return model(latents, text, torch.full((len(text),), 0.5, device=text.device), attention_mask=keep)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The text is the input, with padding on the right; the last block's text output is not used."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=12,
        per_position=False,
        causal=False,
        forward=_called,
        masked=_called,
        padding_sides=("right",),
        unused=("transformer_blocks.1.to_add_out", "transformer_blocks.1.ff_context"),
    )


def observe(model: nn.Module) -> Tensor:
    """Output with five words and three of padding, less that with five words."""
    text = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(1))
    keep = (torch.arange(8) < 5).expand(2, -1)
    with torch.no_grad():
        return _called(model, text, keep) - _called(model, text[:, :5])
