"""Initialisation: values, sizes and symmetry of new weights, and loading of saved weights."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS, dtype_of, reason_of, refusals
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.layers import pattern
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import reraise_if_out_of_memory

# Distances from the loss of a uniform guess, in nats. T5 starts at 0.6, and most models below 0.25. No
# correct model with a standard deviation of logits above 1 exceeds LIMIT.
USUAL, LIMIT = 0.75, 2.0
_TRAINED = "the weights are trained"
_ADDED = 3  # tokens


@check
def initial_loss(subject: Subject) -> CheckResult:
    """Is the first loss near ln(vocabulary)?"""
    spec = subject.spec
    if spec.trained:
        return subject.not_applicable(_TRAINED)
    if spec.inputs != "tokens" or not spec.per_position:
        return subject.not_applicable("needs token ids, and logits over a vocabulary at each position")
    logits = subject.logits(subject.model(), subject.inputs(4)).float()
    if logits.shape[-1] < spec.width:
        return subject.not_applicable(f"{logits.shape[-1]} outputs are no logits over {spec.width} tokens")
    # Random targets, independent of the inputs.
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
        "Look at the scale of the embedding and the head (N(0, 1), the default of nn.Embedding, is too large "
        "if they are tied), and look for a missing final norm."
    )
    if not distance <= LIMIT and not spread <= 1.0:
        return subject.failed(distance, LIMIT, meaning=meaning, advice=advice)
    correct_if = "the architecture starts with large logits on purpose, as with a tied N(0, 1) embedding"
    return subject.warned(distance, USUAL, meaning=meaning, correct_if=correct_if, advice=advice)


@check
def initialized(subject: Subject) -> CheckResult:
    """Is every weight initialised, and with the same value for the same seed?"""
    if subject.spec.trained:
        return subject.not_applicable(_TRAINED)
    with _unset_memory_is_nan():
        model = subject.spec.create("cpu", subject.seed)
    tensors = _saved(model)
    if not tensors:
        return subject.not_applicable("the model has no weights")
    unset = [n for n, t in tensors.items() if t.is_floating_point() and t.isnan().any()]
    if unset:
        return subject.failed(
            len(unset) / len(tensors),
            0.0,
            where=listed(unset),
            meaning=f"{len(unset)} of {len(tensors)} tensors are uninitialised memory.",
            advice="Look for torch.empty() or torch.Tensor(sizes) without initialisation: a module type that "
            "_init_weights does not know, a reset_parameters() that is not called.",
        )
    others = _saved(subject.spec.create("cpu", subject.seed))
    differ = [n for n, t in tensors.items() if not _same(t, others.get(n))]
    if differ:
        return subject.failed(
            len(differ) / len(tensors),
            0.0,
            where=listed(differ),
            meaning=f"{len(differ)} of {len(tensors)} tensors differ between two models of one seed.",
            advice="Look for a separate generator (numpy.random.default_rng(), random.Random()) and for an "
            "order that depends on a set or on ids.",
        )
    return _siblings_initialized(subject, model)


@check
def symmetry(subject: Subject) -> CheckResult:
    """Do the units of a layer differ, in their weights or at least in their gradients?"""
    if subject.spec.trained:
        return subject.not_applicable(_TRAINED)
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
            meaning=f"{len(stuck)} weights have equal rows with equal gradients, so that they stay equal.",
            advice="Look for weights that start constant and should be random.",
        )
    return subject.passed(0.0, 0.0, meaning=f"Equal rows of {listed(equal)} get different gradients.")


@check
def load_round_trip(subject: Subject) -> CheckResult:
    """If a new model loads the state_dict of another model, do both give the same outputs?"""
    source, inputs = subject.model(), subject.inputs(2)
    subject.logits(source, inputs)  # the other model loads before its first call
    generator = torch.Generator().manual_seed(subject.seed)
    with torch.no_grad():
        # Different from initial values, so that an initialisation after loading shows.
        for p in source.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.copy_(p * (1 + 0.1 * noise) + 0.01 * noise)
    saved, expected = _state(source), subject.logits(source, inputs)
    target = subject.spec.create(subject.device, subject.seed + 1).eval()
    try:
        target.load_state_dict(source.state_dict())
    except RuntimeError as error:
        reraise_if_out_of_memory(error)
        return subject.failed(
            where=reason_of(error),
            meaning="A model refuses the state_dict() of another model of its class.",
            advice="Look for names or shapes that depend on earlier calls, and hooks on state_dict.",
        )
    loaded, outputs = _state(target), subject.logits(target, inputs)
    value = relative_difference(expected, outputs).max().item()
    limit = max(subject.spec.tolerance, 8 * torch.finfo(dtype_of(source)).eps)
    if value <= limit:
        return subject.passed(value, limit)
    after = _state(target)
    tensors = dict((*target.named_parameters(), *target.named_buffers()))
    changed = [n for n, t in saved.items() if not _same(loaded.get(n, t), t)]
    later = [n for n, t in after.items() if n in saved and not _same(loaded.get(n, t), t)]
    unsaved = [
        n
        for n, t in (*source.named_parameters(), *source.named_buffers())
        if n not in saved and not _same(t, tensors.get(n))
    ]
    causes = (
        (changed, ", while loading", "Look for hooks that initialise or convert weights."),
        (later, ", at the first call", "Look for an initialisation in forward()."),
        (unsaved, ", not in state_dict()", "Register random buffers with persistent=True."),
    )
    elsewhere = "Look for values outside parameters and buffers, computed once."
    names, when, advice = next((each for each in causes if each[0]), ([], "", elsewhere))
    return subject.failed(
        value,
        limit,
        where=listed(names) + when,
        meaning="After load_state_dict() from another model, the outputs differ from its outputs.",
        advice=advice,
    )


@check
def shared_modules(subject: Subject) -> CheckResult:
    """Does a list of modules hold each module with parameters once?"""
    blocks = subject.spec.facts.block_weights or ()
    shared = [
        f"{name}.{index}" if name else index
        for name, module in subject.model().named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        if len(module) != len(blocks)
        or len(set(blocks)) == len(blocks)  # claimed_block_weights compares them
        for position, (index, part) in enumerate(module._modules.items())
        if part is not None and any(True for _ in part.parameters())
        if any(part is earlier for earlier in list(module)[:position])
    ]
    if not shared:
        return subject.passed(0.0, 0.0)
    return subject.warned(
        float(len(shared)),
        0.0,
        where=listed(shared),
        meaning=f"{len(shared)} entries of a list of modules are the same module as an earlier entry. They "
        "share all weights.",
        correct_if="the entries share weights on purpose (for layers, declare the fact block_weights)",
        advice="Create each entry, as in nn.ModuleList(Layer() for _ in range(n)). [Layer()] * n repeats "
        "one module.",
    )


@check
def resized_vocabulary(subject: Subject) -> CheckResult:
    """Are the logits of the old tokens unchanged by resize_token_embeddings() to more tokens and back?"""
    model: Any = subject.model(fill_zeros=True)
    if subject.spec.inputs != "tokens" or not hasattr(model, "resize_token_embeddings"):
        return subject.not_applicable("needs token ids, and a model with resize_token_embeddings()")
    inputs = subject.inputs(2)
    before = subject.logits(model, inputs)
    try:
        size = len(model.get_input_embeddings().weight)
    except (AttributeError, *REFUSALS) as error:
        return subject.not_applicable(f"needs get_input_embeddings() with a weight: {reason_of(error)}")
    for n_tokens, where in ((size + _ADDED, f"{_ADDED} more tokens"), (size, "the old number again")):
        try:
            with warnings.catch_warnings(action="ignore"):
                model.resize_token_embeddings(n_tokens)
            after = subject.logits(model, inputs)
        except refusals() as error:
            return subject.not_applicable(f"needs a model that can be resized: {reason_of(error)}")
        if before.shape[-1] == size and after.shape[-1] < n_tokens:
            return subject.failed(
                float(after.shape[-1]),
                float(n_tokens),
                where=where,
                meaning=f"The model has {n_tokens} embeddings and {after.shape[-1]} logits.",
                advice="Return the head from get_output_embeddings(), or resize the head as well.",
            )
        # A model may normalise its outputs over the vocabulary.
        same = before.log_softmax(dim=-1), after[..., : before.shape[-1]].log_softmax(dim=-1)
        gap = relative_difference(*same).max().item()
        if not gap <= subject.spec.tolerance:
            return subject.failed(
                gap,
                subject.spec.tolerance,
                where=where,
                meaning="The logits of the old tokens change if the vocabulary is resized.",
                advice="Copy the old rows of each embedding and of the head, and the old bias. Then tie "
                "shared weights again.",
            )
    return subject.passed(gap, subject.spec.tolerance)


def _saved(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the persistent buffers."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors in `state_dict()`."""
    return {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}


def _siblings_initialized(subject: Subject, model: nn.Module) -> CheckResult:
    """Warn if some of several siblings have torch's default initialisation, and the others do not."""
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
    """Return True for values of U(-b, b) with b = 1 / sqrt(fan in), the default of nn.Linear."""
    b, w = weight.shape[1] ** -0.5, weight.detach().double()
    top = w.abs().max().item()
    return 0.95 * b < top <= b * (1 + 1e-4) and bool(abs(w.std().item() * math.sqrt(3) / b - 1) < 0.1)


@contextmanager
def _unset_memory_is_nan() -> Iterator[None]:
    """Fill floating-point tensors of torch.empty() with NaN, which torch does in its deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


def _rows_are_equal(p: Tensor) -> bool:
    """Return True for a matrix of several rows and columns with equal rows."""
    return p.ndim == 2 and min(p.shape) > 1 and p.is_floating_point() and torch.equal(p, p[:1].expand_as(p))


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)
