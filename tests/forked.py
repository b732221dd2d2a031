"""Processes that need not import torch: a server does once, and is copied for each.

Nothing of this process is in them but its variables, its folder and what is handed to them. For tests of what
other processes do; where it matters how one begins, it is started by its command.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
# Limit of a wait that has to end: a process or a test that takes longer hangs. Busy machines take minutes.
HANG_SECONDS = 600
# What takes a while to import.
MODULES = ["pytest", "stackwise.checkpoint", "stackwise.cli.train", "stackwise.stability.faults", "torch"]
MODULES += ["stackwise.training", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run"]


def start(function, *arguments, output, **variables):
    """A process that calls `function(*arguments)`, as multiprocessing has it.

    Args:
        function: at the top of a module.
        *arguments: what pickle takes.
        output: the file that has what it prints, errors too.
        **variables: of its environment, beside those that there are here; None: without it.
    """
    environment = {name: value for name, value in (os.environ | variables).items() if value is not None}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    process = context.Process(target=_call, args=(function, arguments, Path(output), environment))
    sys.path.append(ROOT)  # it has the same, and looks for `function` there
    try:
        process.start()
    finally:
        sys.path.pop()
    return process


def end_of(process, seconds=HANG_SECONDS):
    """Return the exit code of a process. It is killed after `seconds`."""
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode


def printed(program, *arguments):
    """What a program, as text, prints that is told these arguments; it has to end well."""
    with tempfile.TemporaryDirectory() as folder:
        said, errors = Path(folder) / "said", Path(folder) / "errors"
        code = end_of(start(_run, program, ["-c", *arguments], said, output=errors))
        assert code == 0, errors.read_text()
        return said.read_text()


def _run(program, arguments, said):
    sys.argv = arguments
    with said.open("w") as file, contextlib.redirect_stdout(file):
        exec(compile(program, "-c", "exec"), {"__name__": "__main__"})


def _call(function, arguments, output, environment):
    os.environ.clear()
    os.environ.update(environment)
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    if "OMP_NUM_THREADS" in environment:  # which is read as torch is imported
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    function(*arguments)
