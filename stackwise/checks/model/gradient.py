"""Gradients: every parameter that matters gets one, and it is the derivative.

Shapes: B batch, T positions, V outputs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.engine.examination import Examination, gradients_in
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import REFUSALS, refusals
from stackwise.checks.probe.derivative import Comparison, compared, direction_of, trainable_parameters
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.encoder_states import encoder_states, output_with_encoder
from stackwise.checks.probe.layers import pattern, repeated_layers, residual_stream
from stackwise.checks.probe.loss_formula import IGNORED
from stackwise.checks.probe.ties import selects_positions
from stackwise.checks.probe.update import norm
from stackwise.checks.probe.widened import Widened
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.subject.argument import known_kinds
from stackwise.subject.cached_call import names_cache
from stackwise.subject.call_form import forward_parameters
from stackwise.support.hooks import temporary_hooks
from stackwise.support.random_state import seeded

_STEPS = 3
# Further steps with other random numbers, if a parameter got no gradient.
_SEEDS = 8
_ENCODER_POSITIONS = 4
_LONG = 320
# Share of the norm of all gradients, in float64. Smaller gradients are sums that cancel.
_NOISE = 1e-12
_NOTHING_TO_TRAIN = "no parameter is trainable"
_UNUSED = "If they are unused on purpose, declare unused= with their names."
# Arguments of data that the checks do not pass.
_OTHER_DATA = re.compile(
    "pixel|image|video|audio|bbox|xpath|perm_mask|target_mapping|masked_pos|global_attention"
)
_OTHER_DATA_TEXT = "Some parameters are for arguments that the checks do not pass, such as images."
_RETURNED_TEXT = "Some parameters compute a result that is returned, and that this loss does not use."
_OTHER_POSITIONS_TEXT = "Some parameters only change positions that the head does not read."
_DETACHED = (
    "the model detaches a result on purpose, and another output or the loss trains these parameters, as in "
    "the iterative refinement of a detector"
)
_ON_PURPOSE = (
    "they are frozen on purpose, such as a base under adapters (then declare frozen= with their prefixes)"
)
_SELECTING_TEXT = "Some parameters may only choose positions by a top k, and need a loss of their own."


@check
def gradient_flow(subject: Subject) -> CheckResult:
    """Does every parameter get a gradient, at the latest after two optimizer steps?"""
    spec = subject.spec
    model = subject.model(train=True)
    trainable = trainable_parameters(subject, model)
    if not trainable:
        return subject.not_applicable(_NOTHING_TO_TRAIN)
    if subject.seq_len < 2 and spec.causal and spec.loss is None:
        return subject.not_applicable("needs at least 2 positions, to predict the second from the first")
    steps = _first_steps(subject, model, trainable)
    n, missing = len(trainable), steps.missing
    rounded = _only_rounding(subject, n)
    meaning = f"All {n} parameters have a gradient that is not 0."
    if missing:
        elsewhere = _trained_elsewhere(subject)
        missing = [name for name in missing if name not in elsewhere]
        meaning = "Some parameters get a gradient only from the model's own loss, only from long inputs, "
        meaning += "only with some random numbers, or only if encoder_hidden_states are passed."
    if not missing:
        return rounded or subject.passed(0.0, 0.0, meaning=meaning)
    smooth, stepped, without, result = _by_influence(subject, missing)
    finding = (
        _cut_off(subject, n, smooth, result)
        or _without_effect(subject, steps, without)
        or _only_steps(subject, n, stepped)
    )
    if finding is not None:
        return finding
    reasons = _not_in_this_loss(subject, model, missing, steps.called)
    unexplained = [name for name in missing if name not in reasons]
    if not unexplained:
        texts = " ".join(dict.fromkeys(reasons.values()))
        return subject.passed(len(missing) / n, where=listed(missing), meaning=texts)
    return rounded or _untrained(subject, steps, unexplained, stepped)


@dataclass(frozen=True)
class _Steps:
    """First steps of a training run.

    Attributes:
        model: the model.
        n: number of trainable parameters.
        missing: parameters with a gradient of None or 0 in each step.
        connected: those of them with a gradient of 0 in a step.
        called: modules that run.
        empty: modules that return an empty tensor.
    """

    model: nn.Module
    n: int
    missing: list[str]
    connected: set[str]
    called: set[str]
    empty: set[str]

    def runs_owner(self, name: str) -> bool:
        """Return True if the module of a parameter runs."""
        return name.rpartition(".")[0] in self.called


def _first_steps(subject: Subject, model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> _Steps:
    """Train a model for a few steps, or until each parameter had a gradient."""
    steps = _Steps(model, len(trainable), list(trainable), set(), set(), set())
    optimizer = subject.spec.optimizer(list(trainable.values()))

    def note(name: str, output: Any) -> None:
        steps.called.add(name)
        if any(not each.numel() for each in tensors_in(output)):
            steps.empty.add(name)

    handles = (
        m.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
        for name, m in model.named_modules()
    )
    with temporary_hooks(handles):
        for step in range(_STEPS):
            model.zero_grad(set_to_none=True)
            with torch.enable_grad(), subject.fixed_randomness():
                loss = subject.spec.loss_of(model, subject.inputs(4, shift=step))
                if not loss.requires_grad:
                    break
                loss.backward()  # type: ignore[no-untyped-call]
            steps.connected.update(n for n in steps.missing if trainable[n].grad is not None)
            steps.missing[:] = [n for n in steps.missing if (g := trainable[n].grad) is None or not g.any()]
            if not steps.missing:
                break
            optimizer.step()
    return steps


def _finding(
    subject: Subject, n: int, names: list[str], text: str, *, advice: str, correct_if: str | None = None
) -> CheckResult | None:
    """Return a finding about some of n parameters, or None if there are none."""
    if not names:
        return None
    meaning = f"{len(names)} of {n} parameters {text}"
    return subject.failed_unless(
        correct_if, len(names) / n, 0.0, where=listed(names), meaning=meaning, advice=advice
    )


def _untrained(subject: Subject, steps: _Steps, missing: list[str], stepped: list[str]) -> CheckResult:
    """Return the finding about parameters without an influence, or only by large changes (`stepped`).

    If a layer, or a part of all layers, is not called, this may be on purpose: a setting may choose between
    the members of a list, and an optional argument may be for data that the checks do not pass.
    """
    model, called = steps.model, steps.called
    skipped = tuple(f"{layer}." for layer in _skipped(model, called))
    # Parameters in lists are excluded if the same parameter of another member trains: they may belong to
    # experts that no token reached, or to the last layer, part of whose result is not needed. Modules that
    # return empty tensors may need longer inputs.
    training = {pattern(name) for name, _ in model.named_parameters() if name not in missing}
    too_short = tuple(f"{module}." for module in steps.empty)
    unused = [
        name
        for name in missing
        if steps.runs_owner(name)
        and pattern(name) not in training
        and not name.startswith(too_short)
        and name not in stepped
        and not _may_be_unused(model, name, is_connected=name in steps.connected)
    ]
    n_uncalled = sum(not steps.runs_owner(name) for name in missing)
    uncalled = f" Parameters in modules that are never called: {n_uncalled}." if n_uncalled else ""
    selecting = f" Parameters whose large changes change the output: {len(stepped)}." if stepped else ""
    find = partial(_finding, subject, steps.n)
    finding = (
        find(
            [name for name in missing if name.startswith(skipped)],
            "are in layers that are never called. Other layers of the same list are.",
            advice="Look for a return inside the loop over the layers, and for a loop that ends too early. "
            f"{_UNUSED}",
        )
        or find(
            _in_uncalled_parts(model, missing, called),
            "are in modules that no layer calls. They never train.",
            advice="In the forward method of the layer, look for a call of the wrong module, and for a "
            f"condition that is never true. {_UNUSED}",
        )
        or find(
            unused,
            "never train: their modules run, and no output depends on them.",
            advice="Look for a result that is computed and not used, such as a wrong variable after return, "
            f"and for a parameter that forward does not read. {_UNUSED}",
        )
        or find(
            missing,
            f"never train: they get no gradient in {_STEPS} steps, and no small change of them changes the "
            f"output.{uncalled}{selecting}",
            correct_if="they are unused on purpose (then declare unused=), or experts without a token",
            advice="Remove them, or look for the code that should call them.",
        )
    )
    assert finding is not None
    return finding


def _skipped(model: nn.Module, called: set[str]) -> list[str]:
    """Return the layers that are not called, although other layers of the same list are."""
    for names in repeated_layers(model):
        has_parts = len([m for m in model.get_submodule(names[0]).modules() if [*m.parameters(False)]]) > 2
        running = [name for name in names if any(f"{each}.".startswith(f"{name}.") for each in called)]
        is_outermost = "*" not in pattern(names[0]).rpartition(".")[0]
        if has_parts and running and is_outermost:
            return [name for name in names if name not in running]
    return []


def _in_uncalled_parts(model: nn.Module, names: list[str], called: set[str]) -> list[str]:
    """Return the parameters in modules that no layer of a repeated group calls."""
    layers = [layer for group in repeated_layers(model) for layer in group]
    if any(_takes_more(model.get_submodule(layer)) for layer in layers):
        return []
    running = {pattern(name) for name in called}
    owners = {
        name: name.rpartition(".")[0] for name in names if name.startswith(tuple(f"{x}." for x in layers))
    }
    return [
        name
        for name, owner in owners.items()
        if pattern(owner) not in running and not _has_alternative(model, owner, called)
    ]


def _may_be_unused(model: nn.Module, name: str, *, is_connected: bool) -> bool:
    """Return True if a module that runs may leave its parameter without an effect on purpose.

    An optional argument that is not passed may need the parameter, a key may select the module in a
    dictionary, and a product with 0 may connect an unused parameter for DistributedDataParallel.
    """
    parts = name.split(".")
    owner = model.get_submodule(".".join(parts[:-1]))
    if is_connected:
        return not isinstance(owner, nn.RNNBase)
    around = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]
    has_option = any(p.default is None for p in forward_parameters(owner).values())
    return has_option or any(isinstance(each, nn.ModuleDict) for each in around)


def _takes_more(layer: nn.Module) -> bool:
    """Return True if a part of the layer has an optional argument that could be for data of another kind."""
    named = [(n, p) for part in layer.modules() for n, p in forward_parameters(part).items()]
    optional = {n for n, p in named if isinstance(p.default, str | None) and not names_cache(n)}
    return any(not known_kinds(name) or "context" in known_kinds(name) for name in optional)


def _has_alternative(model: nn.Module, name: str, called: set[str]) -> bool:
    """Return True if another member of the list of a module has the same parameter shapes, and is called."""
    parent = name.rpartition(".")[0]
    while not isinstance(model.get_submodule(parent), nn.ModuleDict | nn.ModuleList):
        if parent in called:
            return False
        name, parent = parent, parent.rpartition(".")[0]
    shapes = [p.shape for p in model.get_submodule(name).parameters()]
    others = (f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children())
    return any(
        [p.shape for p in model.get_submodule(each).parameters()] == shapes for each in called & {*others}
    )


def _cut_off(subject: Subject, n: int, cut: list[str], result: str) -> CheckResult | None:
    return _finding(
        subject,
        n,
        cut,
        f"never get a gradient, though the {result} depends on them smoothly.",
        correct_if=_DETACHED if cut and _trained_otherwise(subject, cut) else None,
        advice="Look for detach(), .data, .item(), torch.no_grad(), a tensor created from values, and a "
        "custom backward that returns None. A reentrant checkpoint gives no gradient if none of its "
        "inputs has requires_grad=True.",
    )


def _without_effect(subject: Subject, steps: _Steps, names: list[str]) -> CheckResult | None:
    changing = None if subject.spec.per_position else _changing_stream(subject)
    training = {name for name, _ in steps.model.named_parameters()} - {*names}
    dead = [
        name
        for name in names
        if name in steps.connected and _is_layer_weight(steps.model, name) and name not in (changing or ())
        if not _is_unreached_expert(name, training)
    ]
    reads_one: str | None = (
        "the head reads one position, such as a class token, and these only affect the others"
    )
    if dead and not subject.spec.per_position and not _changes_a_module(subject, dead):
        reads_one = None
    return _finding(
        subject,
        steps.n,
        dead,
        "have a gradient of 0 at each step, and do not change the output, though it is computed from them.",
        correct_if=None if subject.spec.per_position or changing is not None else reads_one,
        advice="Look for a branch that is multiplied by 0, units that are never active, and for dropout "
        "or drop path with p = 1.",
    )


@torch.no_grad()
def _changes_a_module(subject: Subject, names: list[str]) -> bool:
    """Return True if other values of parameters may change the output of a module around their own module.

    Only parameters with an axis of size 1 are tested, such as the weights of one score: a softmax over one
    score is 1 for inputs of any size. Other parameters may only have no effect on a small input.
    """
    model = subject.model(dtype=torch.float64, fill_zeros=True)
    if not all(1 in model.get_parameter(name).shape for name in names):
        return True
    around = {each for name in names for each in itertools.accumulate(name.split(".")[:-1], "{}.{}".format)}
    inner = [model.get_submodule(name) for name in sorted(around)]
    inner = [module for module in inner if any(module.children())]
    outputs: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda _, __, output: outputs.extend(tensors_in(output)))
        for module in inner
    ]
    try:
        with temporary_hooks(handles):
            subject.logits(model, subject.inputs(2))
            before = [*outputs]
            outputs.clear()
            for name in names:
                p = model.get_parameter(name)
                p.add_(direction_of(subject, p))
            subject.logits(model, subject.inputs(2))
    except REFUSALS:  # no float64
        return True
    if not outputs or len(before) != len(outputs):
        return True  # unknown
    return any(not torch.equal(a, b) for a, b in zip(before, outputs, strict=True))


def _is_unreached_expert(name: str, training: set[str]) -> bool:
    """Return True if the parameter is in a list within a layer, and other members of this list train."""
    match = re.fullmatch(r"(.*\.\d+\..*\.)\d+(\..*)", name)
    beside = match and re.compile(rf"{re.escape(match[1])}\d+{re.escape(match[2])}")
    return beside is not None and any(beside.fullmatch(each) for each in training)


def _only_steps(subject: Subject, n: int, stepped: list[str]) -> CheckResult | None:
    return _finding(
        subject,
        n,
        stepped if 2 * len(stepped) > n else [],
        f"get no gradient in {_STEPS} steps: large changes of them change the output, and small ones do not.",
        advice="A step function (round, sign, argmax, a comparison) has the derivative 0. Pass gradients "
        "straight through, as in x + (round(x) - x).detach().",
    )


def _only_rounding(subject: Subject, n: int) -> CheckResult | None:
    """Return a result if the gradient of some matrices is rounding noise, although they select a part.

    A matrix that changes nothing, such as one before a softmax over one entry, is no finding.
    """
    model = subject.model(train=True, dtype=torch.float64)
    try:
        with torch.enable_grad(), subject.fixed_randomness(), Widened():
            logits = subject.spec.logits(model, subject.inputs(4))
            (logits * torch.randn_like(logits)).sum().backward()  # type: ignore[no-untyped-call]
    except REFUSALS:
        return None
    gradients = gradients_in(model)
    total = norm(gradients.values())
    noisy = [name for name, g in gradients.items() if g.ndim > 1 and 0 < norm([g]) < _NOISE * total]
    influence = _influence(subject, noisy, of_loss=False) if noisy else {}
    return _finding(
        subject,
        n,
        [name for name in noisy if influence[name] == "steps"],
        "have only rounding noise as a gradient of the output, although large changes of them change it. "
        "They learn nothing from the task.",
        advice="Look for a value that is divided by itself: a router with one expert per token and "
        "normalised weights multiplies by w / w = 1. Multiply by the probability w instead.",
    )


@check
def gradient_exact(subject: Subject) -> CheckResult:
    """Does the gradient equal the derivative of the output by finite differences in float64?"""
    train = not Examination.of(subject).adds_gradients
    model = subject.model(train=train, dtype=torch.float64, fill_zeros=True)
    if not trainable_parameters(subject, model):
        return subject.not_applicable(_NOTHING_TO_TRAIN)
    inputs = subject.inputs(2)
    try:
        found = compared(subject, model, lambda m: subject.spec.logits(m, inputs.clone()))
    except refusals():
        return subject.not_applicable("needs a model that runs in float64")
    return _judged(subject, found, "output")


@check
def loss_gradient(subject: Subject) -> CheckResult:
    """Is the gradient of the model's own loss its derivative, in eval and train mode, with ignored labels?"""
    worst, limit = -1.0, 0.0
    reason = "needs labelled_loss or loss that is a smooth function of the parameters in float64"
    for place, model, function in _losses(subject):
        if not trainable_parameters(subject, model):
            return subject.not_applicable(_NOTHING_TO_TRAIN)
        try:
            found = compared(subject, model, function)
        except refusals():  # such as labels that the loss does not take
            continue
        result = _judged(subject, found, "loss", place)
        if result.status in ("failed", "warned"):
            return result
        if result.status == "passed" and found.value > worst:
            worst, limit = found.value, found.limit
        if found.is_surrogate:
            reason = result.meaning
    if worst < 0:
        return subject.not_applicable(reason)
    return subject.passed(worst, limit)


