"""`python -m bench.false_alarms`: alarms of the guard in healthy training, and the faults that it notices.

Healthy training: every kind of `bench.healthy_training`, five seeds, 2,000 steps each, with and without
`loss_of`. An alarm is any step that the guard skips or clips. A `GuardError` ends a run.

Faults: every fault of `bench.recovery`, one seed, both optimizers, both places, with and without `loss_of`.
The full table of five seeds is in `bench.recovery`. A run is lost if its validation loss ends more than 1 nat
from that of its healthy twin, or if the guard stops it although the fault is over. The bars are of the runs
with `loss_of`. Without it, a lasting finite fault passes after one step (docs/reference/guard.md, "Limits").

Each finished run is stored in the result file. With `--resume`, it is not repeated.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import recovery
from bench.claim import Bar, Claim
from bench.healthy_training import HELD_OUT, KINDS, Healthy
from stackwise.stability.guard import Guard, GuardError

MODES = {"with loss_of": True, "without loss_of": False}
LOST = 1.0  # nat from the healthy twin
LASTING = "x10 all steps"  # the guard has to stop such a run

Runs = dict[str, dict[str, Any]]


def shared(quick: bool) -> dict[str, Any]:
    if quick:
        return {"seeds": [0], "steps": 100, "fault_steps": 112, "fault_at": [50]}
    return {"seeds": [0, 1, 2, 3, 4], "steps": 2000, "fault_steps": 700, "fault_at": [500, 20]}


def train(healthy: Healthy, *, recomputes: bool) -> dict[str, Any]:
    """Train under a guard with the default policy, and count its alarms.

    Args:
        healthy: training run without faults.
        recomputes: pass `loss_of` to the guard.
    """
    guard = Guard(
        healthy.model,
        healthy.optimizer,
        scheduler=healthy.scheduler,
        loss_of=healthy.loss_of if recomputes else None,
        others=healthy.others,
        scaler=healthy.scaler,
    )
    pending, error = 0, None
    try:
        for batch in guard.batches(healthy.batches):
            healthy.before_loss(batch)
            loss = healthy.loss_of(healthy.model, batch)
            (loss if healthy.scaler is None else healthy.scaler.scale(loss)).backward()
            pending += 1
            if pending < healthy.accumulation:
                continue
            pending = 0
            if not guard.step(loss).found_inf:
                healthy.after_update()
    except GuardError as raised:
        error = str(raised)
    return {
        "alarms": [{"step": a.step, "kind": a.kind, "action": a.action} for a in guard.alarms],
        "recomputed": guard.cleared,
        "guard_error": error,
    }


def measure_healthy(plan: dict[str, Any], runs: Runs, kinds: Iterable[str]) -> Iterable[str]:
    """Train every kind, seed and mode that `runs` lacks. Yield the name of each finished run."""
    for kind in kinds:
        for mode, recomputes in MODES.items():
            for seed in plan["seeds"]:
                name = f"{kind}; {mode}; {seed}"
                if name in runs:
                    continue
                torch.manual_seed(seed)
                found = train(KINDS[kind](plan["steps"]), recomputes=recomputes)
                runs[name] = {"kind": kind, "mode": mode, "seed": seed, "steps": plan["steps"], **found}
                yield name


def measure_faults(plan: dict[str, Any], runs: Runs) -> Iterable[str]:
    """Run every fault that `runs` lacks. Yield the name of each finished run."""
    for at in plan["fault_at"]:
        for optimizer in recovery.OPTIMIZERS:
            twin = f"twin; {optimizer}; {at}"
            if twin not in runs:
                healthy = recovery.Training(optimizer, "clean", at, 0, plan["fault_steps"])
                recovery.train_unguarded(healthy)
                runs[twin] = {"losses": [*healthy.losses.values()]}
                yield twin
            for fault in recovery.FAULTS:
                for mode, recomputes in MODES.items():
                    name = f"{fault}; {optimizer}; {at}; {mode}"
                    if name in runs:
                        continue
                    training = recovery.Training(optimizer, fault, at, 0, plan["fault_steps"])
                    made = recovery.train_guarded(training, recomputes=recomputes)
                    losses = zip(training.losses.values(), runs[twin]["losses"], strict=False)
                    gaps = [abs(a - b) for a, b in losses]
                    runs[name] = {
                        "fault": fault,
                        "mode": mode,
                        "noticed": made["alarms"][:1] == [at],
                        "stopped": bool(made["stopped"]),
                        "distance": max((g if math.isfinite(g) else math.inf for g in gaps), default=0.0),
                    }
                    yield name


def is_lost(run: dict[str, Any]) -> bool:
    """Return True if a fault run ended far from its twin, or was stopped although its fault is over."""
    if run["fault"] == LASTING and run["stopped"]:
        return False
    return bool(run["stopped"] or run["distance"] > LOST)


def alarms_per_1000(runs: Runs, kind: str, mode: str) -> float:
    """Alarms per 1,000 steps over all seeds of one kind."""
    several = [run for run in runs.values() if run["kind"] == kind and run["mode"] == mode]
    return 1000 * sum(len(run["alarms"]) for run in several) / sum(run["steps"] for run in several)


def bars(healthy: Runs, faults: Runs) -> list[Bar]:
    measured = {(run["kind"], run["mode"]) for run in healthy.values()}
    rates = [alarms_per_1000(healthy, *each) for each in measured]
    errors = sum(run["guard_error"] is not None for run in healthy.values())
    checked = [run for run in faults.values() if run.get("mode") == "with loss_of"]
    noticed = sum(run["noticed"] for run in checked) / len(checked) if checked else None
    lost = float(sum(map(is_lost, checked))) if checked else None
    return [
        # One alarm in the 100 steps of a quick run is a rate of 10.
        Bar("worst_alarms_per_1000", max(rates, default=None), 1.0, at_most=True, full_size=True),
        Bar("guard_errors", float(errors), 0.0, at_most=True),
        Bar("faults_noticed_at_their_step", noticed, 1.0),
        Bar("fault_runs_lost", lost, 0.0, at_most=True),
    ]


def tables(healthy: Runs, faults: Runs) -> list[Table]:
    rates = Table("kind of healthy training", *(f"alarms per 1000, {mode}" for mode in MODES), "recomputed")
    for kind in dict.fromkeys(run["kind"] for run in healthy.values()):
        several = [run for run in healthy.values() if run["kind"] == kind]
        errors = sum(run["guard_error"] is not None for run in several)
        recomputed = sum(run["recomputed"] for run in several) * len(MODES)
        rates.add_row(
            kind + (" (held out)" if kind in HELD_OUT else ""),
            *(f"{alarms_per_1000(healthy, kind, mode):.2f}" for mode in MODES),
            f"{1000 * recomputed / sum(run['steps'] for run in several):.1f}"
            + (f", {errors} GuardErrors" if errors else ""),
        )
    noticed = Table("fault", *(f"noticed, lost, {mode}" for mode in MODES))
    for fault in recovery.FAULTS:
        cells = []
        for mode in MODES:
            several = [run for run in faults.values() if (run.get("fault"), run.get("mode")) == (fault, mode)]
            noticed_runs = sum(run["noticed"] for run in several)
            cells.append(f"{noticed_runs}/{len(several)}, {sum(map(is_lost, several))}")
        noticed.add_row(fault, *cells)
    return [rates, noticed]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.false_alarms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 100 steps: proves nothing")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the result file")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="only these kinds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    plan, claim = shared(options.quick), Claim("false_alarms", options.quick)
    if options.resume:
        claim.resume()
    healthy: Runs = claim.figures.get("healthy", {})
    faults: Runs = claim.figures.get("faults", {})
    claim.figures = {**plan, "healthy": healthy, "faults": faults}
    for measured in (measure_healthy(plan, healthy, options.kinds), measure_faults(plan, faults)):
        for name in measured:
            print(name, flush=True)
            claim.bars = bars(healthy, faults)
            claim.write()
    claim.bars = bars(healthy, faults)
    Console(width=130).print(*tables(healthy, faults))
    return claim.conclude()


if __name__ == "__main__":
    sys.exit(main())
