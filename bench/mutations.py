"""`python -m bench.mutations --n 50`: random small architectures with a random bug, and who notices.

An architecture, by Hypothesis, and a mutation are drawn from two grammars. A mutation counts once it is shown
to move something that the model computes, in float64, without any check. Then `check_model` is asked of the
mutant and of its clean twin; both know of the model what a user declares, and no reference. Rates come with
95 % Wilson intervals (Wilson 1927, J. Am. Stat. Assoc. 22, 209).

Shapes: B batch, T positions.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

from bench.architectures import Architecture, architectures
from bench.claim import Bar, Claim
from bench.isolated import all_isolated
from bench.mutation_rules import MUTATIONS, Case
from stackwise.checks import check_model, known_checks
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded


def observe(spec: ModelSpec) -> dict[str, Tensor]:
    """Everything that a bug may move, computed in float64 without any check."""
    model = spec.create().double().eval()
    B, T = 3, 12
    ids = spec.batch(B, T)
    right = torch.arange(T) < torch.tensor([[T], [T - 3], [T - 5]])
    documents = (torch.arange(T) >= 5).long().expand(B, T)
    labels = ids.masked_fill(torch.arange(T) < 4, -100)
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), seeded(1):
        for call in ("first", "second"):
            seen[f"logits, {call} call"] = model(ids).logits
        seen["logits of longer rows"] = model(spec.batch(B, 3 * T)).logits
        seen["right-padded"] = model(ids, keep=right).logits[right]
        seen["left-padded"] = model(ids, keep=right.flip(1)).logits[right.flip(1)]
        seen["padding"] = model(ids, keep=right).logits[~right].isfinite().double()
        seen["packed"] = model(ids, documents=documents).logits
        cache, parts = None, []
        for t in range(T):
            output, cache = spec.decode(model, ids[:, t : t + 1], cache)
            parts.append(output.logits)
        seen["cached"] = torch.cat(parts, dim=1)
        seen["loss of nothing"] = model(ids, labels=torch.full_like(ids, -100)).loss
    with seeded(1):
        output = model.train()(ids, labels=labels)
    seen["logits in training"], seen["loss"] = output.logits.detach(), output.loss.detach()
    output.loss.backward()
    for name, p in model.named_parameters(remove_duplicate=False):
        seen[f"gradient of {name}"] = torch.tensor(torch.nan) if p.grad is None else p.grad
    seen["tied"] = torch.tensor(float(model.head.weight is model.embedding.weight))
    return seen


def moved(case: Case) -> list[str]:
    """What the bug moves, beyond rounding."""
    clean, broken = observe(case.twin()), observe(case.mutant())
    return [name for name in clean if not _alike(clean[name], broken[name])]


def _alike(a: Tensor, b: Tensor) -> bool:
    scale = a.nan_to_num().abs().max().item() if a.numel() else 1.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=1e-9 * (scale or 1.0), equal_nan=True)


def draw_cases(n: int, *, number: int = 0) -> tuple[list[Case], list[Case]]:
    """`n` different cases whose bug moves something, and those that were drawn in vain.

    The rules take turns in a random order, so that each is asked as often as any other; Hypothesis draws
    the architectures.
    """
    chance = random.Random(number)
    pool = _draw_architectures(4 * n + 20, number)
    order = chance.sample(sorted(MUTATIONS), len(MUTATIONS))
    found: dict[Case, None] = {}
    void: dict[Case, None] = {}
    for name in itertools.islice(itertools.cycle(order), 4 * n + len(order)):
        rule = MUTATIONS[name]
        suitable = [architecture for architecture in pool if rule.suits(architecture)]
        if len(found) == n or not suitable:
            continue
        case = Case(name, chance.choice(rule.values), chance.choice(suitable))
        if case not in found and case not in void:
            (found if moved(case) else void)[case] = None
    return list(found), list(void)


def _draw_architectures(n: int, number: int) -> list[Architecture]:
    drawn: dict[Architecture, None] = {}

    @seed(number)
    @settings(
        max_examples=n,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(architectures())
    def collect(architecture: Architecture) -> None:
        drawn[architecture] = None

    collect()
    return list(drawn)


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a rate."""
    if n == 0:
        return 0.0, 1.0
    rate = hits / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass
class Tally:
    """How often, of how many."""

    n: int = 0
    hits: int = 0
    warned: int = 0

    def count(self, *, hit: bool, warned: bool = False) -> None:
        self.n += 1
        self.hits += hit
        self.warned += warned and not hit

    def to_dict(self) -> dict[str, Any]:
        low, high = wilson(self.hits, self.n)
        rate = self.hits / self.n if self.n else None
        return {**asdict(self), "rate": rate, "interval": [low, high]}


@dataclass(frozen=True)
class Verdict:
    """The checks that failed, those that warned, and those that broke off with why."""

    failed: list[str]
    warned: list[str]
    errors: list[str]


def _verdicts(case: Case, suite: Literal["fast", "full"], ask_twin: bool) -> Iterator[Verdict]:
    for spec in (case.mutant(), case.twin())[: 1 + ask_twin]:
        results = check_model(spec, suite=suite)
        failed, warned = ([r.check for r in results if r.status == status] for status in ("failed", "warned"))
        yield Verdict(failed, warned, [f"{r.check}: {r.meaning}" for r in results if r.status == "error"])


