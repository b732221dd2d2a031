"""Inputs: candidates for the inputs of a model, from its layers and settings.

Shapes: B batch, T positions, C channels or features, H height, W width, L samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.call_form import attempt
from stackwise.subject.output import cast, logits_of
from stackwise.support.hooks import temporary_hooks

__all__ = [
    "RandomBatch",
    "example_batch",
    "image_channels",
    "image_sizes",
    "is_sequence",
    "length_limit",
    "limit_by_trial",
    "made_batch",
    "random_batches",
    "reads_images_or_audio",
    "vocabulary_candidates",
    "vocabulary_read",
    "width_candidates",
]

_LONGEST_TRIAL = 1024
# Names of the longest sequence. Some of them have other meanings too, such as a block of sparse attention.
_LIMITS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_length",
    "max_seq_length",
    "max_sequence_length",
    "max_context_length",
    "max_positions",
    "max_len",
    "n_positions",
    "n_ctx",
    "context_length",
    "context_size",
    "block_size",
    "seq_len",
)
# Attributes that hold the configuration of a model.
_SETTINGS = ("config", "cfg", "args", "params")
_IMAGE_SIZES = ("image_size", "img_size", "input_size", "resolution")
# If no setting names the size: small ones first, and those of MNIST and ImageNet.
_TRIAL_SIZES = (32, 28, 64, 96, 224, 256, 8, 48, 84, 128, 16)
_LARGEST_IMAGE = 1024
_TRIAL_FRAMES, _MOST_VIDEO_SIZES = (4, 8, 16), 8
_TRIAL_MELS, _TRIAL_FRAMES_OF_SPEECH = (80, 128, 64, 40), 100
_TRIAL_SAMPLES = (64, 400, 1600, 4000, 16_000)
_READERS = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.RNNBase)


@dataclass(frozen=True)
class RandomBatch:
    """`make_batch` of a model that takes neither ids (B, T) nor vectors (B, T, C), such as images.

    Attributes:
        shape: shape of one row.
    """

    shape: tuple[int, ...]

    def __call__(self, batch_size: int, seq_len: int, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return normal random numbers (batch_size, *shape)."""
        return torch.randn(batch_size, *self.shape, generator=generator)


def reads_images_or_audio(model: nn.Module) -> bool:
    """Return True if the first layer is a convolution of images or videos, or if transformers names such."""
    first = next((m for m in model.modules() if isinstance(m, _READERS)), None)
    named = getattr(model, "main_input_name", "") in ("pixel_values", "input_values", "input_features")
    return named or isinstance(first, nn.Conv2d | nn.Conv3d)


def random_batches(model: nn.Module) -> Iterator[RandomBatch]:
    """Yield images, videos, audio (L) or (C, L), spectrograms and features (C).

    Images are (C, H, W), and videos (C, frames, H, W) or (frames, C, H, W).

    The likeliest come first.
    """
    channels = image_channels(model)
    yield from _speech(model)
    if channels is not None:
        yield from (RandomBatch((channels, *size)) for size in image_sizes(model))
    if channels == 1:
        yield from (RandomBatch((mels, _TRIAL_FRAMES_OF_SPEECH)) for mels in _TRIAL_MELS)
    others = [*_videos(model), *_waves(model)]
    yield from others
    yield from (RandomBatch((width,)) for width in width_candidates(model))
    if channels is not None:  # frames, each an image
        yield from (RandomBatch((n, channels, *size)) for n in _TRIAL_FRAMES for size in image_sizes(model))
    if channels is None and not others:
        yield from (RandomBatch((n, *size)) for n in _patch_channels(model) for size in image_sizes(model))


def _speech(model: nn.Module) -> Iterator[RandomBatch]:
    """Yield spectrograms and audio for a model whose main input is input_values."""
    if getattr(model, "main_input_name", "") == "input_values":
        config = getattr(model, "config", None)
        mels, frames = (getattr(config, name, None) for name in ("num_mel_bins", "max_length"))
        if isinstance(frames, int) and isinstance(mels, int):
            yield RandomBatch((frames, mels))
        yield from (RandomBatch((size,)) for size in _TRIAL_SAMPLES[1:])


