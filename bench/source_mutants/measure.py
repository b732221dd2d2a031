"""Measurement: random mutants of third-party sources, judged by the oracle and examined by the checks."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from bench import third_party
from bench.claim import Bar, Claim
from bench.isolated import Ended, all_isolated
from bench.source_mutants.operators import OPERATORS, Mutant, mutants, mutate
from bench.source_mutants.oracle import Answer, ask, changed, contradictions, new_exceptions

__all__ = ["MODELS", "by_operator", "draw", "install", "measure_source_mutants", "source_mutant_bars"]

# Models of different source files.
MODELS = (
    *("transformers/llama", "transformers/gpt2", "transformers/bert is_decoder", "transformers/qwen2"),
    *("transformers/gemma2", "transformers/mistral", "transformers/mixtral", "transformers/falcon"),
    *("transformers/opt", "transformers/gpt_neox", "transformers/bloom", "transformers/mamba"),
    *("transformers/phi", "transformers/gptj", "transformers/gpt_neo", "transformers/olmo2"),
    *("transformers/cohere", "transformers/stablelm", "transformers/deepseek_v3", "transformers/jamba"),
    *("transformers/mpt", "transformers/xglm", "transformers/gpt_bigcode", "transformers/bart"),
    *("x-transformers/decoder rotary", "x-transformers/decoder grouped queries"),
    *("x-transformers/decoder alibi", "x-transformers/decoder relative bias"),
)
TARGET = 2000  # mutants that change an observable
_BATCH, _QUICK = 50, 6  # mutants that are measured before they are counted, and in a quick run
_SHOWN = 3  # ways in the record of a mutant
_FIRST = {"plain", "batch"}  # ways in which an exception is noticed at the first call
# These run first, because one finding is enough: the first one pays for the comparison of equivalent calls.
_LIKELY = ("backend_gradients", "history", "cache_limit", "rotary_shift", "cache_decoding", "causality")
_SECONDS = 240.0  # of one mutant
Answers = Callable[..., Iterator[dict[str, Any]]]


def measure_source_mutants(claim: Claim, jobs: int, answers: Answers) -> None:
    """Measure mutants until enough of them change an observable.

    Args:
        claim: gets the figures. A mutant that they have is not measured again, unless it was missed: then its
            record says that it was missed at first sight.
        jobs: number of mutants at the same time.
        answers: yields the kind of a subject and the result of each check.
    """
    figures = claim.figures.setdefault("source_mutants", {"originals": {}, "mutants": {}})
    unchanged, known = figures["originals"], figures["mutants"]
    names = MODELS[:2] if claim.quick else MODELS
    _subjects()  # imported here once, not in every process
    asked = {name: functools.partial(_original, name) for name in names}
    originals = {name: ended.values for name, ended in all_isolated(asked, jobs=jobs, seconds=_SECONDS)}
    examined = {name: functools.partial(_failed, name, answers) for name in names if name not in unchanged}
    for name, ended in all_isolated(examined, jobs=jobs, seconds=_SECONDS):
        failed = dict(ended.values)
        unchanged[name] = {"failed": failed, "error": ended.error, "seconds": round(ended.seconds, 2)}
        claim.write()
        print(f"source mutants of {name}: unchanged {unchanged[name]}", flush=True)
    every = draw({name: originals[name][0] for name in names})
    print(f"{len(every)} source mutants can be drawn", flush=True)
    # Mutants that no check found are first, and are measured in any case.
    wanted = [each for each in every if _is_missed(known.get(_text(*each)))]
    wanted.sort(key=lambda each: _text(*each) not in known)
    n_missed = sum(_text(*each) in known for each in wanted)
    size = _QUICK if claim.quick else _BATCH
    for start in range(0, size if claim.quick else len(wanted), size):
        if start >= n_missed and sum(map(_changes, known.values())) >= TARGET:
            break
        new = {
            _text(name, mutant): functools.partial(
                _measured, name, mutant, originals[name][1], unchanged[name]["failed"], answers
            )
            for name, mutant in wanted[start : start + size]
        }
        for text, ended in all_isolated(new, jobs=jobs, seconds=_SECONDS):
            missed = {"missed_at_first": True} if text in known else {}
            known[text] = _record(ended) | missed
            claim.write()
            print(f"{text}: {known[text]}", flush=True)


def _is_missed(mutant: Mapping[str, Any] | None) -> bool:
    """Return True for a mutant that was not measured, or that no check found."""
    return mutant is None or (mutant["kind"] == "decidable" and not mutant["found_by"])


def _record(ended: Ended) -> dict[str, Any]:
    """Return the record of a mutant from the verdict of the oracle and the check that finds it."""
    verdict, *found = ended.values or [{"kind": "crashes"}]
    record = {**verdict, "seconds": round(ended.seconds, 2)}
    if verdict["kind"] == "decidable":
        record["found_by"] = found
    if ended.error is not None:
        record["error"] = ended.error
    return record


def draw(lines: Mapping[str, list[int]], seed: int = 0) -> list[tuple[str, Mutant]]:
    """Return mutants of each model in random order. Models and operators take turns.

    Args:
        lines: executed lines of the source of each model.
        seed: seed of the order.
    """
    order, queues = random.Random(seed), []
    for name, some in lines.items():
        every = mutants(_source(name), set(some))
        for operator in OPERATORS:
            chosen = [mutant for mutant in every if mutant.operator == operator]
            queues.append([(name, mutant) for mutant in order.sample(chosen, len(chosen))])
    order.shuffle(queues)
    longest = max(map(len, queues), default=0)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def install(name: str, mutant: Mutant) -> None:
    """Execute a mutant of the module of a model as a new module, and let its library use it."""
    original = importlib.import_module(_module(name))
    tree = mutate(_source(name), mutant)
    assert original.__file__ is not None
    module = ModuleType(original.__name__)
    module.__file__, module.__package__ = original.__file__, original.__package__
    module.__spec__, module.__loader__ = original.__spec__, original.__loader__
    sys.modules[original.__name__] = module
    exec(compile(tree, original.__file__, "exec"), vars(module))
    _replace(original, module)


def _replace(original: ModuleType, module: ModuleType) -> None:
    """Replace what other modules of the library have imported from the original module."""
    library = original.__name__.partition(".")[0]
    own = {
        id(value): key
        for key, value in vars(original).items()
        if getattr(value, "__module__", None) == original.__name__
    }
    for other in [other for key, other in sys.modules.items() if key.partition(".")[0] == library]:
        for key, value in list(vars(other).items()):
            if other is not module and id(value) in own:
                setattr(other, key, getattr(module, own[id(value)]))


def _text(name: str, mutant: Mutant) -> str:
    return " | ".join((name, *map(str, mutant)))


@functools.cache
def _subjects() -> dict[str, Callable[[], Any]]:
    return dict(third_party.subjects())


@functools.cache
def _make(name: str) -> Callable[[], nn.Module]:
    """Return the factory of a model."""
    made = _subjects()[name]()
    return _subjects()[name] if isinstance(made, nn.Module) else made


def _module(name: str) -> str:
    """Return the name of the module that defines a model."""
    library, _, kind = name.partition("/")
    if library == "x-transformers":
        return "x_transformers.x_transformers"
    _subjects()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = importlib.import_module("transformers").CONFIG_MAPPING[kind.partition(" ")[0]]
    return MODEL_FOR_CAUSAL_LM_MAPPING[config].__module__


@functools.cache
def _source(name: str) -> str:
    file = importlib.import_module(_module(name)).__file__
    assert file is not None
    return Path(file).read_text()


def _original(name: str) -> Iterator[Any]:
    """Yield the executed lines of the source of a model, and its answers."""
    file, lines = importlib.import_module(_module(name)).__file__, set()

    def local(frame: FrameType, *_: Any) -> Any:
        lines.add(frame.f_lineno)
        return local

    def trace(frame: FrameType, *_: Any) -> Any:
        return local(frame) if frame.f_code.co_filename == file else None

    make = _make(name)
    sys.settrace(trace)
    try:
        answers = ask(make)
    finally:
        sys.settrace(None)
    if answers["plain"].error:
        raise ValueError(answers["plain"].error)
    yield sorted(lines)
    yield answers


def _failed(name: str, answers: Answers) -> Iterator[tuple[str, str]]:
    """Yield the name and the finding of each check that fails."""
    make = _make(name)
    for each in answers(lambda: make, first=_LIKELY):
        if each.get("status") == "failed":
            yield each["check"], each.get("meaning", "")


def _measured(
    name: str,
    mutant: Mutant,
    originals: Mapping[str, Answer],
    failed: Mapping[str, str],
    answers: Answers,
) -> Iterator[Any]:
    """Yield the verdict of the oracle, then the first check that fails if the mutant is decidable.

    A check that has the same finding about the unchanged model, in `failed`, does not count.
    """
    make = _make(name)
    install(name, mutant)
    answered = ask(make)
    moved, broken = changed(answered, originals), contradictions(answered, originals)
    raised = new_exceptions(answered, originals)
    if _FIRST & raised.keys():
        yield {"kind": "crashes"}
    elif broken:
        largest = sorted(broken, key=lambda way: -broken[way])[:_SHOWN]
        yield {"kind": "decidable", "contradictions": {way: broken[way] for way in largest}}
        new = (check for check, finding in _failed(name, answers) if failed.get(check) != finding)
        yield from itertools.islice(new, 1)
    elif raised:
        yield {"kind": "raises in a way", "raises": next(iter(raised.items()))}
    else:
        yield {"kind": "another model", "changed": moved[:_SHOWN]} if moved else {"kind": "no change"}


def _changes(mutant: Mapping[str, Any]) -> bool:
    return mutant["kind"] in ("decidable", "another model")


def by_operator(known: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the counts of each operator, and of all."""
    table = {name: Counter[str]() for name in (*OPERATORS, "all")}
    for text, mutant in known.items():
        for row in (table[text.split(" | ")[1]], table["all"]):
            row.update({"drawn": 1, "changes": _changes(mutant), mutant["kind"]: 1})
            is_found = bool(mutant.get("found_by"))
            row.update(
                {"found": is_found, "found at first sight": is_found and "missed_at_first" not in mutant}
            )
    return {name: dict(row) for name, row in table.items() if row}


def source_mutant_bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of the mutants of third-party sources."""
    if not figures.get("mutants"):
        return []
    row = by_operator(figures["mutants"])["all"]
    share = row["found"] / row["decidable"] if "decidable" in row else None
    return [
        Bar("source mutants", float(row["changes"]), float(TARGET), full_size=True),
        Bar("source mutants: decidable found", share, 0.97, full_size=True),
    ]
