"""`python -m bench.plan_70b`: a Rack of 70 billion parameters, trained Block by Block on one H200.

Without a GPU it is a plan: every byte and FLOP of the run by `plan_memory`, beside the same Rack trained at
once with full recomputation. With `--train`, which needs CUDA, the first Blocks are trained for a few steps.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.claim import RESULTS, Bar, Claim
from stackwise import ArchitectureTrainer, StackWiseConfig, create_rack_from_config
from stackwise.benchmark.memory import high_water_mark
from stackwise.training.block_store import block_writer
from stackwise.training.memory_planner import plan_memory

DEVICE_BYTES = 141e9  # of one H200
TOKENS = 10**8
SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "d_model": 8192,
    "n_heads": 64,
    "n_kv_heads": 8,
    "attention_type": "gqa",
    "d_ff": 28672,
    "tie_embeddings": False,
    "architecture": {"n_stacks": 10, "blocks_per_stack": 8},
}
QUICK = {
    "vocab_size": 512,
    "d_model": 128,
    "n_heads": 8,
    "n_kv_heads": 2,
    "d_ff": 384,
    "architecture": {"n_stacks": 2, "blocks_per_stack": 2},
}
SEQ_LEN = 4096
LOCAL = {"cache_bytes": 2**50, "cache_dir": "prefix"}
WAYS: dict[str, dict[str, Any]] = {
    "blockwise, other Blocks in host memory": {
        "training_architecture": "blockwise",
        "scope": {**LOCAL, "offload": "cpu"},
    },
    "blockwise, other Blocks on disk": {
        "training_architecture": "blockwise",
        "scope": {**LOCAL, "offload": "disk", "offload_dir": "blocks"},
    },
    "rackwise, all recomputed": {"training_architecture": "rackwise", "recompute": {"kind": "full"}},
}


def config(way: dict[str, Any], shape: dict[str, Any], max_steps: int) -> StackWiseConfig:
    training = {
        "batch_size": 1,
        "seq_len": SEQ_LEN,
        "max_steps": max_steps,
        "precision": "bf16_weights",
        "objective": {"logits_chunk": 1024},
        **way,
    }
    return StackWiseConfig.from_dict({"model": shape, "training": training})


def planned(way: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The budget of one pass over `TOKENS` tokens, which every unit makes."""
    steps = math.ceil(TOKENS / SEQ_LEN)
    plan = plan_memory(config(way, shape, steps))
    tokens = steps * plan.tokens_per_step
    again = sum(phase.steps * (phase.flops_prefix - phase.flops_prefix_kept) for phase in plan.phases)
    phases = [plan.phases[i] for i in sorted({0, min(2, len(plan.phases) - 1), len(plan.phases) - 1})]
    return {
        "tokens": tokens,
        "n_phases": len(plan.phases),
        "kernels": plan.kernels,
        "peak_bytes": plan.peak,
        "host_bytes": plan.host,
        "disk_bytes": plan.disk,
        "prefix_bytes_per_token": plan.prefix_bytes_per_token,
        "flops_per_token": plan.flops / tokens,
        "flops_per_token_nothing_kept": (plan.flops + again) / tokens,
        "phases": [_row(phase) for phase in phases],
    }


def _row(phase: Any) -> dict[str, Any]:
    names = ("name", "weights", "masters", "optimizer", "gradients", "batch", "activations", "loss")
    names += ("in_flight", "peak", "host", "disk", "flops_forward", "flops_backward", "flops_prefix")
    return {name: getattr(phase, name) for name in (*names, "flops_prefix_kept")}


