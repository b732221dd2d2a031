"""`python -m bench.memory`: what training unit by unit takes, beside training the whole Rack at once.

Peak memory of a training run, each in a fresh process that gives back what it frees: on the CPU the
high-water mark of everything resident, the interpreter and PyTorch included; on CUDA what tensors hold.
Units train with their prefix outputs and the Blocks that take no part on disk; what lies there is stated.
FLOPs are those of matrix products and attention, counted as they run, so that the price is beside the gain.
Embedding and head are two matrices, as in `bench.locality`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.claim import Bar, Claim


@dataclass(frozen=True)
class Run:
    """One training run: what trains at one time, of how many units of how many Blocks."""

    architecture: str
    n_stacks: int
    blocks_per_stack: int
    recompute: str = "none"
    d_model: int = 2048
    n_heads: int = 16
    n_kv_heads: int = 8
    d_ff: int = 5632
    vocab_size: int = 8192
    batch_size: int = 1
    seq_len: int = 512
    steps: int = 2
    precision: str = "bf16"
    count_flops: bool = False

    @property
    def name(self) -> str:
        recompute = " + recompute" if self.recompute == "full" else ""
        return f"{self.architecture}{recompute}, {self.n_blocks} blocks of d {self.d_model}"

    @property
    def n_blocks(self) -> int:
        return self.n_stacks * self.blocks_per_stack

    def config(self, folder: Path) -> Any:
        from stackwise import StackWiseConfig

        local = self.architecture != "rackwise"
        scope: dict[str, Any] = {}
        if local:
            scope = {
                "cache_bytes": 2**40,
                "cache_dir": str(folder / "prefix"),
                "offload": "disk",
                "offload_dir": str(folder / "blocks"),
            }
        shape = {
            "vocab_size": self.vocab_size,
            "tie_embeddings": False,
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "d_ff": self.d_ff,
            "architecture": {"n_stacks": self.n_stacks, "blocks_per_stack": self.blocks_per_stack},
        }
        training = {
            "training_architecture": self.architecture,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "max_steps": self.steps,
            "precision": self.precision,
            "recompute": {"kind": self.recompute},
            "objective": {"logits_chunk": 256},
            "scope": scope,
        }
        return StackWiseConfig.from_dict({"model": shape, "training": training})


def measure(run: Run, folder: Path) -> dict[str, Any]:
    """Train as `run` says in this process; what it took."""
    import torch

    from stackwise import ArchitectureTrainer, create_rack_from_config
    from stackwise.support.device import keep_freed_memory
    from stackwise.training.block_store import block_writer
    from stackwise.training.storage_meter import StorageMeter

    keep_freed_memory(False)
    config = run.config(folder)
    torch.manual_seed(0)
    place = {} if run.architecture == "rackwise" else {"place": block_writer(folder / "blocks")}
    rack = create_rack_from_config(config, **place)
    ids = torch.randint(run.vocab_size, (run.steps, run.batch_size, run.seq_len + 1))
    trainer = ArchitectureTrainer(config, progress=False)
    disk = 0
    start = time.perf_counter()
    if run.count_flops:
        with StorageMeter() as meter:
            trainer.train_architecture(rack, list(ids))
        return {"flops": meter.flops}
    result = trainer.train_architecture(rack, list(ids))
    seconds = time.perf_counter() - start
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    peak = measured_peak(trainer.device)
    return {
        "peak_bytes": peak,
        "disk_bytes": disk + _prefix_bytes(run),
        "seconds": seconds,
        "parameters": result["parameters"],
        "final_loss": result["final_loss"],
    }


def _prefix_bytes(run: Run) -> int:
    """Of hidden states that were kept on disk until the end: float32, one for each token of the data."""
    if run.architecture == "rackwise":
        return 0
    return run.steps * run.batch_size * run.seq_len * run.d_model * 4


def measured_peak(device: Any) -> int | None:
    """The most bytes until now; None: the system does not say."""
    import torch

    from stackwise.benchmark.memory import high_water_mark

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return high_water_mark()


def in_fresh_process(run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stackwise-memory-") as folder:
        command = [sys.executable, "-m", "bench.memory", "--run", json.dumps(asdict(run)), "--folder", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{run.name}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def plan(base: Run) -> list[Run]:
    """Every run: units as Blocks and as Stacks of two, the whole Rack with and without recomputation."""
    runs = []
    for shape, architecture, per_stack in compared(base):
        for units in (4, 8):
            sized = replace(shape, n_stacks=units, blocks_per_stack=per_stack)
            runs += [replace(sized, architecture=architecture)]
            runs += [replace(sized, architecture="rackwise", recompute=kind) for kind in ("full", "none")]
    runs.append(replace(base, n_stacks=32))
    return list({run.name: run for run in runs}.values())


def compared(base: Run) -> list[tuple[Run, str, int]]:
    """Shapes, what trains there at one time, and how many Blocks a unit has.

    A unit's share of the whole is small where its states outweigh what every run has: embedding and head, the
    activations of one unit, the process. In the smallest of these it does not.
    """
    wide = {"d_model": base.d_model * 3 // 2, "n_heads": base.n_heads * 3 // 2}
    wider = replace(base, **wide, d_ff=8192 if base.d_ff == 5632 else base.d_ff)
    return [(wider, "blockwise", 1), (base, "stackwise", 2), (base, "blockwise", 1)]


def bars(base: Run, found: dict[str, dict[str, Any]]) -> list[Bar]:
    """The ratios that are held to a limit."""

    def ratio(one: str, other: str) -> float | None:
        part, whole = (found.get(name, {}).get("peak_bytes") for name in (one, other))
        return None if part is None or whole is None else float(part / whole)

    made = []
    for shape, architecture, per_stack in compared(base):
        for units, limit in ((4, 0.40), (8, 0.25)):
            local = replace(shape, architecture=architecture, n_stacks=units, blocks_per_stack=per_stack)
            whole = replace(local, architecture="rackwise", recompute="full")
            name = f"{architecture} d {shape.d_model} / recompute, {units} units"
            made.append(Bar(name, ratio(local.name, whole.name), limit, at_most=True, full_size=True))
    deep, shallow = replace(base, n_stacks=32), replace(base, n_stacks=4)
    depth = ratio(deep.name, shallow.name)
    made.append(Bar("blockwise, 32 / 4 blocks", depth, 1.05, at_most=True, full_size=True))
    return made


def table(found: dict[str, dict[str, Any]]) -> Table:
    shown = Table("run", "peak GB", "disk GB", "seconds", "TFLOP", "parameters")
    for name, row in found.items():
        shown.add_row(
            name,
            _gigabytes(row["peak_bytes"]),
            f"{row['disk_bytes'] / 1e9:.2f}",
            f"{row['seconds']:.1f}",
            f"{row['flops'] / 1e12:.2f}",
            f"{row['parameters']:,}",
        )
    return shown


def _gigabytes(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / 1e9:.2f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small Blocks: it runs, and proves nothing")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        print(json.dumps(measure(Run(**json.loads(options.run)), Path(options.folder))))
        return 0
    claim = Claim("memory", options.quick, keeps_memory=False)
    base = Run("blockwise", 4, 1)
    if options.quick:
        base = replace(base, d_model=128, n_heads=4, n_kv_heads=2, d_ff=384, vocab_size=256, seq_len=64)
    found: dict[str, dict[str, Any]] = {}
    for run in plan(base):
        # Every step is alike, so one is counted.
        counted = in_fresh_process(replace(run, count_flops=True, steps=1))["flops"]
        found[run.name] = in_fresh_process(run) | {"flops": counted * run.steps}
        claim.figures = {"shape": asdict(base), "runs": found}
        claim.write()
        print(f"{run.name}: {_gigabytes(found[run.name]['peak_bytes'])} GB", flush=True)
    claim.bars = bars(base, found)
    Console(width=110).print(table(found))
    return claim.conclude()


if __name__ == "__main__":
    sys.exit(main())
