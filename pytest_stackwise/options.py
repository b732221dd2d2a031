"""Options of the plugin, on the command line and in the configuration file."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

if TYPE_CHECKING:
    from stackwise.checks.check import Suite
    from stackwise.gate.limit import Limits
    from stackwise.gate.result import Missing

__all__ = [
    "GateOptions",
    "add_gpu_option",
    "add_options",
    "are_set",
    "check_names",
    "device_name",
    "gate",
    "gpu_requested",
    "ini",
    "is_gated",
    "release_gpu_option",
    "report_paths",
    "seed",
    "strict",
    "suite",
    "targets",
]

_GROUP = "stackwise"
_MISSING = ("fail", "warn", "create")
_OF_RUNS = ("device", "seed", "model", "trainer", "checks", "suite", "report")
_GATE: tuple[str, ...] = ("against", "head", "gate", "missing", "build")
_GATE += ("gate_seconds", "gate_timeout", "gate_report", "history")
# Options except `--gpu`: the name of the value, or None for a flag, and the help.
_OPTIONS = {
    "device": (
        "DEVICE",
        "device of the models: auto, cpu, cuda, cuda:N (default: cuda with --gpu, else cpu)",
    ),
    "seed": ("N", "seed of weights, inputs and faults (default: 0)"),
    "model": (
        "MODULE:FACTORY",
        (
            "check this model without a test file: FACTORY() in MODULE or path/to/file.py returns an "
            "nn.Module or a ModelSpec. hf:NAME_OR_FOLDER: a transformers model with random weights; "
            "hf-tiny:NAME_OR_FOLDER: the same architecture with small sizes. Can be repeated"
        ),
    ),
    "trainer": (
        "MODULE:FACTORY",
        (
            "check this training loop without a test file: FACTORY() returns an object with model, optimizer "
            "and step(batch), a transformers or Lightning trainer, or a TrainerSpec; can be repeated"
        ),
    ),
    "checks": (
        "NAMES",
        "run only these checks or families, such as causality,loss (default: all of the suite)",
    ),
    "suite": ("SUITE", "fast: checks that take seconds; full: all of them (default: fast)"),
    "trust_remote_code": (None, "allow hf: models to run code from the Hugging Face hub"),
    "strict": (None, "treat warnings as failures, such as a check that warns or an unstable run"),
    "report": ("PATH", "write all results to PATH: .md, .json, .html, or all of them if PATH has no ending"),
    "against": (
        "BASE",
        (
            "gate (compares the speed and memory of two versions): measure the tests with the benchmark or "
            "throughput fixture on BASE and on the working tree, interleaved. BASE: a git revision, ./FOLDER,"
            " a wheel, or 'callable' for the `against` of each test"
        ),
    ),
    "head": (
        "REVISION",
        "gate: head, the new version: the revision to compare with BASE (default: the working tree)",
    ),
    "gate": (
        "LIMITS",
        "gate: limits for tests without the marker `gate`, such as time=2%%,memory=1%%,floor=50us",
    ),
    "missing": (
        "WHAT",
        (
            "gate: what to do with a test that BASE does not have: fail, warn, or create a first result "
            "(default: warn)"
        ),
    ),
    "build": ("COMMAND", "gate: command that runs in both trees first, for example to compile extensions"),
    "gate_seconds": (
        "SECONDS",
        "gate: time limit; tests that are undecided at its end are INCONCLUSIVE (default: no limit)",
    ),
    "gate_timeout": ("SECONDS", "gate: end a process that reports nothing for this time (default: 600)"),
    "history": (
        "STORE",
        (
            "gate: store the results of head for comparison over time: the path of an SQLite file, or "
            "postgresql://USER:PASSWORD@HOST/DATABASE"
        ),
    ),
    "gate_report": (
        "PATH",
        "gate: write the result to PATH: .md, .json, .html, or all of them if PATH has no ending",
    ),
}
_KINDS: dict[str, dict[str, Any]] = {
    "seed": {"type": int},
    "model": {"action": "append"},
    "trainer": {"action": "append"},
}
_GATE_SECONDS = 600.0
_GPU_HELP = "run the tests marked gpu and measure on CUDA; an error if there is no CUDA device"


def add_options(parser: pytest.Parser) -> None:
    """Add all options except `--gpu`."""
    group = parser.getgroup(_GROUP, "stackwise: check, stress and measure PyTorch models and training loops")
    for name, (metavar, text) in _OPTIONS.items():
        kind = {"metavar": metavar, **_KINDS.get(name, {})} if metavar else {"action": "store_true"}
        group.addoption(_option(name), help=text, **kind)
    parser.addini("stackwise_gpu", "as --gpu", type="bool", default=False)
    parser.addini("stackwise_device", "as --stackwise-device")
    parser.addini("stackwise_seed", "as --stackwise-seed")
    parser.addini("stackwise_model", "as --stackwise-model, one per line", type="linelist")
    parser.addini("stackwise_trainer", "as --stackwise-trainer, one per line", type="linelist")
    parser.addini("stackwise_checks", "as --stackwise-checks, separated by commas or lines")
    parser.addini("stackwise_suite", "as --stackwise-suite")
    parser.addini("stackwise_strict", "as --stackwise-strict", type="bool", default=False)
    parser.addini("stackwise_report", "as --stackwise-report")
    for name in _GATE:
        parser.addini(f"stackwise_{name}", f"as {_option(name)}")


def are_set(config: pytest.Config) -> bool:
    """Return True if the command line or the configuration file sets an option of the plugin.

    `--gpu` and `--stackwise-strict` do not count.
    """
    given, names = config.known_args_namespace, [f"stackwise_{name}" for name in (*_OF_RUNS, *_GATE)]
    return any(getattr(given, name) is not None or ini(config, name) for name in names)


def ini(config: pytest.Config, name: str) -> Any:
    """Return an option of the configuration file as text.

    Values of `[tool.pytest]` have types, and `getini` raises for numbers and lists.
    """
    try:
        return config.getini(name)
    except (TypeError, pytest.UsageError):
        value = cast("Any", config)._inicfg[name].value
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def is_gated(config: pytest.Config) -> bool:
    """Return True if this run compares with a base. A process that measures one side does not."""
    # A side inherits `addopts`, but not the --stackwise-against of the command line.
    if config.pluginmanager.hasplugin("stackwise_side.plugin"):
        return False
    given = config.known_args_namespace.stackwise_against
    return given is not None or bool(ini(config, "stackwise_against"))


def add_gpu_option(parser: pytest.Parser) -> None:
    """Add `--gpu`, unless a conftest defines it; then the conftest's option is used."""
    groups = [getattr(parser, "_anonymous", None), *getattr(parser, "_groups", [])]
    if any("--gpu" in option.names() for group in groups if group for option in group.options):
        return
    try:
        parser.getgroup(_GROUP).addoption("--gpu", dest="stackwise_gpu", action="store_true", help=_GPU_HELP)
    except (ValueError, argparse.ArgumentError):
        return


