"""EarlyImports: modules that a process may import before it becomes a side."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from .imports import file_of

__all__ = ["EarlyImports"]

# Packages with slow imports that start no threads. A fork would lose threads.
_SLOW = frozenset({"mpmath", "networkx", "numpy", "scipy", "sympy", "torch", "transformers", "triton"})
_INSTALLED = frozenset({"dist-packages", "site-packages"})
# Variables that pytest and the gate change, and variables that torch changes when it compiles. Torch reads
# these only then.
_OWN = ("PYTEST_", "STACKWISE_GATE_", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Devices of accelerators. If one exists, some of the packages may open it during the import, and a fork
# cannot use it.
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/accel")


class EarlyImports:
    """Installed modules of this process that twins of later rounds may import before their fork.

    Create it before any code of the tests or their plugins is loaded. Such code may set variables that
    libraries read during their import. Variables that remain changed are detected.
    """

    def __init__(self) -> None:
        self._began = _environment()
        # Search path of the twins: installation folders, including folders of PYTHONPATH of this kind.
        self._places = [place for place in sys.path if not _INSTALLED.isdisjoint(Path(place).parts)]
        self._told: set[str] = set()
        self._never = any(Path(device).exists() for device in _DEVICES)

    def forbid(self) -> None:
        """Forbid early imports from now on, since an import may be the measured call."""
        self._never = True

    def new(self) -> list[str] | None:
        """Return names that were not reported before, in import order; None: early imports are forbidden."""
        if self._never or _environment() != self._began or self._hide_installed():
            return None
        found = [
            name
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in _SLOW and name not in self._told and self._is_installed(module)
        ]
        self._told.update(found)
        return found

    def _hide_installed(self) -> bool:
        """Return True if a module is not installed, but an early import could find an installed one."""
        others = [n for n in _SLOW if n in sys.modules and not self._is_installed(sys.modules[n])]
        return any(PathFinder.find_spec(name, self._places) for name in others)

    def _is_installed(self, module: object) -> bool:
        file = file_of(module)
        return file is not None and any(file.startswith(place + os.sep) for place in self._places)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
