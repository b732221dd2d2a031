"""Exploration: draw compositions, compare them with the plain answers, and shrink the differences."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from dis import get_instructions
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from stackwise.checks.engine.composition import Composition, Plan, plans
from stackwise.checks.engine.examination import LONGEST, Examination
from stackwise.checks.engine.execution import (
    NEXT_CALL,
    SIDE_EFFECT,
    WITHOUT_ANY_LABEL,
    WITHOUT_LABEL,
    Difference,
    differences,
    first_difference,
)
from stackwise.checks.engine.variation import Refused, Variation
from stackwise.checks.probe.call import dtype_of, reason_of
from stackwise.checks.probe.difference import NOT_REPEATED
from stackwise.checks.subject import LARGE, Subject
from stackwise.checks.variations import known_variations
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_choice
from stackwise.support.system_errors import reraise_if_out_of_memory

__all__ = ["Crash", "Exploration", "Explorer", "Finding", "compare"]

# Executions that the search for a simpler composition may take.
_SHRINKING = 60
# Draws of the values of a pair, until the model takes them.
_ATTEMPTS, _ATTEMPTS_OF_A_SET = 4, 3
# Number of parameters above which no call is compared: copies in float64 need too much time and memory.
_TOO_LARGE = 500_000_000
# Exceptions by which a model says that it does not support a call.
_REFUSALS = (Refused, ValueError, NotImplementedError, AssertionError)


@dataclass(frozen=True)
class Finding:
    """Composition whose result differs from the plain answer, and that has no simpler one.

    Attributes:
        composition: the composition.
        difference: the first observable that differs by more than rounding.
        variation: the variation that reports it.
        where: place of the difference, and the first module that differs.
        meaning: the finding as a sentence.
        advice: common causes.
        code: Python code that repeats it; `model` is the subject.
        correct_if: condition under which the difference is correct. None: it never is.
    """

    composition: Composition
    difference: Difference
    variation: str
    where: str
    meaning: str
    advice: str
    code: str
    correct_if: str | None = None


@dataclass(frozen=True)
class Crash:
    """Composition that raises an exception that is no refusal.

    Attributes:
        composition: the composition.
        error: type and text of the exception.
        code: Python code that repeats it.
    """

    composition: Composition
    error: str
    code: str


@dataclass
class Exploration:
    """Result of all compositions.

    Attributes:
        findings: the differences.
        effects: the side effects. Each may occur in several compositions.
        missing: reason why a variation does not apply, by its name.
        executed: number of executed compositions.
        asked: number of executed compositions of each variation, and of each pair.
        refused: last reason why the model refused a set of variations, by the set.
        raised: first crash of each variation and of each pair.
        largest: largest difference of outputs in the compositions of each variation.
        seconds: seconds of each variation.
        limit: largest difference of outputs that is treated as rounding.
    """

    findings: list[Finding] = field(default_factory=list)
    effects: list[Finding] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    executed: int = 0
    asked: Counter[frozenset[str]] = field(default_factory=Counter)
    refused: dict[frozenset[str], str] = field(default_factory=dict)
    raised: dict[frozenset[str], Crash] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    limit: float = 0.0

    def crashes(self) -> list[Crash]:
        """Return the crashes of variations, and those of pairs that never ran although their parts did."""

        def counts(names: frozenset[str]) -> bool:
            parts = [frozenset({name}) for name in names]
            runs_apart = all(self.asked[part] and part not in self.raised for part in parts)
            return len(names) == 1 or (runs_apart and not self.asked[names])

        return [crash for names, crash in self.raised.items() if counts(names)]

    def combined(self, name: str) -> dict[str, int]:
        """Return the number of compositions of a variation with each other one."""
        pairs = ((pair - {name}, count) for pair, count in self.asked.items() if name in pair)
        return {other: count for others, count in pairs for other in others}


class Explorer:
    """Plan of compositions of a model, which can be executed in several steps.

    Args:
        subject: the model.
        variations: names of the variations.
        count: number of compositions. There are more if all variations and pairs need more.
        longest: longest sequence, in positions.

    Attributes:
        result: result of the compositions that were executed.
    """

    def __init__(
        self, subject: Subject, variations: Iterable[str], count: int = 80, *, longest: int = LONGEST
    ) -> None:
        self.result = Exploration()
        self._variations, self._count = list(variations), count
        is_shared = longest == LONGEST
        self._exam = Examination.of(subject) if is_shared else Examination(subject, most=longest)
        self._is_large = subject.spec.n_parameters > LARGE
        # Variations that apply. None: not known yet.
        self._names: list[str] | None = None
        self._executed: set[str] = set()

    @property
    def longest(self) -> int:
        """Return the longest sequence that the model takes, in positions."""
        return self._exam.longest

    def explore(self, only: Set[str] | None = None) -> Exploration:
        """Execute the compositions that contain one of some variations, and return the result so far.

        Each variation alone is always executed first, so that a difference is reported by its cause.

        Args:
            only: names of variations. None: all compositions.

        Raises:
            Exception: the plain call raises.
        """
        result = self.result
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._names is None:
                names = self._applicable()
                self._ask_alone(names)
                self._names = names
            planned = plans(self._names, self._exam.subject.seed, self._count, result.asked)
            if self._is_large:
                planned = (Plan((name,), f"{name} 0") for name in self._names)
            for plan in planned:
                is_chosen = only is None or len(plan.names) == 1 or not only.isdisjoint(plan.names)
                if is_chosen and plan.label not in self._executed:
                    self._execute(plan)
                    self._executed.add(plan.label)
        for name in self._names:
            refusal = result.refused.get(frozenset({name}))
            if not result.asked[frozenset({name})] and refusal is not None:
                result.missing[name] = f"the model refuses it: {refusal}"
        return result

    def _applicable(self) -> list[str]:
        """Return the variations that apply, after a plain call, and record why the others do not."""
        exam, result = self._exam, self.result
        if reason := _unsuitable(exam):
            result.missing = dict.fromkeys(self._variations, reason)
            return []
        result.limit = exam.limit
        reasons = {name: _missing(known_variations()[name], exam) for name in self._variations}
        result.missing |= {name: reason for name, reason in reasons.items() if reason}
        self._execute(Plan((), "plain"))
        if result.findings:
            return []  # a plain call leaves traces, so that no comparison means much
        return [name for name, reason in reasons.items() if not reason]

    def _ask_alone(self, names: list[str]) -> None:
        """Execute the first values of each variation, and each one alone in the model's own dtype."""
        self._ask_first_values(names, self._exam)
        if not names or not self._exam.is_float64 or self._is_large:
            return
        own = self._exam.in_dtype("own")  # it may choose other code
        if dtype_of(own.base) != torch.float64 and own.is_measurable and own.is_repeatable:
            # Those that compare less choose a dtype themselves.
            names = [name for name in names if not known_variations()[name].compares_less]
            self._ask_first_values(names, own)
            for name in names:
                self._ask(Plan((name,), f"{name} own").draw(own), own)

    def _ask_first_values(self, names: list[str], exam: Examination) -> None:
        """Execute the `first_values` of each variation."""
        for name in names:
            try:
                values = list(known_variations()[name].first_values(exam))
            except Exception as error:  # any other exception means: the model does not take the quick test
                reraise_if_out_of_memory(error)
                continue
            for value in values:
                self._ask(Composition({name: value}, exam.longest), exam)

    def _execute(self, plan: Plan) -> None:
        """Draw values until the model takes them: those of a pair may exclude each other."""
        attempts = {0: 1, 1: 1, 2: _ATTEMPTS}.get(len(plan.names), _ATTEMPTS_OF_A_SET)
        for attempt in range(attempts):
            if self._ask(plan.draw(self._exam, attempt), self._exam):
                break

    def _ask(self, composition: Composition, exam: Examination) -> bool:
        """Execute a composition and record the result. Return False if it was refused."""
        result = self.result
        names = composition.names.union(*(variation.includes for variation, _ in composition.variations))
        if any(each.composition.names <= names for each in result.findings):
            return True  # the difference would be the same one
        start = time.perf_counter()
        try:
            found = differences(composition, exam)
        except Exception as error:  # any other exception means: refused
            reraise_if_out_of_memory(error)
            self._record_refusal(composition, error, exam)
            worst = None
        else:
            self._record(composition, found, exam)
            worst = _worst(found, composition, exam)
        if worst is not None and worst.is_real:
            composition, worst = _shrunk(composition, worst, exam)
            result.findings.append(_finding(composition, worst, exam))
        elif worst is not None and worst.observable == "output" and exam.dtype is None:
            for name in names:
                result.largest[name] = max(result.largest.get(name, 0.0), worst.value)
        for name in composition.names:
            share = (time.perf_counter() - start) / len(composition.names)
            result.seconds[name] = result.seconds.get(name, 0.0) + share
        return worst is not None

    def _record(self, composition: Composition, found: list[Difference], exam: Examination) -> None:
        effects = [each for each in found if each.observable == SIDE_EFFECT]
        self.result.effects += [_side_effect(composition, each, exam) for each in effects]
        self.result.executed += 1
        names = sorted(composition.names)
        self.result.asked.update(frozenset(some) for n in (1, 2) for some in combinations(names, n))

    def _record_refusal(self, composition: Composition, error: Exception, exam: Examination) -> None:
        names = composition.names
        text = str(error) if isinstance(error, Refused) else reason_of(error)
        self.result.refused[names] = text
        # A single variation may draw a length that the model does not take.
        counts = len(names) == 2 or (len(names) == 1 and exam.takes_all_lengths)
        if counts and not _is_refusal(error):
            self.result.raised.setdefault(names, Crash(composition, text, _code_of(composition, exam)))