def _losses(subject: Subject) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], Tensor]]]:
    """Yield each way to compute the model's own loss, with a new model: its description and the loss."""
    spec, inputs = subject.spec, subject.inputs(2)
    own = spec.labelled_loss
    labels: dict[str, Tensor | None] = {}
    if own is not None and spec.inputs == "tokens":
        some = inputs.clone()
        some[0, ::3] = IGNORED
        some[1, some.shape[1] // 2 :] = IGNORED
        labels = {"all labels": inputs, "some labels ignored": some}
    if spec.loss is not None:
        labels["the declared loss"] = None

    def loss(model: nn.Module, given: Tensor | None) -> Tensor:
        with WithoutDropout():
            if given is None:
                return spec.loss_of(model, inputs.clone())
            assert own is not None
            return own(model, inputs.clone(), given.clone())

    for train in (False,) if Examination.of(subject).adds_gradients else (False, True):
        for name, given in labels.items():
            model = subject.model(train=train, dtype=torch.float64, fill_zeros=True)
            mode = "train mode" if train else "eval mode"
            yield f"{mode}, {name}", model, partial(loss, given=given)


def _judged(subject: Subject, found: Comparison, name: str, place: str = "") -> CheckResult:
    """Return the result of a comparison of the output or the loss."""
    if not found.has_gradient:
        return subject.failed(
            found.value,
            found.limit,
            where=place,
            meaning=f"The {name} has no gradient at all.",
            advice="Look for detach(), .data, no_grad() or an argmax between the parameters and the result.",
        )
    if not found.is_smooth:
        return subject.not_applicable(f"needs a model whose {name} is smooth in the parameters")
    if found.value <= found.limit:
        return subject.passed(found.value, found.limit)
    if name == "loss" and found.truncates and not _output_is_exact(subject):
        return subject.not_applicable("the recurrence is truncated; see gradient_exact")
    if found.is_surrogate:
        return subject.not_applicable(
            f"needs a {name} that changes with the parameters: the value of a surrogate loss, as with "
            "exp(logp - logp.detach()), hides its gradient on purpose"
        )
    return _not_the_derivative(subject, found, name, place)


def _not_the_derivative(subject: Subject, found: Comparison, name: str, place: str) -> CheckResult:
    """Return the result for a gradient that differs from the derivative of the output or the loss."""
    is_lost = bool(found.wrong) and found.wrong[0][1] == 0
    meaning = f"The gradient is not the derivative of the {name} along a random direction."
    if found.wrong:
        parameter, slope, expected = found.wrong[0]
        meaning += f" For {parameter}, the gradient gives {slope:.3g}, and finite differences {expected:.3g}."
    correct_if = None
    if found.uses_steps:
        correct_if = "the model chooses its own gradient for the step functions that it uses"
    elif found.truncates and not is_lost:
        correct_if = "the model truncates its recurrence on purpose: it runs layers without gradients"
    elif is_lost and _trained_otherwise(subject, [parameter for parameter, _, _ in found.wrong]):
        correct_if = _DETACHED
    elif name == "loss" and not is_lost and _has_auxiliary_head(subject) and _output_is_exact(subject):
        correct_if = (
            "the auxiliary head detaches its input on purpose, so that it does not train other layers"
        )
    return subject.failed_unless(
        correct_if,
        found.value,
        found.limit,
        where=": ".join(filter(None, [place, listed([name for name, _, _ in found.wrong])])),
        meaning=meaning,
        advice="Look for detach(), .data, .item(), torch.no_grad() and tensors created from values, between "
        f"these parameters and the {name}."
        if is_lost
        else "Look for a custom autograd.Function with a wrong backward, a hook that changes gradients, a "
        "partial detach() and an operation in place on what backward needs.",
    )


@check
def trainable(subject: Subject) -> CheckResult:
    """Are all parameters trainable except the declared ones, and do train() and eval() not change this?"""
    model = subject.spec.create(subject.device, subject.seed)
    as_built = {name: p.requires_grad for name, p in model.named_parameters()}
    n = len(as_built)
    if not as_built:
        return subject.not_applicable("the model has no parameters")
    find = partial(_finding, subject, n)
    for call in ("train", "eval"):
        getattr(model, call)()
        changed = [n for n, p in model.named_parameters() if p.requires_grad != as_built.get(n)]
        if finding := find(
            changed,
            f"change requires_grad in {call}().",
            advice="Freeze in the constructor: an optimizer that is created before train() gets other "
            "parameters than one that is created after.",
        ):
            return finding
    trains = [name for name, is_trainable in as_built.items() if is_trainable]
    thawed = [name for name in trains if name.startswith(subject.spec.frozen or "\0")]
    declared = (*subject.spec.unused, *subject.spec.frozen) or "\0"
    others = [name for name in as_built if name not in trains and not name.startswith(declared)]
    undeclared = _with_gradients(subject, others)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a tied weight has two
    absent = [prefix for prefix in subject.spec.frozen if not any(n.startswith(prefix) for n in names)]
    finding = (
        find(
            absent,
            "are declared frozen, and no parameter has such a name.",
            advice="Look for a prefix that does not match after wrapping.",
        )
        or find(
            thawed,
            "are declared frozen, and are trainable.",
            advice="Look for requires_grad_(True) after the freezing.",
        )
        or find(
            # A bias that only chooses experts has no gradient. Training code updates it.
            undeclared,
            "are not trainable.",
            # A constant, such as a table of frequencies, is often a frozen parameter that nobody declares.
            correct_if=None if subject.spec.frozen and _any_of_a_layer(model, undeclared) else _ON_PURPOSE,
            advice="Look for a requires_grad_(False) that was not reversed. If it is on purpose, declare "
            "the prefix in frozen=.",
        )
    )
    return finding or subject.passed(0.0, 0.0, meaning=f"All {n} parameters are as declared.")


def _any_of_a_layer(model: nn.Module, names: list[str]) -> bool:
    """Return True if one of these parameters belongs to a linear layer or a convolution."""
    owners = (model.get_submodule(name.rpartition(".")[0]) for name in names)
    return any(isinstance(owner, nn.Linear | nn.modules.conv._ConvNd) for owner in owners)


def _with_gradients(subject: Subject, frozen: list[str]) -> list[str]:
    """Return the frozen parameters that would have a gradient if they were trainable."""
    model = subject.model(train=True)
    frozen = [name for name in frozen if model.get_parameter(name).is_floating_point()]
    if not frozen:
        return []
    for name in frozen:
        model.get_parameter(name).requires_grad_()
    with torch.enable_grad(), subject.fixed_randomness():
        loss = subject.spec.loss_of(model, subject.inputs(2))
    trained = _trained(subject, model, lambda: loss) if loss.requires_grad else {*frozen}
    return [name for name in frozen if name in trained]


def _trained(subject: Subject, model: nn.Module, result: Callable[[], Tensor | None]) -> set[str]:
    """Return the parameters that get a gradient from a result: none if the model refuses the call."""
    try:
        with torch.enable_grad(), subject.fixed_randomness():
            tensor = result()
            if tensor is not None and tensor.requires_grad:
                tensor.backward()  # type: ignore[no-untyped-call]
    except refusals():
        pass
    return {name for name, gradient in gradients_in(model).items() if gradient.any()}


def _loss_with_seed(subject: Subject, model: nn.Module, seed: int) -> Tensor:
    with seeded(seed, subject.device):
        return subject.spec.loss_of(model, subject.inputs(4))


def _trained_elsewhere(subject: Subject) -> set[str]:
    """Return the parameters that other steps train.

    They have a gradient of the own loss, of long inputs, of encoder_hidden_states, or with other random
    numbers, which may drop layers or hide inputs.
    """
    trained = _trained_by_own_loss(subject)
    for seed in range(_SEEDS):
        model = subject.model(train=True)
        trained |= _trained(subject, model, partial(_loss_with_seed, subject, model, seed))
    # Such as parameters that compress blocks of tokens.
    model, length = subject.model(train=True), min(subject.spec.max_length or _LONG, _LONG)
    inputs = subject.inputs(1, max(length, subject.seq_len))
    trained |= _trained(subject, model, lambda: subject.spec.loss_of(model, inputs))
    exam = Examination.of(subject)
    states = encoder_states(exam, _ENCODER_POSITIONS)
    if states is not None:
        decoder = exam.model()
        trained |= _trained(
            subject, decoder, lambda: output_with_encoder(exam, states, model=decoder).square().sum()
        )
    return trained


def _trained_by_own_loss(subject: Subject) -> set[str]:
    """Return the parameters with a gradient of the model's own loss, which may have more terms."""
    model = subject.model(train=True)
    return _trained(subject, model, lambda: _own_loss(subject, model))


def _trained_otherwise(subject: Subject, names: list[str]) -> bool:
    """Return True if the declared loss and all returned tensors together train the parameters."""
    model, outputs = subject.model(train=True), list[Tensor]()

    def result() -> Tensor:
        outputs.append(subject.spec.loss_of(model, subject.inputs(4)))
        return torch.stack([each.square().mean() for each in outputs if each.requires_grad]).sum()

    handle = model.register_forward_hook(lambda _module, _args, output: outputs.extend(tensors_in(output)))
    with temporary_hooks([handle]):
        return _trained(subject, model, result).issuperset(names)


def _has_auxiliary_head(subject: Subject) -> bool:
    """Return True if the own loss trains parameters that no output depends on."""
    model = subject.model(train=True)
    with torch.enable_grad(), subject.fixed_randomness():
        subject.spec.logits(model, subject.inputs(4)).sum().backward()  # type: ignore[no-untyped-call]
    return bool(_trained_by_own_loss(subject) - gradients_in(model).keys())


def _output_is_exact(subject: Subject) -> bool:
    """Return True if the gradient of the output equals its derivative."""
    model = subject.model(train=True, dtype=torch.float64, fill_zeros=True)
    found = compared(subject, model, lambda m: subject.spec.logits(m, subject.inputs(2)))
    return found.has_gradient and found.is_smooth and found.value <= found.limit


def _own_loss(subject: Subject, model: nn.Module) -> Tensor | None:
    """Return the model's own loss with the inputs as labels, or None if it has none."""
    inputs = subject.inputs(4)
    if subject.spec.labelled_loss is None or subject.spec.inputs != "tokens":
        return None
    with subject.fixed_randomness():
        return subject.spec.labelled_loss(model, inputs, inputs.clone())


def _by_influence(subject: Subject, names: list[str]) -> tuple[list[str], list[str], list[str], str]:
    """Return the parameters with a smooth influence, with steps only and with none, and the result.

    The result is the output, or the own loss if only this one depends smoothly on a parameter.
    """
    influence, result = _influence(subject, names, of_loss=False), "output"
    if "smooth" not in influence.values() and subject.spec.labelled_loss is not None:
        of_loss = _influence(subject, names, of_loss=True)
        if "smooth" in of_loss.values():
            influence, result = of_loss, "model's own loss"
    smooth, stepped, without = (
        [name for name in names if influence[name] == kind] for kind in ("smooth", "steps", "none")
    )
    return smooth, stepped, without, result


@torch.no_grad()
def _influence(subject: Subject, names: list[str], *, of_loss: bool) -> dict[str, str]:
    """Return the influence of each parameter: "smooth", "steps" (large changes only) or "none".

    It is the influence on the output, or on the model's own loss.
    """
    for dtype in (torch.float64, None):
        model = subject.model(train=True, dtype=dtype, fill_zeros=True)
        result = partial(_result, subject, model, of_loss=of_loss)
        try:
            # All together first: usually none of them matters.
            together = _dependence(subject, model, names, result, exact=dtype is not None)
            if together == "none" or len(names) == 1:
                return dict.fromkeys(names, together)
            return {n: _dependence(subject, model, [n], result, exact=dtype is not None) for n in names}
        except REFUSALS:
            continue  # not in float64
    return dict.fromkeys(names, "none")


def _result(subject: Subject, model: nn.Module, *, of_loss: bool) -> Tensor:
    """Return the output, or the own loss beside a 0, because differences are relative to the variation."""
    with Widened():
        if not of_loss:
            return subject.logits(model, subject.inputs(4))
        loss = _own_loss(subject, model)
        assert loss is not None
        return torch.stack((loss, torch.zeros_like(loss)))[None]


def _dependence(
    subject: Subject, model: nn.Module, names: list[str], result: Callable[[], Tensor], *, exact: bool
) -> str:
    parameters = [model.get_parameter(name) for name in names]
    start = [p.clone() for p in parameters]
    directions = [direction_of(subject, p) for p in parameters]
    before = result()

    def moved(size: float) -> float:
        for p, old, direction in zip(parameters, start, directions, strict=True):
            p.copy_(old + size * direction)
        difference = relative_difference(before, result()).max().item()
        for p, old in zip(parameters, start, strict=True):
            p.copy_(old)
        return difference

    noise, size = (1e-11, 1e-4) if exact else (1e-5, 1e-2)
    small, larger = moved(size), moved(10 * size)
    if small > noise and 3 < larger / small < 30:
        return "smooth"
    return "steps" if max(small, larger, moved(1.0)) > 100 * noise else "none"


def _not_in_this_loss(
    subject: Subject, model: nn.Module, missing: list[str], called: set[str]
) -> dict[str, str]:
    """Return why parameters get no gradient on purpose, by name. Parameters without a reason are left out."""
    reasons = {name: _OTHER_DATA_TEXT for name in missing if _reads_other_data(model, name, called)}
    left = [name for name in missing if name not in reasons]
    if left:
        reasons |= dict.fromkeys(_returned_only(subject, left), _RETURNED_TEXT)
    left = [name for name in left if name not in reasons]
    if left and not subject.spec.per_position:
        changing = _changing_stream(subject) or set()
        reasons |= dict.fromkeys(changing.intersection(left), _OTHER_POSITIONS_TEXT)
        left = [name for name in left if name not in reasons]
    if left and selects_positions(subject):
        chosen = (name for name in left if name.rpartition(".")[0] in called)
        reasons |= dict.fromkeys(chosen, _SELECTING_TEXT)
    return reasons


def _reads_other_data(model: nn.Module, name: str, called: set[str]) -> bool:
    """Return True for a parameter that this call does not use, in a module that also takes other data."""
    owner = name.rpartition(".")[0]
    if owner in called and not any(model.get_submodule(owner).children()):
        return False
    parts, passed = owner.split("."), next(iter(forward_parameters(model)), "")
    around = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1))
    taken = {each for module in around for each in forward_parameters(module)} - {passed}
    crosses = "encoder_hidden_states" in taken and re.search("encoder|cross", owner)
    return bool(crosses) or any(_OTHER_DATA.search(each) for each in taken)


