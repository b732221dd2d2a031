"""Precision: what a narrow floating-point format costs is rounding, and no more."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import dtype_of, reason_of, refusals
from stackwise.checks.probe.shadow import Kind, Loss, Shadow
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.inference import cast

# bfloat16 counts to 256 without a gap: what goes wrong with positions shows beyond.
_LENGTH = 320
# Elements that the long call may compute: some tenths of a second. Beyond, the usual length is asked alone.
_BUDGET = 4e7
# In eps of the format. Of sound models, measured: tables and parameters 0.3, activations 1 to 3, at most 15.
_TABLE, _PARAMETER, _ACTIVATION = 2.0, 4.0, 16.0
# Of the logits, where terms cancelled on the way: what is lost there need not matter.
_HARMLESS = 6.0
# In eps of float32: float16, the finest narrow format, rounds by 1700. Of sound models, measured: at most 15.
_NARROW = 1024.0
# How far gains stand apart once a model is trained; at the start they are all alike, and nothing is lost.
_GAIN_SPREAD = 0.02

_ADVICE: Mapping[Kind, str] = {
    "table": "No input has a part in it: positions, frequencies, decays. Compute it in float32 and cast only "
    "the result (for rotary tables: cos and sin).",
    "parameter": "It is made of parameters alone: combine them in float32 and cast the result, as in "
    "(1 + weight.float()) * x.float() of a norm.",
    "activation": "Look for sums and counters that are kept in the narrow format (bfloat16 counts to 256, "
    "float16 to 2048), variance as E[x^2] - E[x]^2, and differences of large numbers.",
}

_NARROW_ADVICE: Mapping[Kind, str] = dict.fromkeys(
    ("table", "parameter", "activation"),
    "Look for a dtype that is written down (.half(), .to(torch.bfloat16)) where that of the weights or the "
    "input is meant, for autocast that the model turns on by itself, and for large numbers that cancel.",
)

_FEW = "a few vectors are near 0, or nearly constant, before a norm, as happens with few channels"
_SHARP = "attention is sharp on purpose, so that the rounding of its inputs decides"
_SHARP_ADVICE = (
    "Look at the scale of the initialisation and at 1 / sqrt(head size), and keep scores and states in "
    "float32."
)


_ONE_DNN = "a kernel of oneDNN is wrong: without torch.backends.mkldnn the model only rounds"
_ONE_DNN_ADVICE = (
    "Compare the operation on another device. Until the kernel is repaired, disable torch.backends.mkldnn "
    "(see https://github.com/pytorch/pytorch/issues/169688)."
)


@dataclass(frozen=True)
class _Run:
    """What a call in a narrow format showed."""

    shadow: Shadow
    error: float
    part_not_finite: float
    exact_is_finite: bool

    @property
    def finite(self) -> bool:
        return self.part_not_finite == 0


@check
def float32_error(subject: Subject) -> CheckResult:
    """Is every result in the float32 model more precise than bfloat16 and float16?"""
    dtype = dtype_of(subject.model())
    if dtype in (torch.bfloat16, torch.float16):
        return subject.not_applicable(f"needs a float32 model; this one is built in {_name(dtype)}")
    return _judge_error(subject, torch.float32, dict.fromkeys(_NARROW_ADVICE, _NARROW), advice=_NARROW_ADVICE)


@check
def bfloat16_error(subject: Subject) -> CheckResult:
    """Does every operation in bfloat16 lose no more than rounding, compared with float64?"""
    return _judge_error(subject, torch.bfloat16, {"table": _TABLE, "activation": _ACTIVATION})


@check
def autocast_error(subject: Subject) -> CheckResult:
    """Does autocast to bfloat16 cast every matrix product, and lose no more than rounding?"""
    limits: dict[Kind, float] = {"table": _TABLE, "parameter": _PARAMETER, "activation": _ACTIVATION}
    return _judge_error(subject, torch.bfloat16, limits, autocast=True)


@check
def float16_range(subject: Subject) -> CheckResult:
    """Is every output finite in float16 if it is finite in float64?"""
    try:
        run = _run(subject, torch.float16, subject.seq_len, {})
    except _Cannot as error:
        if "overflow" in str(error):
            return subject.warned(
                meaning=f"The model does not run in float16: {error}",
                correct_if="the model never runs in float16",
                advice="Look for mask constants beyond 65504, and use torch.finfo(x.dtype).min instead.",
            )
        return subject.not_applicable(f"needs to run in float16: {error}")
    if not run.exact_is_finite:
        return subject.not_applicable("needs outputs that are finite in float64")
    found = run.shadow.overflow
    if run.finite:
        meaning = f"infinite in between, and harmless: {found.where}" if found else "Every output is finite."
        return subject.passed(0.0, 0.0, meaning=meaning)
    return subject.failed(
        run.part_not_finite,
        0.0,
        where=_place(found) if found else "",
        meaning="An output is NaN or infinite in float16, and finite in float64.",
        advice="float16 ends at 65504. Look at the product of gate and up projection, squares in norms, "
        "masks that are added, exponentials without their maximum taken off; compute that in float32.",
    )


@check(suite="full")
def cast_buffers(subject: Subject) -> CheckResult:
    """Do the buffers survive model.to(bfloat16)?"""
    if not any(_is_wide(buffer) for buffer in subject.model().buffers()):
        return subject.not_applicable("needs floating-point buffers")
    eps = torch.finfo(torch.bfloat16).eps
    try:
        run = _run(subject, torch.bfloat16, _LENGTH, {"table": _TABLE * eps}, keep_buffers=False)
    except _Cannot as error:
        return subject.not_applicable(f"needs to run in bfloat16: {error}")
    worst = run.shadow.worst["table"] / eps
    if run.shadow.loss is None:
        return subject.passed(worst, _TABLE)
    return subject.warned(
        worst,
        _TABLE,
        where=_place(run.shadow.loss),
        meaning="model.to(bfloat16) rounds a buffer, and what is computed from it is far off.",
        correct_if="the model is never cast as a whole, but built in bfloat16 or run under autocast",
        advice="Keep inverse frequencies and the like in float32 (override _apply, or compute them in "
        "forward), or build the model in bfloat16 instead of casting it.",
    )


def _judge_error(
    subject: Subject,
    dtype: torch.dtype,
    limits: Mapping[Kind, float],
    *,
    autocast: bool = False,
    advice: Mapping[Kind, str] = _ADVICE,
) -> CheckResult:
    eps = torch.finfo(dtype).eps
    format_name = _name(dtype)
    try:
        run = _run(subject, dtype, _LENGTH, {k: v * eps for k, v in limits.items()}, autocast=autocast)
    except _Cannot as error:
        if autocast and (refusal := _refused_by_autocast(subject, dtype)):
            return subject.warned(
                meaning=f"The model raises under autocast to {format_name}: {refusal}",
                correct_if="the model never runs under autocast",
                advice="Cast the result of a matrix product before it is written into a tensor of another "
                "dtype (index_add_, scatter_, a buffer): autocast narrows products only.",
            )
        return subject.not_applicable(f"needs to run in {format_name}: {error}")
    if not run.exact_is_finite:
        return subject.not_applicable("needs outputs that are finite in float64")
    if not run.finite:
        return subject.failed(
            torch.inf,
            where=_place(run.shadow.overflow) if run.shadow.overflow else "",
            meaning=f"An output is NaN or infinite in {format_name}, and finite in float64.",
            advice=advice["activation"],
        )
    if (loss := run.shadow.loss) is not None:
        cancels = loss.is_difference and loss.kind == "activation"
        excused = loss.is_sharp or (cancels and run.error <= _HARMLESS * eps)
        excuse, hint = (_SHARP, _SHARP_ADVICE) if excused else (None, advice[loss.kind])
        if not excused and _is_of_one_dnn(subject, dtype, limits, autocast=autocast):
            excuse, hint = _ONE_DNN, _ONE_DNN_ADVICE
        return subject.failed_unless(
            excuse,
            loss.error / eps,
            limits[loss.kind],
            where=_place(loss),
            meaning=f"The result in {format_name} differs from float64 by {loss.error / eps:.3g} eps of the "
            "format.",
            advice=hint,
        )
    if autocast and run.shadow.uncast:
        return subject.failed(
            float(len(run.shadow.uncast)),
            0.0,
            where=run.shadow.uncast[0],
            meaning="So many products of matrices stay float32 although autocast is on.",
            advice="Autocast passes over operations in place (addmm_) and with out=, and custom operators "
            "without a rule for it.",
        )
    if (few := run.shadow.loss_of_few) is not None:
        return subject.warned(
            few.error / eps,
            limits[few.kind],
            where=_place(few),
            meaning=f"At a few positions the result in {format_name} differs from float64 by "
            f"{few.error / eps:.3g} eps of the format.",
            correct_if=_FEW,
            advice="Look at what is computed at these positions only.",
        )
    kind: Kind = max(limits, key=lambda each: run.shadow.worst[each] / limits[each])
    return subject.passed(
        run.shadow.worst[kind] / eps, limits[kind], meaning=f"logits are off by {run.error / eps:.2g} eps"
    )


def _is_of_one_dnn(
    subject: Subject, dtype: torch.dtype, limits: Mapping[Kind, float], *, autocast: bool
) -> bool:
    """Return True if the loss of precision disappears without the kernels of oneDNN."""
    if subject.device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return False
    scaled = {kind: limit * torch.finfo(dtype).eps for kind, limit in limits.items()}
    # Setting the flag warns about TF32 on machines without an Intel GPU.
    with _without_warnings(), torch.backends.mkldnn.flags(enabled=False):
        run = _run(subject, dtype, _LENGTH, scaled, autocast=autocast)
    return run.finite and run.shadow.loss is None


def _refused_by_autocast(subject: Subject, dtype: torch.dtype) -> str:
    """What the model raises under autocast and not without; empty: nothing."""
    model, inputs = subject.model(), subject.inputs(1)
    try:
        subject.logits(model, inputs)
    except refusals():
        return ""
    try:
        with _without_warnings(), torch.autocast(subject.device.type, dtype):
            subject.logits(model, inputs)
    except refusals() as error:
        return reason_of(error)
    return ""


class _Cannot(Exception):  # noqa: N818  not for users
    """The model does not run in this format."""


def _run(
    subject: Subject,
    dtype: torch.dtype,
    length: int,
    limits: Mapping[Kind, float],
    *,
    autocast: bool = False,
    keep_buffers: bool = True,
) -> _Run:
    """One call with its shadow, by the longest input up to `length` that the model takes.

    Buffers stay as they are where the model runs so: what is cast is then only what must be.
    """
    lengths = [min(length, subject.spec.max_length or length), subject.seq_len]
    refused = ""
    for buffers_too in (False, True) if keep_buffers and not autocast else (not keep_buffers,):
        for seq_len in dict.fromkeys(lengths):
            budget = _BUDGET if seq_len > subject.seq_len else torch.inf
            try:
                return _attempt(subject, dtype, seq_len, limits, autocast, buffers_too, budget)
            except refusals() as error:
                # Of the shortest: that of a longer one may be its length, or the budget.
                refused = " ".join(str(error).split())[:160]
    raise _Cannot(refused)


def _attempt(
    subject: Subject,
    dtype: torch.dtype,
    seq_len: int,
    limits: Mapping[Kind, float],
    autocast: bool,
    buffers_too: bool,
    budget: float,
) -> _Run:
    model = subject.model()
    _spread_gains(model, subject.seed)
    inputs = subject.inputs(1, seq_len)
    exact_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    around: AbstractContextManager[object] = nullcontext()
    if autocast:
        around = torch.autocast(subject.device.type, dtype)
    else:

        def narrowed(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype) if _is_wide(tensor) else tensor

        if buffers_too:
            # As model.to does: a module may keep some of its own as they are.
            model._apply(narrowed)  # type: ignore[no-untyped-call]
        else:
            for parameter in model.parameters():
                parameter.data = narrowed(parameter.data)
        inputs = cast(inputs, model)
    shadow = Shadow(model, inputs, limits, budget)
    for name, buffer in model.named_buffers():
        shadow.give(buffer, exact_buffers[name], "table")
    # With gradients, so that what runs is what trains: torch's layers take other ways without.
    with subject.fixed_randomness(), _without_warnings(), torch.enable_grad(), around, shadow:
        output = subject.spec.logits(model, inputs)
    output = output.detach()
    exact = shadow.of(output)
    error = (exact - output).norm() / (exact - exact.mean(dim=(0, 1))).norm()
    bad = (~output.isfinite()).double().mean().item()
    return _Run(shadow, error.item(), bad, bool(exact.isfinite().all()))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Kernels warn that a format is slow here; that is not the question."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def _spread_gains(model: nn.Module, seed: int) -> None:
    """Gains that are all alike are made as different as those of a trained model."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 1 and p.numel() > 1 and p.is_floating_point() and bool((p == p[0]).all()):
            p.add_(_GAIN_SPREAD * torch.randn(p.shape, generator=generator).to(p))


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(loss: Loss) -> str:
    return f"{loss.operation} in {loss.where}"
