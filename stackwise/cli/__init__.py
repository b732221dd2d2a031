"""The `stackwise` command: a thin wrapper around the library."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Annotated

import tyro

import stackwise
from stackwise.cli.check import Check
from stackwise.cli.gate import Gate
from stackwise.cli.history import History
from stackwise.cli.keys import described_keys
from stackwise.cli.overrides import split_overrides
from stackwise.cli.quality import Quality
from stackwise.cli.replay import Replay
from stackwise.cli.search import Search
from stackwise.cli.train import Train
from stackwise.support.wait_policy import default_wait_policy

__all__ = ["main"]

Command = (
    Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Replay, tyro.conf.subcommand("replay")]
    | Annotated[Gate, tyro.conf.subcommand("gate")]
    | Annotated[History, tyro.conf.subcommand("history")]
    | Annotated[Quality, tyro.conf.subcommand("quality")]
    | Annotated[Search, tyro.conf.subcommand("search")]
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Errors of the user go to standard error, with exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    default_wait_policy()
    if arguments == ["--version"]:
        print(f"stackwise {stackwise.__version__}")
        return 0
    try:
        return _run(arguments)
    except BrokenPipeError:
        # The process that reads the output has exited, such as `head`. Python must not flush at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("stackwise: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        return _refused(f"{error.filename}: {error.strerror}" if named else str(error))
    except ValueError as error:
        return _refused(f"{error}{_location(error)}")
    except (TypeError, ArithmeticError, RuntimeError, ImportError) as error:
        return _refused(f"{type(error).__name__}: {error}")


def _location(error: BaseException) -> str:
    """Return " (FILE:LINE)" of the user's code that caused an error, or ""."""
    if error.__cause__ is None:
        return ""
    installed = Path(sysconfig.get_paths()["purelib"])
    ours = Path(stackwise.__file__).parent
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    files = [
        frame
        for frame in frames
        if not any(Path(frame.filename).is_relative_to(folder) for folder in (ours, installed))
        and Path(frame.filename).is_file()
    ]
    return f" ({files[-1].filename}:{files[-1].lineno})" if files else ""


def _refused(text: str) -> int:
    """Print an error and return the exit code."""
    print(f"stackwise: {text}", file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int:
    trains = arguments[:1] == ["train"]
    pytest_options: list[str] = []
    if arguments[:1] == ["gate"] and "--" in arguments:
        end = arguments.index("--")
        arguments, pytest_options = arguments[:end], arguments[end + 1 :]
    arguments, overrides = split_overrides(arguments) if trains else (arguments, [])
    try:
        command: Check | Train | Replay | Gate | History | Quality | Search = tyro.cli(
            Command,
            args=arguments,
            prog="stackwise",
            description="Check, stress-test and benchmark PyTorch models and training loops. "
            "`stackwise --version` prints the version.",
        )
    except SystemExit:
        if trains and {"-h", "--help"} & set(arguments):
            print(described_keys(), flush=True)
        raise
    if isinstance(command, Gate):
        return command.run(pytest_options)
    return command.run(overrides) if isinstance(command, Train) else command.run()
