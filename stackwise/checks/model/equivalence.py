"""Equivalence: equivalent calls of a model give equal outputs.

Each variation in `checks/variations` is one check. All of them report the results of one exploration, in
which they are combined with each other.
"""

from __future__ import annotations

from dataclasses import replace

from stackwise.checks.check import Check, check, enter, known_checks
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.exploration import Exploration, Explorer, Finding
from stackwise.checks.engine.variation import Variation
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import LARGE, Subject
from stackwise.checks.variations import known_variations

__all__ = ["explored", "simplest"]

# Length beyond common chunks, blocks and windows, and not a multiple of them.
_FAR = 273
# Compositions of the full suite.
_MANY = 2000


def _explorer(subject: Subject) -> Explorer:
    """Return the explorer that the checks of a subject share."""
    return Examination.of(subject).once("explorer", lambda: Explorer(subject, known_variations("fast")))


def explored(subject: Subject, variation: Variation | None = None) -> Exploration:
    """Return the results of the compositions that a variation needs. None: of all compositions."""
    if variation is None or variation.name == "history":  # any composition may leave traces
        return _explorer(subject).explore()
    if variation.suite == "full":
        # Alone and in pairs; random compositions would take minutes.
        some = [*known_variations("fast"), variation.name]
        return Explorer(subject, some, count=0).explore({variation.name})
    return _explorer(subject).explore({variation.name, *variation.explained_by})


def _result(subject: Subject, variation: Variation, exploration: Exploration) -> CheckResult:
    """Return the result of a variation: its simplest finding, otherwise passed or not applicable."""
    found = [each for each in exploration.findings if each.variation == variation.name]
    if variation.suite == "full":  # no other check runs these compositions
        found = [each for each in exploration.findings if variation.name in each.composition.values]
    if found and (other := _reported_elsewhere(subject, variation, exploration, found)):
        return subject.not_applicable(other)
    if found:
        return simplest(subject, found)
    if reason := exploration.missing.get(variation.name):
        return subject.not_applicable(reason)
    count = exploration.asked[frozenset({variation.name})]
    if not count:
        return subject.not_applicable(
            "not executed: each call of this variation contains a difference that another check reports"
        )
    largest = exploration.largest.get(variation.name)
    limit = None if largest is None else exploration.limit
    return subject.passed(largest, limit, meaning=f"compared in {count} compositions")


def simplest(subject: Subject, found: list[Finding]) -> CheckResult:
    """Return the result for several findings: a failure, if there is one, of the fewest variations."""
    first = min(found, key=lambda each: (each.correct_if is not None, len(each.composition.values)))
    return subject.failed_unless(
        first.correct_if,
        first.difference.value,
        first.difference.limit,
        meaning=first.meaning,
        where=first.where,
        advice=f"{first.advice} To repeat it: {first.code}",
    )


def _reported_elsewhere(
    subject: Subject, variation: Variation, exploration: Exploration, found: list[Finding]
) -> str:
    """Return why the findings of a variation are reported by another check, or ""."""
    alone = all(each.composition.names <= {variation.name} for each in found)
    for name in sorted(variation.explained_by):
        if alone and any(each.composition.names == {name} for each in exploration.findings):
            other = known_variations()[name]
            return f"{other.check or name} fails, and explains the difference"
    for name in variation.single_checks if alone else ():
        if known_checks()[name].function(subject).status == "failed":
            return f"the difference is reported by {name}"
    return ""


@check
def unexpected_exceptions(subject: Subject) -> CheckResult:
    """Does each variation, and each pair of variations, run without an unexpected exception?"""
    exploration = explored(subject)
    # Those with a single check are reported by it. One dtype of half precision may be taken, and another not.
    left_out = {name for name, each in known_variations().items() if each.single_checks or each.compares_less}
    crashes = [crash for crash in exploration.crashes() if crash.composition.names.isdisjoint(left_out)]
    if crashes:
        first = min(crashes, key=lambda crash: (len(crash.composition.names), crash.composition.length))
        composition = first.composition
        others = len(crashes) - 1
        takes = " Each of the two variations runs separately." if len(composition.names) == 2 else ""
        return subject.warned(
            float(len(crashes)),
            0.0,
            where=" and ".join(sorted(composition.names)) + (f"; {others} more" if others else ""),
            meaning=f"The model raises {first.error}, if {composition.text}.{takes}",
            correct_if="the model does not support this call (then raise a ValueError with a clear message)",
            advice="Look for shapes that only one of several branches prepares, and for an argument that "
            f"is overwritten. To repeat it: {first.code}",
        )
    if not exploration.asked:
        return subject.not_applicable(_nothing_asked(exploration))
    pairs = sum(len(names) == 2 for names in exploration.asked)
    return subject.passed(0.0, 0.0, meaning=f"{pairs} pairs of variations were executed")


@check(suite="full")
def many_compositions(subject: Subject) -> CheckResult:
    """Do all equivalent calls agree in 2,000 compositions?"""
    if subject.spec.n_parameters > LARGE:
        return subject.not_applicable(f"needs a model of at most {LARGE / 1e6:.0f} million parameters")
    return _further(subject, Explorer(subject, known_variations("fast"), count=_MANY))


@check(suite="full")
def long_sequences(subject: Subject) -> CheckResult:
    """Do all equivalent calls agree on sequences that are longer than common chunks, blocks and windows?"""
    explorer = Explorer(subject, known_variations("fast"), longest=_FAR)
    if explorer.longest <= Examination.of(subject).longest:
        return subject.not_applicable("needs a model that takes longer sequences")
    return _further(subject, explorer)


def _further(subject: Subject, explorer: Explorer) -> CheckResult:
    """Return the result of more compositions: findings of sets that the fast suite does not find."""
    exploration = explorer.explore()
    known = {each.composition.names for each in explored(subject).findings}
    found = [each for each in exploration.findings if each.composition.names not in known]
    if found:
        return simplest(subject, found)
    if not exploration.asked:
        return subject.not_applicable(_nothing_asked(exploration))
    return subject.passed(max(exploration.largest.values(), default=None), exploration.limit)


def _nothing_asked(exploration: Exploration) -> str:
    """Return why no composition was executed."""
    if exploration.findings:
        return "not executed: a plain call changes the next one; see history"
    return next(iter(exploration.missing.values()), "needs a repeatable model")


def _check_of(variation: Variation) -> Check:
    def ask(subject: Subject) -> CheckResult:
        exploration = explored(subject, variation)
        result = _result(subject, variation, exploration)
        seconds = exploration.seconds.get(variation.name, 0.0)
        return replace(result, seconds=seconds, combined=exploration.combined(variation.name))

    return Check(
        variation.check or variation.name, variation.family, variation.question, ask, suite=variation.suite
    )


for _variation in known_variations().values():
    enter(_check_of(_variation))
