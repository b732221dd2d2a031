"""Data: each example is read once in an epoch, in a new order.

Shapes: B rows of a batch.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.batch import named_tensors, tensors_in
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.random_state import seeded

_NEEDS = "needs epoch(number)"
_MOST_BATCHES = 256
_N_BATCHES = 4
_ACCIDENT = math.log(1e-6)


@trainer_check
def data_repeats(subject: TrainerSubject) -> CheckResult:
    """Do two runs with the same seed read the same data in the same order?"""
    run = subject.run()
    if not subject.has(run, "epoch"):
        return subject.not_applicable(_NEEDS)
    one, two = _marks(subject, run, 0, _N_BATCHES), _marks(subject, subject.run(), 0, _N_BATCHES)
    moved = sum(a != b for a, b in zip(one, two, strict=False)) + abs(len(one) - len(two))
    if moved:
        return subject.failed(
            float(moved),
            0.0,
            where=f"of the first {len(one)} rows of epoch 0",
            meaning="Two runs with the same seed read different data.",
            advice="Look for set() and dict order of strings, os.listdir, the time, and a generator that "
            "has no fixed seed (numpy's default_rng(), random.SystemRandom).",
        )
    return subject.passed(0.0, 0.0, meaning=f"{len(one)} rows compared.")


@trainer_check
def epoch_order(subject: TrainerSubject) -> CheckResult:
    """Does the order of the examples change from epoch to epoch?"""
    run = subject.run()
    if not subject.has(run, "epoch"):
        return subject.not_applicable(_NEEDS)
    one, two = (_marks(subject, run, number) for number in (0, 1))
    if len(set(one)) < 2:
        return subject.not_applicable("needs at least two examples that differ")
    same = sum(a == b for a, b in zip(one, two, strict=False)) / max(len(one), 1)
    if one != two:
        return subject.passed(same, 1.0, meaning="The value is the fraction of rows that keep their place.")
    text = {
        "where": "epochs 0 and 1",
        "meaning": "Every example keeps its place from one epoch to the next.",
        "advice": "Call set_epoch(epoch) of the sampler before each epoch, and let the seed of the "
        "order depend on the epoch.",
    }
    shuffles = getattr(run, "shuffles", None)
    if shuffles is False:
        return subject.passed(same, 1.0, meaning="The run declares a fixed order.")
    if shuffles or _order_has_a_seed(subject, one):
        return subject.failed(same, 1.0, **text)
    return subject.warned(
        same, 1.0, correct_if="a fixed order is intended (then set shuffles = False)", **text
    )


def _order_has_a_seed(subject: TrainerSubject, order: list[bytes]) -> bool:
    """Return True if a different seed gives the same examples in a different order."""
    other = subject.spec.create(subject.device, subject.seed + 1)
    with seeded(subject.seed + 1, subject.device):
        marks = [mark for batch in islice(other.epoch(0), _MOST_BATCHES) for mark in _row_marks(batch)]  # type: ignore[attr-defined]
    return marks != order and Counter(marks) == Counter(order)


@trainer_check
def epoch_coverage(subject: TrainerSubject) -> CheckResult:
    """Does each epoch contain every example exactly once?"""
    run = subject.run()
    if not subject.has(run, "epoch"):
        return subject.not_applicable(_NEEDS)
    batches = _read(subject, run, 0, _MOST_BATCHES + 1)
    if len(batches) > _MOST_BATCHES:
        return subject.not_applicable(f"needs an epoch of at most {_MOST_BATCHES} batches")
    one = Counter(mark for batch in batches for mark in _row_marks(batch))
    two = Counter(_marks(subject, run, 1))
    rows = max((len(_row_marks(batch)) for batch in batches), default=0)
    n_examples = getattr(run, "n_examples", None)
    if n_examples is not None:
        # The last, incomplete batch may be dropped, or filled up.
        for number, count in enumerate((one, two)):
            gap = abs(count.total() - n_examples)
            if gap >= max(rows, 1):
                many = "more than once" if count.total() > n_examples else "not at all"
                return subject.failed(
                    float(gap),
                    float(rows - 1),
                    where=f"epoch {number}: {count.total()} rows of {n_examples} examples",
                    meaning=f"At least as many examples as fill a batch come {many}.",
                    advice="Each worker and each rank has to take its own part of an iterable dataset. "
                    "Look for a length that is divided and rounded down, and for parts that overlap.",
                )
    if not one.keys() & two.keys():
        return subject.not_applicable("needs rows that two epochs have in common")
    # Equal rows of the data set are counted once.
    missed = len(one.keys() | two.keys()) - min(len(one), len(two))
    left_out = max(rows - 1, 0)
    text = {
        "where": "epochs 0 and 1",
        "meaning": "More examples of one epoch are missing in the other one than an incomplete batch has.",
        "advice": "Look for sampling with replacement, and for parts of workers or ranks that overlap.",
    }
    if missed > left_out:
        exempt = "each epoch draws its own examples on purpose" if n_examples is None else None
        return subject.failed_unless(exempt, float(missed), float(left_out), **text)
    times = min(one.values())
    if times > 1 and n_examples is None:
        return subject.warned(
            float(times),
            1.0,
            where="epoch 0",
            meaning=f"Every row comes at least {times} times in one epoch.",
            correct_if="the data repeat each row on purpose",
            advice="Let each worker and each rank take its own part of an iterable dataset.",
        )
    return subject.passed(float(missed), float(left_out), meaning=f"{one.total()} rows in epoch 0.")


@trainer_check
def worker_randomness(subject: TrainerSubject) -> CheckResult:
    """Are the random parts of different batches different?"""
    run = subject.run()
    if not subject.has(run, "epoch"):
        return subject.not_applicable(_NEEDS)
    batches = _read(subject, run, 0, 2 * _N_BATCHES)
    if len(batches) < 3:
        return subject.not_applicable("needs an epoch of at least 3 batches")
    asked = 0
    for name, patterns in _patterns(batches).items():
        if not _may_be_random(patterns):
            continue
        pairs = [(i, j) for i in range(len(patterns)) for j in range(i)]
        alike = {pair: (patterns[pair[0]] == patterns[pair[1]]).double().mean().item() for pair in pairs}
        others = [share for share in alike.values() if share < 1]
        if not others:
            continue
        asked += 1
        share = max(sum(others) / len(others), 1e-12)
        same = [pair for pair in pairs if alike[pair] == 1 and _distinct(batches[pair[0]], batches[pair[1]])]
        if same and patterns[0].numel() * math.log(share) < _ACCIDENT:
            i, j = same[0]
            return subject.failed(
                float(len(same)),
                0.0,
                where=f"{name} of batches {j} and {i} of epoch 0",
                meaning="Different examples have the same random part. In other batches, "
                f"{share:.0%} of its elements are equal.",
                advice="Workers that are copies of one process draw the same numbers: seed each generator "
                "from torch.initial_seed() in worker_init_fn, and create a dataset's generator there.",
            )
    if not asked:
        return subject.not_applicable("needs a part of the batches that differs between rows and batches")
    return subject.passed(0.0, 0.0, meaning=f"Compared parts of {len(batches)} batches: {asked}.")


def _may_be_random(patterns: list[Tensor]) -> bool:
    """Return True for at least three patterns of one shape, whose rows differ."""
    same_shape = all(p.shape == patterns[0].shape for p in patterns)
    return len(patterns) > 2 and same_shape and all(len(p) > 1 and bool((p != p[:1]).any()) for p in patterns)


def _patterns(batches: list[Any]) -> dict[str, list[Tensor]]:
    """Return each tensor by name, and the positions of ignored labels and of frequent ids."""
    patterns: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, leaf in named_tensors(batch):
            if leaf.ndim < 2:
                continue
            patterns.setdefault(name, []).append(leaf)
            if not leaf.is_floating_point() and leaf.dtype != torch.bool:
                values, counts = leaf.unique(return_counts=True)  # type: ignore[no-untyped-call]
                frequent = values[counts.argmax()]
                patterns.setdefault(f"{name} == {int(frequent)}", []).append(leaf == frequent)
    return patterns


def _distinct(a: Any, b: Any) -> bool:
    return _row_marks(a) != _row_marks(b)


@trainer_check
def batch_rows(subject: TrainerSubject) -> CheckResult:
    """Does every part of a batch grow with the number of examples in it?"""
    small, large, other = (subject.batch(i, batch_size=size) for i, size in ((0, 2), (0, 6), (1, 2)))
    sizes = {name: leaf.shape for name, leaf in named_tensors(large)}
    changed = dict(named_tensors(other))
    shapes, stuck = [], []
    for name, leaf in named_tensors(small):
        if name not in sizes or leaf.ndim < 2:
            continue
        shapes.append(name)
        content = name in changed and not torch.equal(leaf, changed[name])
        if content and leaf.shape == sizes[name]:
            stuck.append(f"{name} {tuple(leaf.shape)}")
    if not shapes:
        return subject.not_applicable("needs batches with tensors of two dimensions or more")
    if stuck:
        return subject.failed(
            float(len(stuck)),
            0.0,
            where=", ".join(stuck),
            meaning="This part of a batch contains data, but has the same shape for 6 examples as for 2.",
            advice="Look in the collate function for a squeeze(), an index [0], or a list that is joined to "
            "one row.",
        )
    return subject.passed(0.0, 0.0, meaning=", ".join(shapes))


def _read(subject: TrainerSubject, run: Any, number: int, n_batches: int = _MOST_BATCHES) -> list[Any]:
    with seeded(subject.seed, subject.device):
        return list(islice(run.epoch(number), n_batches))


def _marks(
    subject: TrainerSubject, run: TrainingRun, number: int, n_batches: int = _MOST_BATCHES
) -> list[bytes]:
    """Return a digest of each row of an epoch, in order."""
    return [mark for batch in _read(subject, run, number, n_batches) for mark in _row_marks(batch)]


def _row_marks(batch: Any) -> list[bytes]:
    """Return a digest of each row, over all tensors that have as many rows as the first."""
    leaves = [leaf.detach().cpu() for leaf in tensors_in(batch) if leaf.ndim]
    if not leaves:
        return [hashlib.sha256(repr(batch).encode()).digest()]
    leaves = [leaf for leaf in leaves if len(leaf) == len(leaves[0])]
    marks = []
    for row in range(len(leaves[0])):
        digest = hashlib.sha256()
        for leaf in leaves:
            data = leaf[row].flatten().clone(memory_format=torch.contiguous_format)
            digest.update(data.view(torch.uint8).numpy().tobytes())
        marks.append(digest.digest())
    return marks
