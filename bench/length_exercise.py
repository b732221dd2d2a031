"""`python -m bench.length_exercise`: is sliding-window attention stable at 512, 2048 and 8192 positions?

Two Blocks of sliding-window attention, 32 wide, trained at each length on as many tokens per step. Then the
same model with an instability that is planted at a length which the search is not told:
`first_unstable_length` has to find it. Writes the figures, and plots and tables of
docs/reference/length-sweep.md.
`--quick` has the same at short lengths, into another file, and touches no page.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench.claim import Bar, Claim
from bench.marked_tables import ROOT, recorded, replaced
from bench.planted_lengths import growing_logits, window_rack
from stackwise.stability.lengths import first_unstable_length, length_sweep
from stackwise.stability.lengths.instability import Instability, SeedRun
from stackwise.stability.lengths.plot import length_svg
from stackwise.stability.lengths.point import LengthPoint
from stackwise.stability.run import StabilityRun
from stackwise.stability.telemetry import StepRecord
from stackwise.subject.spec import ModelSpec
from stackwise.support.files import write_whole

__all__ = ["FULL", "PAGE", "PLOTS", "QUICK", "Plan", "measure", "planted_table", "stable_table", "written"]

PAGE = "docs/reference/length-sweep.md"
PLOTS = {
    "stable": ROOT / "docs" / "reference" / "length-sweep-stable.svg",
    "planted": ROOT / "docs" / "reference" / "length-sweep-planted.svg",
}


TITLES = {"stable": "sliding window", "planted": "sliding window, queries that grow with the length"}


@dataclass(frozen=True)
class Plan:
    """What is looked at.

    Attributes:
        lengths: of the exercise.
        window: of attention.
        planted: the first unstable length of the second model.
        step: how finely it is searched, between the shortest and the longest length.
        tokens_per_step: at each length.
        seeds: of each length.
        steps: of each training.
    """

    lengths: tuple[int, ...] = (512, 2048, 8192)
    window: int = 128
    planted: int = 3072
    step: int = 128
    tokens_per_step: int = 8192
    seeds: int = 3
    steps: int = 12


FULL = Plan()
QUICK = Plan((32, 64, 128), 16, 96, 8, 128, 2, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short lengths, another file")
    arguments = parser.parse_args()
    claim = Claim("length_exercise", arguments.quick)
    measure(claim, QUICK if arguments.quick else FULL)
    if not arguments.quick:
        (ROOT / PAGE).write_text(written())
    return claim.conclude()


def measure(claim: Claim, plan: Plan) -> None:
    """Look at both models; their figures, bars and, of a full run, plots."""
    claim.figures["plan"] = asdict(plan)
    sound = ModelSpec.of(partial(window_rack, plan.window), name=TITLES["stable"], causal=True)
    sweep = length_sweep(
        sound,
        plan.lengths,
        tokens_per_step=plan.tokens_per_step,
        seeds=plan.seeds,
        steps=plan.steps,
    )
    print(sweep)
    claim.figures["stable"] = {
        "first_unstable": sweep.first_unstable,
        "problems": sweep.problems,
        "notes": sweep.notes,
        "points": [figures(point) for point in sweep.points],
    }
    unstable = sum(point.verdict == "unstable" for point in sweep.points)
    claim.enter(Bar("unstable lengths of the sound model", float(unstable), 0.0, at_most=True))
    make = partial(growing_logits, plan.planted, plan.window)
    broken = ModelSpec.of(make, name=TITLES["planted"], causal=True)
    found = first_unstable_length(
        broken,
        plan.lengths[0],
        plan.lengths[-1],
        step=plan.step,
        tokens_per_step=plan.tokens_per_step,
        seeds=plan.seeds,
        on_point=print,
        steps=plan.steps,
    )
    print(found)
    claim.figures["planted"] = {
        "first": found.first,
        "verdict": found.verdict,
        "stable_up_to": found.stable_up_to,
        "order": list(found.order),
        "notes": list(found.notes),
        "points": [figures(point) for point in found.points],
    }
    off = None if found.first is None else float(abs(found.first - plan.planted))
    claim.enter(Bar("positions that the find is off by", off, 0.0, at_most=True))
    if not claim.quick:
        claim.write()
        for kind, path in PLOTS.items():
            write_whole(path, plot(kind))


def figures(point: LengthPoint) -> dict[str, Any]:
    """Of a length, what is kept: no single losses."""
    return {
        "seq_len": point.seq_len,
        "batch_size": point.batch_size,
        "verdict": point.verdict,
        "why": point.why,
        "loss": point.loss,
        "logit_max": point.logit_max,
        "peak_bytes": point.peak_bytes,
        "step_seconds": point.step_seconds,
        "unstable_seeds": point.unstable_seeds,
        "gradient_norms": {str(each.seed): each.gradient_norms for each in point.runs},
    }


def plot(kind: str) -> str:
    """The SVG of "stable" or "planted", of what was measured."""
    figures = recorded("length_exercise")["figures"][kind]
    points = [_point(each) for each in figures["points"]]
    return length_svg(points, TITLES[kind], figures.get("first"))


def _point(kept: Mapping[str, Any]) -> LengthPoint:
    """A length again, as far as it is drawn."""
    runs = []
    for seed, norms in kept["gradient_norms"].items():
        records = [StepRecord(step, math.nan, norm, math.nan, False) for step, norm in enumerate(norms)]
        run = StabilityRun("", kept["seq_len"], records, (), (), (), True, len(norms))
        troubled = int(seed) in kept["unstable_seeds"]
        instabilities = (Instability("gradient growth", None, kept["why"]),) if troubled else ()
        runs.append(SeedRun(int(seed), run, instabilities))
    loss, logit = kept["loss"], kept["logit_max"]
    return LengthPoint("", kept["seq_len"], kept["batch_size"], loss, logit, logit, runs=tuple(runs))


def stable_table() -> str:
    """Of the sound model."""
    return _table(recorded("length_exercise")["figures"]["stable"]["points"])


def planted_table() -> str:
    """Of the other: all lengths that the search looked at."""
    return _table(recorded("length_exercise")["figures"]["planted"]["points"])


def _table(points: Sequence[Mapping[str, Any]]) -> str:
    rows = ["| length | rows | gradient norm | largest | memory | seeds | verdict |"]
    rows += ["| ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for point in points:
        norms = [norm for each in point["gradient_norms"].values() for norm in each]
        memory = "-" if point["peak_bytes"] is None else f"{point['peak_bytes'] / 2**20:,.0f} MiB"
        cells = [
            point["seq_len"],
            point["batch_size"],
            f"{statistics.median(norms):.3g}",
            f"{max(norms):.3g}",
        ]
        cells += [memory, len(point["gradient_norms"]), point["verdict"]]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def written() -> str:
    """The page with its tables as they were measured."""
    return replaced(PAGE, {"stable lengths": stable_table, "planted length": planted_table})


if __name__ == "__main__":
    raise SystemExit(main())
