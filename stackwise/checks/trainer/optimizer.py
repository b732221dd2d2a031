"""Optimizer: it decays the right parameters, and its updates reach the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.call import reason_of
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.run_state import different
from stackwise.checks.probe.update import Observation, Update, distance, norm, train, weights_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.optimizer_state import optimizers_in
from stackwise.support.system_errors import reraise_if_out_of_memory

_STEPS = 3
_NARROW = (torch.bfloat16, torch.float16)
# Least usual fraction of the elements with a gradient that an update changes.
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
    decayed = {name for name, p in named.items() if decay[id(p)]}
    if subject.spec.decayed is not None:
        wrong = sorted(decayed ^ {name for name, p in named.items() if subject.spec.decayed(name, p)})
        n_decayed = len(decayed.intersection(wrong))
        return subject.at_most(
            len(wrong),
            0.0,
            where=listed(wrong),
            meaning=f"Parameters with weight decay that is not declared: {n_decayed}. Parameters "
            f"without the declared weight decay: {len(wrong) - n_decayed}.",
            advice="Look at the order of the rules, at tied parameters, and at groups that share a dict.",
        )
    if not any(decay.values()):
        return subject.passed(0.0, 0.0, meaning="No parameter has weight decay.")
    vectors = sorted(name for name in decayed if named[name].ndim < 2)
    if not vectors:
        return subject.passed(0.0, 0.0)
    return subject.warned(
        len(vectors),
        0.0,
        where=listed(vectors),
        meaning=f"Norms and biases with weight decay: {len(vectors)}.",
        correct_if="the recipe decays them on purpose (then declare decayed=)",
        advice="Put parameters with fewer than two dimensions in a group without weight decay.",
    )


@trainer_check
def updates_survive_rounding(subject: TrainerSubject) -> CheckResult:
    """Do updates change bfloat16 and float16 weights, or are they lost by rounding?"""
    run = subject.run()
    seen = train(subject, run, _STEPS)
    named = run.model.named_parameters()
    narrow = {name: p for name, p in named if p.dtype in _NARROW and p.requires_grad}
    needed(narrow, "trainable weights in bfloat16 or float16")
    has_rate = any(update.has_rate for update in seen.updates)
    needed(has_rate, f"a learning rate above 0 in the first {_STEPS} steps")
    shares = _surviving_shares(run, seen, narrow)
    if not shares:
        return subject.passed(1.0, meaning="All half-precision weights have float32 master weights.")
    worst = min(shares, key=lambda name: shares[name])
    if shares[worst] >= _USUAL_SHARE or _rounds_at_random(subject):
        text = f"Weights without float32 master weights: {len(shares)}."
        return subject.passed(shares[worst], meaning=text)
    exempt = "the learning rate is large enough for most updates, as in a short fine-tuning"
    return subject.failed_unless(
        exempt if shares[worst] > 0 else None,
        shares[worst],
        _USUAL_SHARE,
        where=worst,
        meaning=f"Updates are lost by rounding: {100 * shares[worst]:.3g} % of the elements with a "
        f"gradient changed in {_STEPS} steps. Half-precision weights without float32 master weights: "
        f"{len(shares)}.",
        advice="Keep float32 master weights, or round stochastically: an update below 1/256 of a bfloat16 "
        "weight (1/2048 in float16) changes nothing.",
    )


@trainer_check
def strided_updates(subject: TrainerSubject) -> CheckResult:
    """Does a weight with a different memory layout get the same update?"""
    plain = _first_update(subject, strided=False)
    try:
        strided = _first_update(subject, strided=True)
    except (RuntimeError, TypeError) as error:
        reraise_if_out_of_memory(error)
        return subject.not_applicable(f"needs weights that may be non-contiguous: {reason_of(error)}")
    gaps = {
        name: distance({name: strided.moved(name)}, {name: plain.moved(name)})
        for name, gradient in plain.gradients.items()
        if name in strided.gradients
        and gradient.ndim > 1
        and plain.moved(name).any()
        # If the gradient consists of rounding errors, it differs, and the update does as well.
        and distance({name: strided.gradients[name]}, {name: gradient}) <= _SAME_GRADIENT
    }
    worst = max(gaps, key=lambda name: gaps[name], default="")
    value = gaps.get(worst, 0.0)
    if value <= _OTHER_UPDATE:
        return subject.passed(value, _OTHER_UPDATE)
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


def _first_update(subject: TrainerSubject, *, strided: bool) -> Update:
    """Return the first update with a learning rate above 0. If `strided`, matrices are stored transposed."""
    run = subject.run()
    for p in run.model.parameters() if strided else ():
        if p.ndim >= 2 and p.is_contiguous():
            p.data = p.data.transpose(-1, -2).contiguous().transpose(-1, -2)
    with WithoutDropout():
        updates = train(subject, run, _STEPS).updates
    first = next((update for update in updates if update.gradients and update.has_rate), None)
    return needed(first, f"an update in {_STEPS} steps")


def _surviving_shares(run: TrainingRun, seen: Observation, narrow: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of the elements with a gradient that updates changed.

    Weights with a master weight, and updates with a learning rate of 0, are left out.
    """
    wide, shares = list(_wide_tensors(run)), {}
    for name, p in narrow.items():
        # `p` is its master weight after rounding. Parts of a flat master are not compared.
        if any(p.shape == each.shape and torch.equal(each.to(p.dtype), p.detach()) for each in wide):
            continue
        updates = [each for each in seen.updates if name in each.gradients and each.has_rate]
        if name not in seen.reached or not updates:
            continue
        touched = torch.stack([each.gradients[name] != 0 for each in updates]).any(dim=0)
        moved = torch.stack([each.before[name] != each.after[name] for each in updates]).any(dim=0)
        if n_touched := int(touched.sum()):
            least = 1 if n_touched < _FEW else 0
            shares[name] = max(int((touched & moved).sum()), least) / n_touched
    return shares


def _wide_tensors(run: TrainingRun) -> Iterator[Tensor]:
    """Yield the float32 tensors of the optimizer, of inner optimizers, and of lists and dicts of the run."""
    attributes = vars(getattr(run, "run", run)).items()
    places = [value for key, value in attributes if key not in ("model", "optimizer")]
    for each in (*optimizers_in(run.optimizer), *places):
        if hasattr(each, "param_groups"):
            places += [getattr(each, "state", {}), each.param_groups, vars(each)]
    for _ in range(5):
        tensors = [place for place in places if isinstance(place, Tensor)]
        yield from (each.detach() for each in tensors if each.dtype in (torch.float32, torch.float64))
        collections = [place for place in places if isinstance(place, Mapping | list | tuple)]
        places = [x for each in collections for x in (each.values() if isinstance(each, Mapping) else each)]


def _rounds_at_random(subject: TrainerSubject) -> bool:
    """Return True if a step without dropout depends on the random state."""
    values = []
    for seed in range(2):
        run = subject.run()
        with WithoutDropout(), subject.under_seed(seed):
            for number in range(_STEPS):
                run.step(subject.batch(number))
        values.append(weights_of(run))
    return bool(different(*values))
