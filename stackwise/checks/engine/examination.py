"""Examination: the model under test, its plain answers, and their rounding.

Shapes: T positions, V outputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.engine.call import accepts, execute, loss_of, passes
from stackwise.checks.engine.question import Call, Place, Precision
from stackwise.checks.engine.template import Template
from stackwise.checks.probe.call import dtype_of, real_inputs
from stackwise.checks.probe.difference import coarsest_rounding, relative_difference
from stackwise.checks.probe.dropout import EqualDraws, WithoutDropout
from stackwise.checks.subject import Subject
from stackwise.subject.capability import padding_id
from stackwise.subject.spec import ModelSpec
from stackwise.support.global_settings import settings_now
from stackwise.support.random_state import seeded
from stackwise.support.system_errors import false_if_raised, reraise_if_out_of_memory

__all__ = [
    "HALF_PRECISION",
    "LONGEST",
    "LOSS_LIMIT",
    "NARROW_FLOOR",
    "NARROW_GRADIENT_LIMIT",
    "NARROW_LIMIT",
    "Examination",
    "Gradients",
    "gradients_in",
    "largest_gap",
    "projection",
    "randomize_constants",
    "stream",
]

Gradients = Mapping[str, Tensor]

# Largest differences of sound models in float64, relative to the variation of the output and to the norm of a
# gradient. Other shapes change the order of sums.
_OUTPUT_LIMIT, _GRADIENT_LIMIT = 1e-7, 1e-5
# If a part of the model computes in float32, the limits are this many times its measured rounding.
_ROUNDINGS = 100.0
# The limit is at least this many times the rounding of the dtype: the measured one may be 0 by chance.
_LEAST_ROUNDINGS = 16.0
# Beyond this, a comparison says nothing.
_LARGEST_LIMIT, _LARGEST_GRADIENT_LIMIT = 1e-2, 0.1
# Losses are computed in float32 by many models, in whatever dtype the model is.
LOSS_LIMIT = 1e-5
# Gradients below this share of the norm of all are rounding, such as those of a key's bias.
_FLOOR, NARROW_FLOOR = 1e-6, 1e-4
# Largest difference of outputs if a variation computes a part in float32.
NARROW_LIMIT = 1e-5
# Sums of gradients in float32 that cancel, such as those of a router's weights.
NARROW_GRADIENT_LIMIT = 3e-3
LONGEST = 24
_LONGEST_WINDOW = 64
# Length of one earlier call: above the original length of most rotary embeddings of tiny models.
_FAR = 80
# Number of lengths that are drawn, roughly.
_DRAWN_LENGTHS = 8
# Constants beyond this size are masks, not weights.
_LARGE = 1e3
# Memory for gradients of plain answers. Older ones are computed again.
_GRADIENT_BYTES = 64 * 2**20
HALF_PRECISION: tuple[Precision, ...] = (torch.bfloat16, torch.float16, "autocast")

T = TypeVar("T")


@dataclass
class Examination:
    """Model under examination: its plain answers, and everything that variations need to know of it.

    The model runs in float64 if it can. Weights and buffers that are constant get random values, so that no
    code is hidden by a factor of 0 or 1.

    Attributes:
        subject: the model, its device and its seed.
        dtype: dtype of the model. None: float64 if the model runs in it, otherwise its own.
        most: longest sequence to ask, in positions.
        random_norms: False if the weights of norms stay constant.
        settings: global settings before the first call.
    """

    subject: Subject
    dtype: Precision | None = None
    most: int = LONGEST
    random_norms: bool = True
    settings: list[Any] = field(default_factory=settings_now)
    _results: dict[str, Any] = field(default_factory=dict)
    _gradients: dict[tuple[Any, ...], Gradients] = field(default_factory=dict)

    @classmethod
    def of(cls, subject: Subject) -> Examination:
        """Return the examination that all checks of a subject share."""
        return subject.once("examination", lambda: cls(subject))

    @property
    def spec(self) -> ModelSpec:
        """Return the spec of the model."""
        return self.subject.spec

    @cached_property
    def base(self) -> nn.Module:
        """Return the model that `model` copies. It is never called."""
        return self._built(self._cast_to)

    @cached_property
    def _cast_to(self) -> torch.dtype | None:
        """Return the dtype to which a new model is cast. None: it stays as it is."""
        if self.dtype is None:
            return torch.float64 if self._runs_in(torch.float64) else None
        return self.dtype if isinstance(self.dtype, torch.dtype) else None

    def precision(self) -> AbstractContextManager[object]:
        """Return the context of each call: autocast to bfloat16, or none."""
        if self.dtype != "autocast":
            return nullcontext()
        return torch.autocast(self.subject.device.type, torch.bfloat16)

    def other_model(self) -> nn.Module:
        """Return a model of another seed in eval mode."""
        return _with_exact_norms(replace(self.subject, seed=self.subject.seed + 1).model(dtype=self._cast_to))

    def in_dtype(self, dtype: Precision) -> Examination:
        """Return the examination of the same model in another dtype."""
        # The results are shared, because lengths and capabilities are those of the model in any dtype.
        return self.once(f"examination in {dtype}", lambda: replace(self, dtype=dtype))

    @property
    def compares_values(self) -> bool:
        """Return False for half precision, in which only NaN and inf are compared."""
        return self.dtype not in HALF_PRECISION

    def model(self) -> nn.Module:
        """Return a new model in eval mode: a copy, or built again if copies are not independent."""
        return _with_exact_norms(self._template.copy() if self._can_copy else self._built(self._cast_to))

    @cached_property
    def _template(self) -> Template:
        return Template(self.base)

    @cached_property
    def _can_copy(self) -> bool:
        """Return True if a copy does not use the tensors of its original."""
        inputs = self.subject.inputs(1)
        return self._template.has_own_tensors(lambda model: self.spec.logits(model, inputs))

    def _built(self, dtype: torch.dtype | None) -> nn.Module:
        model = self.subject.model(dtype=dtype)
        _randomize_constants(model, self.subject.seed, norms=self.random_norms)
        return model

    @property
    def is_float64(self) -> bool:
        """Return True if the model runs in float64."""
        return dtype_of(self.base) == torch.float64

    @property
    def longest(self) -> int:
        """Return the longest sequence of the examination that the model takes."""
        return self.once("longest", self._longest)

    def _longest(self) -> int:
        most, window = self.most, self.spec.window
        if isinstance(window, int) and window <= _LONGEST_WINDOW:
            most = max(most, 2 * window + 3)  # a cache of this window rolls
        most = min(most, self.spec.max_length or most)
        lengths = {most, most // 2, most // 4, self.subject.seq_len, 8, 4}
        taken = (n for n in sorted(lengths, reverse=True) if 0 < n <= most and self._takes(n))
        return next(taken, self.subject.seq_len)

    @property
    def shortest(self) -> int:
        """Return the shortest length of 1, 2, 4, 8 and 16 that the model takes, or that of the checks.

        A model with patches of 8 does not take 9 positions.
        """
        return self.once("shortest", self._shortest)

    def _shortest(self) -> int:
        lengths = (n for n in (1, 2, 4, 8, 16) if n <= self.longest and self._takes(n))
        return next((n for n in lengths if n < 8 or self._takes(n + 1)), self.subject.seq_len)

    @cached_property
    def lengths(self) -> range:
        """Return all lengths that a composition may have."""
        if self.shortest == self.subject.seq_len and not self._takes(2):
            return range(self.shortest, self.shortest + 1)
        return range(max(2, self.shortest), self.longest + 1)

    @cached_property
    def drawn_lengths(self) -> range:
        """Return the lengths that are drawn: about eight, so that few sequences need a plain answer."""
        step = len(self.lengths) // _DRAWN_LENGTHS
        return self.lengths[:: -(step | 1)]  # an odd step gives even and odd lengths

    @cached_property
    def far(self) -> int:
        """Return a length far above the others that the model takes, or 0."""
        # A rotary embedding works beyond its stated limit. On CUDA, an index beyond a table ends the process.
        limit = None if self.spec.rotary else self.spec.max_length
        is_safe = limit is not None or self.subject.device.type == "cpu" or bool(self.spec.rotary)
        length = min(limit or _FAR, _FAR)
        return length if is_safe and length > self.longest and self._takes_repeated(length) else 0

    def repeated(self, number: int, length: int) -> Tensor:
        """Return sequence `number` of the longest length, repeated up to a longer one, (T,) or (T, C)."""
        x = self.sequence(number, self.longest)
        return torch.cat([x] * -(-length // len(x)))[:length]

    @false_if_raised
    def _takes_repeated(self, length: int) -> bool:
        output = self.spec.logits(self.model(), self.repeated(50, length)[None])
        return output.shape[:2] == (1, length)

    @cached_property
    @false_if_raised
    def takes_all_lengths(self) -> bool:
        """Return True if plain calls of all lengths that can be drawn run."""
        for length in self.lengths:
            self.answer(0, length)
        return True

    @false_if_raised
    def _takes(self, length: int) -> bool:
        """Return True if inputs of a length have this length, and the model takes them."""
        inputs = self.subject.inputs(1, length)
        if inputs.ndim < 2 or inputs.shape[1] != length:
            return False
        self.subject.logits(self.subject.model(), inputs)
        return True

    @false_if_raised
    @torch.no_grad()
    def _runs_in(self, dtype: torch.dtype) -> bool:
        """Return True if a model of this dtype gives an output with finite values."""
        return bool(self.spec.logits(self._built(dtype), self.subject.inputs(1)).isfinite().any())

    def sequence(self, number: int, length: int) -> Tensor:
        """Return sequence `number`, (T,) or (T, C), which depends on the length as well."""
        key = f"sequence {number} of {length}"
        return self.once(key, lambda: self._real_inputs(1, length, 1 + number)[0]).clone()

    @property
    def plain_inputs(self) -> Tensor:
        """Return the first sequence of the longest length as inputs, (1, T) or (1, T, C)."""
        return self.sequence(0, self.lengths[-1])[None]

    def filler(self, n_rows: int, width: int) -> Tensor:
        """Return other inputs, such as those after a sequence, (B, W) or (B, W, C)."""
        key = f"filler {n_rows} x {width}"
        return self.once(key, lambda: self._real_inputs(n_rows, width, 1000)).clone()

    def _real_inputs(self, n_rows: int, width: int, shift: int) -> Tensor:
        return real_inputs(self.subject, n_rows, width, shift=shift, model=self.base)

    def padding(self, n_rows: int, width: int) -> Tensor:
        """Return inputs for padding: other inputs, or the padding id of a text classifier.

        Classifiers with a decoder find the last token of a row by the padding id.
        """
        filler = self.filler(n_rows, width)
        is_classifier = self.spec.inputs == "tokens" and not self.spec.per_position
        token = padding_id(self.base) if is_classifier else None
        return filler if token is None else torch.full_like(filler, token)

    def unlike(self, inputs: Tensor, others: Tensor) -> Tensor:
        """Return `others`, with the next id in place of each id that is equal to that of `inputs`."""
        if inputs.is_floating_point():
            return others
        return torch.where(others == inputs, (others + 1) % self.spec.width, others)

    @torch.no_grad()
    def answer(self, number: int, length: int) -> Tensor:
        """Return the plain answer to a sequence, (T, V), or (1, V) of an output per row."""
        key = f"answer {number} of {length} in {self.dtype}"
        return self.once(key, lambda: self.plain(self.model(), self.sequence(number, length)))

    def plain(self, model: nn.Module, sequence: Tensor) -> Tensor:
        """Return the output of a plain call, (T, V), or (1, V) of an output per row."""
        with self.subject.fixed_randomness(), self.precision():
            output = self.spec.logits(model, sequence[None].clone())
        return output[0] if self.spec.per_position else output.flatten(1)

    def answer_gradients(self, number: int, length: int) -> Gradients:
        """Return the gradients of the projection of the plain answer."""
        key, stored = (number, length, self.dtype), self._gradients
        if key not in stored:
            model = self.model().train(self.gradients_in_train_mode)
            stored[key] = self._plain_gradients(model, number, length)
        stored[key] = stored.pop(key)  # the last one is the most recent
        size = sum(8 * p.numel() for p in self.base.parameters() if p.requires_grad)
        while len(stored) > max(_GRADIENT_BYTES // max(size, 1), 4):
            del stored[next(iter(stored))]
        return stored[key]

    def reference_loss(
        self, labels: list[tuple[int, int, Tensor]], shift: int
    ) -> tuple[Tensor, Gradients, int]:
        """Return the mean negative log likelihood of labels, its gradients and the number of labels.

        Args:
            labels: number, length and labels (T,) of each sequence; -100 is ignored.
            shift: 1 if output t predicts label t + 1, 0 if it predicts label t.
        """
        model = self.model().train(self.gradients_in_train_mode)
        total, count = torch.zeros((), dtype=torch.float64), 0
        with torch.enable_grad(), WithoutDropout():
            for number, length, ids in labels:
                output = self.plain(model, self.sequence(number, length)).double()[: length - shift]
                targets = ids[shift:]
                count += int((targets != -100).sum())
                total = total + F.cross_entropy(output, targets, ignore_index=-100, reduction="sum")
            loss = total / max(count, 1)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), gradients_in(model), count

    def once(self, key: str, trial: Callable[[], T]) -> T:
        """Return the result of a trial, which is done once for each key."""
        if key not in self._results:
            self._results[key] = trial()
        result: T = self._results[key]
        return result

    @false_if_raised
    def agrees(self, call: Call) -> bool:
        """Return True if a call gives the plain answers. False also if it raises an exception."""
        with torch.no_grad(), self.subject.fixed_randomness(), self.precision():
            output = execute(self.spec, self.model(), call)
        pairs = [(self.answer(*place.sequence), self.row(output, place)) for place in call.places]
        return all(
            row.shape == answer.shape and bool(relative_difference(answer, row).max() <= self.limit)
            for answer, row in pairs
        )

    @false_if_raised
    @torch.no_grad()
    def runs(self, call: Call) -> bool:
        """Return True if the model takes a call."""
        execute(self.spec, self.model(), call)
        return True

    def row(self, output: Tensor, place: Place) -> Tensor:
        """Return the output at a place of a batch, of the shape of an answer."""
        if not self.spec.per_position:
            return output[place.row : place.row + 1].flatten(1)
        return output[place.row, place.start : place.end]

    @cached_property
    def takes_positions(self) -> bool:
        """Return True if `forward` has a parameter `position_ids` that a plain call does not pass."""
        is_accepted = accepts(self.base, "position_ids")
        return is_accepted and not passes(self.spec, self.model(), self.plain_inputs, "position_ids")

    @cached_property
    def first_position(self) -> int:
        """Return the position of the first token: 0, or more if the model reserves some.

        RoBERTa counts from the position after its padding_idx.
        """
        tables = (module for module in self.base.modules() if isinstance(module, nn.Embedding))
        paddings = ((table.padding_idx, table.num_embeddings) for table in tables)
        # A position beyond a table would be an error of the device.
        starts = (pad + 1 for pad, size in paddings if pad is not None and pad + self.lengths[-1] < size)
        return next((first for first in dict.fromkeys((0, 1, 2, *starts)) if self.agrees_at(first)), 0)

    def agrees_at(self, first: int) -> bool:
        """Return True if a plain call gives the same answer with `position_ids` that start at `first`."""
        inputs, length = self.plain_inputs, self.lengths[-1]
        positions = torch.arange(first, first + length, device=inputs.device)[None]
        return self.agrees(Call(inputs, [Place(0, 0, length)], arguments={"position_ids": positions}))

    @cached_property
    def loss_shift(self) -> int | None:
        """Return the shift of the labels in the own loss. None: it is no mean negative log likelihood."""
        length = self.lengths[-1]
        ids = self.sequence(0, length)
        labels = ids.clone()
        labels[0] = -100
        call = Call(ids[None], labels=labels[None])
        with torch.no_grad():
            found = float(loss_of(self.spec, self.model(), call))
        for shift in (1, 0):
            expected = float(self.reference_loss([(0, length, labels)], shift)[0])
            if abs(found - expected) <= LOSS_LIMIT * max(abs(expected), 1.0):
                return shift
        return None

    @cached_property
    def is_repeatable(self) -> bool:
        """Return True if plain calls of two models in eval mode agree, each with another random state."""
        return self._agree(train=False)

    @cached_property
    @false_if_raised
    def is_finite(self) -> bool:
        """Return True if the model runs in the dtype of the examination, with a finite plain answer."""
        return bool(self.answer(0, self.lengths[-1]).isfinite().all())

    @cached_property
    @false_if_raised
    def is_measurable(self) -> bool:
        """Return True if the rounding of the model can be measured, which needs its gradients."""
        return self.limit < torch.inf

    @cached_property
    @false_if_raised  # such as a batch norm of one row
    def has_train_mode(self) -> bool:
        """Return True if plain calls in train mode agree, with dropout off, and update no statistics."""
        model = self.model().train()
        with torch.no_grad(), WithoutDropout(), self.subject.fixed_randomness():
            self.spec.logits(model, self.plain_inputs)
        pairs = zip(model.buffers(), self.base.buffers(), strict=True)
        if any(b.is_floating_point() and not torch.equal(a, b) for a, b in pairs):
            return False
        return self._agree(train=True) and not self._drops_at_random()

    @torch.no_grad()
    def _drops_at_random(self) -> bool:
        """Return True if draws other than dropout change the output in train mode.

        A layer that is dropped with a low probability, as in stochastic depth, seldom differs in two calls.
        The same is true of a router that selects at random among experts of nearly equal scores.
        """
        sequence, outputs = self.sequence(0, self.lengths[-1]), []
        for value in (0.0, 0.999):
            with WithoutDropout(), EqualDraws(value) as draws:
                outputs.append(self.plain(self.model().train(), sequence))
            if draws.selects:
                return True
        return not relative_difference(*outputs).max() <= self.limit

    @cached_property
    @false_if_raised
    def adds_gradients(self) -> bool:
        """Return True if the backward pass of train mode adds gradients to those of the output.

        Mixtures of experts add that of an auxiliary loss in a torch.autograd.Function. Parameters then get a
        gradient even if that of the output is 0.
        """
        model = self.model().train()
        with torch.enable_grad(), WithoutDropout(), self.subject.fixed_randomness():
            output = self.plain(model, self.sequence(0, self.lengths[-1]))
            output.backward(torch.zeros_like(output))  # type: ignore[no-untyped-call]
        return any(bool(g.nan_to_num().any()) for g in gradients_in(model).values())

    @cached_property
    def gradients_in_train_mode(self) -> bool:
        """Return True if gradients are those of train mode: its outputs are right, and none are added."""
        if not self.has_train_mode or self.adds_gradients:
            return False
        key = (0, self.lengths[-1])
        with torch.no_grad(), WithoutDropout():
            output = self.plain(self.model().train(), self.sequence(*key))
        return bool(relative_difference(self.answer(*key), output).max() <= self.limit)

    @torch.no_grad()
    def _agree(self, *, train: bool) -> bool:
        outputs = []
        for seed in (1, 2):
            model = self.model().train(train)
            dropout = WithoutDropout() if train else nullcontext()
            with seeded(seed, self.subject.device), dropout:
                outputs.append(self.spec.logits(model, self.plain_inputs))
        return bool(relative_difference(*outputs).max() <= self.limit)

    @property
    def limit(self) -> float:
        """Return the largest difference of outputs that is rounding."""
        return self._limits[0]

    def limit_of(self, number: int, length: int) -> float:
        """Return the largest difference of one answer that is rounding, which may be more than `limit`."""
        if self._coarse_rounding is None:
            return self.limit
        return min(max(self.limit, _ROUNDINGS * self._rounding_of(number, length)), _LARGEST_LIMIT)

    @property
    def gradient_limit(self) -> float:
        """Return the largest difference of gradients that is rounding."""
        return self._limits[1]

    @property
    def gradient_floor(self) -> float:
        """Return the share of the norm of all gradients below which a gradient is rounding."""
        return _FLOOR if self.gradient_limit == _GRADIENT_LIMIT else NARROW_FLOOR

    @cached_property
    def _limits(self) -> tuple[float, float]:
        """Return the limits of outputs and of gradients.

        If a part of the model computes in a narrower dtype than float64, the limits are a multiple of the
        effect of a change of the weights by the rounding of this dtype.
        """
        if not self.compares_values:
            return _LARGEST_LIMIT, _LARGEST_GRADIENT_LIMIT
        if self._coarse_rounding is None:
            return _OUTPUT_LIMIT, _GRADIENT_LIMIT
        key, gradient_gap = (0, self.lengths[-1]), 0.0
        least = _LEAST_ROUNDINGS * self._coarse_rounding
        if self.has_gradients:
            models = self.model(), self._rounded_model()
            gradients, others = (self._plain_gradients(each, *key) for each in models)
            gradient_gap, _ = largest_gap(gradients, others, NARROW_FLOOR)
        return (
            min(max(least, _ROUNDINGS * self._rounding_of(*key)), _LARGEST_LIMIT),
            min(max(NARROW_GRADIENT_LIMIT, _ROUNDINGS * gradient_gap), _LARGEST_GRADIENT_LIMIT),
        )

    @cached_property
    def _coarse_rounding(self) -> float | None:
        """Return the rounding of the narrowest dtype of a part. None: all parts compute in float64."""
        if not self.is_float64:
            return torch.finfo(dtype_of(self.base)).eps
        inputs = self.plain_inputs
        with torch.no_grad():
            return coarsest_rounding(self.model(), lambda m: self.spec.logits(m, inputs)) or None

    def _rounded_model(self) -> nn.Module:
        """Return a model whose weights differ by rounding."""
        model, rounding = self.model(), self._coarse_rounding or 0.0
        generator = torch.Generator().manual_seed(self.subject.seed)
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point():
                    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
                    p.mul_(1 + rounding * noise)
        return model

    def _rounding_of(self, number: int, length: int) -> float:
        """Return the effect of rounding of the weights on one answer."""

        @torch.no_grad()
        def trial() -> float:
            changed = self.plain(self._rounded_model(), self.sequence(number, length))
            return float(relative_difference(self.answer(number, length), changed).max())

        return self.once(f"rounding {number} of {length} in {self.dtype}", trial)

    @cached_property
    def has_gradients(self) -> bool:
        """Return True if the backward pass of a plain call runs."""
        try:
            self._plain_gradients(self.model(), 0, self.lengths[-1])
        except RuntimeError as error:  # such as an operation in place that changes saved tensors
            reraise_if_out_of_memory(error)
            return False
        return True

    def _plain_gradients(self, model: nn.Module, number: int, length: int) -> Gradients:
        with torch.enable_grad(), WithoutDropout():
            output = self.plain(model, self.sequence(number, length))
            if output.requires_grad:
                (output * projection(output, number)).sum().backward()  # type: ignore[no-untyped-call]
        return gradients_in(model)


def _with_exact_norms(model: nn.Module) -> nn.Module:
    """Return a model whose 2-dimensional norms get contiguous gradients.

    On the CPU, torch computes wrong gradients of these norms for one row and strides of channels_last.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d):
            module.register_forward_hook(_make_gradient_contiguous)
    return model


