"""The options: each on the command line and in the configuration file."""

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
_GATE = (
    "against",
    "head",
    "gate",
    "missing",
    "build",
    "gate_seconds",
    "gate_timeout",
    "gate_report",
    "history",
)
_GATE_SECONDS = 600.0
_GPU_HELP = "run the tests marked gpu, and measure on CUDA; the run stops where there is no CUDA device"


def add_options(parser: pytest.Parser) -> None:
    """All but `--gpu`."""
    group = parser.getgroup(_GROUP, "stackwise: is a transformer architecture right, stable, fast?")
    group.addoption(
        "--stackwise-device",
        metavar="DEVICE",
        help="where models run: auto, cpu, cuda, cuda:N (default: cuda with --gpu, else cpu)",
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
        "--stackwise-trainer",
        metavar="MODULE:FACTORY",
        action="append",
        help="check this training step in the same way: FACTORY() returns an object with model, optimizer "
        "and step(batch), or a TrainerSpec; may be given several times",
    )
    group.addoption(
        "--stackwise-checks",
        metavar="NAMES",
        help="ask only these checks or families, such as causality,loss (default: all of the suite)",
    )
    group.addoption(
        "--stackwise-suite",
        metavar="SUITE",
        help="fast: checks that take seconds; full: all of them (default: fast)",
    )
    group.addoption(
        "--stackwise-trust-remote-code",
        action="store_true",
        help="allow hf: names of --stackwise-model to run code of the hub",
    )
    group.addoption(
        "--stackwise-strict",
        action="store_true",
        help="fail a test for each finding that is otherwise a warning: a check that warns, an unstable run",
    )
    group.addoption(
        "--stackwise-report",
        metavar="PATH",
        help="write all results to PATH: .md, .json, .html, or all of them if PATH has no ending",
    )
    group.addoption(
        "--stackwise-against",
        metavar="BASE",
        help="gate: compare the tests that use benchmark or throughput with BASE, in turns: a revision, "
        "./FOLDER, a wheel, or 'callable': what each names as `against`",
    )
    group.addoption(
        "--stackwise-head",
        metavar="REVISION",
        help="gate: what is compared with the base (default: the files as they are)",
    )
    group.addoption(
        "--stackwise-gate",
        metavar="LIMITS",
        help="gate: limits of tests whose marker `gate` does not say, such as time=2%%,memory=1%%,floor=50us",
    )
    group.addoption(
        "--stackwise-missing",
        metavar="WHAT",
        help="gate: how to treat a test that the base does not have: fail, warn or create (default: warn)",
    )
    group.addoption(
        "--stackwise-build",
        metavar="COMMAND",
        help="gate: run this in both trees before, to compile extensions, say",
    )
    group.addoption(
        "--stackwise-gate-seconds",
        metavar="SECONDS",
        help="gate: time limit; what cannot be told within it is INCONCLUSIVE (default: no limit)",
    )
    group.addoption(
        "--stackwise-gate-timeout",
        metavar="SECONDS",
        help="gate: a process that says nothing for this time hangs (default: 600)",
    )
    group.addoption(
        "--stackwise-history",
        metavar="STORE",
        help="gate: keep what was found of the head, beside a pinned reference: the path of an SQLite file, "
        "or postgresql://USER:PASSWORD@HOST/DATABASE",
    )
    group.addoption(
        "--stackwise-gate-report",
        metavar="PATH",
        help="gate: write the result to PATH: .md, .json, .html, or all of them if PATH has no ending",
    )
    parser.addini("stackwise_gpu", "as --gpu", type="bool", default=False)
    parser.addini("stackwise_device", "as --stackwise-device")
    parser.addini("stackwise_seed", "as --stackwise-seed")
    parser.addini("stackwise_model", "as --stackwise-model, one a line", type="linelist")
    parser.addini("stackwise_trainer", "as --stackwise-trainer, one a line", type="linelist")
    parser.addini("stackwise_checks", "as --stackwise-checks, by commas or one a line")
    parser.addini("stackwise_suite", "as --stackwise-suite")
    parser.addini("stackwise_strict", "as --stackwise-strict", type="bool", default=False)
    parser.addini("stackwise_report", "as --stackwise-report")
    for name in _GATE:
        parser.addini(f"stackwise_{name}", f"as --stackwise-{name.replace('_', '-')}")


def are_set(config: pytest.Config) -> bool:
    """Return True if the command line or the configuration file sets an option of the plugin.

    `--gpu` and `--stackwise-strict` do not count.
    """
    given, names = config.known_args_namespace, [f"stackwise_{name}" for name in (*_OF_RUNS, *_GATE)]
    return any(getattr(given, name) is not None or ini(config, name) for name in names)


def ini(config: pytest.Config, name: str) -> Any:
    """Return an option of the configuration file; text also where `[tool.pytest]` has a number or a list.

    Values of `[tool.pytest]` have types, and `getini` refuses those that are no text.
    """
    try:
        return config.getini(name)
    except (TypeError, pytest.UsageError):
        value = cast("Any", config)._inicfg[name].value
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def is_gated(config: pytest.Config) -> bool:
    """Return True if this run compares with a base: not in the process of a side."""
    # First: a side has those of `addopts` too, without --stackwise-against of the command line.
    if config.pluginmanager.hasplugin("stackwise_side.plugin"):
        return False
    given = config.known_args_namespace.stackwise_against
    return given is not None or bool(ini(config, "stackwise_against"))


