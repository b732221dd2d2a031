"""Composition: a set of variations with their values, and the plan of all compositions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from stackwise.checks.engine.examination import Examination, stream
from stackwise.checks.engine.variation import Variation

__all__ = ["Composition", "Plan", "Variations", "plans"]

Variations = Mapping[str, Variation]
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

    def without(self, name: str) -> Composition:
        """Return the composition without a variation."""
        return replace(self, values={each: value for each, value in self.values.items() if each != name})

    def simpler(self, variations: Variations, exam: Examination) -> Iterator[Composition]:
        """Yield simpler compositions: without a variation, with a simpler value, with a shorter sequence."""
        for name in sorted(self.values, key=lambda each: -variations[each].rank):
            if len(self.values) > 1:
                yield self.without(name)
        if self.gradients:
            yield replace(self, gradients=False)
        if self.after:
            yield replace(self, after=False)
        for name, value in self.values.items():
            for simpler in variations[name].simpler(value):
                yield replace(self, values={**self.values, name: simpler})
        for length in (exam.lengths[0], self.length // 2, self.length - 1):
            if length in exam.lengths and length < self.length:
                yield replace(self, length=length)

    def text(self, variations: Variations) -> str:
        """Return the variations in words, as the end of "The output changes if ..."."""
        ordered = sorted(self.values, key=lambda name: -variations[name].rank)
        return " and ".join(variations[name].text(self.values[name]) for name in ordered)


@dataclass(frozen=True)
class Plan:
    """Set of variations to compose, without their values.

    Attributes:
        names: names of the variations.
        label: seed of the values. Each variation draws from a random stream of its own.
    """

    names: tuple[str, ...]
    label: str

    def draw(self, variations: Variations, exam: Examination, attempt: int) -> Composition:
        """Return a composition with random values. Each attempt gives other values."""
        seed = exam.subject.seed
        ordered = sorted(self.names, key=lambda name: variations[name].rank)
        words = (seed, self.label, attempt)
        values = {name: variations[name].draw(exam, stream(name, *words)) for name in ordered}
        # The longer of two, because more can go wrong in a long sequence.
        length = max(stream("length", number, *words).choice(exam.drawn_lengths) for number in range(2))
        gradients = bool(values) and stream("gradients", *words).random() < _WITH_GRADIENTS
        return Composition(values, length, gradients)


def plans(
    names: list[str],
    variations: Variations,
    seed: int,
    count: int,
    asked: Counter[frozenset[str]],
    *,
    is_large: bool = False,
) -> Iterator[Plan]:
    """Yield each variation alone, then sets that together contain each pair, then random sets.

    A variation is planned alone with several values. Pairs are planned in sets of up to five variations
    (pairwise testing). If the model refuses all sets with a pair, this pair is planned as a set of two.

    Args:
        names: variations that apply to the model.
        variations: all variations, by name.
        seed: seed of the random sets.
        count: number of plans. There are more if all variations and pairs need more.
        asked: number of executions of each pair, which the caller updates.
        is_large: plan each variation once, alone.
    """
    if is_large:
        yield from (Plan((name,), f"{name} 0") for name in names)
        return
    alone = [Plan((name,), f"{name} {number}") for name in names for number in range(_DRAWS_ALONE)]
    yield from alone
    sets = _covering(names, variations)
    yield from (Plan(chosen, f"set {number}") for number, chosen in enumerate(sets))
    for pair in combinations(names, 2):
        if not asked[frozenset(pair)] and _compatible(pair, variations):
            yield Plan(pair, " ".join(sorted(pair)))
    for number in range(max(0, count - len(alone) - len(sets)) if names else 0):
        chosen = [
            name
            for name in names
            if not variations[name].compares_less and stream(seed, number, name, "chosen").random() < _CHANCE
        ]
        chosen.sort(key=lambda name: stream(seed, number, name, "order").random())
        group: tuple[str, ...] = ()
        for name in chosen:
            if _compatible((*group, name), variations):
                group = (*group, name)
        yield Plan(group, f"random {number}")


def _covering(names: list[str], variations: Variations) -> list[tuple[str, ...]]:
    """Return sets of variations that contain each compatible pair at least once.

    Each variation joins earlier sets first, and then forms new ones (in-parameter-order, Lei and Tai 1998,
    "In-parameter-order: a test generation strategy for pairwise testing").
    """
    sets: list[tuple[str, ...]] = []
    for index, name in enumerate(names):
        missing = [other for other in names[:index] if _compatible((other, name), variations)]
        for number, chosen in enumerate([] if variations[name].compares_less else sets):
            fits = len(chosen) < _LARGEST_SET and _compatible((*chosen, name), variations)
            if fits and any(other in missing for other in chosen):
                sets[number] = (*chosen, name)
                missing = [other for other in missing if other not in chosen]
        while missing:
            chosen = (missing.pop(0), name)
            for other in list(missing):
                if len(chosen) < _LARGEST_SET and _compatible((*chosen, other), variations):
                    chosen = (*chosen, other)
                    missing.remove(other)
            sets.append(chosen)
    return sets


def _compatible(names: tuple[str, ...], variations: Variations) -> bool:
    return not any(
        b in variations[a].excludes or a in variations[b].excludes for a, b in combinations(names, 2)
    )
