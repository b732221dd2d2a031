"""Search: samplers against random sampling at an equal budget, and what a killed or shared study keeps.

The space is trained once, see `trained_grid`. Each way to search it has the same number of trials, and is
repeated from other seeds; differences are of the same repeat. The rival samples as the prototyping recipe
does: one choice for each key, each time anew, whatever was seen before.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.table import Table

from bench.claim import Bar
from bench.prototype.part import Part, Work
from bench.prototype.search_worker import EvaluationLog
from bench.prototype.trained_grid import TrainedGrid, train_grid
from stackwise.prototype.search import search_architecture_space
from stackwise.prototype.search.space import Space

__all__ = ["RANDOM", "WAYS", "Plan", "killed_search", "measure", "paired", "rows", "shared_search"]

RANDOM = "random, as the recipe"
TPE, TPE_BOTH, NSGA2_BOTH = "TPE", "TPE, two objectives", "NSGA-II, two objectives"
BOTH = ("loss", "tokens_per_second")
# Name: sampler and objective of `search_architecture_space`.
WAYS: dict[str, dict[str, Any]] = {
    "random": {"sampler": "random", "objective": "score"},
    TPE: {"sampler": "tpe", "objective": "score"},
    TPE_BOTH: {"sampler": "tpe", "objective": BOTH},
    NSGA2_BOTH: {"sampler": "nsga2", "objective": BOTH},
}
_PATIENCE = 120.0  # seconds, for a worker to begin


@dataclass(frozen=True)
class Plan:
    """What is searched.

    Attributes:
        heads: the most, of 16 numbers each.
        layers: the most.
        d_ff_ratios: choices.
        learning_rates: choices.
        steps: of each training of the grid.
        batch_size: rows.
        seq_len: T.
        budget: trials of a search.
        repeats: of each way.
        killed_budget: trials of the studies that are killed or shared.
        trial_seconds: of each of these.
    """

    heads: int = 6
    layers: int = 4
    d_ff_ratios: tuple[int, ...] = (1, 2, 4)
    learning_rates: tuple[float, ...] = (1e-3, 4e-3, 1.6e-2, 6.4e-2)
    steps: int = 60
    batch_size: int = 8
    seq_len: int = 64
    budget: int = 40
    repeats: int = 20
    killed_budget: int = 24
    trial_seconds: float = 0.5

    def space(self) -> Space:
        """Widths, depths and learning rates of small Racks, trained on the documentation of Python."""
        base = {
            "model": {
                "vocab_size": 256,
                "d_model": 16,
                "n_heads": 1,
                "n_kv_heads": None,
                "attention_type": "mha",
                "d_ff": 32,
                "architecture": {"n_stacks": 1, "blocks_per_stack": 2},
            },
            "training": {
                "batch_size": self.batch_size,
                "seq_len": self.seq_len,
                "max_steps": self.steps,
                "precision": "fp32",
                "device": "cpu",
            },
            "data": {"validation_fraction": 0.02},
        }
        keys = {
            "model.n_heads": {"low": 1, "high": self.heads},
            "n_layers": {"low": 1, "high": self.layers},
            "d_ff_ratio": list(self.d_ff_ratios),
            "training.optimizer.lr": list(self.learning_rates),
        }
        return Space.from_dict({"base": base, "space": keys})


QUICK = Plan(2, 2, (2,), (2e-3, 3.2e-2), 4, 2, 32, 4, 3, 5, 0.1)


def measure(work: Work) -> Part:
    """Train the grid, search it in every way, kill and share a study; of each what is missing."""
    plan = QUICK if work.quick else Plan()
    space = plan.space()
    grid = train_grid(work, space, plan.steps)
    found: dict[str, dict[str, Any]] = {}
    if grid is not None:
        runs: dict[str, Callable[[], Iterator[Mapping[str, Any]]]] = {}
        for repeat in range(plan.repeats):
            runs[f"{RANDOM}; {repeat}"] = partial(sample, space, grid, plan.budget, repeat)
            for way in WAYS:
                runs[f"{way}; {repeat}"] = partial(search, space, grid, plan.budget, repeat, way)
        settings = asdict(plan) | {"outcomes": sorted((*key, vars(of)) for key, of in grid.outcomes.items())}
        found = work.complete(runs, {"what": "search", **settings})
    studies = {
        "killed": partial(killed_search, plan.killed_budget, plan.trial_seconds),
        "shared": partial(shared_search, plan.killed_budget, plan.trial_seconds),
    }
    # One at a time: they start processes of their own.
    kept = work.complete(studies, {"what": "study", **asdict(plan)}, jobs=1)
    made = figures(plan, space, grid, found, kept)
    return Part(made, bars(made, whole=not work.missing), table(made), tuple(work.missing))


def sample(space: Space, grid: TrainedGrid, budget: int, repeat: int) -> Iterator[dict[str, float]]:
    """The recipe: `random.choice` of each key, `budget` times, what was drawn before included."""
    source = random.Random(f"repeat {repeat}")
    drawn = [
        {key: source.choice(dimension.lattice()) for key, dimension in space.dimensions.items()}
        for _ in range(budget)
    ]
    yield _found(grid, [grid(space.config(values), 0, _unheard) for values in drawn])


def search(space: Space, grid: TrainedGrid, budget: int, repeat: int, way: str) -> Iterator[dict[str, float]]:
    """One search by a sampler of Optuna."""
    result = search_architecture_space(
        space, budget, storage="memory", name=way, seed=repeat, evaluate=grid, **WAYS[way]
    )
    yield _found(grid, result.trials)


def _found(grid: TrainedGrid, trials: Sequence[Any]) -> dict[str, float]:
    return {
        "trials": len(trials),
        "best_score": max(map(grid.score, trials)),
        "hypervolume": grid.share_of_hypervolume(iter(trials)),
    }


def _unheard(part: float, loss: float) -> None:
    """Nobody prunes."""


# Studies that are killed or shared


def killed_search(budget: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A search that is killed halfway by SIGKILL, and then run again on what it has left."""
    with tempfile.TemporaryDirectory() as folder:
        log = EvaluationLog(Path(folder) / "log")
        worker = _worker(folder, budget, seconds)

        def halfway() -> bool:
            begun, ended = (sum(log.counts(event).values()) for event in ("begin", "end"))
            return ended >= budget // 2 and begun > ended  # the next one runs: the study has the others

        _wait_for(worker, halfway)
        os.killpg(worker.pid, signal.SIGKILL)
        worker.communicate()
        begun, ended = (sum(log.counts(event).values()) for event in ("begin", "end"))
        _finish(_worker(folder, budget, seconds))
        yield {
            "budget": budget,
            "ended_before": ended,
            "running_at_kill": begun - ended,
            # Done and done again, or done beyond the budget.
            "lost": sum(log.counts("end").values()) - budget,
            "done_twice": sum(count - 1 for count in log.counts("end").values()),
        }


