"""Initialisation: a fresh model knows nothing, and says so.

Shapes: N vectors, C channels.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS, dtype_of
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.layers import pattern
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import is_out_of_memory

# A sound model stays well below the first; beyond the second with widely spread logits none does.
USUAL, LIMIT = 0.25, 2.0
_N_VECTORS = 64


@check
def initial_loss(subject: Subject) -> CheckResult:
    """Is the first loss near ln(vocabulary)?"""
    spec = subject.spec
    if spec.trained:
        return subject.not_applicable("the weights are trained")
    if spec.inputs != "tokens":
        return subject.not_applicable("needs token ids and logits over a vocabulary")
    if not spec.per_position:
        return subject.not_applicable("needs an output per position")
    logits = subject.logits(subject.model(), subject.inputs(4)).float()
    if logits.shape[-1] < spec.width:
        return subject.not_applicable(f"{logits.shape[-1]} outputs are no logits over {spec.width} tokens")
    # Independent random targets: what no model can know, causal or not.
    targets = subject.inputs(4, shift=1)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    expected = math.log(logits.shape[-1])
    distance, spread = abs(loss - expected), logits.std().item()
    numbers = f"{loss:.2f} nats, ln({logits.shape[-1]}) = {expected:.2f}; std of logits {spread:.2f}."
    if distance <= USUAL:
        return subject.passed(distance, USUAL, meaning=f"First loss {numbers}")
    side = "above" if loss > expected else "below"
    meaning = f"The first loss is {distance:.2f} nats {side} that of a uniform guess: {numbers}"
    advice = (
        "Look at the scale of the embedding and the head (N(0, 1), torch's default, is too large when "
        "they are tied), and at a final norm that is missing."
    )
    if not distance <= LIMIT and not spread <= 1.0:
        return subject.failed(distance, LIMIT, meaning=meaning, advice=advice)
    return subject.warned(
        distance,
        USUAL,
        meaning=meaning,
        correct_if="the architecture starts with large logits on purpose, as with a tied N(0, 1) embedding",
        advice=advice,
    )


@check
def initialized(subject: Subject) -> CheckResult:
    """Is every weight initialized, and to the same value under the same seed?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    with _unset_memory_is_nan():
        model = subject.spec.create("cpu", subject.seed)
    tensors = {**dict(model.named_parameters()), **_saved_buffers(model)}
    if not tensors:
        return subject.not_applicable("the model has no weights")
    unset = [n for n, t in tensors.items() if t.is_floating_point() and t.isnan().any()]
    again = subject.spec.create("cpu", subject.seed)
    if not unset:
        others = {**dict(again.named_parameters()), **_saved_buffers(again)}
        differ = [n for n, t in tensors.items() if n not in others or not torch.equal(t, others[n])]
        if differ:
            return subject.failed(
                len(differ) / len(tensors),
                0.0,
                where=listed(differ),
                meaning=f"{len(differ)} of {len(tensors)} tensors differ between two models of one seed.",
                advice="Look for a generator of its own (numpy.random.default_rng(), random.Random()) and "
                "for an order that hangs on a set or on ids.",
            )
        return _initialized_alike(subject, model)
    return subject.failed(
        len(unset) / len(tensors),
        0.0,
        where=listed(unset),
        meaning=f"{len(unset)} of {len(tensors)} tensors have values that nothing set: memory as it was.",
        advice="Look for torch.empty() or torch.Tensor(sizes) whose initialisation is skipped: a module type "
        "that _init_weights does not know, a reset_parameters() that is not called.",
    )


