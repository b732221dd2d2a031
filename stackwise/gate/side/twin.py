"""Twin: what a process of a side is before it is that of a side. Run as a program, without the package.

One process, which has done nothing yet, forks into those of both sides. So they begin with the same hash
seed, the same environment and the same layout of memory, which the system chooses anew for each round. Of
pure Python of 0.1 ms rounds differed by 1.7 % (standard deviation) where each side had a layout of its own,
in steps of what a layout is worth, and by 0.3 % as twins, also where one of them had more code.

Arguments: the descriptor of the parent's channel, and that of each twin's. On the first it is told `imports`,
names of installed modules that both would import, which are imported before the fork, and tells of the twins;
on the others each is told what to become: `module`, `arguments`, `folder`, `import_path`, `environment`,
`log`. Each message is a line of JSON.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import site
import sys
import warnings
from collections.abc import Iterable
from typing import Any

_INSTALLED = frozenset({"dist-packages", "site-packages"})  # as in `early_imports`
_CHUNK = 65536


def become() -> str:
    """Fork the twins, and return in each of them alone: the module that it is to run, in its place."""
    parent, *channels = map(int, sys.argv[1:])
    _import(_told(parent, _CHUNK)["imports"])  # all that the parent is ever told
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


def _import(names: Iterable[str]) -> None:
    """Import what is installed; what cannot be, each side will find out for itself."""
    path = list(sys.path)
    # Not from the folder of this file, nor from where the sides' own code may lie.
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = {os.path.abspath(place) for place in inherited if not _is_installed(place)}  # noqa: PTH100
    sys.path[:] = [place for place in (path if sys.flags.safe_path else path[1:]) if place not in own]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    sys.path[:] = path
    gc.collect()
    gc.freeze()  # or the first collection on each side would write on all of it


def _is_installed(place: str) -> bool:
    return not _INSTALLED.isdisjoint(place.split(os.sep))  # noqa: PTH206


def _watch(parent: int, twins: list[int]) -> None:
    """Tell how each of the twins ends, and end what is left of them when nobody listens any more."""
    left = dict(enumerate(twins))

    def look(*_: object) -> None:
        for number, twin in list(left.items()):
            # It stays until this process ends, so that its number is nobody else's.
            ended = os.waitid(os.P_PID, twin, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                # Where both end at once, the second is told of while the first is.
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
    with contextlib.suppress(OSError):  # nobody listens: the end is near
        os.write(descriptor, json.dumps(what).encode() + b"\n")


def _told(channel: int, at_once: int = 1) -> dict[str, Any]:
    """The first line of a channel, and nothing behind it where no more than a byte is read at once."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(channel, at_once)
        if not piece:
            os._exit(0)
        line += piece
    told: dict[str, Any] = json.loads(line)
    return told


def _prepare(told: dict[str, Any]) -> None:
    """Be where and what `python -m MODULE` would be, started in that folder with that environment."""
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    os.environ.update(told["environment"])
    if "tempfile" in sys.modules:
        # An import may have looked for it in the environment of before.
        vars(sys.modules["tempfile"])["tempdir"] = None
    os.chdir(told["folder"])
    # The first is the folder of this file, where Python is not told to leave out what it was started with.
    own = [] if sys.flags.safe_path else [os.getcwd()]  # noqa: PTH109
    sys.path[:] = [*own, *told["import_path"], *sys.path[len(own) :]]
    sys.argv[:] = [told["module"], *told["arguments"]]
    if "sitecustomize" not in sys.modules and not sys.flags.no_site:
        site.execsitecustomize()  # it may be of the tree


if __name__ == "__main__":
    runpy.run_module(become(), run_name="__main__", alter_sys=True)
