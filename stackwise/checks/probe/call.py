"""Calls of a model that change neither the model nor its inputs, and the errors that a model may raise.

Shapes: B batch, T positions, V outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stackwise.checks.subject import Subject
from stackwise.subject.cached_call import cache_tensors
from stackwise.subject.capability import padding_id
from stackwise.subject.inference import cast, logits_of
from stackwise.support.system_errors import is_out_of_memory

__all__ = [
    "REFUSALS",
    "decoded",
    "dtype_of",
    "has_fixed_state",
    "leaves_state",
    "reads_padding_by_a_state",
    "real_inputs",
    "reason_of",
    "refusals",
]

# Errors of a model that does not support a dtype, a length, an argument, or a longer cache.
# NotImplementedError is a RuntimeError.
REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AssertionError)
# Share of a recurrent state's elements that one token changes.
_REWRITTEN = 0.5


def refusals() -> tuple[type[Exception], ...]:
    """Return `REFUSALS` for an except clause, or () if the current error is out of memory.

    Python evaluates the clause when an error occurs. Out of memory is not an answer of the model.
    """
    error = sys.exception()
    return () if error is not None and is_out_of_memory(error) else REFUSALS


def decoded(subject: Subject, model: nn.Module, inputs: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the logits (B, T, V) of inputs that are decoded through a cache, in parts of these sizes."""
    decode = subject.spec.decode
    assert decode is not None

    def run() -> Tensor:
        cache, outputs = None, []
        for part in torch.split(inputs, list(sizes), dim=1):
            output, cache = decode(model, cast(part.clone(), model), cache)
            outputs.append(logits_of(output))
            if outputs[-1].shape[1] != part.shape[1]:
                raise ValueError(f"{part.shape[1]} tokens at once gave {outputs[-1].shape[1]} outputs")
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
    """Return a batch of `subject.inputs` without padding ids, which some models ignore at any position.

    `model` is a model of the subject. None: a new one is built.
    """
    inputs = subject.inputs(batch_size, seq_len, shift=shift)
    if subject.spec.inputs != "tokens" or subject.spec.make_batch is not None:
        return inputs
    model = subject.spec.create(subject.device, subject.seed) if model is None else model
    declared = [m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding)]
    reserved = {each for each in (*declared, padding_id(model)) if each is not None}
    # The next id may be reserved too.
    for _ in range(len(reserved)):
        for each in reserved:
            inputs = torch.where(inputs == each, (inputs + 1) % subject.spec.width, inputs)
    return inputs


def has_fixed_state(subject: Subject, inputs: Tensor) -> bool:
    """Return True if decoding rewrites a tensor in the cache that does not grow, as recurrent layers do.

    Memory that is allocated for later tokens does not grow either, but a token writes only its own place.
    Counters of tokens are integers and do not count.

    Args:
        subject: the model, with or without a cache.
        inputs: (B, T), T > 1.
    """

    @torch.no_grad()
    def rewrites_state() -> bool:
        decode, model = subject.spec.decode, subject.model()
        if decode is None:
            return False
        before: list[Tensor] = []
        after: list[Tensor] = []
        cache = None
        for part in torch.split(inputs, 1, dim=1):  # a rolling cache may refuse several tokens at once
            _, cache = decode(model, cast(part.clone(), model), cache)
            before, after = after, [tensor.clone() for tensor in cache_tensors(cache)]
        return any(
            old.shape == new.shape
            and new.is_floating_point()
            and float((old != new).float().mean()) > _REWRITTEN
            for old, new in zip(before, after, strict=False)
        )

    return subject.once(f"fixed state of {inputs.shape[1]}", rewrites_state)


def leaves_state(subject: Subject, inputs: Tensor) -> bool:
    """Return True if a call stores floating-point tensors in attributes other than weights and buffers."""
    model = subject.model()

    def stored() -> set[tuple[str, str]]:
        return {
            (name, key)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1
        }

    before = stored()
    subject.logits(model, inputs)
    return stored() != before


def reads_padding_by_a_state(subject: Subject, most: int) -> bool:
    """Return True if the model has a recurrent state, and `padding_sides` is a guess.

    `most` is the length of the longest row to try.
    """
    if "padding_sides" not in subject.spec.assumed:
        return False
    inputs = real_inputs(subject, 1, min(subject.seq_len, most))
    return has_fixed_state(subject, inputs) or leaves_state(subject, inputs)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, or float32 without one."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def reason_of(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
