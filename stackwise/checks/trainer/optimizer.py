"""Optimizer: it decays the right parameters, and its updates reach the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.call import reason_of
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.update import Observation, Update, distance, norm, observed
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.optimizer_state import optimizers_in
from stackwise.support.system_errors import is_out_of_memory

_STEPS = 3
_NARROW = (torch.bfloat16, torch.float16)
# Expected fraction of the elements with a gradient that an update changes.
_USUAL_SHARE = 0.5
# In tensors with fewer elements, it may be by chance that no element changes.
_FEW = 16
_OTHER_UPDATE = 0.1
_SAME_GRADIENT = 1e-3


@trainer_check
def weight_decay_groups(subject: TrainerSubject) -> CheckResult:
    """Does weight decay skip norms and biases, unless it is declared for them?"""
    run = subject.run()
    decay = {
        id(p): float(group.get("weight_decay") or 0.0)
        for group in run.optimizer.param_groups
        for p in group["params"]
    }
    named = {name: p for name, p in run.model.named_parameters() if id(p) in decay}
    if subject.spec.decayed is not None:
        wrong = sorted(
            name for name, p in named.items() if bool(decay[id(p)]) != bool(subject.spec.decayed(name, p))
        )
        if wrong:
            decayed = [name for name in wrong if decay[id(named[name])]]
            return subject.failed(
                len(wrong),
                0.0,
                where=listed(wrong),
                meaning=f"Parameters with weight decay that is not declared: {len(decayed)}. Parameters "
                f"without the declared weight decay: {len(wrong) - len(decayed)}.",
                advice="Look at the order of the rules for groups, at names of tied parameters, and at "
                "groups that share one dict.",
            )
        return subject.passed(0.0, 0.0)
    if not any(decay.values()):
        return subject.passed(0.0, 0.0, meaning="No parameter has weight decay.")
    vectors = sorted(name for name, p in named.items() if p.ndim < 2 and decay[id(p)])
    if vectors:
        return subject.warned(
            len(vectors),
            0.0,
            where=listed(vectors),
            meaning=f"Norms and biases with weight decay: {len(vectors)}.",
            correct_if="the recipe decays them on purpose (then declare decayed=)",
            advice="Put parameters with fewer than two dimensions in a group without weight decay.",
        )
    return subject.passed(0.0, 0.0)


@trainer_check
def updates_survive_rounding(subject: TrainerSubject) -> CheckResult:
    """Do updates change bfloat16 and float16 weights, or are they lost by rounding?"""
    run, seen = _trained(subject)
    named = dict(run.model.named_parameters())
    narrow = {name: p for name, p in named.items() if p.dtype in _NARROW and p.requires_grad}
    if not narrow:
        return subject.not_applicable("needs trainable weights in bfloat16 or float16")
    if not any(update.has_rate for update in seen.updates):
        return subject.not_applicable(f"needs a learning rate above 0 in the first {_STEPS} steps")
    shares = _surviving_shares(run, seen, narrow)
    if not shares:
        return subject.passed(1.0, meaning="All half-precision weights have float32 master weights.")
    worst = min(shares, key=lambda name: shares[name])
    text = {
        "where": worst,
        "meaning": f"Updates are lost by rounding: {100 * shares[worst]:.3g} % of the elements with a "
        f"gradient changed in {_STEPS} steps. Half-precision weights without float32 master weights: "
        f"{len(shares)}.",
        "advice": "Keep float32 master weights, or round stochastically: an update below 1/256 of a bfloat16 "
        "weight (1/2048 in float16) changes nothing.",
    }
    if shares[worst] > 0 or _rounds_at_random(subject):
        if shares[worst] < _USUAL_SHARE and not _rounds_at_random(subject):
            exempt = "the learning rate is large enough for most updates, as in a short fine-tuning"
            return subject.warned(shares[worst], _USUAL_SHARE, correct_if=exempt, **text)
        return subject.passed(
            shares[worst], meaning=f"Weights without float32 master weights: {len(shares)}."
        )
    return subject.failed(shares[worst], _USUAL_SHARE, **text)


@trainer_check
def strided_updates(subject: TrainerSubject) -> CheckResult:
    """Does a weight with a different memory layout get the same update?"""
    plain = _first_update(subject, strided=False)
    try:
        strided = _first_update(subject, strided=True)
    except (RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        return subject.not_applicable(f"needs weights that may be non-contiguous: {reason_of(error)}")
    if plain is None or strided is None:
        return subject.not_applicable(f"needs an update in {_STEPS} steps")
    value, worst = 0.0, ""
    for name in _same_matrix_gradients(plain, strided):
        if (apart := distance({name: strided.moved(name)}, {name: plain.moved(name)})) > value:
            value, worst = apart, name
    if value > _OTHER_UPDATE:
        share = norm([strided.moved(worst)]) / norm([plain.moved(worst)])
        return subject.failed(
            value,
            _OTHER_UPDATE,
            where=worst,
            meaning=f"With the same gradient, the update of this weight is {share:.3g} times as large if the "
            "memory of the weight is transposed.",
            advice="Look for an operation of the optimizer that copies non-contiguous tensors, such as "
            "transposed weights, and writes the update into the copy.",
        )
    return subject.passed(value, _OTHER_UPDATE)


def _first_update(subject: TrainerSubject, *, strided: bool) -> Update | None:
    """Return the first update with a learning rate above 0, or None.

    If `strided`, matrices are stored as their transpose.
    """
    run = subject.run()
    for p in run.model.parameters() if strided else ():
        if p.ndim >= 2 and p.is_contiguous():
            p.data = p.data.transpose(-1, -2).contiguous().transpose(-1, -2)
    with WithoutDropout(), subject.fixed_randomness(), observed(run) as seen:
        for number in range(_STEPS):
            run.step(subject.batch(number))
    return next((update for update in seen.updates if update.gradients and update.has_rate), None)


def _same_matrix_gradients(plain: Update, other: Update) -> Iterator[str]:
    """Yield the matrices that move, and whose gradient is the same in both updates.

    If the gradient consists of rounding errors, it differs, and the update does as well.
    """
    for name, gradient in plain.gradients.items():
        if name not in other.gradients or gradient.ndim < 2 or not plain.moved(name).any():
            continue
        if distance({name: other.gradients[name]}, {name: gradient}) <= _SAME_GRADIENT:
            yield name


def _trained(subject: TrainerSubject) -> tuple[TrainingRun, Observation]:
    """Return a run after some steps, and its updates."""
    run = subject.run()
    with subject.fixed_randomness(), observed(run) as seen:
        for number in range(_STEPS):
            run.step(subject.batch(number))
    return run, seen


def _surviving_shares(run: TrainingRun, seen: Observation, narrow: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of the elements that updates changed, for each weight without a master weight."""
    wide, shares = list(_wide_tensors(run)), {}
    for name, p in narrow.items():
        touched, moved = _touched(seen.updates, name)
        if touched and name in seen.reached and not any(_is_master(tensor, p) for tensor in wide):
            least = 1 if touched < _FEW else 0
            shares[name] = max(moved, least) / touched
    return shares