def _returned_only(subject: Subject, names: list[str]) -> list[str]:
    """Return the parameters that a module outside the layers uses for one of several tensors that it returns.

    Such as a pooler: its output is returned beside the hidden states, and a head may use it.
    """
    model = subject.model(train=True)
    layers = tuple(f"{layer}." for group in repeated_layers(model) for layer in group)
    returned: list[Tensor] = []

    def keep(module: nn.Module, _args: Any, output: Any) -> None:
        tensors = [each for each in tensors_in(output) if each.requires_grad]
        returned.extend(tensors if len(tensors) > 1 else ())
        kept = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        returned.extend(each for each in tensors_in(kept) if each.requires_grad)

    for name, module in model.named_modules():
        # A recurrent layer returns the same states twice.
        if not f"{name}.".startswith(layers) and not isinstance(module, nn.RNNBase):
            module.register_forward_hook(keep)
    with torch.enable_grad(), subject.fixed_randomness():
        subject.spec.logits(model, subject.inputs(4))
        if returned:
            torch.stack([each.sum() for each in returned]).sum().backward()  # type: ignore[no-untyped-call]
    return [name for name in names if model.get_parameter(name).grad is not None]


def _changing_stream(subject: Subject) -> set[str] | None:
    """Return the parameters that change the residual stream, or None if there is no stream.

    A head may ignore some positions of the stream.
    """
    model = subject.model(train=True)
    with torch.enable_grad(), subject.fixed_randomness():
        stream = residual_stream(model, lambda: subject.spec.logits(model, subject.inputs(4)))
    if stream is None:
        return None
    return _trained(subject, model, lambda: torch.stack([x.square().sum() for x in stream.after]).sum())


def _is_layer_weight(model: nn.Module, name: str) -> bool:
    """Return True for a weight matrix of a repeated layer."""
    groups = repeated_layers(model)
    in_layer = bool(groups) and any(name.startswith(layer + ".") for layer in groups[0])
    return in_layer and model.get_parameter(name).ndim >= 2
