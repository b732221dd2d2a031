"""Claim: measured figures, the bars they are held to, and the file both are kept in."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from stackwise.support.device import fingerprint, keep_freed_memory

_HERE = Path(__file__).parent
RESULTS = _HERE / "results"


_NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Bar:
    """Figure and the limit that it is held to.

    Attributes:
        name: name of the figure.
        value: the figure. None: not measured.
        limit: smallest value allowed, or largest if `at_most` is True.
        at_most: True if `limit` is an upper limit.
        full_size: True if the limit holds only at the size of a full run, for example a ratio of large
            models or a number of runs. A quick run does not judge such a bar.
    """

    name: str
    value: float | None
    limit: float
    at_most: bool = False
    full_size: bool = False

    @property
    def verdict(self) -> str:
        """Verdict of a full run."""
        if self.value is None:
            return "NOT MEASURED"
        met = self.value <= self.limit if self.at_most else self.value >= self.limit
        return "PASS" if met else "SHORT"

    def judge(self, *, quick: bool) -> str:
        """Return the verdict of a full or a quick run."""
        is_measured = self.value is not None
        return _NOT_JUDGED if quick and self.full_size and is_measured else self.verdict

    def line(self, *, quick: bool) -> str:
        """Return name, value, limit and verdict as one line of text."""
        value = "-" if self.value is None else f"{self.value:.3f}"
        comparison = "<=" if self.at_most else ">="
        verdict = self.judge(quick=quick)
        return f"bar {self.name:<34} {value:>8} {comparison} {self.limit:<6} {verdict}"

    def to_dict(self, *, quick: bool = False) -> dict[str, Any]:
        """Return the record of the bar in a result file."""
        record = asdict(self) | {"verdict": self.judge(quick=quick)}
        del record["full_size"]
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Bar:
        """Return the bar of a record. A bar that was not judged stays unjudged in a quick run."""
        bar = {key: value for key, value in record.items() if key != "verdict"}
        return cls(**bar, full_size=record["verdict"] == _NOT_JUDGED)


@dataclass
class Claim:
    """What one `python -m bench.NAME` found. Everything in its process is measured with kept memory."""

    name: str
    quick: bool
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    commit: str = field(default_factory=lambda: commit_of(_HERE))  # of the start, not of the end
    keeps_memory: bool = field(default_factory=keep_freed_memory)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)

    def resume(self) -> None:
        """Begin with what the file has: a row that is measured again replaces its own."""
        path = self._path()
        if path.exists():
            record = json.loads(path.read_text())
            self.figures, self.measured = record["figures"], record.get("measured", {})
            self.bars += map(Bar.from_dict, record["bars"])

    def enter(self, bar: Bar, figures: Any = None) -> None:
        """Keep a bar, and the figures that it comes from, beside when and of what they were measured."""
        names = [each.name for each in self.bars]
        if bar.name in names:
            self.bars[names.index(bar.name)] = bar
        else:
            self.bars.append(bar)
        if figures is not None:
            self.figures[bar.name] = figures
        self.measured[bar.name] = {"commit": self.commit, "load_average": os.getloadavg(), "date": _now()}
        self.write()

    def conclude(self) -> int:
        """Print the bars, write the file, and return 1 if any bar that this run judges was missed."""
        return self._tell(self.write())

    def judge_again(self, bars: list[Bar], figures: Mapping[str, Any]) -> int:
        """Hold what the file has to these bars, and conclude. When and of what it was measured stays in it.

        Args:
            bars: in place of those of the file.
            figures: beside those of the file.
        """
        path = self._path()
        record = json.loads(path.read_text())
        self.bars, self.commit, self.measured = bars, record["commit"], record.get("measured", {})
        record["bars"] = self._judged()
        record["figures"].update(figures)
        path.write_text(json.dumps(record, indent=1) + "\n")
        return self._tell(path)

    def _tell(self, path: Path) -> int:
        for bar in self.bars:
            print(bar.line(quick=self.quick))
        print(f"written to {path}")
        commits = {self.commit, *(each["commit"] for each in self.measured.values())}
        nowhere = sorted(commit for commit in commits if not is_commit(commit))
        if nowhere and not self.quick:
            print(
                f"WARNING: measured of {', '.join(nowhere)}, which nobody can check out: commit what has "
                "changed and measure again before it is shown"
            )
        return int(any(bar.judge(quick=self.quick) == "SHORT" for bar in self.bars))

    def _judged(self) -> list[dict[str, Any]]:
        return [bar.to_dict(quick=self.quick) for bar in self.bars]

    def write(self) -> Path:
        """The file, with what is measured so far."""
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "claim": self.name,
            "quick": self.quick,
            "date": _now(),
            "commit": self.commit,
            "machine": fingerprint(),
            "load_average": os.getloadavg(),
            "keeps_freed_memory": self.keeps_memory,
            "bars": self._judged(),
            "measured": self.measured,
            "figures": self.figures,
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
        return path

    def _path(self) -> Path:
        device = fingerprint()["gpu"]
        folder = RESULTS / ("cpu" if device is None else str(device["name"]).replace(" ", "-").lower())
        return folder / f"{self.name}{'-quick' if self.quick else ''}.json"


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    seconds: float = 0.3,
    seed: int = 0,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per call: `rounds` samples of each, one of every call in each round, in random order.

    A sample is as many calls as take about `seconds`. Each call is made twice beforehand. `wait` runs at the
    end of each sample, inside its time: on a GPU it synchronizes.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        wait()
        start = time.perf_counter()
        call()
        wait()
        repeats[name] = max(1, round(seconds / (time.perf_counter() - start)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(seed).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    calls[name]()
                wait()
                samples[name].append((time.perf_counter() - start) / repeats[name])
    finally:
        gc.enable()
    return samples


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """How many times `fast` is faster: the median over rounds, and the middle half of them."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return {"median": median(ratios), "quartile_low": low, "quartile_high": high}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_commit(name: str) -> bool:
    """Whether this is what `commit_of` gives of files that are those of a commit."""
    return re.fullmatch("[0-9a-f]{7,40}", name) is not None


def commit_of(folder: Path) -> str:
    """The commit that the files around a folder are of, with "-dirty" where they have changed since.

    Changed results do not count: they are what a claim writes, and not what it measures. "unknown" where
    there is no git, or no commit.
    """

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return None if done.returncode else done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    if commit is None:
        return "unknown"
    measured = (":/", ":(top,exclude)bench/results")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *measured)
    return commit if changed == "" else f"{commit}-dirty"
