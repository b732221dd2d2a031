"""Precision: a narrow floating-point format costs no more than rounding."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.engine.examination import HALF_PRECISION, Examination
from stackwise.checks.engine.question import Precision
from stackwise.checks.probe.call import dtype_of, reason_of, refusals
from stackwise.checks.probe.difference import NOT_REPEATED, relative_difference
from stackwise.checks.probe.shadow import Kind, Loss, Shadow
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.inference import cast

# bfloat16 represents integers up to 256. Errors of positions show after that.
_LENGTH = 320
# Largest number of elements of the long call: some tenths of a second.
_BUDGET = 4e7
# In eps of the format. Healthy models: tables and parameters 0.3, activations 1 to 3, at most 15.
_TABLE, _PARAMETER, _ACTIVATION = 2.0, 4.0, 16.0
# Error of the logits, in eps, up to which cancellation inside the model is harmless.
_HARMLESS = 6.0
# In eps of float32. Rounding to float16, the finest narrow format, is 1,700. Healthy models: at most 15.
_NARROW = 1024.0
# Limits of the median difference of outputs, relative to their variation. Each limit is at least ten times
# the largest value of 60 healthy models: 1e-6 (own dtype), 0.028 (bfloat16) and 0.004 (float16).
_OUTPUT_LIMITS: Mapping[Precision, float] = {
    "own": 1e-3,
    torch.bfloat16: 0.3,
    torch.float16: 0.05,
    "autocast": 0.3,
}
# Differences that grow less than this many times as fast as the eps of the dtype are rounding. They are large
# if the output is a difference of nearly equal numbers.
_PROPORTIONAL = 4.0
_UNRELATED = 0.7  # outputs that have nothing in common differ by more than this
_SEQUENCES = 2
# Spread of the gains of a trained model. Equal gains, as in a new model, lose no precision.
_GAIN_SPREAD = 0.02

_ADVICE: Mapping[Kind, str] = {
    "table": "The value does not depend on the input: positions, frequencies, decays. Compute it in float32 "
    "and cast only the result (for rotary tables: cos and sin).",
    "parameter": "The value depends on parameters only: combine them in float32 and cast the result, as in "
    "(1 + weight.float()) * x.float() of a norm.",
    "activation": "Look for sums and counters in the narrow format (bfloat16 counts to 256, float16 to "
    "2048), variance as E[x^2] - E[x]^2, and differences of large numbers.",
}
_NARROW_ADVICE = (
    "Look for a dtype that is written down (.half(), .to(torch.bfloat16)) instead of the dtype of the "
    "weights or the input, for autocast that the model switches on, and for large numbers that cancel."
)


@dataclass(frozen=True)
class _Format:
    """Narrow format in which a model is called.

    Attributes:
        dtype: the format.
        limits: largest errors that pass, in eps of the format.
        autocast: True for a call under autocast, False for a model that is cast.
    """

    dtype: torch.dtype
    limits: Mapping[Kind, float]
    autocast: bool = False

    @property
    def eps(self) -> float:
        """Largest relative rounding."""
        return torch.finfo(self.dtype).eps

    def advice(self, kind: Kind) -> str:
        """Return advice for an error of a kind of value."""
        return _NARROW_ADVICE if self.dtype == torch.float32 else _ADVICE[kind]

    def __str__(self) -> str:
        return _name(self.dtype)


@dataclass(frozen=True)
class _Run:
    """Call in a narrow format, with the same call in float64.

    Attributes:
        shadow: the float64 values.
        error: relative error of the logits, in eps of the format.
        part_not_finite: share of the outputs that are NaN or infinite in the narrow format.
    """

    shadow: Shadow
    error: float
    part_not_finite: float


@check
def float32_error(subject: Subject) -> CheckResult:
    """Is no operation of the float32 model as coarse as a narrow format, compared with float64?"""
    dtype = dtype_of(subject.model())
    if dtype in (torch.bfloat16, torch.float16):
        return subject.not_applicable(f"needs a float32 model; this one is built in {_name(dtype)}")
    return _judged(subject, _Format(torch.float32, dict.fromkeys(_ADVICE, _NARROW)))


@check
def bfloat16_error(subject: Subject) -> CheckResult:
    """Is the error of every operation in bfloat16 only rounding, compared with float64?"""
    return _judged(subject, _Format(torch.bfloat16, {"table": _TABLE, "activation": _ACTIVATION}))


@check
def autocast_error(subject: Subject) -> CheckResult:
    """Under autocast to bfloat16, is every error only rounding, and is every matrix product cast?"""
    limits: dict[Kind, float] = {"table": _TABLE, "parameter": _PARAMETER, "activation": _ACTIVATION}
    return _judged(subject, _Format(torch.bfloat16, limits, autocast=True))


@check
def dtype_outputs(subject: Subject) -> CheckResult:
    """Do the outputs in float32, half precision and autocast agree with those in float64, up to rounding?"""
    exam = Examination.of(subject)
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    gaps: dict[str, float] = {}
    roundings = 0.0  # typical gap of the own dtype, in its eps
    for precision, limit in _OUTPUT_LIMITS.items():
        other = exam.in_dtype(precision)
        if precision == "own" and (narrow := _narrowest(other.base)) in HALF_PRECISION:
            limit = _OUTPUT_LIMITS[narrow]  # a model of several dtypes
        name = _name(dtype_of(other.base) if precision == "own" else precision)
        if name != _name(dtype_of(exam.base)) and other.is_finite:
            gap, eps = _typical_gap(exam, other), torch.finfo(_dtype(other)).eps
            gaps[name] = gap / max(limit, min(_PROPORTIONAL * roundings * eps, _UNRELATED))
            if name == "float32":
                roundings = gap / eps
    if not gaps:
        return subject.not_applicable("needs a model that runs in several dtypes")
    worst = max(gaps, key=lambda name: gaps[name])
    reference = _name(dtype_of(exam.base))
    if gaps[worst] <= 1:
        return subject.passed(gaps[worst], 1.0, meaning=f"compared with {reference}: {', '.join(gaps)}")
    return subject.failed(
        gaps[worst],
        1.0,
        where=worst,
        meaning=f"The median difference between the outputs in {worst} and in {reference} is "
        f"{gaps[worst]:.3g} times the limit. Rounding alone does not explain it.",
        advice="Look for branches on the dtype, for constants that one dtype cannot represent, and for "
        "x.to(dtype) before an operation in place, which changes x itself if the dtype is the same.",
    )


def _dtype(exam: Examination) -> torch.dtype:
    """Return the dtype of the products of an examination."""
    return torch.bfloat16 if exam.dtype == "autocast" else dtype_of(exam.base)


def _narrowest(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of the parameters that has the largest rounding."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _typical_gap(exam: Examination, other: Examination) -> float:
    """Return the median difference of the outputs of all positions.

    A router that chooses another expert changes few positions.
    """
    gaps = []
    for number in range(_SEQUENCES):
        answer, found = (each.answer(number, exam.lengths[-1]) for each in (exam, other))
        gaps.append(relative_difference(answer, found.to(answer)).amax(dim=-1))
    return float(torch.cat(gaps).median())


@check
def float16_range(subject: Subject) -> CheckResult:
    """Is every output finite in float16 if it is finite in float64?"""
    try:
        run = _run(subject, _Format(torch.float16, {}), subject.seq_len)
    except _Cannot as error:
        if "overflow" in str(error):
            return subject.warned(
                meaning=f"The model does not run in float16: {error}",
                correct_if="the model never runs in float16",
                advice="Look for mask constants beyond 65504, and use torch.finfo(x.dtype).min instead.",
            )
        return subject.not_applicable(f"needs to run in float16: {error}")
    overflow = run.shadow.overflow
    if not run.part_not_finite:
        where = f"An intermediate value is infinite, which is harmless: {overflow.where}." if overflow else ""
        return subject.passed(0.0, 0.0, meaning=where or "Every output is finite.")
    return subject.failed(
        run.part_not_finite,
        0.0,
        where=_place(overflow) if overflow else "",
        meaning="An output is NaN or infinite in float16, and finite in float64.",
        advice="The largest float16 is 65504. Look at the product of gate and up projection, squares in "
        "norms, additive masks, exponentials without subtraction of the maximum; compute them in float32.",
    )


@check(suite="full")
def cast_buffers(subject: Subject) -> CheckResult:
    """Do the buffers keep their precision in model.to(bfloat16)?"""
    if not any(_is_wide(buffer) for buffer in subject.model().buffers()):
        return subject.not_applicable("needs floating-point buffers")
    form = _Format(torch.bfloat16, {"table": _TABLE})
    try:
        run = _run(subject, form, keep_buffers=False)
    except _Cannot as error:
        return subject.not_applicable(f"needs to run in bfloat16: {error}")
    worst = run.shadow.worst["table"] / form.eps
    if run.shadow.loss is None:
        return subject.passed(worst, _TABLE)
    return subject.warned(
        worst,
        _TABLE,
        where=_place(run.shadow.loss),
        meaning="model.to(bfloat16) rounds a buffer, and values computed from it have a large error.",
        correct_if="the model is never cast as a whole, but built in bfloat16 or run under autocast",
        advice="Store inverse frequencies in float32 (override _apply, or compute them in forward), or build "
        "the model in bfloat16 instead of casting it.",
    )


def _judged(subject: Subject, form: _Format) -> CheckResult:
    """Compare the errors of a call with the limits of a format."""
    try:
        run = _run(subject, form)
    except _Cannot as error:
        if form.autocast and (refusal := _refused_by_autocast(subject, form.dtype)):
            return subject.warned(
                meaning=f"The model raises under autocast to {form}: {refusal}",
                correct_if="the model never runs under autocast",
                advice="Cast the result of a matrix product before it is written into a tensor of another "
                "dtype (index_add_, scatter_, a buffer): autocast narrows products only.",
            )
        return subject.not_applicable(f"needs to run in {form}: {error}")
    shadow = run.shadow
    if run.part_not_finite:
        return subject.failed(
            torch.inf,
            where=_place(shadow.overflow) if shadow.overflow else "",
            meaning=f"An output is NaN or infinite in {form}, and finite in float64.",
            advice=form.advice("activation"),
        )
    if shadow.loss is not None:
        return _of_loss(subject, form, run, shadow.loss)
    if form.autocast and shadow.uncast:
        return subject.failed(
            float(len(shadow.uncast)),
            0.0,
            where=shadow.uncast[0],
            meaning=f"{len(shadow.uncast)} matrix products stay float32 although autocast is on.",
            advice="Autocast ignores in-place operations (addmm_), operations with out=, and custom "
            "operators without a rule for it.",
        )
    if (few := shadow.loss_of_few) is not None:
        value = few.error / form.eps
        return subject.warned(
            value,
            form.limits[few.kind],
            where=_place(few),
            meaning=f"At a few positions the result in {form} differs from float64 by {value:.3g} eps of the "
            "format.",
            correct_if="a few vectors are near 0, or nearly constant, before a norm, as happens with few "
            "channels",
            advice="Look at the computation at these positions only.",
        )
    errors = {kind: shadow.worst[kind] / form.eps for kind in form.limits}
    kind = max(errors, key=lambda each: errors[each] / form.limits[each])
    return subject.passed(
        errors[kind], form.limits[kind], meaning=f"error of the logits: {run.error:.2g} eps"
    )


def _of_loss(subject: Subject, form: _Format, run: _Run, loss: Loss) -> CheckResult:
    """Return the result for an operation with a large error."""
    value, limit, place = loss.error / form.eps, form.limits[loss.kind], _place(loss)
    amplifies = loss.is_sharp or (loss.is_difference and loss.kind == "activation")
    if amplifies and run.error <= _HARMLESS:
        meaning = f"The operation amplifies rounding; error of the logits: {run.error:.2g} eps"
        return subject.passed(value, limit, where=place, meaning=meaning)
    correct_if, advice = _excuse(subject, form, loss)
    if form.autocast and correct_if and _differs_without_autocast(subject, form, loss):
        return subject.not_applicable(f"bfloat16_error finds the same error: {place}")
    return subject.failed_unless(
        correct_if,
        value,
        limit,
        where=place,
        meaning=f"The result in {form} differs from float64 by {value:.3g} eps of the format.",
        advice=advice,
    )


def _excuse(subject: Subject, form: _Format, loss: Loss) -> tuple[str | None, str]:
    """Return the condition under which a loss of precision is correct, or None, and advice for it."""
    rounding = loss.angle * form.eps
    if form.dtype == torch.float32 and loss.error <= rounding:
        step = f"float32 rounds an angle of {loss.angle:.3g} by {rounding / 2:.1g}"
        advice = "Count positions from 0, or compute the angles in float64."
        return f"positions are this large on purpose: {step}", advice
    if loss.is_sharp:
        advice = "Look at the scale of the initialisation, and compute scores and states in float32."
        return "the operation amplifies rounding on purpose (large scores, or terms that cancel)", advice
    if subject.device.type == "cpu" and torch.backends.mkldnn.enabled:
        # Setting the flag warns about TF32 on machines without an Intel GPU.
        with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
            plain = _run(subject, form)
        if not plain.part_not_finite and plain.shadow.loss is None:
            advice = (
                "Compare the operation on another device. Until the kernel is repaired, disable "
                "torch.backends.mkldnn (see https://github.com/pytorch/pytorch/issues/169688)."
            )
            return "the error comes from a kernel of oneDNN: without it, there is only rounding", advice
    return None, form.advice(loss.kind)


def _differs_without_autocast(subject: Subject, form: _Format, loss: Loss) -> bool:
    """Return True if the same operation has a large error in the model that is cast to the format."""
    try:
        other = _run(subject, replace(form, autocast=False)).shadow.loss
    except _Cannot:
        return False
    return other is not None and _place(other) == _place(loss)


def _refused_by_autocast(subject: Subject, dtype: torch.dtype) -> str:
    """Return the exception that the model raises under autocast only, or ""."""
    model, inputs = subject.model(), subject.inputs(1)
    try:
        subject.logits(model, inputs)
    except refusals():
        return ""
    try:
        with warnings.catch_warnings(action="ignore"), torch.autocast(subject.device.type, dtype):
            subject.logits(model, inputs)
    except refusals() as error:
        return reason_of(error)
    return ""


class _Cannot(Exception):  # noqa: N818  not for users
    """The model does not run in this format."""


def _run(subject: Subject, form: _Format, length: int = _LENGTH, *, keep_buffers: bool = True) -> _Run:
    """Call the model in a narrow format and in float64, with the longest input that it accepts.

    Buffers are cast only if the model does not run otherwise.
    """
    lengths = dict.fromkeys((min(length, subject.spec.max_length or length), subject.seq_len))
    reason = ""
    for casts_buffers in (False, True) if keep_buffers and not form.autocast else (not keep_buffers,):
        for seq_len in lengths:
            try:
                return _attempt(subject, form, seq_len, casts_buffers)
            except refusals() as error:
                # The last reason counts: a longer input may exceed the length limit or the budget.
                reason = " ".join(str(error).split())[:160]
    raise _Cannot(reason)


def _attempt(subject: Subject, form: _Format, seq_len: int, casts_buffers: bool) -> _Run:
    model = subject.model()
    _spread_gains(model, subject.seed)
    inputs = subject.inputs(1, seq_len)
    exact_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    around: AbstractContextManager[object] = nullcontext()
    if form.autocast:
        around = torch.autocast(subject.device.type, form.dtype)
    else:

        def narrowed(tensor: Tensor) -> Tensor:
            return tensor.detach().to(form.dtype) if _is_wide(tensor) else tensor

        if casts_buffers:
            # Like model.to, which lets a module exclude buffers.
            model._apply(narrowed)  # type: ignore[no-untyped-call]
        else:
            for parameter in model.parameters():
                parameter.data = narrowed(parameter.data)
        inputs = cast(inputs, model)
    limits: dict[Kind, float] = {kind: limit * form.eps for kind, limit in form.limits.items()}
    shadow = Shadow(model, inputs, limits, _BUDGET if seq_len > subject.seq_len else torch.inf)
    for name, buffer in model.named_buffers():
        shadow.give(buffer, exact_buffers[name], "table")
    quiet = warnings.catch_warnings(action="ignore")  # kernels warn if a format is slow
    # With gradients, because layers of torch use other kernels without them.
    with subject.fixed_randomness(), quiet, torch.enable_grad(), around, shadow:
        output = subject.spec.logits(model, inputs)
    output = output.detach()
    exact = shadow.of(output)
    if not exact.isfinite().all():
        raise ValueError("the outputs are not finite in float64")
    error = (exact - output).norm() / (exact - exact.mean(dim=(0, 1))).norm()
    bad = (~output.isfinite()).double().mean().item()
    return _Run(shadow, error.item() / form.eps, bad)


@torch.no_grad()
def _spread_gains(model: nn.Module, seed: int) -> None:
    """Make equal gains as different as those of a trained model."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 1 and p.numel() > 1 and p.is_floating_point() and bool((p == p[0]).all()):
            p.add_(_GAIN_SPREAD * torch.randn(p.shape, generator=generator).to(p))


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64)


def _name(dtype: Precision) -> str:
    return str(dtype).removeprefix("torch.")


def _place(loss: Loss) -> str:
    return f"{loss.operation} in {loss.where}"