def release_gpu_option(config: pytest.Config) -> None:
    """Remove `--gpu` after parsing, because a conftest found during collection may define it."""
    parser = getattr(getattr(config, "_parser", None), "optparser", None)
    getattr(parser, "_option_string_actions", {}).pop("--gpu", None)


def gpu_requested(config: pytest.Config) -> bool:
    """Return True if `--gpu`, ours or a conftest's, or `stackwise_gpu` is set."""
    # A conftest's --gpu may take a number or a name. Only True has our meaning.
    flags = (config.getoption("stackwise_gpu", False), config.getoption("--gpu", False))
    return any(flag is True for flag in flags) or _ini_flag(config, "stackwise_gpu")


def device_name(config: pytest.Config) -> str:
    """Return the device of the models, cpu, cuda or cuda:N, with "auto" resolved."""
    named = config.getoption("stackwise_device") or ini(config, "stackwise_device")
    if named == "auto":
        from stackwise.support.device import resolve_device

        return str(resolve_device("auto"))
    return str(named) if named else ("cuda" if gpu_requested(config) else "cpu")


def seed(config: pytest.Config) -> int:
    """Return the seed.

    Raises:
        pytest.UsageError: the seed is not an integer from 0 to 2**63 - 1.
    """
    given = config.getoption("stackwise_seed")
    if given is None:
        given = ini(config, "stackwise_seed") or 0
    try:
        value = int(given)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise pytest.UsageError(f"--stackwise-seed: got {given!r}; allowed: an integer >= 0 and below 2**63")
    return value


def suite(config: pytest.Config) -> Suite:
    """Return the suite of checks.

    Raises:
        pytest.UsageError: there is no suite with this name.
    """
    given = config.getoption("stackwise_suite") or ini(config, "stackwise_suite") or "fast"
    if given not in ("fast", "full"):
        raise pytest.UsageError(f"--stackwise-suite: got {given!r}; allowed: 'fast', 'full'")
    return "full" if given == "full" else "fast"


def strict(config: pytest.Config) -> bool:
    """Return True if warnings fail tests."""
    return bool(config.getoption("stackwise_strict")) or _ini_flag(config, "stackwise_strict")


def _ini_flag(config: pytest.Config, name: str) -> bool:
    """Return a boolean of the configuration file.

    Raises:
        pytest.UsageError: the value is neither true nor false.
    """
    try:
        return bool(config.getini(name))
    except (ValueError, pytest.UsageError):
        given = cast("Any", config).inicfg.get(name)
        given = getattr(given, "value", given)
        raise pytest.UsageError(f"{name}: got {given!r}; allowed: true, false") from None