def compare(
    model: object,
    values: Mapping[str, Any],
    *,
    length: int = 8,
    gradients: bool = False,
    after: bool = False,
    longest: int = LONGEST,
    own_dtype: bool = False,
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
        longest: longest row, in positions, to which variations shorten the sequences.
        own_dtype: keep the dtype of the model. Otherwise it runs in float64, if it can.
        device: where the model runs.
        seed: seed of weights and inputs.

    Raises:
        ValueError: an unknown variation, or one that does not apply to the model.
        Refused: the variations cannot be combined.
    """
    subject = Subject(ModelSpec.of(model), torch.device(device), seed)
    exam = Examination(subject, "own" if own_dtype else None, longest)
    for name in values:
        check_choice("values", name, tuple(known_variations()))
        if reason := known_variations()[name].missing(exam):
            raise ValueError(f"values: {name} does not apply to this model: {reason}")
    return differences(Composition(values, length, gradients, after), exam)


def _unsuitable(exam: Examination) -> str:
    """Return why no variation applies to a model, or ""."""
    size = exam.spec.n_parameters
    if size > _TOO_LARGE:
        return (
            f"needs a model of at most {_TOO_LARGE / 1e6:.0f} million parameters: copies of this one in "
            f"float64 need {4 * 8 * size / 1e9:.0f} GB. Check a model with fewer layers and less width"
        )
    if not exam.is_repeatable:
        return NOT_REPEATED
    is_finite = exam.answer(0, exam.lengths[-1]).isfinite().any()
    return "" if is_finite else "needs a finite output; see finite_logits"


def _missing(variation: Variation, exam: Examination) -> str:
    """Return why a variation does not apply, also if the calls that find out raise an exception."""
    try:
        return variation.missing(exam)
    except Exception as error:  # any other exception means: not applicable
        reraise_if_out_of_memory(error)
        return f"the model refuses it: {reason_of(error)}"


def _difference(composition: Composition, exam: Examination) -> Difference | None:
    """Return the first difference above its limit, or the largest one. None: the model refuses the call."""
    try:
        return _worst(differences(composition, exam), composition, exam)
    except Exception as error:  # any other exception means: refused
        reraise_if_out_of_memory(error)
        return None


def _worst(found: list[Difference], composition: Composition, exam: Examination) -> Difference | None:
    """Return the first difference above its limit, or the largest one."""
    found = [each for each in found if each.observable != SIDE_EFFECT]
    real = next((each for each in found if each.is_real), None)
    if real is None:
        nothing = Difference("output", 0.0, exam.limit)
        return max(found, key=lambda each: each.value / max(each.limit, 1e-300), default=nothing)
    if exam.is_float64 and not math.isfinite(real.value):
        # The lowest float64 is infinite in a softmax in float32, and the own dtype decides.
        return _difference(composition, exam.in_dtype("own"))
    return real


def _is_refusal(error: Exception) -> bool:
    """Return True if an exception says that the model does not support a call.

    These are some types, and all errors of a `raise` or `assert` statement outside of torch and einops.
    """
    if isinstance(error, _REFUSALS):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    libraries = [sys.modules[name].__file__ or "" for name in ("torch", "einops") if name in sys.modules]
    is_library = any(Path(code.co_filename).is_relative_to(Path(file).parent) for file in libraries)
    raising = (each.offset for each in get_instructions(code) if each.opname == "RAISE_VARARGS")
    return last.tb_lasti in raising and not is_library


def _shrunk(composition: Composition, worst: Difference, exam: Examination) -> tuple[Composition, Difference]:
    """Return the simplest composition found that still differs."""
    candidates = composition.simpler(exam)
    for _ in range(_SHRINKING):
        simpler = next(candidates, None)
        if simpler is None:
            break
        found = _difference(simpler, exam)
        if found is not None and found.is_real:
            composition, worst, candidates = simpler, found, simpler.simpler(exam)
    return composition, worst


def _finding(composition: Composition, worst: Difference, exam: Examination) -> Finding:
    known, module = known_variations(), ""
    if worst.observable == "output":
        try:
            module = first_difference(composition, exam)
        except Exception as error:
            reraise_if_out_of_memory(error)
    conditions = (variation.correct_if(exam, value) for variation, value in composition.variations)
    by_rank = [variation.name for variation, _ in composition.variations]
    reporter = by_rank[-1] if by_rank and worst.observable != NEXT_CALL else "history"
    return Finding(
        composition,
        worst,
        reporter,
        where=", ".join(filter(None, [worst.place, f"first difference: {module}" if module else ""])),
        meaning=_meaning(composition, worst),
        advice=known[reporter].advice_for(exam),
        code=_code_of(composition, exam),
        correct_if=next((each for each in conditions if each is not None), None),
    )


def _meaning(composition: Composition, worst: Difference) -> str:
    """Return a difference as a sentence."""
    text = composition.text
    if worst.observable == NEXT_CALL:
        condition = f", if in the first call {text}" if text else ""
        return f"A call changes the output of the next plain call{condition}."
    if worst.observable == WITHOUT_LABEL:
        return f"An output without a label is trained to predict a token, if {text}."
    if worst.observable == WITHOUT_ANY_LABEL:
        return f"The gradient is not zero although all labels are ignored, if {text}."
    if not text:
        return "Two plain calls differ."
    if "half_precision" in composition.values:
        return f"The {worst.observable} is not finite if {text}, but finite in a plain call in this dtype."
    return f"The {worst.observable} changes if {text}."


def _side_effect(composition: Composition, effect: Difference, exam: Examination) -> Finding:
    return Finding(
        composition,
        effect,
        "side_effects",
        where=f"in a call in which {composition.text}" if composition.values else "in a plain call",
        meaning=effect.place,
        advice="Work on a copy (x = x.clone()), change a mode or a setting in a context manager only, and "
        "draw random numbers from a torch.Generator of the model.",
        code=_code_of(composition, exam),
        correct_if=effect.correct_if,
    )


def _code_of(composition: Composition, exam: Examination) -> str:
    """Return Python code that repeats a composition; `model` is the subject."""
    subject, device = exam.subject, str(exam.subject.device)
    arguments: dict[str, Any] = {
        "length": composition.length,
        "gradients": composition.gradients,
        "after": composition.after,
        "longest": exam.most if exam.most != LONGEST else None,
        "seed": subject.seed,
        "own_dtype": exam.dtype == "own",
        "device": device if device != "cpu" else None,
    }
    text = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value)
    return f"compare(model, {dict(composition.values)}, {text})"
