"""Sizes: candidates for the width and length of the inputs, from layers and settings.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.inference.output import cast, logits_of
from stackwise.support.system_errors import is_out_of_memory

__all__ = [
    "example_batch",
    "is_sequence",
    "length_limit",
    "takes_more",
    "vocabulary_candidates",
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
)
# Attributes that hold the configuration of a model.
_SETTINGS = ("config", "cfg", "args", "params")


def vocabulary_candidates(model: nn.Module) -> list[int]:
    """Return possible vocabulary sizes, in ascending order."""
    config = getattr(model, "config", None)
    named = [getattr(config, "vocab_size", None)] + [
        getattr(model, n, None) for n in ("vocab_size", "num_tokens")
    ]
    seen = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    # Ascending, so that ids beyond an embedding come last: on CUDA, an index out of range ends the process.
    return sorted({v for v in (*named, *seen) if isinstance(v, int) and v > 0})


def width_candidates(model: nn.Module) -> list[int]:
    """Return possible widths of input vectors, the likeliest first."""
    widths: list[Any] = [getattr(model, name, None) for name in ("d_model", "dim", "hidden_size")]
    for module in model.modules():
        match module:
            case nn.LayerNorm() | nn.RMSNorm():
                widths.append(module.normalized_shape[-1])
            case nn.Linear():
                widths.append(module.in_features)
            case nn.MultiheadAttention():
                widths.append(module.embed_dim)
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


@torch.no_grad()
def takes_more(model: nn.Module, known: Mapping[str, Any]) -> bool:
    """Return True if the model takes one position more than its limit.

    A limit is believed without a trial if it is long, if `make_batch` is declared, and on CUDA, where an
    index out of range ruins the process.
    """
    limit = known["max_length"]
    on_cpu = next((p.device.type for p in model.parameters()), "cpu") == "cpu"
    if limit is None or limit > _LONGEST_TRIAL or not on_cpu or "make_batch" in known:
        return False
    inputs = example_batch(model, {**known, "seq_len": limit + 1})[:1]
    try:
        return logits_of(known["forward"](model, inputs)).shape[:2] == inputs.shape[:2]
    except Exception as error:  # any failure but this one is an answer: it does not
        if is_out_of_memory(error):
            raise
        return False


def example_batch(model: nn.Module, known: Mapping[str, Any]) -> Tensor:
    """Return two rows that the model takes, from `make_batch` if it is declared."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    shape = (2, known["seq_len"])
    if "make_batch" in known:
        inputs: Tensor = known["make_batch"](*shape, torch.Generator().manual_seed(0))
        return cast(inputs.to(device), model)
    if known["inputs"] == "tokens":
        return torch.randint(known["width"], shape, device=device)
    return cast(torch.randn(*shape, known["width"], device=device), model)


def is_sequence(inputs: Tensor) -> bool:
    """Return True for ids (B, T) and vectors (B, T, C), False for images and other inputs."""
    return inputs.ndim == (3 if inputs.is_floating_point() else 2)
