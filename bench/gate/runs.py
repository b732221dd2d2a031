"""Runs: what every tool said of every pair of commits, one line of JSON each, and the decisions in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gate.tools.tool import Outcome

__all__ = ["Decided", "Key", "Run", "RunLog", "decisions"]

Key = tuple[int, str]


@dataclass(frozen=True)
class Run:
    """One tool before one pair of commits.

    Attributes:
        block: in which tools are compared; a block has one condition and one effect.
        tool: its name.
        condition: of the machine.
        effect: the branch that was the head.
        seconds: that it took, from the start of its first process to the end of its last.
        effort: that it was given.
        date: when it began.
        commit: of this project then.
        outcomes: of each call, by name.
        error: why there are none; None: there are.
    """

    block: int
    tool: str
    condition: str
    effect: str
    seconds: float
    effort: float
    date: str
    commit: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> Key:
        """What there is one run of."""
        return self.block, self.tool

    def to_json(self) -> str:
        """One line."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Run:
        """What `to_json` gave."""
        values = json.loads(line)
        outcomes = {name: _outcome(**outcome) for name, outcome in values.pop("outcomes").items()}
        return cls(**values, outcomes=outcomes)


class RunLog:
    """A file of runs that only grows.

    A line that was cut off, since the process was ended within it, is not read, and the next one is whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Run]:
        """All of them. Of two with the same key the later one."""
        if not self.path.exists():
            return []
        found: dict[Key, Run] = {}
        for line in self.path.read_text().splitlines():
            try:
                run = Run.from_json(line)
            except json.JSONDecodeError:
                continue
            found[run.key] = run
        return list(found.values())

    def append(self, run: Run) -> None:
        """Write one more."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write(("\n" if torn else "") + run.to_json() + "\n")


@dataclass(frozen=True)
class Decided:
    """What one rule of a tool said of one call.

    Attributes:
        block, tool, condition, effect: of the run.
        rule: of the tool.
        workload: the call.
        verdict: "REGRESSED", "PASS", "IMPROVED" or "INCONCLUSIVE".
        estimate: that a threshold can be moved over; -inf: below each.
        seconds: of the run, over the calls that share it.
        raw: what it was decided from.
    """

    block: int
    tool: str
    condition: str
    effect: str
    rule: str
    workload: str
    verdict: str
    estimate: float
    seconds: float
    raw: Mapping[str, Any]

    @property
    def alarmed(self) -> bool:
        """Whether it was found slower."""
        return self.verdict == "REGRESSED"


def decisions(runs: list[Run]) -> Iterator[Decided]:
    """Of all runs that came to some."""
    for run in runs:
        for workload, outcome in run.outcomes.items():
            for rule, verdict in outcome.verdicts.items():
                yield Decided(
                    run.block,
                    run.tool,
                    run.condition,
                    run.effect,
                    rule,
                    workload,
                    verdict,
                    outcome.estimates[rule],
                    run.seconds / len(run.outcomes),
                    outcome.raw,
                )


def _outcome(verdicts: dict[str, str], estimates: dict[str, float | None], raw: dict[str, Any]) -> Outcome:
    known = {rule: -math.inf if value is None else value for rule, value in estimates.items()}
    return Outcome(verdicts, known, raw)


def _finite(value: Any) -> Any:
    """Without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
