"""Subject: a model under examination, which is rebuilt for each check."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.result import Examined
from stackwise.subject.inference import logits_of
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject(Examined):
    """Model under examination.

    Attributes:
        spec: description of the model.
        device: device of the model.
        seed: seed of weights, inputs and dropout.
    """

    spec: ModelSpec
    device: torch.device
    seed: int = 0

    def is_same(self, other: Subject) -> bool:
        """Return True if `other` has the same spec object, device and seed."""
        return self.spec is other.spec and (self.device, self.seed) == (other.device, other.seed)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.spec.name

    def model(
        self, *, train: bool = False, dtype: torch.dtype | None = None, fill_zeros: bool = False
    ) -> nn.Module:
        """Return a new model.

        Args:
            train: train mode or eval mode.
            dtype: dtype of floating-point weights and buffers. Complex ones get the complex dtype of it.
            fill_zeros: replace weights that are zero by random ones. See `starts_at_zero`.
        """
        model = self.spec.create(self.device, self.seed)
        if fill_zeros:
            generator = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                for p in _zero_weights(model):
                    p.copy_(0.02 * torch.randn(p.shape, generator=generator))
        if dtype is not None:
            model._apply(lambda tensor: _as_wide_as(tensor, dtype))  # type: ignore[no-untyped-call]
        return model.train(train)

    @property
    def starts_at_zero(self) -> bool:
        """True if a weight (not a bias) is all zero, as in branches and heads that are off at the start.

        It hides the code before it until it is trained or replaced by a random one.
        """
        return bool(_zero_weights(self.spec.create(self.device, self.seed)))

    def inputs(self, batch_size: int, seq_len: int | None = None, *, shift: int = 0) -> Tensor:
        """Return a batch, another one for each `shift`."""
        seq_len = self.seq_len if seq_len is None else seq_len
        return self.spec.batch(batch_size, seq_len, device=self.device, seed=self.seed + 7919 * shift)

    @property
    def seq_len(self) -> int:
        """Number of positions T of inputs, within the limit of the model."""
        return min(self.spec.seq_len, self.spec.max_length or self.spec.seq_len)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the logits without gradients. Random choices (dropout) are the same at each call."""
        return self.call(model, lambda: self.spec.logits(model, inputs.clone()))

    @torch.no_grad()
    def call(self, model: nn.Module, function: Callable[[], Any]) -> Tensor:
        """Return the logits in the result of a function, without gradients and with the same random choices.

        Buffers that the call updates (running statistics) are restored, so that calls are comparable.
        """
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with self.fixed_randomness():
            output = logits_of(function())
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])
        return output

    def fixed_randomness(self) -> AbstractContextManager[None]:
        """Return a context in which random choices start from the seed. It restores random states."""
        return seeded(self.seed, self.device)


def _zero_weights(model: nn.Module) -> list[nn.Parameter]:
    named = model.named_parameters()
    return [p for name, p in named if p.is_floating_point() and not name.endswith("bias") and not p.any()]


def _as_wide_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        with warnings.catch_warnings(action="ignore"):  # complex float16 is experimental
            return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
