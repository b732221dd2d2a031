"""Composition: a set of variations with their values, and the plan of all compositions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from stackwise.checks.engine.examination import Examination, stream
from stackwise.checks.engine.variation import Variation
from stackwise.checks.variations import known_variations

__all__ = ["Composition", "Plan", "plans"]

# Share of the compositions whose gradients are compared.
_WITH_GRADIENTS = 0.3
# Values of each variation that are asked alone.
_DRAWS_ALONE = 2
# Chance of each variation to be part of a random composition.
_CHANCE = 0.3
# Variations of a set that is planned for its pairs.
_LARGEST_SET = 5


@dataclass(frozen=True)
class Composition:
    """Set of variations with their values.

    Attributes:
        values: value of each variation, by its name.
        length: number of positions of the first sequence.
        gradients: True if the gradients are compared.
        after: True if a plain call of the same model follows, which must give the plain answer.
    """

    values: Mapping[str, Any]
    length: int
    gradients: bool = False
    after: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the variations."""
        return frozenset(self.values)

    @property
    def variations(self) -> list[tuple[Variation, Any]]:
        """Return the variations with their values, in ascending order of their rank."""
        known = known_variations().items()
        return [(variation, self.values[name]) for name, variation in known if name in self.values]

    def simpler(self, exam: Examination) -> Iterator[Composition]:
        """Yield simpler compositions: without a variation, with a simpler value, with a shorter sequence."""
        if len(self.values) > 1:
            for variation, _ in reversed(self.variations):
                others = {name: value for name, value in self.values.items() if name != variation.name}
                yield replace(self, values=others)
        if self.gradients:
            yield replace(self, gradients=False)
        if self.after:
            yield replace(self, after=False)
        for name, value in self.values.items():
            for simpler in known_variations()[name].simpler(value):
                yield replace(self, values={**self.values, name: simpler})
        for length in (exam.lengths[0], self.length // 2, self.length - 1):
            if length in exam.lengths and length < self.length:
                yield replace(self, length=length)

    @property
    def text(self) -> str:
        """Return the variations in words, as the end of "The output changes if ..."."""
        return " and ".join(variation.text(value) for variation, value in reversed(self.variations))


@dataclass(frozen=True)
class Plan:
    """Set of variations to compose, without their values.

    Attributes:
        names: names of the variations.
        label: seed of the values. Each variation draws from a random stream of its own.
    """

    names: tuple[str, ...]
    label: str

    def draw(self, exam: Examination, attempt: int = 0) -> Composition:
        """Return a composition with random values. Each attempt gives other values."""
        words = (exam.subject.seed, self.label, attempt)
        known = ((name, each) for name, each in known_variations().items() if name in self.names)
        values = {name: variation.draw(exam, stream(name, *words)) for name, variation in known}
        # The longer of two, because more can go wrong in a long sequence.
        length = max(stream("length", number, *words).choice(exam.drawn_lengths) for number in range(2))
        gradients = bool(values) and stream("gradients", *words).random() < _WITH_GRADIENTS
        return Composition(values, length, gradients)


def plans(names: list[str], seed: int, count: int, asked: Counter[frozenset[str]]) -> Iterator[Plan]:
    """Yield each variation alone, then sets that together contain each pair, then random sets.

    A variation is planned alone with several values. Pairs are planned in sets of up to five variations
    (pairwise testing). If the model refuses all sets with a pair, this pair is planned as a set of two.

    Args:
        names: variations that apply to the model.
        seed: seed of the random sets.
        count: number of plans. There are more if all variations and pairs need more.
        asked: number of executions of each pair, which the caller updates.
    """
    alone = [Plan((name,), f"{name} {number}") for name in names for number in range(_DRAWS_ALONE)]
    yield from alone
    sets = _covering(names)
    yield from (Plan(chosen, f"set {number}") for number, chosen in enumerate(sets))
    for pair in combinations(names, 2):
        if not asked[frozenset(pair)] and _compatible(pair):
            yield Plan(pair, " ".join(sorted(pair)))
    for number in range(max(0, count - len(alone) - len(sets)) if names else 0):
        yield Plan(_random_set(names, seed, number), f"random {number}")


def _random_set(names: list[str], seed: int, number: int) -> tuple[str, ...]:
    """Return a random set of compatible variations."""

    def draw(name: str, purpose: str) -> float:
        return stream(seed, number, name, purpose).random()

    chosen: tuple[str, ...] = ()
    for name in sorted(names, key=lambda name: draw(name, "order")):
        is_drawn = not known_variations()[name].compares_less and draw(name, "chosen") < _CHANCE
        if is_drawn and _compatible((*chosen, name)):
            chosen = (*chosen, name)
    return chosen


def _covering(names: list[str]) -> list[tuple[str, ...]]:
    """Return sets of variations that contain each compatible pair at least once.

    Each variation joins earlier sets first, and then forms new ones (in-parameter-order, Lei and Tai 1998,
    "In-parameter-order: a test generation strategy for pairwise testing").
    """
    sets: list[tuple[str, ...]] = []
    for index, name in enumerate(names):
        missing = [other for other in names[:index] if _compatible((other, name))]
        for number, chosen in enumerate([] if known_variations()[name].compares_less else sets):
            fits = len(chosen) < _LARGEST_SET and _compatible((*chosen, name))
            if fits and any(other in missing for other in chosen):
                sets[number] = (*chosen, name)
                missing = [other for other in missing if other not in chosen]
        while missing:
            chosen = (missing.pop(0), name)
            for other in list(missing):
                if len(chosen) < _LARGEST_SET and _compatible((*chosen, other)):
                    chosen = (*chosen, other)
                    missing.remove(other)
            sets.append(chosen)
    return sets


def _compatible(names: tuple[str, ...]) -> bool:
    known = known_variations()
    return not any(b in known[a].excludes or a in known[b].excludes for a, b in combinations(names, 2))
