"""Check: one question asked of a model or of a training step, and the registry of all of them.

A family of checks is one file in `model/` or `trainer/`; `@check` and `@trainer_check` enter each function
in the registry, and the registry reads the folders, so that a new family is one new file and touches
nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, TypeVar, overload

import torch

from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec
from stackwise.support.arguments import check_choice, require
from stackwise.support.device import threads_for

__all__ = [
    "OTHER_NAMES",
    "Check",
    "Suite",
    "check",
    "enter",
    "known_checks",
    "refuse_unknown",
    "select_checks",
    "trainer_check",
]

Suite = Literal["fast", "full"]
# Names that selections and declarations may also use -> the check that asks the same question.
OTHER_NAMES = {
    "cache_chunks": "cache_decoding",
    "cache_padding": "padding_amount",
    "causality_far": "long_sequences",
    "packing_isolation": "packing_alone",
    "padding_content": "padding_amount",
    "padding_finite": "half_precision",
    "padding_gradients": "padding_empty_row",
}
Question = TypeVar("Question", bound=Callable[..., CheckResult])


@dataclass(frozen=True)
class Check:
    """A named question.

    Attributes:
        name: in test ids, reports and selections.
        family: the file it lives in.
        summary: the question, in one line.
        function: asks it of a Subject, or of a TrainerSubject.
        asks: what it is asked of, "model" or "trainer".
        suite: "fast" where it belongs to both suites, "full" where to that alone.
    """

    name: str
    family: str
    summary: str
    function: Callable[[Any], CheckResult]
    asks: Literal["model", "trainer"] = "model"
    suite: Suite = "fast"

    def run(
        self, spec: ModelSpec | TrainerSpec, *, device: torch.device | str = "cpu", seed: int = 0
    ) -> CheckResult:
        """Ask the question. Tiny models run on one thread.

        Raises:
            Exception: any exception of the subject or of the check, unchanged.
        """
        subject: Subject | TrainerSubject
        if isinstance(spec, TrainerSpec):
            subject = TrainerSubject(spec, torch.device(device), seed)
        else:
            subject = Subject(spec, torch.device(device), seed)
        start = time.perf_counter()
        with threads_for(spec.n_parameters):
            result = self.function(subject)
        seconds = time.perf_counter() - start if result.seconds is None else result.seconds
        return replace(result, check=self.name, seconds=round(seconds, 3))


_registry: dict[str, Check] = {}


@overload
def check(question: Question, *, suite: Suite = "fast") -> Question: ...
@overload
def check(question: None = None, *, suite: Suite = "fast") -> Callable[[Question], Question]: ...
def check(question: Question | None = None, *, suite: Suite = "fast") -> Any:
    """Enter a question about a model in the registry, under the function's name.

    Its docstring's first line is the question. `@check`, or `@check(suite="full")` for what takes seconds.
    """
    return _entered(question, "model", suite)


@overload
def trainer_check(question: Question, *, suite: Suite = "fast") -> Question: ...
@overload
def trainer_check(question: None = None, *, suite: Suite = "fast") -> Callable[[Question], Question]: ...
def trainer_check(question: Question | None = None, *, suite: Suite = "fast") -> Any:
    """As `check`, for a question about a training step."""
    return _entered(question, "trainer", suite)


def _entered(question: Question | None, asks: Literal["model", "trainer"], suite: Suite) -> Any:
    def decorate(function: Question) -> Question:
        assert function.__doc__, function
        family = function.__module__.rpartition(".")[2]
        summary = function.__doc__.strip().splitlines()[0]
        enter(Check(function.__name__, family, summary, function, asks, suite))
        return function

    return decorate if question is None else decorate(question)


def enter(check: Check) -> None:
    """Enter a check in the registry."""
    assert check.name not in _registry, check.name
    _registry[check.name] = check


@cache
def known_checks() -> Mapping[str, Check]:
    """Every check by name, determinism first: where it fails, no comparison means much."""
    from stackwise.checks import model, trainer

    for package in (model, trainer):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    return dict(sorted(_registry.items(), key=lambda item: (item[1].family != "determinism", item[0])))


def refuse_unknown(names: Iterable[str], *, asks: Literal["model", "trainer"] | None = None) -> None:
    """Refuse names that no check and no family has.

    Args:
        names: to be looked up.
        asks: of what the checks are asked; None: of either.

    Raises:
        ValueError: naming them, or where there is none.
    """
    wanted = set(names)
    require(bool(wanted), "checks", [], "names of checks or families, or None for all")
    kinds: dict[str, dict[str, None]] = {"model": {}, "trainer": {}}
    for one in known_checks().values():
        kinds[one.asks].update(dict.fromkeys((one.name, one.family)))
    kinds["model"].update(dict.fromkeys(OTHER_NAMES))
    known = {name: None for kind, some in kinds.items() if asks in (None, kind) for name in some}
    refused = sorted(wanted - known.keys())
    elsewhere = [name for name in refused if any(name in some for some in kinds.values())]
    unknown = [name for name in refused if name not in elsewhere]
    problems = [f"unknown {', '.join(unknown)}"] if unknown else []
    if elsewhere:
        this, other = ("a model", "a training step") if asks == "model" else ("a training step", "a model")
        problems.append(f"{', '.join(elsewhere)} asked of {other}, and this is {this}")
    if problems:
        text = "; ".join(problems)
        matches = {name: get_close_matches(name, known.keys() - OTHER_NAMES.keys(), n=2) for name in unknown}
        near = dict.fromkeys(match for found in matches.values() for match in found)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        checks = {one.name: one.family for one in known_checks().values() if asks in (None, one.asks)}
        families = ", ".join(dict.fromkeys(checks.values()))
        every = "" if matches and all(matches.values()) else f"; checks: {', '.join(checks)}"
        raise ValueError(f"checks: {text}{hint}; families: {families}{every}")


def select_checks(
    names: Iterable[str] | None = None,
    *,
    suite: Suite = "fast",
    asks: Literal["model", "trainer"] = "model",
) -> list[Check]:
    """The checks of a suite, in registry order.

    Args:
        names: of checks, or of families; None: all. A check that is named is taken, whatever its suite.
        suite: "fast" (seconds) or "full" (all).
        asks: of what they are asked.

    Raises:
        ValueError: a name that is neither a check nor a family of these, or an unknown suite.
    """
    check_choice("suite", suite, ("fast", "full"))
    known = {name: c for name, c in known_checks().items() if c.asks == asks}
    in_suite = [c for c in known.values() if suite == "full" or c.suite == "fast"]
    if names is None:
        return in_suite
    wanted = set(names)
    refuse_unknown(wanted, asks=asks)
    wanted = {OTHER_NAMES.get(name, name) for name in wanted}
    return [c for c in known.values() if c.name in wanted or (c.family in wanted and c in in_suite)]
