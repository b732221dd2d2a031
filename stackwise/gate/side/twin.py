"""Twin: program that forks the processes of both sides. It runs without the package.

One idle process forks into the processes of both sides. Both therefore have the same hash seed, environment
and memory layout. The system chooses a new layout for each round. Rounds of pure Python calls of 0.1 ms
differed by 1.7 % (standard deviation) with a separate layout per side, in steps between layouts. Rounds of
twins differed by 0.3 %, even if one side had more code.

Arguments: the descriptor of the parent's channel, and the descriptor of each twin's channel. The parent
reports on the twins. Each twin receives its task: `module`, `arguments`, `folder`, `import_path`,
`environment`, `log`. Each message is a line of JSON.
"""

import contextlib
import importlib.machinery
import json
import os
import runpy
import signal
import site
import sys
from typing import Any


def become() -> str:
    """Fork the twins. Return, in each twin only, the name of the module that it runs."""
    parent, *channels = map(int, sys.argv[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    twins = []
    for channel in channels:
        twin = os.fork()
        if twin == 0:
            for other in (parent, *channels):
                if other != channel:
                    os.close(other)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            os.setsid()
            told = _told(channel)
            _prepare(told)
            return str(told["module"])
        twins.append(twin)
    for channel in channels:
        os.close(channel)
    _watch(parent, twins)
    return os._exit(0)


def _watch(parent: int, twins: list[int]) -> None:
    """Report the exit of each twin. Kill the remaining processes if the channel is closed."""
    left = dict(enumerate(twins))

    def look(*_: object) -> None:
        for number, twin in list(left.items()):
            # WNOWAIT keeps the process ID reserved until this process exits.
            ended = os.waitid(os.P_PID, twin, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                # If both exit at once, a nested call has already reported the second one.
                if left.pop(number, None) is None:
                    continue
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                _tell(parent, twin=number, code=code)

    signal.signal(signal.SIGCHLD, look)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    _tell(parent, pids=twins)
    look()
    while os.read(parent, 1):
        pass
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for twin in twins:
        try:
            os.killpg(twin, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # not yet a session of its own, or gone
            os.kill(twin, signal.SIGKILL)
        os.waitpid(twin, 0)


def _tell(descriptor: int, **what: object) -> None:
    with contextlib.suppress(OSError):  # the channel is closed
        os.write(descriptor, json.dumps(what).encode() + b"\n")


def _told(channel: int) -> dict[str, Any]:
    """Return the first line of a channel. No byte after the line is read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(channel, 1)
        if not piece:
            os._exit(0)
        line += piece
    told: dict[str, Any] = json.loads(line)
    return told


def _prepare(told: dict[str, Any]) -> None:
    """Prepare this process as `python -m MODULE` would, with the folder, environment and log of its task."""
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    # Without safe_path, the first entry is the folder of this file.
    own = [] if sys.flags.safe_path else [os.getcwd()]  # noqa: PTH109
    sys.path[:] = [*own, *told["import_path"], *sys.path[len(own) :]]
    sys.argv[:] = [told["module"], *told["arguments"]]
    if not sys.flags.no_site:
        _customize()


def _customize() -> None:
    """Run `sitecustomize` of this side, unless the interpreter already ran this file.

    Debian's Python has its own `sitecustomize`, which runs first.
    """
    imported = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    found = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if found is not None and found.origin != imported:
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()


if __name__ == "__main__":
    runpy.run_module(become(), run_name="__main__", alter_sys=True)