def _make_gradient_contiguous(_: nn.Module, __: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.contiguous())  # type: ignore[no-untyped-call]


def _randomize_constants(model: nn.Module, seed: int, *, norms: bool) -> None:
    """Make weights and buffers random that are constant. Without `norms`, those of norms stay constant."""
    layers, statistics = list(model.modules()), (nn.modules.batchnorm._NormBase,)
    kept = {id(b) for each in layers if isinstance(each, statistics) for b in each.buffers(recurse=False)}
    if not norms:
        of_norms = (each for each in layers if "norm" in type(each).__name__.lower())
        kept |= {id(p) for each in of_norms for p in each.parameters(recurse=False)}
    saved = model.state_dict().keys()
    buffers = (b for name, b in model.named_buffers() if name in saved and b.numel() > 1)
    randomize_constants((each for each in (*model.parameters(), *buffers) if id(each) not in kept), seed)


def randomize_constants(tensors: Iterable[Tensor], seed: int) -> None:
    """Add noise to the tensors that are constant, so that 1 and 0 become random values near 1 and 0."""
    generator = torch.Generator().manual_seed(seed + 77)
    with torch.no_grad():
        for tensor in tensors:
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            first = tensor.flatten()[0]
            if not torch.isfinite(first) or first.abs() > _LARGE or not bool((tensor == first).all()):
                continue
            size = 0.05 if tensor.ndim > 1 else 0.2
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.add_(size * noise.to(tensor))


def gradients_in(model: nn.Module) -> Gradients:
    """Return the gradient of each parameter that has one."""
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


def largest_gap(expected: Gradients, found: Gradients, floor: float) -> tuple[float, str]:
    """Return the largest relative difference of two gradients of one parameter, and its name.

    Differences are relative to the larger norm, or to `floor` times the norm of all gradients.
    """
    total = sum(float(g.double().norm()) ** 2 for g in expected.values()) ** 0.5
    worst, where = 0.0, ""
    for name in sorted(expected.keys() | found.keys()):
        a, b = (some.get(name, torch.zeros(())).double() for some in (expected, found))
        size = max(float(a.norm()), float(b.norm()), floor * total)
        value = float((a - b).norm()) / size if size else 0.0
        if not value <= worst:
            worst, where = value, name
    return worst, where


def projection(output: Tensor, number: int) -> Tensor:
    """Return random factors for the outputs of sequence `number`; a gradient is that of their product."""
    generator = torch.Generator().manual_seed(number)
    factors = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    return factors.masked_fill(~output.detach().isfinite(), 0.0)


def stream(*words: object) -> random.Random:
    """Return a random generator that depends on the words alone."""
    return random.Random("/".join(map(str, words)))  # noqa: S311  not for secrets
