"""The main job from end to end: train a small Rack on real text, then let pytest question it.

Run from the project's root: `python docs/demo/demo.py`. Writes `build/demo/report.md` and `.json`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console

from stackwise import ArchitectureTrainer, Report, StackWiseConfig, create_rack_from_config
from stackwise.data import create_data
from stackwise.device import fingerprint

HERE = Path(__file__).parent
BUILD = Path("build/demo")


def train() -> dict[str, float]:
    """Train the configured Rack with a live progress line; its weights go to build/demo/rack."""
    config = StackWiseConfig.from_yaml(HERE / "config.yaml")
    shutil.rmtree(config.training.checkpoint_dir, ignore_errors=True)
    torch.manual_seed(config.training.seed)
    rack = create_rack_from_config(config)
    training, validation = create_data(config)
    trainer = ArchitectureTrainer(config, progress=True)
    result = trainer.train_architecture(rack, training)
    return {
        "parameters": result["parameters"],
        "num_batches": result["num_batches"],
        "seconds": result["seconds"],
        "tokens_per_second": result["tokens_per_second"],
        "first_loss": result["records"][0].loss,
        "final_loss": result["final_loss"],
        "validation_loss": trainer.evaluate(rack, validation),
    }


def question() -> int:
    """Run the checks, the three faults and the throughput benchmark on the trained Rack."""
    options = ["-v", "--no-header", "--benchmark-columns=min,median,max,rounds"]
    command = [sys.executable, "-m", "pytest", str(HERE), *options, f"--stackwise-report={BUILD / 'report'}"]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    console = Console()
    console.rule("1/2  train a Rack on the Python documentation")
    trained = train()
    console.rule("2/2  pytest: is it right, is it stable, is it fast?")
    exit_code = question()
    if exit_code > 1:
        return exit_code
    report = Report.from_json(BUILD / "report.json")
    report.training, report.environment = trained, fingerprint()
    for ending in (".md", ".json"):
        report.write(BUILD / f"report{ending}")
    console.rule("summary")
    for line in (
        report.training_line(),
        report.summary(),
        f"written: {BUILD}/report.md, {BUILD}/report.json",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
