"""Subject: a model under examination, which is rebuilt for each check."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stackwise.checks.engine.template import Template
from stackwise.checks.result import Examined
from stackwise.subject.inference import logits_of
from stackwise.subject.spec import ModelSpec

__all__ = ["LARGE", "Subject", "forget_results", "kept_buffers"]

T = TypeVar("T")

# Number of parameters above which a model is built again instead of copied, and variations are not combined,
# because copies need too much time and memory.
LARGE = 20_000_000


@dataclass(frozen=True)
class Subject(Examined):
    """Model under examination, with a device and a seed."""

    spec: ModelSpec

    def once(self, key: str, trial: Callable[[], T]) -> T:
        """Return the result of a trial, which runs only once for this spec, device and seed.

        Only the results of the last spec are stored.
        """
        if not (_results and _results[0][0] is self.spec):
            _results[:] = [(self.spec, {})]
        results, place = _results[0][1], (key, self.device, self.seed)
        if place not in results:
            results[place] = trial()
        result: T = results[place]
        return result

    def model(
        self, *, train: bool = False, dtype: torch.dtype | None = None, fill_zeros: bool = False
    ) -> nn.Module:
        """Return a new model.

        Args:
            train: train mode or eval mode.
            dtype: dtype of floating-point weights and buffers. Complex ones get the complex dtype of it.
            fill_zeros: replace weights that are zero by random ones. See `starts_at_zero`.
        """
        template = self.once("template", self._template)
        model = self.spec.create(self.device, self.seed) if template is None else template.copy()
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
        return bool(_zero_weights(self.model()))

    def _template(self) -> Template | None:
        """Return the template that new models are copied from, or None if copies may share state."""
        if self.spec.n_parameters > LARGE:
            return None
        template = Template(self.spec.create(self.device, self.seed))

        def call(model: nn.Module) -> Tensor:
            with self.fixed_randomness():
                return self.spec.logits(model.eval(), self.inputs(1))

        return template if template.is_pickled and template.has_own_tensors(call) else None

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
        with kept_buffers(model), self.fixed_randomness():
            return logits_of(function())


_results: list[tuple[ModelSpec, dict[tuple[str, torch.device, int], Any]]] = []


def forget_results() -> None:
    """Free the results of `Subject.once`, with their models."""
    _results.clear()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers that calls in the block update, such as running statistics."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])


def _zero_weights(model: nn.Module) -> list[nn.Parameter]:
    named = model.named_parameters()
    return [p for name, p in named if p.is_floating_point() and not name.endswith("bias") and not p.any()]


def _as_wide_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        with warnings.catch_warnings(action="ignore"):  # complex float16 is experimental
            return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