@dataclass
class SelfTest:
    """What came of all cases so far."""

    suite: Literal["fast", "full"] = "fast"
    detection: dict[str, Tally] = field(default_factory=dict)
    false_alarms: Tally = field(default_factory=Tally)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    missed: list[dict[str, Any]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    asked: dict[Architecture, None] = field(default_factory=dict)

    def ask(self, cases: Iterable[Case], *, jobs: int = 1) -> Iterator[tuple[Case, bool]]:
        """Ask of each mutant, and of its twin where that is new; say of each whether the bug was found."""
        named = {str(number): case for number, case in enumerate(cases)}
        questions = {}
        for name, case in named.items():
            ask_twin = case.architecture not in self.asked
            self.asked[case.architecture] = None
            questions[name] = functools.partial(_verdicts, case, self.suite, ask_twin)
        for name, ended in all_isolated(questions, jobs=jobs, seconds=300.0):
            if ended.error:
                self.errors[ended.error] += 1
            else:
                yield named[name], self._enter(named[name], *ended.values)

    def _enter(self, case: Case, of_mutant: Verdict, of_twin: Verdict | None = None) -> bool:
        failed, warned = of_mutant.failed, of_mutant.warned
        rule = case.rule
        certain = "decidable" if rule.decidable else "only by a reference"
        for group in ("all", certain, f"kind: {rule.kind}", f"rule: {rule.name}"):
            self.detection.setdefault(group, Tally()).count(hit=bool(failed), warned=bool(warned))
        self.families.update({known_checks()[name].family for name in failed})
        if not failed:
            self.missed.append({**_shown(case), "decidable": rule.decidable, "warned": warned})
        self.errors.update(of_mutant.errors)
        if of_twin is not None:
            self.errors.update(of_twin.errors)
            self.false_alarms.count(hit=bool(of_twin.failed), warned=bool(of_twin.warned))
            if of_twin.failed:
                self.alarms.append({"architecture": asdict(case.architecture), "checks": of_twin.failed})
        return bool(failed)

    def to_dict(self) -> dict[str, Any]:
        order = sorted(self.detection, key=lambda group: (":" in group, group))
        return {
            "suite": self.suite,
            "detection": {group: self.detection[group].to_dict() for group in order},
            "false_alarms": self.false_alarms.to_dict(),
            "alarms": self.alarms,
            "missed": self.missed,
            "errors": dict(self.errors),
            "caught_by": dict(self.families.most_common()),
        }


def _shown(case: Case) -> dict[str, Any]:
    return {"rule": case.mutation, "value": str(case.value), "architecture": asdict(case.architecture)}


def measure_mutations(
    claim: Claim, n: int, *, suite: Literal["fast", "full"] = "fast", number: int = 0, jobs: int = 1
) -> SelfTest:
    """Ask of `n` cases, with the figures entered in `claim` as they come."""
    start = time.perf_counter()
    drawn, void = draw_cases(n, number=number)
    test = SelfTest(suite)
    for index, (case, found) in enumerate(test.ask(drawn, jobs=jobs), 1):
        print(f"{index:4}/{len(drawn)} {'found ' if found else 'missed'} {case.mutation} {case.value or ''}")
        claim.figures["mutations"] = {
            "cases": index,
            "void": len(void),
            "seed": number,
            "seconds": time.perf_counter() - start,
            **test.to_dict(),
        }
        if index % 10 == 0:
            claim.write()
    return test


def mutation_bars(figures: Mapping[str, Any]) -> list[Bar]:
    """What the figures are held to."""
    if not figures:
        return []
    decidable = figures["detection"].get("decidable", Tally().to_dict())
    return [
        Bar("mutations: decidable bugs found", decidable["rate"], 0.9, full_size=True),
        Bar("mutations: false alarms", float(figures["false_alarms"]["hits"]), 0.0, at_most=True),
    ]


def table(test: SelfTest) -> Iterable[str]:
    """The rates, one a line."""
    groups = {**test.to_dict()["detection"], "false alarms": test.false_alarms.to_dict()}
    for group, row in groups.items():
        rate = "-" if row["rate"] is None else f"{row['rate']:.2f}"
        low, high = row["interval"]
        found = f"{row['hits']:4} of {row['n']:4}  {rate} [{low:.2f}, {high:.2f}]"
        yield f"{group:40} {found}, {row['warned']} more warned"
    for error, count in test.errors.items():
        yield f"ERROR {count} times: {error}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=50, help="how many mutants")
    parser.add_argument("--suite", choices=("fast", "full"), default="fast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases asked at a time")
    given_ = parser.parse_args(arguments)
    claim = Claim("mutations", quick=given_.n < 200)
    torch.set_num_threads(1)  # of this process, which is forked for each case
    test = measure_mutations(claim, given_.n, suite=given_.suite, number=given_.seed, jobs=given_.jobs)
    for line in table(test):
        print(line)
    claim.bars = mutation_bars(claim.figures["mutations"])
    return claim.conclude()


if __name__ == "__main__":
    sys.exit(main())
