"""Call: the ways to call a model beyond its inputs alone, each without a trace on it.

Shapes: B batch, T positions, V outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.subject import Subject
from stackwise.subject.cached_call import cache_tensors
from stackwise.subject.call_form import ContiguousCall
from stackwise.subject.capability import masked_with_positions, padding_id
from stackwise.subject.inference import cast, logits_of
from stackwise.support.system_errors import is_out_of_memory

__all__ = [
    "REFUSALS",
    "decoded",
    "dtype_of",
    "has_fixed_state",
    "leaves_state",
    "masked",
    "reads_padding_by_a_state",
    "real_inputs",
    "reason_of",
    "refusals",
]

# What a model raises that cannot be asked this: in this dtype, of this length, in this way, or with a cache
# that has no more room. NotImplementedError is a RuntimeError.
REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AssertionError)
# Share of a state's elements that one token has to change.
_MOST = 0.5


def refusals() -> tuple[type[Exception], ...]:
    """`REFUSALS`, for an except clause, which asks as an error comes; none where memory was too small.

    That error says nothing of the model, and breaks the check off.
    """
    error = sys.exception()
    return () if error is not None and is_out_of_memory(error) else REFUSALS


def masked(subject: Subject, model: nn.Module, inputs: Tensor, keep: Tensor) -> Tensor:
    """The logits (B, T, V) of a batch with padding; `keep` (B, T) is true at real positions."""
    by_mask = subject.spec.masked
    assert by_mask is not None
    return subject.call(model, lambda: by_mask(model, cast(inputs.clone(), model), keep.clone()))


def decoded(
    subject: Subject,
    model: nn.Module,
    inputs: Tensor,
    sizes: Sequence[int],
    keep: Tensor | None = None,
) -> Tensor:
    """The logits (B, T, V) of inputs that come in parts of these sizes, through a cache.

    `keep` (B, T) is true at real positions; only a `decode` that takes it as a fourth argument can be asked.
    """
    assert sum(sizes) == inputs.shape[1]
    decode: Any = subject.spec.decode
    assert decode is not None

    def run() -> Tensor:
        cache, end, outputs = None, 0, []
        for size in sizes:
            start, end = end, end + size
            extra = () if keep is None else (keep[:, :end].clone(),)
            output, cache = decode(model, cast(inputs[:, start:end].clone(), model), cache, *extra)
            outputs.append(logits_of(output))
            if outputs[-1].shape[1] != size:
                raise ValueError(f"{size} tokens at once gave {outputs[-1].shape[1]} outputs")
        return torch.cat(outputs, dim=1)

    return subject.call(model, run)


def real_inputs(
    subject: Subject,
    batch_size: int,
    seq_len: int | None = None,
    *,
    shift: int = 0,
    model: nn.Module | None = None,
) -> Tensor:
    """A batch as of `subject.inputs`, without the ids that a model takes for padding wherever they stand.

    `model` is one of the subject's, if there is one already.
    """
    inputs = subject.inputs(batch_size, seq_len, shift=shift)
    if subject.spec.inputs != "tokens" or subject.spec.make_batch is not None:
        return inputs
    model = subject.spec.create(subject.device, subject.seed) if model is None else model
    reserved = _padding_ids(model)
    # The next id that is free; of a vocabulary of padding alone nothing can be asked.
    for _ in range(len(reserved)):
        for each in reserved:
            inputs = torch.where(inputs == each, (inputs + 1) % subject.spec.width, inputs)
    return inputs


def _padding_ids(model: nn.Module) -> set[int]:
    named = [m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding)]
    named.append(padding_id(model))
    return {each for each in named if isinstance(each, int)}


@torch.no_grad()
def has_fixed_state(subject: Subject, inputs: Tensor) -> bool:
    """Return True if decoding rewrites a tensor in the cache that does not grow, as recurrent layers do.

    Memory that is allocated for later tokens does not grow either, but a token writes only its own place.

    Args:
        subject: the model, with or without a cache.
        inputs: (B, T), T > 1.
    """
    decode, model = subject.spec.decode, subject.model()
    if decode is None:
        return False
    before: list[Tensor] = []
    after: list[Tensor] = []
    cache = None
    for part in torch.split(inputs, 1, dim=1):  # a cache that rolls need not take more at once
        _, cache = decode(model, cast(part.clone(), model), cache)
        before, after = after, [tensor.clone() for tensor in cache_tensors(cache)]
    return any(_is_rewritten(*pair) for pair in zip(before, after, strict=False))


def _is_rewritten(before: Tensor, after: Tensor) -> bool:
    """Return True if most elements of a state changed. Counters of tokens are integers and do not count."""
    if before.shape != after.shape or not after.is_floating_point():
        return False
    return float((before != after).float().mean()) > _MOST


def leaves_state(subject: Subject, inputs: Tensor) -> bool:
    """Whether a call leaves floating-point tensors on the modules, beside weights and buffers."""
    model = subject.model()

    def left() -> set[tuple[str, str]]:
        return {
            (name, key)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1
        }

    before = left()
    subject.logits(model, inputs)
    return left() != before


def reads_padding_by_a_state(subject: Subject, most: int) -> bool:
    """Return True if padding on the left was only guessed to be possible, and there is a recurrent state.

    `most` is the longest row to try.
    """
    if subject.spec.masked != ContiguousCall(masked_with_positions):
        return False
    inputs = real_inputs(subject, 1, min(subject.seq_len, most))
    return has_fixed_state(subject, inputs) or leaves_state(subject, inputs)


def dtype_of(model: nn.Module) -> torch.dtype:
    """That of the first floating-point parameter; float32 where there is none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def reason_of(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
