"""Train: the command that trains a Rack from a configuration file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from stackwise.cli.overrides import Override, load_configuration
from stackwise.config.yaml import dump_yaml

if TYPE_CHECKING:
    from stackwise.config import StackWiseConfig
    from stackwise.training import TrainingResult

__all__ = ["Train"]


@dataclass(frozen=True)
class Train:
    """Train a Rack from a YAML file. Options such as --training.optimizer.lr 3e-4 override its keys."""

    config: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[FILE]")] = None
    """YAML file; if not given: all keys have their defaults."""
    progress: Literal["on", "off"] = "on"
    """Show progress on standard error."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the complete configuration as YAML, without training."""
    plan: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print an estimate of memory and computation, without training. It is for CUDA, unless training.device
    is cpu."""
    report: Path | None = None
    """Write losses and alarms to this file: .md, .json, .html, or all three if the name has no suffix."""

    def run(self, overrides: Sequence[Override] = ()) -> int:
        """Train, and print the results in the first process.

        Returns:
            0; 75 after SIGTERM and 130 after Ctrl-C, if the run is saved.
        """
        config = load_configuration(self.config, overrides)
        if self.print_config:
            if os.environ.get("RANK", "0") == "0":
                print(dump_yaml(config.to_dict()), end="")
            return 0
        if self.plan:
            if os.environ.get("RANK", "0") == "0":
                _print_plan(config)
            return 0
        import torch

        from stackwise.data import Prefetched, create_data
        from stackwise.model import create_rack_from_config
        from stackwise.report import report_files
        from stackwise.support.device import keep_freed_memory, threads_for
        from stackwise.training import ArchitectureTrainer, TrainingTerminated
        from stackwise.training.block_store import block_writer
        from stackwise.training.processes import Processes

        progress = self.progress != "off"
        files = report_files(self.report) if self.report else []
        with Processes.from_environment(config.training) as processes:
            training, validation = create_data(config, processes.rank, processes.world_size)
            trainer = ArchitectureTrainer(config, progress=progress, processes=processes)
            folder = trainer.offload_dir
            keep_freed_memory(folder is None)
            torch.manual_seed(config.training.seed)
            rack = create_rack_from_config(config, *([] if folder is None else [block_writer(folder)]))
            try:
                with threads_for(rack.get_parameter_count()), closing(Prefetched(training)) as ahead:
                    result = trainer.train_architecture(rack, ahead, validation)
            except TrainingTerminated as ended:
                if processes.is_main:
                    print(ended, file=sys.stderr)
                return ended.exit_code
            validation_loss = None if validation is None else trainer.evaluate(rack, validation)
            if processes.is_main:
                _print_result(config, result, validation_loss)
                _write_report(files, config, result, validation_loss)
        return 0


def _print_result(config: StackWiseConfig, result: TrainingResult, validation_loss: float | None) -> None:
    settings = config.training
    stacks = " + ".join(map(str, result["blocks_per_stack"]))
    print(
        f"{settings.training_architecture}: stacks of {stacks} blocks, {result['parameters']:,} parameters, "
        f"{settings.objective.kind}, {settings.precision}"
    )
    if "results" in result:
        _print_units(result)
    line = f"{len(result['records'])} steps, {result['tokens_per_second']:,.0f} tokens/s, "
    line += f"loss {result['final_loss']:.4f}"
    if validation_loss is not None:
        line += f", validation {validation_loss:.4f} nats per {_predicted(config)}"
    print(line)
    if alarms := result.get("alarms"):
        print(f"{len(alarms)} alarms, {result['skipped_steps']} steps left out; first: {alarms[0]}")
    for noun, place in (
        ("saved in", settings.checkpoint_dir),
        ("steps in", settings.telemetry.jsonl),
        ("events in", settings.telemetry.tensorboard),
    ):
        if place:
            print(f"{noun} {place}")


def _write_report(
    files: Sequence[Path], config: StackWiseConfig, result: TrainingResult, validation_loss: float | None
) -> None:
    from stackwise.report import Report, training_record
    from stackwise.support.device import fingerprint

    if not files:
        return
    training = training_record(result, validation_loss, _predicted(config))
    device = config.training.device
    report = Report(training=training, environment=fingerprint(None if device == "auto" else device))
    for file in files:
        report.write(file)
        print(f"report: {file}")


def _print_plan(config: StackWiseConfig) -> None:
    import torch
    from rich.console import Console

    from stackwise.training.memory_planner import plan_memory

    device = torch.device("cuda" if config.training.device == "auto" else config.training.device)
    plan = plan_memory(config, device=device.type)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(plan.table())
    if device.type == "cuda" and torch.cuda.is_available():
        there = torch.cuda.get_device_properties(device).total_memory
        verdict = "fits" if plan.peak <= there else "does not fit"
        print(f"{verdict}: {plan.peak / 1e9:.1f} GB of tensors, {there / 1e9:.1f} GB on {device}")


def _print_units(result: TrainingResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("unit")
    for column in ("parameters", "batches", "mean loss", "final loss", "seconds"):
        table.add_column(column, justify="right")
    units = [*result["results"], *([result["polish"]] if "polish" in result else [])]
    for unit in units:
        name = f"stack {unit['stack_idx']}" if "stack_idx" in unit else "all together"
        table.add_row(
            name + (f" block {unit['block_idx']}" if "block_idx" in unit else ""),
            f"{unit['parameters']:,}",
            str(unit["num_batches"]),
            f"{unit['avg_loss']:.4f}",
            f"{unit['final_loss']:.4f}",
            f"{unit['seconds']:.1f}",
        )
    Console(highlight=False).print(table)


def _predicted(config: StackWiseConfig) -> str:
    """Return the unit that the model predicts: "byte" with the byte tokenizer, otherwise "token"."""
    data = config.data
    shards = data.dataset_path is not None and Path(data.dataset_path).is_dir()
    noun = "byte" if data.task is None and data.tokenizer == "byte" and not shards else "token"
    return f"masked {noun}" if config.training.objective.kind == "masked_token" else noun
