"""examples#1178 (pytorch/examples): the vision transformer has one position embedding for all patches.

Its shape is (batch size, 1, width), not (1, patches + 1, width), so that the model does not know the places
of the patches. https://github.com/pytorch/examples/issues/1178
"""

import torch
from torch import Tensor, nn


class PatchExtractor(nn.Module):
    """Pixels of each patch of an image: (B, C, H, W) to (B, patches, pixels)."""

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size

    def forward(self, input_data: Tensor) -> Tensor:
        patches = input_data.unfold(2, self.patch_size, self.patch_size)
        patches = patches.unfold(3, self.patch_size, self.patch_size)
        return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class InputEmbedding(nn.Module):
    """Projection of patches, class token and positions."""

    def __init__(self, patch_size: int, n_channels: int, latent_size: int, n_positions: int) -> None:
        super().__init__()
        self.patchify = PatchExtractor(patch_size)
        self.linear_projection = nn.Linear(patch_size**2 * n_channels, latent_size)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, latent_size))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, n_positions, latent_size))

    def forward(self, input_data: Tensor) -> Tensor:
        linear_projection = self.linear_projection(self.patchify(input_data))
        b, n, _ = linear_projection.shape
        linear_projection = torch.cat((self.class_token.expand(b, -1, -1), linear_projection), dim=1)
        return linear_projection + self.pos_embedding[:, : n + 1, :]


class EncoderBlock(nn.Module):
    """Attention and MLP, each after its norm."""

    def __init__(self, latent_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(latent_size), nn.LayerNorm(latent_size)
        self.attention = nn.MultiheadAttention(latent_size, num_heads, dropout=dropout, batch_first=True)
        self.enc_mlp = nn.Sequential(
            nn.Linear(latent_size, latent_size * 4),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(latent_size * 4, latent_size),
            nn.Dropout(dropout),
        )

    def forward(self, emb_patches: Tensor) -> Tensor:
        first_norm = self.norm1(emb_patches)
        first_added = self.attention(first_norm, first_norm, first_norm)[0] + emb_patches
        return self.enc_mlp(self.norm2(first_added)) + first_added


class ViT(nn.Module):
    """Classifier of images of 32 x 32 pixels."""

    def __init__(
        self, *, n_positions: int, latent_size: int = 32, num_encoders: int = 2, num_classes: int = 10
    ) -> None:
        super().__init__()
        self.embedding = InputEmbedding(8, 3, latent_size, n_positions)
        self.encoders = nn.ModuleList(EncoderBlock(latent_size, 4, dropout=0.1) for _ in range(num_encoders))
        self.mlp_head = nn.Sequential(
            nn.LayerNorm(latent_size),
            nn.Linear(latent_size, latent_size),
            nn.Linear(latent_size, num_classes),
        )

    def forward(self, test_input: Tensor) -> Tensor:
        enc_output = self.embedding(test_input)
        for enc_layer in self.encoders:
            enc_output = enc_layer(enc_output)
        return self.mlp_head(enc_output[:, 0])


def buggy() -> nn.Module:
    """One embedding (with a batch size of 1)."""
    return ViT(n_positions=1)


def healthy() -> nn.Module:
    """An embedding of each patch, and of the class token."""
    return ViT(n_positions=17)


@torch.no_grad()
def observe(model: nn.Module) -> float:
    """Largest change of the logits if the left and the right half of the image are exchanged."""
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return (model.eval()(image) - model(image.roll(16, dims=3))).abs().max().item()
