"""Demonstration: train a small Rack, test it, find a bug in a copy, gate a slow change, and write a report.

Run in the root of the project: `python examples/demo/demo.py`. Results are in build/demo.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stackwise import ArchitectureTrainer, Report, StackWiseConfig, create_rack_from_config
from stackwise.data import create_data
from stackwise.gate.page import gate_page
from stackwise.gate.result import GateResult
from stackwise.report import training_record
from stackwise.report.html import report_page
from stackwise.support.device import fingerprint

HERE = Path("examples/demo")
BUILD = Path("build/demo")
FUSED = """\
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)
"""
BY_HAND = """\
import torch


def attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v
"""
BENCHMARK = """\
import torch
from attention import attention


def test_attention(benchmark):
    q, k, v = torch.randn(3, 2, 4, 128, 32)
    benchmark(attention, q, k, v)
"""


def train() -> dict[str, Any]:
    """Train the configured Rack and return the figures of the run. The weights go to build/demo/rack."""
    config = StackWiseConfig.from_yaml(HERE / "config.yaml")
    shutil.rmtree(config.training.checkpoint_dir, ignore_errors=True)
    torch.manual_seed(config.training.seed)
    rack = create_rack_from_config(config)
    training, validation = create_data(config)
    trainer = ArchitectureTrainer(config, progress=True)
    result = trainer.train_architecture(rack, training)
    return training_record(result, trainer.evaluate(rack, validation))


def run_tests() -> int:
    """Run examples/demo/test_rack.py with pytest, and return its exit code."""
    options = ["--no-header", "--benchmark-columns=min,median,max,rounds"]
    report = f"--stackwise-report={BUILD / 'report.json'}"
    return run([sys.executable, "-m", "pytest", str(HERE), "-p", "no:cacheprovider", *options, report])


def check_copy_with_a_bug() -> int:
    """Check the KV cache of a copy with a bug, and return the exit code, which should be 1."""
    subject = f"{HERE}/test_rack.py:rack_with_a_bug"
    return run([sys.executable, "-m", "stackwise.cli", "check", subject, "--checks", "cache_decoding"])


def gate_slow_change() -> GateResult:
    """Compare two versions of attention with the gate, and return the result, which should be REGRESSED."""
    project, report = BUILD / "project", (BUILD / "gate.json").resolve()
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir(parents=True)
    (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (project / "attention.py").write_text(FUSED)
    (project / "test_attention.py").write_text(BENCHMARK)
    author = ["-c", "user.name=demo", "-c", "user.email=demo@localhost"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], [*author, "commit", "-q", "-m", "fused"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    (project / "attention.py").write_text(BY_HAND)
    run(
        [sys.executable, "-m", "stackwise.cli", "gate", "main", "--seconds", "90", "--report", str(report)],
        folder=project,
    )
    return GateResult.from_dict(json.loads(report.read_text()))


def run(command: list[str], folder: Path | None = None) -> int:
    """Print and run a command, and return its exit code."""
    shown = ["python" if part == sys.executable else part for part in command]
    print(f"$ {' '.join(shown).replace('python -m stackwise.cli', 'stackwise')}", flush=True)
    return subprocess.run(command, cwd=folder, check=False).returncode


def main() -> int:
    console = Console()
    console.rule("1/4  train a Rack on the documentation of Python")
    trained = train()
    console.rule("2/4  is it correct, stable and fast?")
    tests = run_tests()
    if tests > 1:
        return tests
    console.rule("3/4  a copy with a bug that training does not show: this check must fail")
    found = check_copy_with_a_bug()
    console.rule("4/4  a change that makes attention slower: the gate must report it")
    gate = gate_slow_change()
    report = Report.from_json(BUILD / "report.json")
    report.training, report.environment = trained, fingerprint()
    page = report_page(report)
    plots = [replace(each, title="Gate: the slow change") for each in gate_page(gate).sections if each.plots]
    shown, folded = ([each for each in page.sections if each.folded is fold] for fold in (False, True))
    replace(page, sections=[*shown, *plots, *folded]).write(BUILD / "report.html")
    console.rule("result")
    console.print(report.training_line(), highlight=False, markup=False, soft_wrap=True)
    expected = found == 1 and gate.verdict == "REGRESSED"
    if not expected:
        print(f"step 3: exit code {found} (expected 1); step 4: {gate.verdict} (expected REGRESSED)")
    print(f"{report.summary()}, report: {BUILD}/report.html")
    return 0 if tests == 0 and expected else 1


if __name__ == "__main__":
    raise SystemExit(main())
