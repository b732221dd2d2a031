"""The options: each on the command line and in the configuration file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

__all__ = [
    "add_gpu_option",
    "add_options",
    "device_name",
    "gpu_requested",
    "model_targets",
    "report_paths",
    "seed",
]

_GROUP = "stackwise"
_GPU_HELP = "run the tests marked gpu, and measure on CUDA; the run stops where there is no CUDA device"


def add_options(parser: pytest.Parser) -> None:
    """All but `--gpu`."""
    group = parser.getgroup(_GROUP, "stackwise: is a transformer architecture right, stable, fast?")
    group.addoption(
        "--stackwise-device",
        metavar="DEVICE",
        help="where models run: cpu, cuda, cuda:N (default: cuda with --gpu, else cpu)",
    )
    group.addoption(
        "--stackwise-seed",
        metavar="N",
        type=int,
        help="seed of weights, inputs and faults (default: 0)",
    )
    group.addoption(
        "--stackwise-model",
        metavar="MODULE:FACTORY",
        action="append",
        help="check this model, without a line of code: FACTORY() in MODULE (or path/to/file.py) returns "
        "an nn.Module or a ModelSpec; may be given several times",
    )
    group.addoption(
        "--stackwise-report",
        metavar="PATH",
        help="write checks, stability runs and throughput to PATH: .md, .json, or both where it has none",
    )
    parser.addini("stackwise_gpu", "as --gpu", type="bool", default=False)
    parser.addini("stackwise_device", "as --stackwise-device")
    parser.addini("stackwise_seed", "as --stackwise-seed")
    parser.addini("stackwise_model", "as --stackwise-model, one a line", type="linelist")
    parser.addini("stackwise_report", "as --stackwise-report")


def add_gpu_option(parser: pytest.Parser) -> None:
    """`--gpu`, unless a conftest has it: then that one is read."""
    groups = [getattr(parser, "_anonymous", None), *getattr(parser, "_groups", [])]
    if any("--gpu" in option.names() for group in groups if group for option in group.options):
        return
    try:
        parser.getgroup(_GROUP).addoption("--gpu", dest="stackwise_gpu", action="store_true", help=_GPU_HELP)
    except (ValueError, argparse.ArgumentError):
        return


def gpu_requested(config: pytest.Config) -> bool:
    """Whether `--gpu`, ours or a conftest's, or its ini twin is on."""
    flags = (config.getoption("stackwise_gpu", False), config.getoption("--gpu", False))
    return any(map(bool, flags)) or bool(config.getini("stackwise_gpu"))


def device_name(config: pytest.Config) -> str:
    """Where models run."""
    named = config.getoption("stackwise_device") or config.getini("stackwise_device")
    return str(named) if named else ("cuda" if gpu_requested(config) else "cpu")


def seed(config: pytest.Config) -> int:
    """The seed; UsageError where the ini value is no number."""
    given = config.getoption("stackwise_seed")
    if given is None:
        given = config.getini("stackwise_seed") or 0
    try:
        value = int(given)
    except ValueError:
        value = -1
    if value < 0:
        raise pytest.UsageError(f"stackwise_seed: got {given!r}; allowed: an integer >= 0")
    return value


def model_targets(config: pytest.Config) -> list[str]:
    """MODULE:FACTORY of every model to check without code, each once."""
    named = [*config.getini("stackwise_model"), *(config.getoption("stackwise_model") or [])]
    return list(dict.fromkeys(named))


def report_paths(config: pytest.Config) -> list[Path]:
    """The files to write; UsageError for an ending that is not known."""
    given = config.getoption("stackwise_report") or config.getini("stackwise_report")
    if not given:
        return []
    path = Path(given)
    match path.suffix:
        case ".md" | ".json":
            return [path]
        case "":
            return [path.with_suffix(".md"), path.with_suffix(".json")]
    raise pytest.UsageError(
        f"--stackwise-report: got {given!r}; allowed endings: .md, .json, or none for both"
    )
