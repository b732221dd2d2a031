"""`python -m bench.locality`: what training unit by unit costs in quality, beside training the whole Rack.

Validation loss on the documentation that every CPython carries, after equal numbers of tokens: each unit sees
as many as the Rack does. Early on a local loss is ahead, since it reaches every Block at once; so the
budget that counts is the largest, where the Rack itself gains less than 2 % from twice the tokens. Every
run is a process of its own with one thread. What is done is kept in the result file and not done again
with `--resume`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.claim import Bar, Claim
from bench.isolated import all_isolated

RACKWISE = "rackwise"
# Name: (what trains at one time, the scope's choices). Fractions of the steps are filled in for each budget.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    RACKWISE: ("rackwise", {}),
    "rackwise, growing": ("rackwise", {"growth": True}),
    "blockwise": ("blockwise", {}),
    "blockwise, a head for each unit": ("blockwise", {"head": "per_unit"}),
    "blockwise, right to left": ("blockwise", {"order": "right_to_left"}),
    "blockwise, growing": ("blockwise", {"growth": True}),
    "blockwise, overlap 1": ("blockwise", {"overlap": 1}),
    "blockwise, suffix 1": ("blockwise", {"suffix": 1}),
    "blockwise, polish 1/4": ("blockwise", {"polish": 0.25}),
    "blockwise, overlap 1, polish 1/4": ("blockwise", {"overlap": 1, "polish": 0.25}),
    "stackwise": ("stackwise", {}),
    "stackwise, overlap 1": ("stackwise", {"overlap": 1}),
}
SEEDS = (0, 1, 2)
BUDGETS = (250_000, 1_000_000, 4_000_000)
SHAPE = {"d_model": 48, "d_ff": 128, "n_heads": 3, "n_kv_heads": 3, "attention_type": "mha"}
N_STACKS, BLOCKS_PER_STACK = 2, 2
BATCH_SIZE, SEQ_LEN, LEARNING_RATE = 32, 64, 5e-3
VALIDATION_FRACTION = 0.1


def config_of(recipe: str, tokens: int, seed: int) -> Any:
    from stackwise import StackWiseConfig

    architecture, scope = RECIPES[recipe]
    steps = tokens // (BATCH_SIZE * SEQ_LEN)
    scope = dict(scope)
    if polish := scope.pop("polish", 0):
        scope["polish_steps"] = round(steps * polish)
    return StackWiseConfig.from_dict(
        {
            "model": {
                **SHAPE,
                "vocab_size": 256,
                "tie_embeddings": False,
                "architecture": {"n_stacks": N_STACKS, "blocks_per_stack": BLOCKS_PER_STACK},
            },
            "training": {
                "training_architecture": architecture,
                "batch_size": BATCH_SIZE,
                "seq_len": SEQ_LEN,
                "max_steps": steps,
                "precision": "fp32",
                "device": "cpu",
                "seed": seed,
                "log_interval": 100,
                "optimizer": {"lr": LEARNING_RATE},
                "scope": scope,
            },
            "data": {"validation_fraction": VALIDATION_FRACTION},
        }
    )


def train(recipe: str, tokens: int, seed: int) -> Iterator[dict[str, Any]]:
    """One run in this process: its losses, time and FLOPs."""
    import torch

    from stackwise import ArchitectureTrainer, create_rack_from_config
    from stackwise.data import create_data

    torch.set_num_threads(1)
    config = config_of(recipe, tokens, seed)
    torch.manual_seed(seed)
    rack = create_rack_from_config(config)
    training, validation = create_data(config)
    trainer = ArchitectureTrainer(config, progress=False)
    start = time.process_time()
    result = trainer.train_architecture(rack, training)
    seconds = time.process_time() - start
    assert validation is not None
    yield {
        "recipe": recipe,
        "tokens": tokens,
        "seed": seed,
        "validation": trainer.evaluate(rack, validation),
        "training": result["final_loss"],
        "units": [unit["final_loss"] for unit in result.get("results", [])],
        "cpu_seconds": seconds,
        "flops": flops(recipe, tokens, seed),
    }


def flops(recipe: str, tokens: int, seed: int) -> float:
    """Of a whole run, without keeping prefix outputs: those of eight steps of every phase, in proportion."""
    import torch

    from stackwise import ArchitectureTrainer, create_rack_from_config
    from stackwise.training.storage_meter import StorageMeter

    counted = 8
    config = config_of(recipe, counted * BATCH_SIZE * SEQ_LEN, seed)
    rack = create_rack_from_config(config)
    ids = torch.randint(256, (BATCH_SIZE, SEQ_LEN + 1))
    with StorageMeter() as meter:
        ArchitectureTrainer(config, progress=False).train_architecture(rack, [ids])
    return meter.flops / counted * (tokens // (BATCH_SIZE * SEQ_LEN))


def jobs_of(budgets: tuple[int, ...], seeds: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """Every run, the long ones first; and the Rack with twice the tokens."""
    runs = [(recipe, tokens, seed) for tokens in budgets for recipe in RECIPES for seed in seeds]
    runs += [(RACKWISE, 2 * budgets[-1], seed) for seed in seeds]
    return sorted(runs, key=lambda run: -run[1])


def name_of(recipe: str, tokens: int, seed: int) -> str:
    return f"{recipe}; {tokens}; {seed}"


def losses(runs: dict[str, dict[str, Any]], recipe: str, tokens: int) -> list[float]:
    return [run["validation"] for run in runs.values() if (run["recipe"], run["tokens"]) == (recipe, tokens)]


def bars(runs: dict[str, dict[str, Any]], budgets: tuple[int, ...]) -> list[Bar]:
    """Whether the largest budget is large enough, and the best local recipes there beside the Rack.

    One bar is of all recipes, one of those in which the memory that a unit takes is never exceeded.
    """
    largest = budgets[-1]
    whole, twice = (losses(runs, RACKWISE, tokens) for tokens in (largest, 2 * largest))
    gain = 1 - mean(twice) / mean(whole) if whole and twice else None
    local = {
        recipe: mean(found) / mean(whole)
        for recipe, (architecture, _) in RECIPES.items()
        if architecture != "rackwise" and whole and (found := losses(runs, recipe, largest))
    }
    throughout = {recipe: ratio for recipe, ratio in local.items() if not trains_all(recipe)}
    made = [Bar("rackwise gains from twice the tokens", gain, 0.02, at_most=True, full_size=True)]
    for which, ratios in (("", local), (", never all at once", throughout)):
        best = min(ratios, key=ratios.__getitem__) if ratios else "no run"
        name = f"{best} / rackwise{which}"
        made.append(Bar(name, ratios.get(best), 1.03, at_most=True, full_size=True))
    return made


def trains_all(recipe: str) -> bool:
    """Whether all of the Rack trains at one time at the end of it."""
    architecture, scope = RECIPES[recipe]
    units = N_STACKS if architecture == "stackwise" else N_STACKS * BLOCKS_PER_STACK
    return architecture == "rackwise" or "polish" in scope or scope.get("overlap", 0) >= units - 1


def table(runs: dict[str, dict[str, Any]], budgets: tuple[int, ...]) -> Table:
    shown = Table(
        "recipe", *(f"{tokens / 1e6:g}M tokens" for tokens in budgets), "/ rackwise", "FLOPs", "CPU s"
    )
    whole = losses(runs, RACKWISE, budgets[-1])
    for recipe in RECIPES:
        cells = []
        for tokens in budgets:
            found = losses(runs, recipe, tokens)
            spread = f" ±{stdev(found):.3f}" if len(found) > 1 else ""
            cells.append(f"{mean(found):.3f}{spread}" if found else "-")
        found = losses(runs, recipe, budgets[-1])
        last = [r for r in runs.values() if (r["recipe"], r["tokens"]) == (recipe, budgets[-1])]
        cells.append(f"{mean(found) / mean(whole):.3f}" if found and whole else "-")
        cells.append(f"{mean(r['flops'] for r in last):.2e}" if last else "-")
        cells.append(f"{mean(r['cpu_seconds'] for r in last):.0f}" if last else "-")
        shown.add_row(recipe, *cells)
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.locality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, small budgets: proves nothing")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the result file has")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    budgets, seeds = ((40_000, 80_000), (0,)) if options.quick else (BUDGETS, SEEDS)
    claim = Claim("locality", options.quick)
    if options.resume:
        claim.resume()
    runs: dict[str, dict[str, Any]] = claim.figures.get("runs", {})
    missing = {
        name: partial(train, *job) for job in jobs_of(budgets, seeds) if (name := name_of(*job)) not in runs
    }
    for name, ended in all_isolated(missing, jobs=options.jobs, seconds=7200):
        if ended.error is not None:
            raise RuntimeError(f"{name}: {ended.error}")
        runs[name] = ended.values[0]
        claim.figures = {"shape": SHAPE, "batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "runs": runs}
        claim.write()
        print(f"{name}: {runs[name]['validation']:.4f}", flush=True)
    claim.bars = bars(runs, budgets)
    Console(width=110).print(table(runs, budgets))
    return claim.conclude()


if __name__ == "__main__":
    sys.exit(main())
