"""Exploration: draw compositions, compare them with the plain answers, and shrink the differences."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stackwise.checks.engine.composition import Composition, Variations, plans
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.execution import (
    NEXT_CALL,
    WITHOUT_ANY_LABEL,
    WITHOUT_LABEL,
    Difference,
    differences,
)
from stackwise.checks.engine.location import first_difference
from stackwise.checks.engine.variation import Refused
from stackwise.checks.probe.call import reason_of
from stackwise.checks.probe.difference import NOT_REPEATED
from stackwise.checks.subject import Subject
from stackwise.checks.variations import known_variations
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_choice
from stackwise.support.system_errors import reraise_if_out_of_memory

__all__ = ["Exploration", "Finding", "compare", "explore"]

# Executions that the search for a simpler composition may take.
_SHRINKING = 60
# Draws of the values of a pair, until the model takes them.
_ATTEMPTS = 4
# Numbers of parameters above which variations are not combined, and above which nothing is asked, because
# copies in float64 need too much time and memory.
_LARGE, _TOO_LARGE = 20_000_000, 500_000_000


@dataclass(frozen=True)
class Finding:
    """Composition whose result differs from the plain answer, and that has no simpler one.

    Attributes:
        composition: the composition.
        difference: the largest difference.
        variation: the variation that reports it.
        where: place of the difference, and the first module that differs.
        meaning: the finding as a sentence.
        advice: common causes.
        correct_if: condition under which the difference is correct. None: it never is.
    """

    composition: Composition
    difference: Difference
    variation: str
    where: str
    meaning: str
    advice: str
    correct_if: str | None = None

    @property
    def code(self) -> str:
        """Return Python code that repeats the composition; `model` is the subject."""
        gradients = ", gradients=True" if self.composition.gradients else ""
        after = ", after=True" if self.composition.after else ""
        values, length = dict(self.composition.values), self.composition.length
        return f"compare(model, {values}, length={length}{gradients}{after})"


@dataclass
class Exploration:
    """Result of all compositions.

    Attributes:
        findings: the differences.
        missing: reason why a variation does not apply, by its name.
        asked: number of executed compositions of each variation, and of each pair.
        refused: reason why the model did not take a set of variations, the last one.
        largest: largest difference of outputs in the compositions of each variation.
        seconds: seconds of each variation.
        limit: largest difference of outputs that is rounding.
    """

    findings: list[Finding] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    asked: Counter[frozenset[str]] = field(default_factory=Counter)
    refused: dict[frozenset[str], str] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    limit: float = 0.0

    def combined(self, name: str) -> dict[str, int]:
        """Return the number of compositions of a variation with each other one."""
        pairs = (
            (pair - {name}, count) for pair, count in self.asked.items() if name in pair and len(pair) == 2
        )
        return {other: count for (other,), count in pairs}


def explore(
    subject: Subject, variations: Variations, count: int = 150, *, longest: int | None = None
) -> Exploration:
    """Execute `count` compositions of the variations that apply to a model.

    Args:
        subject: the model.
        variations: the variations, by name.
        count: number of compositions, at least one of each variation and of each pair.
        longest: longest sequence to ask, in positions. None: that of `Examination`.

    Raises:
        Exception: the plain call raises.
    """
    size = subject.spec.n_parameters
    if size > _TOO_LARGE:
        gigabytes = 4 * 8 * size / 1e9
        reason = (
            f"needs a model of at most {_TOO_LARGE / 1e6:.0f} million parameters: copies of this one in "
            f"float64 need {gigabytes:.0f} GB. A model with fewer layers and less width shows the same bugs"
        )
        return Exploration(missing=dict.fromkeys(variations, reason))
    exam = Examination(subject) if longest is None else Examination(subject, most=longest)
    result = Exploration()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not exam.is_repeatable:
            return Exploration(missing=dict.fromkeys(variations, NOT_REPEATED))
        if not exam.answer(0, exam.lengths[-1]).isfinite().any():
            return Exploration(missing=dict.fromkeys(variations, "needs a finite output; see finite_logits"))
        result.limit = exam.limit
        names = []
        for name, variation in variations.items():
            if reason := variation.missing(exam):
                result.missing[name] = reason
            else:
                names.append(name)
        for plan in plans(names, variations, subject.seed, count, is_large=size > _LARGE):
            attempts = _ATTEMPTS if len(plan.names) == 2 else 1
            # The values of a pair may exclude each other, such as a side of padding and a cache.
            for attempt in range(attempts):
                if _ask(plan.draw(variations, exam, attempt), variations, exam, result):
                    break
            if result.findings and not result.findings[-1].composition.names:
                break  # a plain call leaves traces, so that no comparison means much
    for name in names:
        refusal = result.refused.get(frozenset({name}))
        if not result.asked[frozenset({name})] and refusal is not None:
            result.missing[name] = f"the model refuses it: {refusal}"
    return result


def compare(
    model: object,
    values: Mapping[str, Any],
    *,
    length: int = 8,
    gradients: bool = False,
    after: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[Difference]:
    """Ask a model once in a composition of ways, and return the difference of each observable.

    Args:
        model: anything that `ModelSpec.of` understands.
        values: value of each variation, as in a finding: {"cache_parts": [3, 1]}.
        length: number of positions of the first sequence.
        gradients: also compare the gradients.
        after: also compare the output of a plain call that follows.
        device: where the model runs.
        seed: seed of weights and inputs.

    Raises:
        ValueError: an unknown variation, or one that does not apply to the model.
        Refused: the variations cannot be combined.
    """
    variations = known_variations()
    exam = Examination(Subject(ModelSpec.of(model), torch.device(device), seed))
    for name in values:
        check_choice("values", name, tuple(variations))
        if reason := variations[name].missing(exam):
            raise ValueError(f"values: got {name}, which does not apply to this model; it {reason}")
    return differences(Composition(values, length, gradients, after), variations, exam)


def _ask(composition: Composition, variations: Variations, exam: Examination, result: Exploration) -> bool:
    """Execute a composition and record the result. Return False if it was refused."""
    names = composition.names.union(*(variations[name].includes for name in composition.names))
    if any(each.composition.names <= names for each in result.findings):
        return True  # the difference would be the same one
    start = time.perf_counter()
    worst = _worst(composition, variations, exam, result)
    if worst is not None and not worst.is_real and worst.observable == "output":
        for name in names:
            result.largest[name] = max(result.largest.get(name, 0.0), worst.value)
    if worst is not None and worst.is_real:
        composition, worst = _shrunk(composition, worst, variations, exam)
        result.findings.append(_finding(composition, worst, variations, exam))
    for name in composition.names:
        share = (time.perf_counter() - start) / len(composition.names)
        result.seconds[name] = result.seconds.get(name, 0.0) + share
    return worst is not None


def _worst(
    composition: Composition, variations: Variations, exam: Examination, result: Exploration | None = None
) -> Difference | None:
    """Return the first real difference, or the largest one. None: the composition was refused."""
    try:
        found = differences(composition, variations, exam)
    except Exception as error:  # any other exception means: refused
        reraise_if_out_of_memory(error)
        if result is not None:
            text = str(error) if isinstance(error, Refused) else reason_of(error)
            result.refused[composition.names] = text
        return None
    if result is not None:
        for name in composition.names:
            result.asked[frozenset({name})] += 1
            for other in composition.names:
                if name < other:
                    result.asked[frozenset({name, other})] += 1
    real = [each for each in found if each.is_real]
    if real and exam.is_float64 and not math.isfinite(real[0].value):
        # The lowest float64 is infinite in a softmax in float32, and the own dtype decides.
        return _worst(composition, variations, exam.in_dtype("own"))
    if real:
        return real[0]
    nothing = Difference("output", 0.0, exam.limit)
    return max(found, key=lambda each: each.value / max(each.limit, 1e-300), default=nothing)


def _shrunk(
    composition: Composition, worst: Difference, variations: Variations, exam: Examination
) -> tuple[Composition, Difference]:
    """Return the simplest composition found that still differs."""
    executions = 0
    again = True
    while again:
        again = False
        for simpler in composition.simpler(variations, exam):
            executions += 1
            if executions > _SHRINKING:
                return composition, worst
            found = _worst(simpler, variations, exam)
            if found is not None and found.is_real:
                composition, worst, again = simpler, found, True
                break
    return composition, worst


def _finding(
    composition: Composition, worst: Difference, variations: Variations, exam: Examination
) -> Finding:
    names = composition.names
    is_trace = worst.observable == NEXT_CALL
    reporter = "history" if is_trace or not names else max(names, key=lambda name: variations[name].rank)
    module = ""
    if worst.observable == "output":
        try:
            module = first_difference(composition, variations, exam)
        except Exception as error:
            reraise_if_out_of_memory(error)
    where = ", ".join(filter(None, [worst.place, f"first difference: {module}" if module else ""]))
    text = composition.text(variations)
    if is_trace:
        meaning = "A call changes the output of the next one" + (
            f", if {text} in the first." if text else "."
        )
    elif worst.observable == WITHOUT_LABEL:
        meaning = f"An output without a label is trained to predict a token, if {text}."
    elif worst.observable == WITHOUT_ANY_LABEL:
        meaning = f"The gradient is not zero although all labels are ignored, if {text}."
    else:
        meaning = f"The {worst.observable} changes if {text}."
    conditions = [variations[name].correct_if(exam, value) for name, value in composition.values.items()]
    correct_if = next((each for each in conditions if each is not None), None)
    advice = variations[reporter].advice_for(exam) if reporter in variations else ""
    return Finding(composition, worst, reporter, where, meaning, advice, correct_if)
