"""`python -m bench.gate`: the regression gate, and how other tools do where it does its work.

Two commits of a small repository are compared, of which the second adds nothing to each call, or real work
that takes 1, 2, 5 or 10 % of it, or 5 % of sleep. The calls are pure Python, matrix products, copies of
memory, a step and a decoding of a tiny transformer, and a data loader. Everything that a comparison of all
of them takes, with every start of a process, is in its seconds, and all tools have the same of these:
`--seconds` a call. The gate may end before that, where it is sure.

A block is one effect under one condition: an idle machine, bursts of work on all cores, or slow phases.
Within a block the tools come in random order, and each meets the same disturbance, from its beginning. In
most blocks the gate is alone, since its rates are what is claimed; in every `--rivals-every`th cycle of
blocks all are there for nothing added, 2 % and 5 %, once under each condition, and tools are compared over
the blocks that all of them have come through.

Runs are kept in a file, a line each, and with `--resume` none is made again. `--minutes` begins no block
that would end later. Nothing else should run on the machine. Needs `make gate-rivals`.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from bench.claim import Claim
from bench.gate.ablation import DESIGNS, judge, series
from bench.gate.adoption import adoption
from bench.gate.command import CommandFailedError
from bench.gate.effects import EFFECTS, SAME, branches, calibrate, count_instructions
from bench.gate.findings import bars, own_history_bar, self_checks, summary, table
from bench.gate.noise import CONDITIONS, noise
from bench.gate.own_history import compare_own_history
from bench.gate.plan import QUICK, Block, Plan, blocks, fair_seconds, next_effort, tools_of
from bench.gate.replay import changed, replayed
from bench.gate.repository import SUITE, Repository
from bench.gate.runs import Run, RunLog
from bench.gate.tools import TOOLS, missing_tools, versions
from bench.gate.tools.tool import Tool, ToolFailedError
from bench.marked_tables import ROOT
from stackwise.support.device import fingerprint

FOLDER = ROOT / "build" / "gate"
WORK = SUITE / "subject" / "work.py"


def compare(
    block: Block,
    tool: Tool,
    repository: Repository,
    plan: Plan,
    effort: float,
    seconds: float,
    commit: str,
) -> Run:
    """One run of a tool; `commit` is that of the gate."""
    date, outcomes, error = datetime.now(UTC).isoformat(timespec="seconds"), {}, None
    # The disturbance has a seed of its block, and begins anew for each tool.
    with noise(block.condition, block.number):
        began = time.monotonic()
        try:
            outcomes = tool.compare(repository, block.effect, plan.names, effort, seconds)
        except (CommandFailedError, ToolFailedError) as failure:
            error = str(failure)
        took = time.monotonic() - began
    return Run(
        block.number,
        tool.name,
        block.condition,
        block.effect,
        took,
        effort,
        date,
        commit,
        outcomes,
        error,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cycle of a small plan: proves nothing")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are on file")
    parser.add_argument("--minutes", type=float, help="begin no block that ends later (default: no limit)")
    parser.add_argument("--blocks", type=int, help="end after so many more blocks")
    parser.add_argument("--seconds", type=float, help="of each tool, a call (default: 15; with --quick 8)")
    parser.add_argument(
        "--rivals-every", type=int, default=3, metavar="N", help="cycles (default: %(default)s)"
    )
    parser.add_argument("--conditions", help=f"only blocks under these of {','.join(CONDITIONS)}")
    parser.add_argument("--effects", help=f"only blocks of these of {','.join(EFFECTS)}")
    parser.add_argument(
        "--ablations",
        type=int,
        metavar="SERIES",
        help="only the gate without its parts, until there are so many",
    )
    parser.add_argument("--own-history", action="store_true", help="only a slowdown of this project's past")
    parser.add_argument(
        "--count-instructions", action="store_true", help="only this, of what is added to a call"
    )
    parser.add_argument("--only", choices=["adoption"], help="the gate in projects of many kinds")
    parser.add_argument("--project", help="with --only adoption: only this one")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the repository (default: build/gate)")
    options = parser.parse_args(arguments)
    if options.only == "adoption":
        return adoption(options.quick, options.resume, options.project)
    plan = _plan(options, parser)
    torch.set_num_threads(1)  # as all that is measured; part of what a machine is known by
    claim = Claim("gate", options.quick)
    claim.resume()
    if options.own_history:
        found = compare_own_history()
        print(found)
        claim.enter(own_history_bar(found), found)
        return int(found["verdict"] != "REGRESSED")
    if options.ablations or options.count_instructions:
        repository = _repository(claim, plan, options.folder.resolve())
        return _ablate(claim, repository, plan, options) if options.ablations else _count(claim)
    if lacking := missing_tools():
        parser.error(f"not installed: {', '.join(lacking)}; `make gate-rivals` does it")
    log = RunLog(claim.write().with_name(f"gate{'-quick' if options.quick else ''}-runs.jsonl"))
    if options.quick and not options.resume:
        log.path.unlink(missing_ok=True)
        claim.figures = {}
    if log.path.exists() and not options.resume:
        parser.error(f"{log.path} has runs: go on with --resume, or take the file away")
    claim.figures["versions"] = versions()
    _run(claim, log, _repository(claim, plan, options.folder.resolve()), plan, options)
    return claim.conclude()


def _plan(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Plan:
    plan = QUICK if options.quick else Plan()
    if options.quick:
        options.blocks = options.blocks or len(QUICK.conditions) * (QUICK.same + len(QUICK.effects))
        options.rivals_every = 1
    if options.seconds is not None:
        if options.seconds <= 0:
            parser.error(f"--seconds: got {options.seconds}; allowed: a number > 0")
        plan = replace(plan, seconds=options.seconds)
    for name, known in (("conditions", plan.conditions), ("effects", (SAME, *plan.effects))):
        given = getattr(options, name)
        chosen = given.split(",") if given else known
        if unknown := set(chosen) - set(known):
            got, allowed = ", ".join(sorted(unknown)), ", ".join(known)
            parser.error(f"--{name}: got {got}; allowed: {allowed}")
        setattr(options, name, chosen)
    if options.rivals_every < 1:
        parser.error(f"--rivals-every: got {options.rivals_every}; allowed: an integer >= 1")
    return plan


def _repository(claim: Claim, plan: Plan, folder: Path) -> Repository:
    """Made anew, of what has been calibrated once, for all runs on file."""
    machine, calls = fingerprint(), hashlib.sha256(WORK.read_bytes()).hexdigest()
    kept = claim.figures.setdefault("calibrated", {"machine": machine, "work": calls, "calls": {}})
    if (kept["machine"], kept["work"]) != (machine, calls):
        raise RuntimeError(
            "the runs on file are of another machine, of other versions or of other calls, and what is added "
            "to each call was calibrated there: take the files away, or go on where they were made"
        )
    for name in plan.names:
        if name not in kept["calls"]:
            print(f"calibrating {name}", flush=True)
            kept["calls"][name] = calibrate(name, plan.calibration)
            claim.write()
    return Repository.create(folder, branches(kept["calls"]), plan.names)


def _count(claim: Claim) -> int:
    """By callgrind, of each call and what the largest effect adds to it."""
    counted = claim.figures.setdefault("instructions", {})
    for name, of in claim.figures["calibrated"]["calls"].items():
        found = count_instructions(name, of["effects"]["up10"]["iterations"])
        if found is None:
            print("valgrind is not installed: nothing was counted")
            return 1
        counted[name] = found
        print(f"{name}: {found['call']:,.0f} instructions, {found['share']:.1%} added", flush=True)
        claim.write()
    return 0


def _ablate(claim: Claim, repository: Repository, plan: Plan, options: argparse.Namespace) -> int:
    """Series in turns under all conditions, until there are as many of each as asked for."""
    begun = time.monotonic()
    found = claim.figures.setdefault("ablations", {})
    for number in range(options.ablations):
        for condition in options.conditions:
            of = found.setdefault(condition, {"series": 0, "designs": {}})
            if of["series"] > number:
                continue
            if options.minutes is not None and time.monotonic() - begun > 60 * options.minutes:
                return 0
            taken = series(repository, plan.names, condition, number)
            for design in DESIGNS:
                kept = of["designs"].setdefault(design, {"differences": {}, "calls": {}})
                for name, values in taken[design].items():
                    differences = kept["differences"].setdefault(name, [])
                    differences += values
                    kept["calls"][name] = judge(differences)
                spreads = {name: f"{each['spread']:.2%}" for name, each in kept["calls"].items()}
                print(f"{condition}, series {number}, {design}: {spreads}", flush=True)
            of["series"] = number + 1
            claim.write()
    return 0


def _run(claim: Claim, log: RunLog, repository: Repository, plan: Plan, options: argparse.Namespace) -> None:
    begun = time.monotonic()
    runs, more, seconds = log.read(), 0, plan.seconds * len(plan.names)
    for tool in TOOLS:
        tool.prepare(repository)
    for block in blocks(plan):
        done = {run.tool: run for run in runs if run.block == block.number}
        for run in done.values():
            if (run.condition, run.effect) != (block.condition, block.effect):
                raise RuntimeError(f"{log.path} has runs of another plan: take it away")
        missing = [tool for tool in tools_of(block, TOOLS, options.rivals_every) if tool.name not in done]
        asked_for = block.condition in options.conditions and block.effect in options.effects
        if not missing or not asked_for:
            continue
        left = None if options.minutes is None else 60 * options.minutes - (time.monotonic() - begun)
        if more == options.blocks or (left is not None and left < len(missing) * seconds):
            break
        more += 1
        for tool in missing:
            effort = next_effort(tool, runs, fair_seconds(runs, seconds))
            run = compare(block, tool, repository, plan, effort, seconds, claim.commit)
            log.append(run)
            runs.append(run)
            told = run.error or ", ".join(
                f"{name} {'/'.join(dict.fromkeys(outcome.verdicts.values()))}"
                for name, outcome in run.outcomes.items()
            )
            effect = EFFECTS[block.effect]
            print(
                f"{block.number} {block.condition}, {effect}: {tool.name}, {run.seconds:.0f} s: {told}",
                flush=True,
            )
        _enter(claim, runs, plan)
    _enter(claim, runs, plan)
    Console(width=160).print(table(claim.figures["rules"]))


def _enter(claim: Claim, runs: Sequence[Run], plan: Plan) -> None:
    """Of all runs, judged by the rule as it is."""
    judged = replayed(runs)
    claim.figures["plan"] = {"seconds": plan.seconds, "calls": plan.names, "conditions": plan.conditions}
    claim.figures["judged anew"] = changed(runs, judged)
    claim.figures["rules"] = summary(judged)
    claim.figures["self_checks"] = self_checks(judged)
    claim.bars = bars(judged, claim.figures)
    claim.write()


if __name__ == "__main__":
    # As Ctrl-C: what runs is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