def trained(shape: dict[str, Any], offload: str, n_blocks: int, steps: int) -> dict[str, Any]:
    """Train the first Blocks of the shape on CUDA, each for a few steps on random tokens; what it took."""
    with tempfile.TemporaryDirectory(prefix="stackwise-70b-") as folder:
        scope = {"cache_bytes": 2**40, "cache_dir": f"{folder}/prefix", "offload": offload}
        place: dict[str, Any] = {}
        if offload == "disk":
            scope["offload_dir"] = f"{folder}/blocks"
            place["place"] = block_writer(f"{folder}/blocks")
        first = {**shape, "architecture": {"n_stacks": 1, "blocks_per_stack": n_blocks}}
        way = {"training_architecture": "blockwise", "scope": scope, "device": "cuda"}
        settings = config(way, first, steps)
        torch.manual_seed(0)
        rack = create_rack_from_config(settings, **place)
        ids = torch.randint(shape["vocab_size"], (steps, 1, SEQ_LEN + 1))
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = ArchitectureTrainer(settings, progress=False).train_architecture(rack, list(ids))
        seconds = time.perf_counter() - start
    plan = plan_memory(settings)
    return {
        "n_blocks": n_blocks,
        "steps": steps,
        "offload": offload,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "planned_peak_bytes": plan.peak,
        "host_bytes": high_water_mark(),
        "seconds": seconds,
        "tokens_per_second": result["tokens_per_second"],
        "unit_seconds": [unit["seconds"] for unit in result["results"]],
        "final_loss": [unit["final_loss"] for unit in result["results"]],
    }


def table(record: dict[str, Any]) -> str:
    """The budget in Markdown, as docs/reference/memory.md has it."""
    ways: dict[str, dict[str, Any]] = record["figures"]["planned"]
    rows = ["| | " + " | ".join(ways) + " |", "| --- |" + " ---: |" * len(ways)]

    def row(name: str, cells: list[str]) -> None:
        rows.append(f"| {name} | " + " | ".join(cells) + " |")

    # Of the phase that takes most, on the device.
    largest = [max(way["phases"], key=lambda phase: phase["peak"]) for way in ways.values()]
    for name, keys in (
        ("weights", ("weights",)),
        ("masters", ("masters",)),
        ("moments", ("optimizer",)),
        ("gradients", ("gradients",)),
        ("activations and loss", ("activations", "loss")),
    ):
        row(f"{name}, GB", [f"{sum(phase[key] for key in keys) / 1e9:,.1f}" for phase in largest])
    row("most at one time, GB", [f"{way['peak_bytes'] / 1e9:,.1f}" for way in ways.values()])
    row("memory of the host, GB", [f"{way['host_bytes'] / 1e9:,.0f}" for way in ways.values()])
    row("disk, GB", [f"{way['disk_bytes'] / 1e9:,.0f}" for way in ways.values()])
    row("TFLOP a token", [f"{way['flops_per_token'] / 1e12:.2f}" for way in ways.values()])
    kept = [f"{way['flops_per_token_nothing_kept'] / 1e12:.2f}" for way in ways.values()]
    row("TFLOP a token, with no prefix kept", kept)
    return "\n".join(rows)


def recorded(path: Path = RESULTS / "cpu" / "plan_70b.json") -> dict[str, Any]:
    """The last full plan."""
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_70b", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small Blocks: it runs, and proves nothing")
    parser.add_argument("--train", action="store_true", help="train as well; needs CUDA")
    parser.add_argument("--blocks", type=int, default=80, help="with --train: how many Blocks")
    parser.add_argument("--steps", type=int, default=4, help="with --train: steps of each")
    parser.add_argument("--offload", choices=("cpu", "disk"), default="cpu", help="with --train")
    options = parser.parse_args(arguments)
    shape = {**SHAPE, **QUICK} if options.quick else SHAPE
    claim = Claim("plan_70b", options.quick)
    found = {name: planned(way, shape) for name, way in WAYS.items()}
    claim.figures = {"shape": shape, "seq_len": SEQ_LEN, "planned": found}
    for name, way in found.items():
        if name.startswith("blockwise"):
            limit = DEVICE_BYTES / 1e9
            peak = way["peak_bytes"] / 1e9
            claim.bars.append(Bar(f"GB, {name}", peak, limit, at_most=True, full_size=True))
    claim.write()
    value = None
    if options.train and torch.cuda.is_available():
        claim.figures["trained"] = trained(shape, options.offload, options.blocks, options.steps)
        value = claim.figures["trained"]["peak_bytes"] / 1e9
    claim.bars.append(Bar("GB, as trained", value, DEVICE_BYTES / 1e9, at_most=True, full_size=True))
    print(table({"figures": claim.figures}))
    return claim.conclude()


if __name__ == "__main__":
    sys.exit(main())
