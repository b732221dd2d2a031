"""Gradients: every parameter that matters gets one, and it is the derivative of what the model computes.

Shapes: B batch, T positions, V outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.check import check
from stackwise.checks.engine.examination import Examination, gradients_in
from stackwise.checks.probe.call import REFUSALS
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.encoder_states import encoder_states, output_with_encoder
from stackwise.checks.probe.layers import repeated_layers
from stackwise.checks.probe.widened import Widened
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject

_STEPS = 3
_STATES = 4  # positions of an encoder
# Finite differences of a smooth function in float64 are good to 1e-7; a branch that is cut off, to 1.
_EXACT = 1e-5
_VAGUE = 0.05
_SIZES = (1e-6, 1e-5, 1e-3, 1e-2)
# If the slope at this step differs from that at a longer step, the output is not smooth there, and the check
# does not apply. Example: batch norm over two rows with one value each.
_CLOSER = 1e-9
# Operations whose derivative is 0 almost everywhere: who trains through them chooses a surrogate.
_STEP_FUNCTIONS = ("round", "sign", "heaviside", "bernoulli", "argmax")


@check
def gradient_flow(subject: Subject) -> CheckResult:
    """Does every parameter get a gradient, at the latest after two optimizer steps?"""
    spec = subject.spec
    model = subject.model(train=True)
    trainable = _trainable(subject, model)
    if not trainable:
        return subject.not_applicable("no parameter is trainable")
    if subject.seq_len < 2 and spec.causal and spec.loss is None:
        return subject.not_applicable("needs at least 2 positions, to predict one from the other")
    called: set[str] = set()
    connected: set[str] = set()
    missing = _without_gradient(subject, model, trainable, called, connected)
    n = len(trainable)
    if not missing:
        return subject.passed(0.0, 0.0, meaning=f"All {n} parameters have a gradient that is not 0.")
    only_with_encoder = _trained_with_encoder(subject)
    missing = [name for name in missing if name not in only_with_encoder]
    if not missing:
        return subject.passed(
            0.0, 0.0, meaning="Some parameters have a gradient only if encoder_hidden_states are passed."
        )
    influence = _influence(subject, missing)
    cut = [name for name in missing if influence[name] == "smooth"]
    if cut:
        return subject.failed(
            len(cut) / n,
            0.0,
            where=listed(cut),
            meaning=f"{len(cut)} of {n} parameters never get a gradient, though the output depends on them "
            "smoothly.",
            advice="Look for detach(), .data, .item(), torch.no_grad(), a tensor made anew from values, and "
            "a custom backward that returns None.",
        )
    dead = [n for n in missing if influence[n] == "none" and n in connected and _is_layer_weight(model, n)]
    if dead:
        reads_one = "the head reads one position, such as a class token, and these only affect the others"
        return subject.failed_unless(
            None if spec.per_position else reads_one,
            len(dead) / n,
            0.0,
            where=listed(dead),
            meaning=f"The gradient of {len(dead)} of {n} parameters is 0 at each step, and they do not "
            "change the output, though it is computed from them.",
            advice="Look for a branch that is multiplied by 0, units that are never active, and for dropout "
            "or drop path with p = 1.",
        )
    behind_steps = [name for name in missing if influence[name] == "steps"]
    if 2 * len(behind_steps) > n:
        return subject.failed(
            len(behind_steps) / n,
            0.5,
            where=listed(behind_steps),
            meaning=f"{len(behind_steps)} of {n} parameters get no gradient in {_STEPS} steps: large changes "
            "of them move the output, and small ones do not.",
            advice="A step function (round, sign, argmax, a comparison) stands between them and the output, "
            "and its derivative is 0: pass gradients straight through, as in x + (round(x) - x).detach().",
        )
    unused = [name for name in missing if name.rpartition(".")[0] not in called]
    return subject.warned(
        len(missing) / n,
        0.0,
        where=listed(missing),
        meaning=f"{len(missing)} of {n} parameters never train: they get no gradient in {_STEPS} steps, and "
        f"no small change of them moves the output. The modules of {len(unused)} are not called; large "
        f"changes of {len(behind_steps)} move the output.",
        correct_if="they are experts that no token reached, or a pooler or cross-attention that is not used "
        "(then declare unused=)",
        advice="Remove them, or look for the code that should call them.",
    )


@check
def gradient_exact(subject: Subject) -> CheckResult:
    """Is the gradient the derivative of the output, as finite differences in float64 see it?"""
    model = subject.model(train=True, dtype=torch.float64, fill_zeros=True)
    trainable = _trainable(subject, model)
    if not trainable:
        return subject.not_applicable("no parameter is trainable")
    probe = _Probe.of(subject, model, trainable)
    if probe is None:
        return subject.not_applicable("needs a model that runs in float64")
    if not probe.slopes:
        return subject.failed(
            1.0,
            _EXACT,
            meaning="The output has no gradient at all.",
            advice="Look for detach(), .data, no_grad() or an argmax between the parameters and the output.",
        )
    total = sum(probe.slopes.values())
    best: tuple[float, float, float] | None = None  # noise, measured, size
    for size in _SIZES:
        (measured, _), (half, bend) = (probe.difference(trainable, s) for s in (size, size / 2))
        scale = max(abs(half), sum(s * s for s in probe.slopes.values()) ** 0.5, 1e-300)
        # At a kink, as of relu at 0, the slopes on both sides differ, and autograd takes one of them.
        noise = max(abs(measured - half), bend) / scale
        if best is None or noise < best[0]:
            best = (noise, half, size / 2)
        if noise < _EXACT / 10:
            break
    assert best is not None
    noise, measured, size = best
    scale = max(abs(measured), sum(s * s for s in probe.slopes.values()) ** 0.5, 1e-300)
    value, limit = abs(measured - total) / scale, max(_EXACT, 10 * noise)
    if not limit <= _VAGUE:
        return subject.not_applicable("needs an output that is smooth in the parameters")
    if value <= limit:
        return subject.passed(value, limit)
    closer, _ = probe.difference(trainable, _CLOSER)
    if abs(closer - measured) > _VAGUE * scale:
        return subject.not_applicable("needs an output that is smooth in the parameters")
    wrong = probe.wrong(trainable, size, limit * scale)
    where = listed([name for name, _, _ in wrong])
    lost = bool(wrong) and wrong[0][1] == 0
    meaning = "The gradient is not the derivative of the output along a random direction" + (
        f"; of {wrong[0][0]} it says {wrong[0][1]:.3g}, and is {wrong[0][2]:.3g}." if wrong else "."
    )
    advice = (
        "Look for detach(), .data, .item(), torch.no_grad() and tensors made from values, between these "
        "parameters and the output."
        if lost
        else "Look for a custom autograd.Function whose backward is not its forward's derivative, a hook "
        "that changes gradients, a partial detach() and an operation in place on what backward needs."
    )
    if probe.steps or (probe.truncated and not lost):
        exempt = (
            "the model chooses its own gradient for the step functions that it uses"
            if probe.steps
            else "the model cuts its recurrence short on purpose: it runs layers without gradients"
        )
        return subject.warned(value, limit, where=where, meaning=meaning, correct_if=exempt, advice=advice)
    return subject.failed(value, limit, where=where, meaning=meaning, advice=advice)


@check
def trainable(subject: Subject) -> CheckResult:
    """Are all parameters trainable but those declared, and is that left alone by train() and eval()?"""
    model = subject.spec.create(subject.device, subject.seed)
    as_built = {name: p.requires_grad for name, p in model.named_parameters()}
    if not as_built:
        return subject.not_applicable("the model has no parameters")
    for call in ("train", "eval"):
        getattr(model, call)()
        changed = [n for n, p in model.named_parameters() if p.requires_grad != as_built.get(n)]
        if changed:
            return subject.failed(
                len(changed) / len(as_built),
                0.0,
                where=f"{listed(changed)} after {call}()",
                meaning=f"{call}() changes requires_grad of {len(changed)} of {len(as_built)} parameters.",
                advice="Freeze in the constructor: an optimizer that is made before train() gets other "
                "parameters than one that is made after.",
            )
    frozen = [
        name
        for name, wanted in as_built.items()
        if not wanted
        and not name.startswith((*subject.spec.unused, *subject.spec.frozen) or "\0")
        and model.get_parameter(name).is_floating_point()
    ]
    thawed = [n for n, trains in as_built.items() if trains and n.startswith(subject.spec.frozen or "\0")]
    if thawed:
        return subject.failed(
            len(thawed) / len(as_built),
            0.0,
            where=listed(thawed),
            meaning=f"{len(thawed)} of {len(as_built)} parameters are declared frozen, and are trainable.",
            advice="Look for a prefix that does not match after wrapping, and for requires_grad_(True) that "
            "comes after the freezing.",
        )
    if frozen:
        return subject.warned(
            len(frozen) / len(as_built),
            0.0,
            where=listed(frozen),
            meaning=f"{len(frozen)} of {len(as_built)} parameters are not trainable.",
            correct_if="they are meant to stay as they are, as a base under adapters (then declare frozen= "
            "with their prefixes)",
            advice="Look for a requires_grad_(False) that was not reversed.",
        )
    return subject.passed(0.0, 0.0, meaning=f"All {len(as_built)} parameters are as declared.")


def _trainable(subject: Subject, model: nn.Module) -> dict[str, nn.Parameter]:
    unused = subject.spec.unused
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.is_floating_point() and p.numel() and not name.startswith(unused or "\0")
    }


def _trained_with_encoder(subject: Subject) -> set[str]:
    """Return the parameters that have a gradient if encoder_hidden_states are passed."""
    exam = Examination(subject)
    states = encoder_states(exam, _STATES)
    if states is None:
        return set()
    model = exam.model()
    with torch.enable_grad():
        output_with_encoder(exam, states, model=model).square().sum().backward()  # type: ignore[no-untyped-call]
    return {name for name, gradient in gradients_in(model).items() if gradient.any()}


def _without_gradient(
    subject: Subject,
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    called: set[str],
    connected: set[str],
) -> list[str]:
    """Parameters whose gradient is None or 0 in each of a few steps.

    `called` gets the modules that run, `connected` the parameters whose gradient is not None.
    """
    missing = list(trainable)
    optimizer = None
    handles = [
        m.register_forward_pre_hook(lambda _module, _args, name=name: called.add(name))
        for name, m in model.named_modules()
    ]
    try:
        for step in range(_STEPS):
            model.zero_grad(set_to_none=True)
            with torch.enable_grad(), subject.fixed_randomness():
                loss = subject.spec.loss_of(model, subject.inputs(4, shift=step))
                if not loss.requires_grad:
                    break
                loss.backward()  # type: ignore[no-untyped-call]
            connected.update(n for n in missing if trainable[n].grad is not None)
            missing = [n for n in missing if (g := trainable[n].grad) is None or not g.any()]
            if not missing or step == _STEPS - 1:
                break
            if optimizer is None:
                optimizer = subject.spec.optimizer(list(trainable.values()))
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    return missing


@torch.no_grad()
def _influence(subject: Subject, names: list[str]) -> dict[str, str]:
    """How the output depends on each parameter: "smooth", "steps" (large changes alone move it) or "none"."""
    for dtype in (torch.float64, None):
        model = subject.model(train=True, dtype=dtype, fill_zeros=True)
        try:
            # All at once: most often none of them matters.
            together = _dependence(subject, model, names, exact=dtype is not None)
            if together == "none" or len(names) == 1:
                return dict.fromkeys(names, together)
            return {n: _dependence(subject, model, [n], exact=dtype is not None) for n in names}
        except REFUSALS:
            continue  # not in float64
    return dict.fromkeys(names, "none")


def _dependence(subject: Subject, model: nn.Module, names: list[str], *, exact: bool) -> str:
    parameters = [model.get_parameter(name) for name in names]
    start = [p.clone() for p in parameters]
    directions = [_direction(subject, p) for p in parameters]
    inputs = subject.inputs(4)
    before = _output(subject, model, inputs)

    def moved(size: float) -> float:
        for p, old, direction in zip(parameters, start, directions, strict=True):
            p.copy_(old + size * direction)
        difference = relative_difference(before, _output(subject, model, inputs)).max().item()
        for p, old in zip(parameters, start, strict=True):
            p.copy_(old)
        return difference

    noise, size = (1e-11, 1e-4) if exact else (1e-5, 1e-2)
    small, larger = moved(size), moved(10 * size)
    if small > noise and 3 < larger / small < 30:
        return "smooth"
    return "steps" if max(small, larger, moved(1.0)) > 100 * noise else "none"


def _is_layer_weight(model: nn.Module, name: str) -> bool:
    """Whether it is a weight matrix of a repeated layer."""
    groups = repeated_layers(model)
    in_layer = bool(groups) and any(name.startswith(layer + ".") for layer in groups[0])
    return in_layer and model.get_parameter(name).ndim >= 2


@torch.no_grad()
def _output(subject: Subject, model: nn.Module, inputs: Tensor) -> Tensor:
    with Widened():
        return subject.logits(model, inputs)


def _direction(subject: Subject, p: Tensor) -> Tensor:
    """Random, as large as the parameter."""
    generator = torch.Generator().manual_seed(subject.seed + p.numel())
    size = p.detach().double().square().mean().sqrt().item() or 0.02
    return (size * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p)


@dataclass
class _Probe:
    """A scalar of the output, its slope along a direction for each parameter, and finite differences.

    Attributes:
        slopes: parameter -> gradient times direction.
        steps: whether the model uses step functions.
        truncated: whether it multiplies with weights while gradients are off.
    """

    subject: Subject
    model: nn.Module
    inputs: Tensor
    base: Tensor
    weights: Tensor
    directions: dict[str, Tensor]
    slopes: dict[str, float]
    steps: bool
    truncated: bool

    @classmethod
    def of(cls, subject: Subject, model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> _Probe | None:
        inputs = subject.inputs(2)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        watch = _StepFunctions()  # type: ignore[no-untyped-call]
        try:
            with torch.enable_grad(), subject.fixed_randomness(), watch, Widened():
                output = subject.spec.logits(model, inputs.clone())
        except REFUSALS:
            return None
        base = output.detach().double()
        generator = torch.Generator().manual_seed(subject.seed + 1)
        weights = torch.randn(base.shape, generator=generator, dtype=torch.float64).to(base.device)
        weights = weights.masked_fill(~base.isfinite(), 0.0)
        directions = {name: _direction(subject, p) for name, p in trainable.items()}
        names = {id(p): name for name, p in trainable.items()}
        for module in model.modules():
            # The row of the padding token gets no gradient by design.
            row, name = getattr(module, "padding_idx", None), names.get(id(getattr(module, "weight", None)))
            if isinstance(row, int) and name is not None and directions[name].ndim == 2:
                directions[name][row] = 0.0
        slopes: dict[str, float] = {}
        if output.requires_grad:
            finite = output.masked_fill(~base.isfinite(), 0.0)
            gradients = torch.autograd.grad(
                finite, list(trainable.values()), weights.to(finite), allow_unused=True
            )
            slopes = {
                name: 0.0 if g is None else float((g.double() * directions[name]).sum())
                for name, g in zip(trainable, gradients, strict=True)
            }
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])
        return cls(subject, model, inputs, base, weights, directions, slopes, watch.seen, watch.truncated)

    @torch.no_grad()
    def difference(self, parameters: Mapping[str, nn.Parameter], size: float) -> tuple[float, float]:
        """The central difference along the directions of `parameters`, and how far both sides are apart."""
        start = {name: p.clone() for name, p in parameters.items()}
        values = []
        for sign in (1.0, -1.0):
            for name, p in parameters.items():
                p.copy_(start[name] + sign * size * self.directions[name])
            moved = _output(self.subject, self.model, self.inputs).double() - self.base
            values.append((moved.nan_to_num(0.0, 0.0, 0.0) * self.weights).sum().item())
        for name, p in parameters.items():
            p.copy_(start[name])
        return (values[0] - values[1]) / (2 * size), abs(values[0] + values[1]) / (2 * size)

    def wrong(
        self, parameters: Mapping[str, nn.Parameter], size: float, tolerance: float
    ) -> list[tuple[str, float, float]]:
        """(name, slope, difference) of each parameter whose own differ: slopes of 0 first, then the worst."""
        found = []
        for name, p in parameters.items():
            seen, _ = self.difference({name: p}, size)
            if abs(seen - self.slopes[name]) > tolerance / max(1, len(parameters)):
                found.append((name, self.slopes[name], seen))
        return sorted(found, key=lambda item: (item[1] != 0, -abs(item[1] - item[2])))


class _StepFunctions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a step function is taken of floating-point numbers, and products without gradient."""

    seen: bool = False
    truncated: bool = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__.rstrip("_")
        self.truncated = self.truncated or (name in ("mm", "addmm") and not torch.is_grad_enabled())
        if name in _STEP_FUNCTIONS and isinstance(args[0], Tensor) and args[0].is_floating_point():
            # Dropout draws its mask by filling an empty tensor, which no gradient passes through.
            self.seen = self.seen or name != "bernoulli" or not function.overloadpacket.__name__.endswith("_")
        return function(*args, **(kwargs or {}))
