"""`python -m bench.prototype`: how far small runs predict large ones, part by part.

- `ranks`: architectures, small and large: does the order of the small variants hold for the large ones?
- `transfer`: does the best learning rate hold over widths, with muP and without?
- `sensitivity`: what qk-norm and z-loss do to the sensitivity to the learning rate.
- `lengths`: are planted instabilities found at their length, and none in healthy attention?
- `search`: Optuna's samplers against random sampling at an equal budget, and what a killed study keeps.

Every run is a line in a file of its part beside the result, and with `--resume` none is made again.
`--minutes` begins no run after that time. Nothing else should run on the machine: throughput is measured.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from bench.claim import Claim
from bench.prototype.part import Part, Work
from bench.prototype.runs import RunStore

PARTS = ("ranks", "transfer", "sensitivity", "lengths", "search")


def store_of(result: Path, part: str) -> RunStore:
    """Beside the result file: prototype-PART.jsonl, or prototype-quick-PART.jsonl."""
    return RunStore(result.with_name(f"{result.stem}-{part}.jsonl"))


def enter(claim: Claim, name: str, part: Part, seconds: float) -> None:
    """Put a part into the claim in the place of what it came to before, and write the file."""
    claim.bars = [bar for bar in claim.bars if not bar.name.startswith(f"{name}:")]
    before = claim.figures.get(name, {}).get("seconds", 0.0)
    claim.figures[name] = {**part.figures, "missing": list(part.missing), "seconds": before + seconds}
    for bar in part.bars:
        if not bar.name.startswith(f"{name}:"):
            raise ValueError(f"bar of {name}: got {bar.name!r}; its name has to begin with '{name}:'")
        claim.enter(bar)
    claim.measured = {key: of for key, of in claim.measured.items() if key in {b.name for b in claim.bars}}
    claim.write()


def chosen_parts(text: str | None, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """The parts of `--only`, in the bench's order."""
    if text is None:
        return PARTS
    chosen = text.split(",")
    if unknown := sorted(set(chosen) - set(PARTS)):
        parser.error(f"--only: got {', '.join(unknown)}; allowed: {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in chosen)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prototype",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small plans of minutes: proves nothing")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are on file")
    parser.add_argument("--minutes", type=float, help="begin no run after that time (default: no limit)")
    parser.add_argument("--only", metavar="PART,...", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at a time")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs: got {options.jobs}; allowed: an integer >= 1")
    parts = chosen_parts(options.only, parser)
    os.environ["OMP_NUM_THREADS"] = "1"
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    claim = Claim("prototype", options.quick)
    claim.resume()
    result = claim.write()
    stores = {part: store_of(result, part) for part in parts}
    if not options.resume:
        _begin_anew(claim, stores, parser, quick=options.quick)
    for name, store in stores.items():
        print(f"-- {name}", flush=True)
        work = Work(options.quick, store, options.jobs, until, claim.commit)
        begun = time.monotonic()
        part = importlib.import_module(f"bench.prototype.{name}").measure(work)
        enter(claim, name, part, time.monotonic() - begun)
        if part.table is not None:
            Console(width=140).print(part.table)
        if part.missing:
            print(f"{name}: {len(part.missing)} runs are still to be made; go on with --resume", flush=True)
    return claim.conclude()


def _begin_anew(
    claim: Claim, stores: dict[str, RunStore], parser: argparse.ArgumentParser, *, quick: bool
) -> None:
    """Without what quick runs left; hours of others are not thrown away by forgetting an option."""
    for name, store in stores.items():
        if quick:
            store.path.unlink(missing_ok=True)
        elif store.path.exists():
            parser.error(f"{store.path} has runs: go on with --resume, or take the file away")
        claim.figures.pop(name, None)


if __name__ == "__main__":
    # As Ctrl-C: what runs is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
