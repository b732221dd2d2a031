"""Run a function with a training run in new processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stackwise.subject.factory import load_factory
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun
from stackwise.support.files import replacing

__all__ = ["Outcome", "Recipe", "run_in_processes"]

_SECONDS = 300.0


@dataclass(frozen=True)
class Recipe:
    """Instructions for another process to build a run: a pickled function, or "MODULE:FACTORY".

    Attributes:
        attribute: name of the spec's function that builds the run.
        pickled: the pickled function. None: it cannot be pickled.
        factory: "MODULE:FACTORY" of the spec or the run. None: unknown.
    """

    attribute: str
    pickled: bytes | None
    factory: str | None

    @classmethod
    def of(cls, spec: TrainerSpec, attribute: str = "build") -> Recipe | None:
        """Return the instructions for a spec, or None if there is neither a function nor a factory."""
        pickled: bytes | None = None
        with suppress(pickle.PicklingError, AttributeError, TypeError):
            pickled = pickle.dumps(getattr(spec, attribute))
        return None if pickled is None and spec.factory is None else cls(attribute, pickled, spec.factory)

    def build(self) -> Callable[[], TrainingRun]:
        """Return the function that builds the run."""
        if self.pickled is not None:
            try:
                return pickle.loads(self.pickled)  # type: ignore[no-any-return]  # noqa: S301  our own bytes
            except Exception:
                if self.factory is None:
                    raise
        assert self.factory is not None
        spec = TrainerSpec.of(load_factory(self.factory))
        return getattr(spec, self.attribute)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Outcome:
    """Result of a process.

    Attributes:
        value: return value of the function.
        error: the exception, or the reason why the process stopped; "" if the function returned.
        built: False if the process could not build the run.
    """

    value: Any = None
    error: str = ""
    built: bool = True


def run_in_processes(
    function: str,
    recipe: Recipe,
    arguments: list[dict[str, Any]],
    *,
    seconds: float = _SECONDS,
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Call `function(build, **arguments[i])` in a new process for each i, all at the same time.

    Args:
        function: "module:name" of a function. Its first argument is the function that builds the run.
        recipe: instructions to build the run.
        arguments: keyword arguments for each process. They must be picklable.
        seconds: time limit. A process that exceeds it is killed.
        stop: polled. If it returns True, all processes are killed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for index, keywords in enumerate(arguments):
            folder = Path(scratch) / str(index)
            folder.mkdir()
            request = (function, recipe, keywords, torch.get_num_threads())
            (folder / "request").write_bytes(pickle.dumps(request))
            children.append((folder, _start(folder)))
        deadline, reason = time.monotonic() + seconds, ""
        while not reason and any(child.poll() is None for _, child in children):
            time.sleep(0.02)
            if stop():
                reason = "was stopped"
            elif time.monotonic() > deadline:
                reason = f"did not finish in {seconds:g} s"
        for _, child in children:
            child.kill()
            child.wait()
        return [_outcome(folder, child.returncode, reason) for folder, child in children]


def _start(folder: Path) -> subprocess.Popen[bytes]:
    # The new process can import everything that this one can.
    paths = [path or str(Path.cwd()) for path in sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = "import sys; from stackwise.checks.probe.another_process import main; main(sys.argv[1])"
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603  our own interpreter and our own command
            [sys.executable, "-c", command, str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _outcome(folder: Path, code: int, reason: str) -> Outcome:
    answer = folder / "answer"
    if answer.exists():
        return pickle.loads(answer.read_bytes())  # type: ignore[no-any-return]  # noqa: S301
    if reason and code < 0:
        return Outcome(error=f"the process {reason}")
    last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
    return Outcome(error=f"the process exited with status {code}: {''.join(last)}")


def main(folder: str) -> None:
    """Read the request from a folder, execute it, and write the outcome."""
    function, recipe, keywords, n_threads = pickle.loads((Path(folder) / "request").read_bytes())  # noqa: S301
    torch.set_num_threads(n_threads)
    built = False
    try:
        build = recipe.build()
        built = True
        outcome = Outcome(load_factory(function)(build, **keywords))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        outcome = Outcome(error=text, built=built)
    with replacing(Path(folder) / "answer") as scratch:
        scratch.write_bytes(pickle.dumps(outcome))