@check
def norm_gains(subject: Subject) -> CheckResult:
    """Do the norms of a fresh model return vectors of RMS 1, without a bias or changed signs?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    norms = _norms(subject)
    if not norms:
        return subject.not_applicable("no module was seen that norms vectors and has weights")
    worst = max(norms, key=lambda name: abs(math.log(max(norms[name][0], 1e-9))))
    for name, (size, flipped, offset) in norms.items():
        meaning = f"{len(norms)} norms; {name} gives vectors of RMS {size:.3g}, offset {offset:.3g}"
        if size > 0 and flipped > 0.05:
            return subject.failed(
                flipped,
                0.05,
                where=name,
                meaning=f"{meaning}, and turns the sign of {flipped:.0%} of the channels.",
                advice="Gains start at 1 (or at 0 where 1 + gain is meant): look for an initialisation of "
                "all weights from N(0, std) that takes norms with it.",
            )
    size, _, offset = norms[worst]
    value = abs(math.log(max(size, 1e-9)))
    meaning = f"{len(norms)} norms; {worst} gives vectors of RMS {size:.3g}."
    usual = "norms of this architecture start that way, as published"
    advice = "Look for gains that start at another value than 1: (1 + gain) or gain, eps and scale."
    biased = max(norms, key=lambda name: norms[name][2])
    if norms[biased][2] > 0.1:
        return subject.warned(
            norms[biased][2],
            0.1,
            where=biased,
            meaning=f"A fresh norm adds a bias of RMS {norms[biased][2]:.3g}, where 0 is usual.",
            correct_if=usual,
            advice="Look for an initialisation of all biases that includes those of norms.",
        )
    if value > math.log(3):
        meaning = f"A fresh norm gives vectors of RMS {size:.3g}, where 1 is usual."
        return subject.warned(
            value, math.log(3), where=worst, meaning=meaning, correct_if=usual, advice=advice
        )
    return subject.passed(value, math.log(3), meaning=meaning)


@check
def symmetry(subject: Subject) -> CheckResult:
    """Do units of a layer differ, in their weights or at least in their gradients?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    if subject.seq_len < 2 and subject.spec.causal and subject.spec.loss is None:
        return subject.not_applicable("needs at least 2 positions, to predict one from the other")
    model = subject.model()
    equal = {n: p for n, p in model.named_parameters() if p.requires_grad and _rows_are_equal(p)}
    if not equal:
        return subject.passed(0.0, 0.0, meaning="No weight matrix has equal rows.")
    with torch.enable_grad(), subject.fixed_randomness():
        loss = subject.spec.loss_of(model, subject.inputs(2))
    if not loss.requires_grad:
        return subject.not_applicable("needs a loss with a gradient")
    loss.backward()  # type: ignore[no-untyped-call]
    stuck = [
        n
        for n, p in equal.items()
        if p.grad is not None
        and p.grad.any()
        and (p.grad - p.grad[:1]).abs().max() <= 1e-5 * p.grad.abs().max()
    ]
    if stuck:
        return subject.failed(
            len(stuck) / len(equal),
            0.0,
            where=listed(stuck),
            meaning=f"All rows of {len(stuck)} weights are equal and get equal gradients, for good.",
            advice="Look for weights that start constant where random ones are meant.",
        )
    return subject.passed(0.0, 0.0, meaning=f"Equal rows of {listed(equal)} get different gradients.")


@check
def load_round_trip(subject: Subject) -> CheckResult:
    """Does a model that loads the weights of another model give the same output?"""
    source, inputs = subject.model(), subject.inputs(2)
    subject.logits(source, inputs)  # one that has been used, beside one that has not
    generator = torch.Generator().manual_seed(subject.seed)
    with torch.no_grad():
        # No value that an initialisation would give, so that one that comes after loading shows.
        for p in source.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.copy_(p * (1 + 0.1 * noise) + 0.01 * noise)
    state = {name: t.clone() for name, t in source.state_dict().items() if isinstance(t, Tensor)}
    wanted = subject.logits(source, inputs)
    target = subject.spec.create(subject.device, subject.seed + 1).eval()
    try:
        target.load_state_dict(source.state_dict())
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return subject.failed(
            where=" ".join(str(error).split())[:160],
            meaning="A model refuses the state_dict() of another of its kind.",
            advice="Look for names or shapes that depend on what was called before, and hooks on state_dict.",
        )
    loaded = {name: t.clone() for name, t in target.state_dict().items() if isinstance(t, Tensor)}
    got = subject.logits(target, inputs)
    value = relative_difference(wanted, got).max().item()
    limit = max(subject.spec.tolerance, 8 * torch.finfo(dtype_of(source)).eps)
    if value <= limit:
        return subject.passed(value, limit)
    after = {name: t for name, t in target.state_dict().items() if isinstance(t, Tensor)}
    changed = [n for n in state if not torch.equal(loaded.get(n, state[n]), state[n])]
    later = [n for n in state if n in after and not torch.equal(after[n], loaded.get(n, after[n]))]
    unsaved = [
        n
        for n, t in (*source.named_parameters(), *source.named_buffers())
        if n not in state and not _same(t, dict((*target.named_parameters(), *target.named_buffers())).get(n))
    ]
    if changed:
        where, advice = (
            f"{listed(changed)}, while loading",
            "Look for hooks that initialise or convert weights.",
        )
    elif later:
        where, advice = f"{listed(later)}, at the first call", "Look for an initialisation in forward()."
    elif unsaved:
        where, advice = f"{listed(unsaved)}, not in state_dict()", "Save what is random: persistent=True."
    else:
        where, advice = "", "Look for values outside parameters and buffers, and derived from them once."
    return subject.failed(
        value,
        limit,
        where=where,
        meaning="Given the weights of another model by load_state_dict(), a model computes something else.",
        advice=advice,
    )