def _videos(model: nn.Module) -> Iterator[RandomBatch]:
    video = next((m for m in model.modules() if isinstance(m, nn.Conv3d)), None)
    if video is not None:
        frames = (getattr(model, "num_frames", None), 2 * video.stride[0], *_TRIAL_FRAMES)
        named_frames = [each for each in frames if isinstance(each, int)]
        for size in image_sizes(model)[:_MOST_VIDEO_SIZES]:
            yield from (RandomBatch((video.in_channels, n, *size)) for n in dict.fromkeys(named_frames))


def _waves(model: nn.Module) -> Iterator[RandomBatch]:
    """Yield audio for a convolution over time."""
    conv = next((m for m in model.modules() if isinstance(m, nn.Conv1d)), None)
    if conv is not None:
        for size in _TRIAL_SAMPLES:
            yield RandomBatch((conv.in_channels, size))
            if conv.in_channels == 1:
                yield RandomBatch((size,))


def _patch_channels(model: nn.Module) -> list[int]:
    """Return the channels of images whose patches, cut without a convolution, fit the first linear layer."""
    first = next((m for m in model.modules() if isinstance(m, _READERS)), None)
    if not isinstance(first, nn.Linear):
        return []
    sizes = {n: first.in_features / n for n in (3, 1)}
    return [n for n, size in sizes.items() if size > 1 and size == math.isqrt(int(size)) ** 2]


def image_channels(model: nn.Module) -> int | None:
    """Return the number of channels of the images that the model takes; None: it has no 2d convolution."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    named = getattr(getattr(model, "config", None), "num_channels", None)
    return named if isinstance(named, int) else first.in_channels if first is not None else None


def image_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Return heights and widths: those of settings first."""
    named: list[Any] = []
    for module in (m for m in model.modules() if not isinstance(m, nn.RNNBase)):
        named += [getattr(owner, n, None) for owner in (module, _settings_of(module)) for n in _IMAGE_SIZES]
    sizes = [
        (value, value) if isinstance(value, int) else tuple(value[-2:])
        for value in (*named, *_TRIAL_SIZES)
        if (type(value) is int and 0 < value <= _LARGEST_IMAGE)
        or (isinstance(value, list | tuple) and len(value) > 1 and all(type(v) is int for v in value))
    ]
    return list(dict.fromkeys(sizes))


def _settings_of(module: nn.Module) -> Any:
    return next((getattr(module, name) for name in _SETTINGS if hasattr(module, name)), None)


def vocabulary_candidates(model: nn.Module) -> list[int]:
    """Return possible vocabulary sizes, in ascending order."""
    config = getattr(model, "config", None)
    named = [getattr(config, "vocab_size", None)] + [
        getattr(model, n, None) for n in ("vocab_size", "num_tokens")
    ]
    seen = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    # Ascending, so that ids beyond an embedding come last: on CUDA, an index out of range ends the process.
    return sorted({v for v in (*named, *seen) if isinstance(v, int) and v > 0})


def vocabulary_read(model: nn.Module, call: Callable[..., Any], ids: Tensor) -> int | None:
    """Return the size of the smallest embedding that reads `ids` (B, T) or their transpose, or None.

    An embedding of positions may read ids too, to find padding (FSMT).
    """
    sizes: list[int] = []

    def see(module: nn.Module, given: tuple[Any, ...]) -> None:
        read = next((each for each in given if isinstance(each, Tensor)), None)
        if read is not None and (torch.equal(read, ids) or torch.equal(read, ids.transpose(0, 1))):
            sizes.append(module.num_embeddings)  # type: ignore[arg-type]

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    with temporary_hooks(module.register_forward_pre_hook(see) for module in embeddings):
        attempt(lambda: call(model, ids))
    return min(sizes, default=None)