def _touched(updates: list[Update], name: str) -> tuple[int, int]:
    """Return the number of elements with a gradient in some update, and the number of changed ones.

    Updates with a learning rate of 0 are ignored.
    """
    touched: Any = False
    moved: Any = False
    for update in updates:
        if name in update.gradients and update.has_rate:
            touched = touched | (update.gradients[name] != 0)
            moved = moved | (update.before[name] != update.after[name])
    if touched is False:
        return 0, 0
    return int(touched.sum()), int((touched & moved).sum())


def _wide_tensors(run: TrainingRun) -> Iterator[Tensor]:
    """Yield the float32 tensors of the optimizer, of inner optimizers, and of lists and dicts of the run."""
    seen: set[int] = set()
    places: list[Any] = []
    for each in optimizers_in(run.optimizer):
        places += [getattr(each, "state", {}), each.param_groups, vars(each)]
    places += [
        value for key, value in vars(getattr(run, "run", run)).items() if key not in ("model", "optimizer")
    ]
    for depth in range(5):
        further: list[Any] = []
        for place in places:
            if id(place) in seen or isinstance(place, nn.Module):
                continue
            seen.add(id(place))
            if isinstance(place, Tensor):
                if place.dtype in (torch.float32, torch.float64):
                    yield place.detach()
            elif isinstance(place, Mapping):
                further += place.values()
            elif isinstance(place, list | tuple):
                further += place
            elif isinstance(place, torch.optim.Optimizer) and depth == 0:
                further += [place.state, place.param_groups, vars(place)]
        places = further


def _is_master(tensor: Tensor, p: Tensor) -> bool:
    """Return True if `p` is `tensor` after rounding. Parts of a flat tensor are not compared."""
    return tensor.shape == p.shape and torch.equal(tensor.to(p.dtype), p.detach())


def _rounds_at_random(subject: TrainerSubject) -> bool:
    """Return True if a step without dropout depends on the random state."""
    values = []
    for seed in range(2):
        run = subject.run()
        with WithoutDropout(), subject.under_seed(seed):
            for number in range(_STEPS):
                run.step(subject.batch(number))
        values.append([p.detach().clone() for p in run.model.parameters()])
    return not all(torch.equal(a, b) for a, b in zip(*values, strict=True))