def add_gpu_option(parser: pytest.Parser) -> None:
    """`--gpu`, unless a conftest has it: then that one is read."""
    groups = [getattr(parser, "_anonymous", None), *getattr(parser, "_groups", [])]
    if any("--gpu" in option.names() for group in groups if group for option in group.options):
        return
    try:
        parser.getgroup(_GROUP).addoption("--gpu", dest="stackwise_gpu", action="store_true", help=_GPU_HELP)
    except (ValueError, argparse.ArgumentError):
        return


def release_gpu_option(config: pytest.Config) -> None:
    """Once all is parsed, let a conftest that is only found during collection have its own `--gpu`."""
    parser = getattr(getattr(config, "_parser", None), "optparser", None)
    getattr(parser, "_option_string_actions", {}).pop("--gpu", None)


def gpu_requested(config: pytest.Config) -> bool:
    """Whether `--gpu`, ours or a conftest's, or its ini twin is on."""
    # A conftest's own --gpu may take a number or a name: only a flag that is on means what ours does.
    flags = (config.getoption("stackwise_gpu", False), config.getoption("--gpu", False))
    return any(flag is True for flag in flags) or _ini_flag(config, "stackwise_gpu")


def device_name(config: pytest.Config) -> str:
    """Where models run: cpu, cuda or cuda:N; "auto" is resolved."""
    named = config.getoption("stackwise_device") or ini(config, "stackwise_device")
    if named == "auto":
        from stackwise.device import resolve_device

        return str(resolve_device("auto"))
    return str(named) if named else ("cuda" if gpu_requested(config) else "cpu")


def seed(config: pytest.Config) -> int:
    """The seed; UsageError where it is no number, or out of range."""
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
    """The suite of checks; UsageError where there is none of that name."""
    given = config.getoption("stackwise_suite") or ini(config, "stackwise_suite") or "fast"
    if given not in ("fast", "full"):
        raise pytest.UsageError(f"--stackwise-suite: got {given!r}; allowed: 'fast', 'full'")
    return "full" if given == "full" else "fast"


def strict(config: pytest.Config) -> bool:
    """Return True if warnings fail tests."""
    return bool(config.getoption("stackwise_strict")) or _ini_flag(config, "stackwise_strict")


def _ini_flag(config: pytest.Config, name: str) -> bool:
    """Return a value of the configuration file that is true or false.

    Raises:
        pytest.UsageError: it is neither.
    """
    try:
        return bool(config.getini(name))
    except (ValueError, pytest.UsageError):
        given = cast("Any", config).inicfg.get(name)
        given = getattr(given, "value", given)
        raise pytest.UsageError(f"{name}: got {given!r}; allowed: true, false") from None


def check_names(config: pytest.Config) -> tuple[str, ...] | None:
    """The checks and families that were asked for, as they were written; None: all."""
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
    """MODULE:FACTORY of all that is checked without code, and the folder where its module is looked for.

    That of the configuration file for those that it names, else the one that pytest was started in.
    """
    in_file = dict.fromkeys(config.getini(f"stackwise_{asks}"), config.rootpath)
    given = config.getoption(f"stackwise_{asks}") or []
    return in_file | dict.fromkeys(given, config.invocation_params.dir)


def report_paths(config: pytest.Config) -> list[Path]:
    """The files to write; UsageError for an ending that is not known, or a folder that cannot be written."""
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
    """What the gate is asked for.

    Attributes:
        against: the base.
        head: the revision of the head; None: the files as they are.
        limits: of tests that say nothing.
        missing: how to treat a test that the base does not have.
        build: a command for both trees; None: there is none.
        seconds: time limit of the run; None: no limit.
        timeout: seconds after which a silent process hangs.
        report: the files to write.
        history: path or URL of the store for the results; None: they are not kept.
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
    """What the gate is asked for; None where it is not.

    Raises:
        pytest.UsageError: an option without --stackwise-against, or with a value that is not allowed.
    """
    against = _text(config, "against")
    if against is None:
        # In a configuration file they are for the runs that have one.
        for name in _GATE[1:]:
            if config.getoption(f"stackwise_{name}") is not None:
                raise pytest.UsageError(
                    f"--stackwise-{name.replace('_', '-')}: allowed with --stackwise-against"
                )
        return None
    if not against:  # a variable of the CI that is not set; as a folder it would be this one
        allowed = "a revision, ./FOLDER, a wheel, 'callable'"
        raise pytest.UsageError(f"--stackwise-against: got {against!r}; allowed: {allowed}")
    for name in ("head", "build"):
        if against == "callable" and config.getoption(f"stackwise_{name}") is not None:
            raise pytest.UsageError(
                f"--stackwise-{name}: allowed with a base of its own, not with 'callable': there is one tree"
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
        option = f"--stackwise-{name.replace('_', '-')}"
        raise pytest.UsageError(f"{option}: got {given!r}; allowed: a number of seconds > 0")
    return seconds


def _gate_files(given: str | None, folder: Path) -> tuple[Path, ...]:
    if given is None:
        return ()
    from stackwise.report import report_files

    try:
        return tuple(report_files(folder / given))
    except (ValueError, OSError) as error:
        raise pytest.UsageError(f"--stackwise-gate-report: got {given}: {error}") from None
