"""big_vision#115 (google-research/big_vision): a port of the SigLIP loss divides by the batch size twice.

It takes the mean of n x n terms and divides by n again, so that the loss and its gradient fall with the size
of the batch. The paper sums, and divides once. https://github.com/google-research/big_vision/issues/115
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


def tower(dim: int) -> nn.TransformerEncoder:
    """Two pre-norm layers."""
    layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class SiglipModel(nn.Module):
    """Image and text tower with a pairwise sigmoid loss."""

    def __init__(self, mean: bool, vocab_size: int = 50, dim: int = 32) -> None:
        super().__init__()
        self.mean = mean
        self.patches, self.image_positions = nn.Conv2d(3, dim, 4, stride=4), nn.Embedding(16, dim)
        self.tokens, self.text_positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.vision_model, self.text_model = tower(dim), tower(dim)
        self.logit_scale = nn.Parameter(torch.tensor(10.0).log())
        self.logit_bias = nn.Parameter(torch.tensor(-10.0))

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Unit vectors of images (batch, 3, 16, 16)."""
        x = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.image_positions.weight
        return F.normalize(self.vision_model(x).mean(dim=1), dim=-1)

    def get_text_features(self, input_ids: Tensor) -> Tensor:
        """Unit vectors of texts (batch, length)."""
        x = self.tokens(input_ids) + self.text_positions.weight[: input_ids.shape[1]]
        return F.normalize(self.text_model(x)[:, -1], dim=-1)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, return_loss: bool = False) -> SimpleNamespace:
        """Similarities of all pairs, and the loss."""
        image, text = self.get_image_features(pixel_values), self.get_text_features(input_ids)
        logits = text @ image.T * self.logit_scale.exp() + self.logit_bias
        loss = None
        if return_loss:
            n = len(logits)
            terms = F.logsigmoid((2 * torch.eye(n, device=logits.device, dtype=logits.dtype) - 1) * logits)
            loss = -(terms.mean() if self.mean else terms.sum()) / n
        return SimpleNamespace(loss=loss, logits_per_text=logits, text_embeds=text, image_embeds=image)


def buggy() -> nn.Module:
    """Mean over pairs."""
    return SiglipModel(mean=True)


def healthy() -> nn.Module:
    """Sum over pairs."""
    return SiglipModel(mean=False)


def _images(model: nn.Module, ids: Tensor) -> Tensor:
    """An image for each text."""
    pixels = torch.arange(3 * 16 * 16, device=ids.device).view(1, 3, 16, 16) * ids[:, :1, None, None]
    # In double precision, so that a model of low precision gets the same images.
    return pixels.double().mul(0.01).sin().to(model.logit_scale.dtype)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The training loss is that of the model."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=50,
        causal=False,
        per_position=False,
        forward=lambda model, ids: model(ids, _images(model, ids)).text_embeds,
        loss=lambda model, ids: model(ids, _images(model, ids), return_loss=True).loss,
    )


def observe(model: nn.Module) -> Tensor:
    """Loss of a batch, less the mean of the summed terms of each text."""
    ids = torch.randint(1, 50, (6, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids, _images(model, ids), return_loss=True)
        signs = 2 * torch.eye(6) - 1
        return out.loss + F.logsigmoid(signs * out.logits_per_text).sum(dim=1).mean()