def _initialized_alike(subject: Subject, model: nn.Module) -> CheckResult:
    """Warn if one of several siblings has torch's default initialisation, and the others have another."""
    siblings: dict[tuple[str, type[nn.Module], torch.Size], list[str]] = defaultdict(list)
    weights = {n: p for n, p in model.named_parameters() if p.ndim == 2 and p.numel() >= 256}
    for name, p in weights.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        siblings[pattern(name), type(owner), p.shape].append(name)
    for names in siblings.values():
        default = [n for n in names if _is_torch_default(weights[n])]
        if default and len(default) < len(names):
            return subject.warned(
                len(default) / len(names),
                0.0,
                where=listed(default),
                meaning=f"{len(default)} of {len(names)} weights of the same kind have torch's default "
                "initialisation, and the others do not.",
                correct_if="these layers are meant to start differently",
                advice="Look for a module that the initialisation does not reach.",
            )
    return subject.passed(0.0, 0.0)


def _is_torch_default(weight: Tensor) -> bool:
    """Whether it looks like U(-b, b) with b = 1 / sqrt(fan in), as nn.Linear gives."""
    b, w = weight.shape[1] ** -0.5, weight.detach().double()
    top = w.abs().max().item()
    return 0.95 * b < top <= b * (1 + 1e-4) and bool(abs(w.std().item() * math.sqrt(3) / b - 1) < 0.1)


@contextmanager
def _unset_memory_is_nan() -> Iterator[None]:
    """Inside, torch.empty() is filled with NaN (in float tensors)."""
    was, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warned)
        deterministic.fill_uninitialized_memory = filled


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict().keys()
    return {name: b for name, b in model.named_buffers() if name in saved}


def _norms(subject: Subject) -> dict[str, tuple[float, float, float]]:
    """Modules that give the same for x and 4 x: (RMS of the output, part of channels turned, RMS of bias)."""
    model, widths = subject.model(), dict[str, int]()

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            x = next((a for a in args if isinstance(a, Tensor)), None)
            alike = isinstance(output, Tensor) and x is not None and x.shape == output.shape
            if alike and x is not None and x.is_floating_point() and x.shape[-1] > 3:
                widths[name] = x.shape[-1]

        return hook

    handles = [
        m.register_forward_hook(note(name))
        for name, m in model.named_modules()
        if any(p.ndim == 1 for p in m.parameters(recurse=False))
        and not any(list(child.parameters()) for child in m.children())
    ]
    try:
        subject.logits(model, subject.inputs(2))
    finally:
        for handle in handles:
            handle.remove()
    generator, found = torch.Generator().manual_seed(subject.seed), {}
    for name, C in widths.items():
        module = model.get_submodule(name)
        if any(p.ndim > 1 for p in module.parameters(recurse=False)):
            continue
        half_NC = torch.randn(1, _N_VECTORS, C, generator=generator)
        x_NC = torch.cat((half_NC, -half_NC), dim=1)
        with suppress(*REFUSALS), torch.no_grad():
            weight = next(module.parameters())
            x_NC = x_NC.to(weight)
            y_NC, larger = module(x_NC).double()[0], module(4 * x_NC).double()[0]
            variable = y_NC - y_NC.mean(dim=0)
            if (larger - y_NC).abs().max() > 0.02 * max(variable.abs().max().item(), 1e-12):
                continue
            along = (variable * x_NC[0].double()).sum(dim=0)
            turned = (along < 0).double().mean().item()
            found[name] = (
                variable.square().mean().sqrt().item(),
                min(turned, 1 - turned),
                y_NC.mean(dim=0).square().mean().sqrt().item(),
            )
    return found


def _rows_are_equal(p: Tensor) -> bool:
    """Of a weight matrix with several rows and several columns."""
    return p.ndim == 2 and min(p.shape) > 1 and p.is_floating_point() and torch.equal(p, p[:1].expand_as(p))


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)