def check_names(config: pytest.Config) -> tuple[str, ...] | None:
    """Return the requested checks and families as written, or None for all."""
    given = config.getoption("stackwise_checks")
    if given is None:
        given = ini(config, "stackwise_checks") or None
    if given is None:
        return None
    names = tuple(dict.fromkeys(name for name in re.split(r"[,\s]+", given) if name))
    if not names:
        raise pytest.UsageError("--stackwise-checks: got no name; allowed: names of checks or families")
    return names


def targets(config: pytest.Config, asks: Literal["model", "trainer"]) -> dict[str, Path]:
    """Return the subjects that are checked without a test file, each with the folder to import from.

    The folder is that of the configuration file for its subjects, otherwise the working directory.
    """
    in_file = dict.fromkeys(config.getini(f"stackwise_{asks}"), config.rootpath)
    given = config.getoption(f"stackwise_{asks}") or []
    return in_file | dict.fromkeys(given, config.invocation_params.dir)


def report_paths(config: pytest.Config) -> list[Path]:
    """Return the report files to write.

    Raises:
        pytest.UsageError: the ending is unknown, or the folder cannot be written.
    """
    given, folder = config.getoption("stackwise_report"), config.invocation_params.dir
    if not given:
        given, folder = ini(config, "stackwise_report"), config.rootpath
    if not given:
        return []
    from stackwise.report import report_files

    try:
        return report_files(folder / given)
    except (ValueError, OSError) as error:
        raise pytest.UsageError(f"--stackwise-report: got {given}: {error}") from None


@dataclass(frozen=True)
class GateOptions:
    """Options of the gate.

    Attributes:
        against: the base.
        head: the revision of the head; None: the working tree.
        limits: limits for tests without the marker `gate`.
        missing: action for a test that the base lacks.
        build: command that runs in both trees first; None: no command.
        seconds: time limit of the run; None: no limit.
        timeout: seconds without a report after which a process is treated as hung.
        report: files to write.
        history: path or URL of the store for the results; None: no store.
    """

    against: str
    head: str | None
    limits: Limits
    missing: Missing
    build: str | None
    seconds: float | None
    timeout: float
    report: tuple[Path, ...]
    history: str | None


def gate(config: pytest.Config) -> GateOptions | None:
    """Return the options of the gate, or None without --stackwise-against.

    Raises:
        pytest.UsageError: an option needs --stackwise-against, or its value is not allowed.
    """
    against = _text(config, "against")
    if against is None:
        # The configuration file may set them for runs with --stackwise-against.
        for name in _GATE[1:]:
            if config.getoption(f"stackwise_{name}") is not None:
                raise pytest.UsageError(f"{_option(name)}: allowed with --stackwise-against")
        return None
    if not against:  # for example an unset variable in CI; as a path, it would be the working directory
        allowed = "a revision, ./FOLDER, a wheel, 'callable'"
        raise pytest.UsageError(f"--stackwise-against: got {against!r}; allowed: {allowed}")
    for name in ("head", "build"):
        if against == "callable" and config.getoption(f"stackwise_{name}") is not None:
            raise pytest.UsageError(
                f"--stackwise-{name}: not allowed with --stackwise-against=callable, which has only one tree"
            )
    from stackwise.gate.limit import Limits, parse_limits

    missing: Any = _text(config, "missing") or "warn"
    if missing not in _MISSING:
        raise pytest.UsageError(f"--stackwise-missing: got {missing!r}; allowed: {', '.join(_MISSING)}")
    limits = Limits()
    if given := _text(config, "gate"):
        try:
            limits = limits.changed(**parse_limits(given))
        except ValueError as error:
            raise pytest.UsageError(f"--stackwise-gate: {error}") from None
    on_command_line = config.getoption("stackwise_gate_report") is not None
    folder = config.invocation_params.dir if on_command_line else config.rootpath
    return GateOptions(
        against,
        _text(config, "head"),
        limits,
        missing,
        _text(config, "build"),
        _seconds(config, "gate_seconds"),
        _seconds(config, "gate_timeout") or _GATE_SECONDS,
        _gate_files(_text(config, "gate_report"), folder),
        _text(config, "history"),
    )


def _option(name: str) -> str:
    return f"--stackwise-{name.replace('_', '-')}"


def _text(config: pytest.Config, name: str) -> str | None:
    given = config.getoption(f"stackwise_{name}")
    return given if given is not None else (ini(config, f"stackwise_{name}") or None)


def _seconds(config: pytest.Config, name: str) -> float | None:
    given = _text(config, name)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise pytest.UsageError(f"{_option(name)}: got {given!r}; allowed: a number of seconds > 0")
    return seconds


def _gate_files(given: str | None, folder: Path) -> tuple[Path, ...]:
    if given is None:
        return ()
    from stackwise.report import report_files

    try:
        return tuple(report_files(folder / given))
    except (ValueError, OSError) as error:
        raise pytest.UsageError(f"--stackwise-gate-report: got {given}: {error}") from None
