"""vmlx-swift#404 (osaurus-ai/vmlx-swift): Qwen3-VL puts image features on video tokens if the video is first.

The features of images are in front of those of videos, but the placeholders are in the order of the
conversation. One scatter fills both. https://github.com/osaurus-ai/vmlx-swift/pull/404
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, MAX_LENGTH, PATCH, IMAGE, VIDEO = 64, 32, 4, 64, 12, 0, 1
Opt = Tensor | None


class VisionModel(nn.Module):
    """Merged features of patches, and features for the first decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.norm = nn.Linear(PATCH, DIM), nn.LayerNorm(DIM, 1e-6)
        self.merger, self.deepstack_merger = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.patch_embed(pixel_values))
        return self.merger(F.gelu(x)), self.deepstack_merger(x)


class DecoderLayer(nn.Module):
    """Causal attention and a gated MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        self.qkv_proj, self.o_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate_up_proj, self.down_proj = nn.Linear(DIM, 128, bias=False), nn.Linear(64, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.o_proj(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class Qwen3VL(nn.Module):
    """Language model of text, images and videos."""

    def __init__(self, *, reorders: bool) -> None:
        super().__init__()
        self.reorders, self.visual, self.lm_head = reorders, VisionModel(), nn.Linear(DIM, VOCAB, bias=False)
        self.embed_tokens, self.embed_positions = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX_LENGTH, DIM)
        self.layers, self.norm = nn.ModuleList(DecoderLayer() for _ in range(2)), nn.RMSNorm(DIM, 1e-6)

    def forward(self, input_ids: Tensor, pixel_values: Opt = None, pixel_values_videos: Opt = None) -> object:
        """Logits. Pixels are the patches (n, PATCH) of all images, and those of all videos."""
        x, visual = self.embed_tokens(input_ids), ((input_ids == IMAGE) | (input_ids == VIDEO))[..., None]
        pixels = [each for each in (pixel_values, pixel_values_videos) if each is not None]
        features = self.visual(torch.cat(pixels)) if pixels else None
        if pixels and self.reorders:  # images are in front, each kind in the order of its placeholders
            order = input_ids[visual[..., 0]].argsort(stable=True).argsort()
            features = [rows[order] for rows in features]
        x = x if features is None else x.masked_scatter(visual, features[0])
        x = self.layers[0](x + self.embed_positions.weight[: input_ids.shape[1]])
        x = x if features is None else x + torch.zeros_like(x).masked_scatter(visual, features[1])
        return SimpleNamespace(logits=self.lm_head(self.norm(self.layers[1](x))))


def buggy() -> nn.Module:
    return Qwen3VL(reorders=False)


def healthy() -> nn.Module:
    return Qwen3VL(reorders=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Each row has a video and an image, whose patches depend on the token before their placeholder."""

    def make_batch(batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        ids = torch.randint(2, VOCAB, (batch_size, length), generator=generator)
        ids[:, 1:4], ids[:, -5:-3] = VIDEO, IMAGE
        return ids

    def forward(model: nn.Module, ids: Tensor) -> SimpleNamespace:
        patches = (F.pad(ids, (1, 0))[:, :-1, None] + torch.arange(PATCH).to(model.lm_head.weight)).sin()
        return model(ids, patches[ids == IMAGE], patches[ids == VIDEO])

    return ModelSpec.of(make, causal=True, max_length=MAX_LENGTH, make_batch=make_batch, forward=forward)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Change of the logits of a video and the text behind it by another image at the end."""
    ids = torch.tensor([[5, VIDEO, VIDEO, 6, 7, IMAGE, IMAGE, 8]])
    image, video = torch.randn(2, 2, PATCH, generator=torch.Generator().manual_seed(1))
    return (model(ids, image, video).logits - model(ids, -image, video).logits)[0, 1:5, :4]
