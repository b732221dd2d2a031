"""Pixels: places in output images, and numbers of the input that are read."""

import pytest
import torch
from torch import nn

from stackwise import ModelSpec

SIZE, PATCH = 16, 4


class Denoiser(nn.Module):
    """Image -> image of the same size, by patches that attend to each other."""

    join = (1, 4, 2, 5)

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 32, PATCH, stride=PATCH)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 2 * PATCH**2)

    def forward(self, images):
        x = self.embed(images)
        n = x.shape[-1]
        x = self.head(self.layer(x.flatten(2).transpose(1, 2)))
        x = x.view(len(x), n, n, 2, PATCH, PATCH)  # rows, columns, channel, row and column in the patch
        return x.permute(0, 3, *self.join).reshape(len(x), 2, SIZE, SIZE)


class WithoutPermutation(Denoiser):
    join = (1, 2, 4, 5)


class Transposed(Denoiser):
    join = (2, 4, 1, 5)


class PixelConvolutions(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))


class ImagesLast(Denoiser):
    def forward(self, images):
        return super().forward(images).movedim(1, -1)


def images(build, **declared):
    def make_batch(batch_size, _length, generator):
        return torch.randn(batch_size, 3, SIZE, SIZE, generator=generator)

    return ModelSpec.of(build, make_batch=make_batch, per_position=False, **declared)


@pytest.mark.parametrize(
    ("build", "status"),
    [
        (Denoiser, "passed"),
        (ImagesLast, "passed"),
        (PixelConvolutions, "passed"),
        (WithoutPermutation, "failed"),
        (Transposed, "failed"),
    ],
)
def test_output_images_are_aligned(subjects, build, status):
    result = subjects.ask(images(build), "pixel_alignment")
    assert result.status == status, result
    assert (result.value < 0.1) == (status == "passed")
    assert result.limit == 0.3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 32, PATCH, stride=PATCH), nn.Linear(32, 5)

    def forward(self, images):
        return self.head(self.embed(images).tanh().mean((2, 3)))


class WithoutLastChannel(Classifier):
    def forward(self, images):
        return super().forward(torch.cat((images[:, :2], images[:, :1]), dim=1))


class Cropped(Classifier):
    def forward(self, images):
        return super().forward(images[..., : SIZE - PATCH])


class RandomMask(Classifier):
    """A masked autoencoder hides patches at random."""

    def forward(self, images):
        hidden = torch.rand(SIZE, device=images.device) < 0.5
        return super().forward(images.masked_fill(hidden, 0.0))


@pytest.mark.parametrize(
    ("build", "status", "unread"),
    [
        (Classifier, "passed", 0),
        (WithoutLastChannel, "failed", SIZE * SIZE),
        (Cropped, "warned", 3 * SIZE * PATCH),
        (RandomMask, "not applicable", None),
    ],
)
def test_pixels_and_channels_without_effect(subjects, build, status, unread):
    result = subjects.ask(images(build), "input_effect")
    assert (result.status, result.value) == (status, unread)


def test_images_of_a_classifier_have_no_place(subjects):
    assert subjects.ask(images(Classifier), "pixel_alignment").status == "not applicable"


class Strided(nn.Module):
    """Channels before time. The last two samples fill no frame."""

    def __init__(self):
        super().__init__()
        self.frames, self.head = nn.Conv1d(4, 8, 4, stride=4), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.frames(x).relu().mean(2))


def test_an_incomplete_frame_at_the_end(subjects):
    def make_batch(batch_size, _length, generator):
        return torch.randn(batch_size, 4, 30, generator=generator)

    spec = ModelSpec.of(Strided, make_batch=make_batch, per_position=False)
    result = subjects.ask(spec, "input_effect")
    assert (result.status, result.value) == ("warned", 8)


class PatchTokens(nn.Module):
    """Returns 16 vectors of 16 numbers for an image of 16 x 16 pixels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, SIZE, PATCH, stride=PATCH)

    def forward(self, images):
        return self.embed(images).flatten(2).transpose(1, 2)


def test_vectors_of_patches_are_no_image(subjects):
    assert subjects.ask(images(PatchTokens), "pixel_alignment").status == "not applicable"


class FeatureModel(nn.Module):
    """Reads a number of the features of each position."""

    def __init__(self, n_read):
        super().__init__()
        self.n_read = n_read
        self.inner, self.head = nn.Linear(n_read, 16), nn.Linear(16, 4)

    def forward(self, vectors):
        return self.head(self.inner(vectors[..., : self.n_read]).tanh())


@pytest.mark.parametrize(("n_read", "status"), [(6, "passed"), (5, "failed")])
def test_a_feature_without_effect(subjects, n_read, status):
    spec = ModelSpec.of(lambda: FeatureModel(n_read), inputs="vectors", width=6)
    result = subjects.ask(spec, "input_effect")
    assert result.status == status
    assert status == "passed" or ", 5] of" in result.where


def test_token_ids_have_no_numbers(subjects):
    for check in ("input_effect", "pixel_alignment"):
        assert (
            subjects.ask(lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)), check).status
            == "not applicable"
        )


class PatchClassifier(nn.Module):
    """Image -> classes, by patches and a class token, with `n_rows` rows of positions."""

    def __init__(self, n_rows):
        super().__init__()
        self.embed = nn.Conv2d(3, 32, PATCH, stride=PATCH)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, 32))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, n_rows, 32)) if n_rows else 0.0
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.layer(x)[:, 0])


@pytest.mark.parametrize(("n_rows", "status"), [(17, "passed"), (1, "failed"), (0, "warned")])
def test_order_of_patches_has_an_effect(subjects, n_rows, status):
    result = subjects.ask(images(lambda: PatchClassifier(n_rows)), "patch_order")
    assert (result.status, result.where) == (status, "pos_embed" if status == "failed" else "")


def test_table_of_distances_is_no_table_of_positions(subjects):
    class Windows(PatchClassifier):
        def __init__(self):
            super().__init__(0)
            self.relative_position_bias = nn.Parameter(torch.randn(32))

        def forward(self, images):
            return super().forward(images) + self.relative_position_bias.mean()

    assert subjects.ask(images(Windows), "patch_order").status == "warned"


def test_order_of_patches_is_asked_of_images_with_one_output(subjects):
    convolutions = images(lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)))
    unordered = images(lambda: PatchClassifier(0), positionless=True)

    assert subjects.ask(convolutions, "patch_order").status == "passed"
    assert subjects.ask(unordered, "patch_order").status == "not applicable"
    assert subjects.ask(lambda: nn.Embedding(31, 31), "patch_order").status == "not applicable"
