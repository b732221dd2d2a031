"""Data: each example is read once in an epoch, in a new order.

Shapes: B rows of a batch.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.batch import named_tensors, tensors_in
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject

_MOST_BATCHES = 256
_N_BATCHES = 4
_ACCIDENT = math.log(1e-6)


@trainer_check
def data_repeats(subject: TrainerSubject) -> CheckResult:
    """Do two runs with the same seed read the same data in the same order?"""
    one, two = (_marks(_epoch(subject, subject.run(), 0, _N_BATCHES)) for _ in range(2))
    moved = sum(a != b for a, b in zip_longest(one, two))
    if not moved:
        return subject.passed(0.0, 0.0, meaning=f"{len(one)} rows compared.")
    return subject.failed(
        float(moved),
        0.0,
        where=f"of the first {len(one)} rows of epoch 0",
        meaning="Two runs with the same seed read different data.",
        advice="Look for set() and dict order of strings, os.listdir, the time, and a generator that "
        "has no fixed seed (numpy's default_rng(), random.SystemRandom).",
    )


@trainer_check
def epoch_order(subject: TrainerSubject) -> CheckResult:
    """Does the order of the examples change from epoch to epoch?"""
    run = subject.run()
    one, two = (_marks(_epoch(subject, run, number)) for number in (0, 1))
    needed(len(set(one)) > 1, "at least two examples that differ")
    same = sum(a == b for a, b in zip(one, two, strict=False)) / len(one)
    if one != two:
        return subject.passed(same, 1.0, meaning="The value is the fraction of rows that keep their place.")
    shuffles = getattr(run, "shuffles", None)
    if shuffles is False:
        return subject.passed(same, 1.0, meaning="The run declares a fixed order.")
    is_wrong = shuffles or _order_has_a_seed(subject, one)
    return subject.failed_unless(
        None if is_wrong else "a fixed order is intended (then set shuffles = False)",
        same,
        1.0,
        where="epochs 0 and 1",
        meaning="Every example keeps its place from one epoch to the next.",
        advice="Call set_epoch(epoch) of the sampler, and let the seed of the order depend on the epoch.",
    )


def _order_has_a_seed(subject: TrainerSubject, order: list[bytes]) -> bool:
    """Return True if a different seed gives the same examples in a different order."""
    other = replace(subject, seed=subject.seed + 1)
    marks = _marks(_epoch(other, other.run(), 0))
    return marks != order and Counter(marks) == Counter(order)


@trainer_check
def epoch_coverage(subject: TrainerSubject) -> CheckResult:
    """Does each epoch contain every example exactly once?"""
    run = subject.run()
    batches = _epoch(subject, run, 0, _MOST_BATCHES + 1)
    needed(len(batches) <= _MOST_BATCHES, f"an epoch of at most {_MOST_BATCHES} batches")
    one, two = (Counter(_marks(each)) for each in (batches, _epoch(subject, run, 1)))
    # The last, incomplete batch may be dropped, or filled up.
    allowed = max((len(_row_marks(batch)) - 1 for batch in batches), default=0)
    n_examples: Any = getattr(run, "n_examples", None)
    for number, count in enumerate((one, two)):
        gap = 0 if n_examples is None else abs(count.total() - n_examples)
        if gap > allowed:
            many = "more than once" if count.total() > n_examples else "not at all"
            return subject.failed(
                float(gap),
                float(allowed),
                where=f"epoch {number}: {count.total()} rows of {n_examples} examples",
                meaning=f"At least as many examples as fill a batch come {many}.",
                advice="Each worker and each rank has to take its own part of an iterable dataset. "
                "Look for a length that is divided and rounded down, and for parts that overlap.",
            )
    needed(one.keys() & two.keys(), "rows that two epochs have in common")
    # Equal rows of the data set are counted once.
    missed = len(one.keys() | two.keys()) - min(len(one), len(two))
    if missed > allowed:
        return subject.failed_unless(
            "each epoch draws its own examples on purpose" if n_examples is None else None,
            float(missed),
            float(allowed),
            where="epochs 0 and 1",
            meaning="More examples of one epoch are missing in the other one than an incomplete batch has.",
            advice="Look for sampling with replacement, and for parts of workers or ranks that overlap.",
        )
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
    return subject.passed(float(missed), float(allowed), meaning=f"{one.total()} rows in epoch 0.")


@trainer_check
def worker_randomness(subject: TrainerSubject) -> CheckResult:
    """Are the random parts of different batches different?"""
    batches = _epoch(subject, subject.run(), 0, 2 * _N_BATCHES)
    needed(len(batches) > 2, "an epoch of at least 3 batches")
    marks = [_row_marks(batch) for batch in batches]
    n_compared = 0
    for name, patterns in _patterns(batches).items():
        if len(patterns) < 3 or len({p.shape for p in patterns}) > 1:
            continue
        if any(bool((p == p[:1]).all()) for p in patterns):  # equal rows are not random
            continue
        pairs = list(combinations(range(len(patterns)), 2))
        alike = {(i, j): (patterns[i] == patterns[j]).double().mean().item() for i, j in pairs}
        others = [share for share in alike.values() if share < 1]
        if not others:
            continue
        n_compared += 1
        share = max(sum(others) / len(others), 1e-12)
        same = [(i, j) for i, j in pairs if alike[i, j] == 1 and marks[i] != marks[j]]
        if same and patterns[0].numel() * math.log(share) < _ACCIDENT:
            i, j = same[0]
            return subject.failed(
                float(len(same)),
                0.0,
                where=f"{name} of batches {i} and {j} of epoch 0",
                meaning="Different examples have the same random part. In other batches, "
                f"{share:.0%} of its elements are equal.",
                advice="Workers that are copies of one process draw the same numbers: seed each generator "
                "from torch.initial_seed() in worker_init_fn, and create a dataset's generator there.",
            )
    needed(n_compared > 0, "a part of the batches that differs between rows and batches")
    return subject.passed(0.0, 0.0, meaning=f"Compared parts of {len(batches)} batches: {n_compared}.")


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


@trainer_check
def batch_rows(subject: TrainerSubject) -> CheckResult:
    """Does every part of a batch grow with the number of examples in it?"""
    small, large, other = (
        dict(named_tensors(subject.batch(number, batch_size=size)))
        for number, size in ((0, 2), (0, 6), (1, 2))
    )
    parts = {name: leaf for name, leaf in small.items() if name in large and leaf.ndim > 1}
    needed(parts, "batches with tensors of two dimensions or more")
    # A part that is the same in each batch contains no data.
    stuck = [
        f"{name} {tuple(leaf.shape)}"
        for name, leaf in parts.items()
        if name in other and not torch.equal(leaf, other[name]) and leaf.shape == large[name].shape
    ]
    if not stuck:
        return subject.passed(0.0, 0.0, meaning=", ".join(parts))
    return subject.failed(
        float(len(stuck)),
        0.0,
        where=", ".join(stuck),
        meaning="This part of a batch contains data, but has the same shape for 6 examples as for 2.",
        advice="Look in the collate function for a squeeze(), an index [0], or a list that is joined.",
    )


def _epoch(subject: TrainerSubject, run: Any, number: int, n_batches: int = _MOST_BATCHES) -> list[Any]:
    """Return the first batches of an epoch."""
    needed(subject.has(run, "epoch"), "epoch(number)")
    with subject.fixed_randomness():
        return list(islice(run.epoch(number), n_batches))


def _marks(batches: list[Any]) -> list[bytes]:
    """Return a digest of each row, in order."""
    return [mark for batch in batches for mark in _row_marks(batch)]


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