def shared_search(budget: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Two processes that search on one storage at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        log = EvaluationLog(Path(folder) / "log")
        for worker in [_worker(folder, budget, seconds) for _ in range(2)]:
            _finish(worker)
        lines = [line.split() for line in log.path.read_text().splitlines() if line.startswith("end ")]
        yield {
            "budget": budget,
            "done": len(lines),
            "done_twice": len(lines) - len({config for _, config, _ in lines}),
            "by_process": sorted(
                sum(process == each for *_, process in lines) for each in {line[2] for line in lines}
            ),
        }


def _worker(folder: str, budget: int, seconds: float) -> subprocess.Popen[bytes]:
    arguments = [str(Path(folder) / "search.db"), str(Path(folder) / "log"), str(budget), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-m", "bench.prototype.search_worker", *arguments],
        cwd=Path(__file__).parent.parent.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _wait_for(worker: subprocess.Popen[bytes], reached: Callable[[], bool]) -> None:
    limit = time.monotonic() + _PATIENCE
    while not reached():
        if worker.poll() is not None or time.monotonic() > limit:
            _finish(worker)
            raise RuntimeError("the search came to its end, or to nothing, before it could be killed")
        time.sleep(0.02)


def _finish(worker: subprocess.Popen[bytes]) -> None:
    try:
        _, errors = worker.communicate(timeout=_PATIENCE * 5)
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.communicate()
    if worker.returncode != 0:
        raise RuntimeError(f"a search ended with {worker.returncode}: {errors.decode()[-300:]}")


# What came of it


def paired(ours: Sequence[float], theirs: Sequence[float], *, resamples: int = 10_000) -> dict[str, float]:
    """Mean of the differences, repeat by repeat, and the bounds of 95 % of its bootstrap resamples."""
    differences = np.subtract(ours, theirs)
    drawn = np.random.default_rng(0).integers(len(differences), size=(resamples, len(differences)))
    low, high = np.percentile(differences[drawn].mean(axis=1), [2.5, 97.5])
    return {"mean": float(differences.mean()), "low": float(low), "high": float(high)}


def figures(
    plan: Plan,
    space: Space,
    grid: TrainedGrid | None,
    found: Mapping[str, Mapping[str, float]],
    studies: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """As JSON has them."""
    by_way: dict[str, dict[str, Any]] = {}
    for way in (RANDOM, *WAYS):
        runs = [found[name] for repeat in range(plan.repeats) if (name := f"{way}; {repeat}") in found]
        if len(runs) == plan.repeats:
            by_way[way] = {key: [run[key] for run in runs] for key in ("best_score", "hypervolume")}
    for of in by_way.values():
        if RANDOM in by_way:
            for key in ("best_score", "hypervolume"):
                of[f"{key}_over_random"] = paired(of[key], by_way[RANDOM][key])
    known = None if grid is None else {"configurations": len(grid.outcomes), "best_score": grid.best_score}
    if grid is not None and known is not None:
        failed = [of.status for of in grid.outcomes.values() if of.status != "success"]
        known["failed"] = len(failed)
    return {"plan": asdict(plan), "space": space.to_dict(), "grid": known, "ways": by_way, **studies}


def bars(figures: Mapping[str, Any], *, whole: bool) -> tuple[Bar, ...]:
    """Of samplers the low end of the interval of what they are better by; None before all are there."""

    def low(way: str, key: str) -> float | None:
        of = figures["ways"].get(way)
        return of[f"{key}_over_random"]["low"] if whole and of else None

    def count(study: str, key: str) -> float | None:
        return float(figures[study][key]) if study in figures else None

    return (
        Bar("search: best score, TPE - random, low end", low(TPE, "best_score"), 0.0, full_size=True),
        Bar(
            "search: hypervolume, NSGA-II - random, low end",
            low(NSGA2_BOTH, "hypervolume"),
            0.0,
            full_size=True,
        ),
        Bar(
            "search: hypervolume, TPE - random, low end",
            low(TPE_BOTH, "hypervolume"),
            0.0,
            full_size=True,
        ),
        Bar("search: trials lost by SIGKILL, but the running", count("killed", "lost"), 0.0, at_most=True),
        Bar("search: trials done twice by two processes", count("shared", "done_twice"), 0.0, at_most=True),
    )


def table(figures: Mapping[str, Any]) -> Table:
    """One row a way to search."""
    shown = Table("way", "best score, nats", "above random", "hypervolume", "above random")
    for way, of in figures["ways"].items():
        shown.add_row(way, *_cells(of))
    return shown


def rows(figures: Mapping[str, Any]) -> str:
    """A Markdown table for the documentation: one row a way to search."""
    lines = [
        "| | best score, nats | above random | hypervolume | above random |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {way} | {' | '.join(_cells(of))} |" for way, of in figures["ways"].items()]
    return "\n".join(lines)


def _cells(of: Mapping[str, Any]) -> list[str]:
    cells = []
    for key, form in (("best_score", ".3f"), ("hypervolume", ".1%")):
        over = of[f"{key}_over_random"]
        above, low, high = (f"{over[each]:+{form}}" for each in ("mean", "low", "high"))
        cells += [f"{mean(of[key]):{form}}", f"{above} [{low}, {high}]"]
    return cells
