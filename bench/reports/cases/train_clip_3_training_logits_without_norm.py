"""train-CLIP#3 (Zasder3/train-CLIP): the training loss compares features that have no unit length.

`forward`, and so the validation loss, divides the features by their length. The training step calls
`encode_image` and `encode_text` and multiplies their results as they are. Its logits are no cosines.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, CONTEXT, IMAGE, PATCH = 50, 8, 16, 4


def transformer(width: int, heads: int) -> nn.TransformerEncoder:
    """Return two pre-norm layers."""
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class CLIP(nn.Module):
    """Image and text encoder."""

    def __init__(self, width: int = 32, heads: int = 4, embed_dim: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, PATCH, PATCH, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width) * width**-0.5)
        self.image_positions = nn.Parameter(torch.randn((IMAGE // PATCH) ** 2 + 1, width) * width**-0.5)
        self.visual, self.ln_post = transformer(width, heads), nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.randn(width, embed_dim) * width**-0.5)
        self.token_embedding = nn.Embedding(VOCAB, width)
        self.positional_embedding = nn.Parameter(torch.randn(CONTEXT, width) * 0.01)
        self.transformer, self.ln_final = transformer(width, heads), nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, embed_dim) * width**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def encode_image(self, image: Tensor) -> Tensor:
        """`image` is (batch, 3, IMAGE, IMAGE)."""
        x = self.conv1(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.image_positions
        return self.ln_post(self.visual(x)[:, 0]) @ self.proj

    def encode_text(self, text: Tensor) -> Tensor:
        """`text` is (batch, CONTEXT). Its end token has the largest id."""
        x = self.token_embedding(text) + self.positional_embedding
        mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool, device=x.device).triu(1)
        x = self.ln_final(self.transformer(x, mask=mask))
        return x[torch.arange(len(x), device=x.device), text.argmax(dim=-1)] @ self.text_projection

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of each image and of each text."""
        image_features = F.normalize(self.encode_image(image), dim=1)
        text_features = F.normalize(self.encode_text(text), dim=1)
        logits = self.logit_scale.exp() * image_features @ text_features.t()
        return logits, logits.t()


class CLIPWrapper(nn.Module):
    """CLIP with its training step."""

    def __init__(self, *, normalize: bool) -> None:
        super().__init__()
        self.normalize, self.model = normalize, CLIP()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of each image and of each text."""
        return self.model(image, text)

    def training_step(self, image: Tensor, text: Tensor) -> Tensor:
        """Return the contrastive loss."""
        ims, txt = self.model.encode_image(image), self.model.encode_text(text)
        if self.normalize:
            ims, txt = F.normalize(ims, dim=1), F.normalize(txt, dim=1)
        image_logits = ims @ txt.t() * self.model.logit_scale.exp()
        ground_truth = torch.arange(len(image_logits), device=image.device)
        return (
            F.cross_entropy(image_logits, ground_truth) + F.cross_entropy(image_logits.t(), ground_truth)
        ) / 2


def buggy() -> nn.Module:
    """Multiply the features as they are."""
    return CLIPWrapper(normalize=False)


def healthy() -> nn.Module:
    """Multiply unit vectors."""
    return CLIPWrapper(normalize=True)


def _texts(image: Tensor) -> Tensor:
    """Return a text for each image, with the end token behind it."""
    rows, at = torch.arange(len(image), device=image.device), torch.arange(CONTEXT, device=image.device)
    text = 1 + (11 * rows[:, None] + 7 * at) % (VOCAB - 2)
    return torch.where(at < CONTEXT - 1, text, VOCAB - 1)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State images, their unit vectors, and the loss of the training step."""
    return ModelSpec.of(
        make,
        make_batch=_make_batch,
        per_position=False,
        forward=lambda model, image: F.normalize(model.model.encode_image(image), dim=1),
        loss=lambda model, image: model.training_step(image, _texts(image)),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the training loss minus the loss of the logits of `forward`."""
    image = _make_batch(4, 0, torch.Generator().manual_seed(1))
    of_images, of_texts = model(image, _texts(image))
    truth = torch.arange(4)
    wanted = (F.cross_entropy(of_images, truth) + F.cross_entropy(of_texts, truth)) / 2
    return model.training_step(image, _texts(image)) - wanted