def width_candidates(model: nn.Module) -> list[int]:
    """Return possible widths of input vectors, the likeliest first."""
    widths: list[Any] = [getattr(model, name, None) for name in ("d_model", "dim", "hidden_size")]
    last: int | None = None  # the output width of a denoiser is its input width
    for module in model.modules():
        match module:
            case nn.LayerNorm() | nn.RMSNorm():
                widths.append(module.normalized_shape[-1])
            case nn.Linear():
                widths.append(module.in_features)
                last = module.out_features
            case nn.RNNBase():
                widths.append(module.input_size)
            case nn.Conv1d():
                widths.append(module.in_channels)
            case nn.MultiheadAttention():
                widths.append(module.embed_dim)
    widths.append(last)
    return list(dict.fromkeys(w for w in widths if isinstance(w, int) and w > 0))


def length_limit(model: nn.Module) -> tuple[int | None, bool]:
    """Return the longest sequence of the settings (None: no limit), and True if the name is ambiguous."""
    config = getattr(model, "config", None)
    owners = (model, *(getattr(model, name, None) for name in _SETTINGS))
    certain = [(config, "max_position_embeddings"), (model, "max_seq_len"), (model, "max_length")]
    # max_length of a configuration may be the length of generated texts.
    doubtful = [(o, name) for name in _LIMITS for o in owners if o is model or name != "max_length"]
    for place, (owner, name) in enumerate(certain + doubtful):
        limit = getattr(owner, name, None)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return limit, place >= len(certain)
    return None, False


def limit_by_trial(model: nn.Module, known: Mapping[str, Any], *, is_doubtful: bool) -> int | None:
    """Return the longest sequence that the model takes, near the limit of its settings.

    If the name of the limit is ambiguous and the model takes one position more, there is no limit. A table of
    positions with a padding_idx reserves the rows up to it, or one or two (RoBERTa). A limit is used without
    a trial if it is long, if `make_batch` is declared, and on CUDA, where an index out of range ruins the
    process.
    """
    limit: int | None = known["max_length"]
    on_cpu = next((p.device.type for p in model.parameters()), "cpu") == "cpu"
    if limit is None or limit > _LONGEST_TRIAL or not on_cpu or "make_batch" in known:
        return limit

    # Modules like an embedding, such as one that quantises its table, have the same attributes.
    tables: list[Any] = [each for each in model.modules() if getattr(each, "padding_idx", None) is not None]

    def takes(length: int) -> bool:
        inputs = example_batch(model, {**known, "seq_len": length})[:1]
        if known["inputs"] == "tokens":  # padding may take no position
            for table in tables:
                inputs[inputs == table.padding_idx] = (table.padding_idx + 1) % known["width"]
        logits = attempt(lambda: logits_of(known["forward"](model, inputs)))
        return logits is not None and logits.shape[:2] == inputs.shape[:2]

    if is_doubtful and takes(limit + 1):
        return None
    paddings = [each.padding_idx for each in tables if len(getattr(each, "weight", ())) == limit]
    lengths = (limit, limit - 1, limit - 2, *(limit - 1 - row for row in paddings)) if paddings else (limit,)
    return next((length for length in lengths if length > 0 and takes(length)), limit)


def example_batch(model: nn.Module, known: Mapping[str, Any]) -> Tensor:
    """Return two rows that the model takes, from `make_batch` if it is declared."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    shape = (2, known["seq_len"])
    if "make_batch" in known:
        inputs = made_batch(known["make_batch"], *shape, torch.Generator().manual_seed(0))
        return cast(inputs.to(device), model)
    if known["inputs"] == "tokens":
        return torch.randint(known["width"], shape, device=device)
    return cast(torch.randn(*shape, known["width"], device=device), model)


def made_batch(
    make_batch: Callable[..., Any], batch_size: int, seq_len: int, generator: torch.Generator
) -> Tensor:
    """Return the batch of a user's function.

    Raises:
        ValueError: it is no tensor.
    """
    batch = make_batch(batch_size, seq_len, generator)
    if not isinstance(batch, Tensor):
        raise ValueError(
            f"make_batch: got {type(batch).__name__}; allowed: a function that returns a tensor. A model of "
            "several tensors gets the others from forward="
        )
    return batch


def is_sequence(inputs: Tensor) -> bool:
    """Return True for ids (B, T) and vectors (B, T, C), False for images and other inputs."""
    return inputs.ndim == (3 if inputs.is_floating_point() else 2)
