"""EarlyImports: what a process of a side may have imported before it is one."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from .imports import file_of

__all__ = ["EarlyImports"]

# They take seconds to import, and start no thread by that which a fork would miss.
_SLOW = frozenset({"mpmath", "networkx", "numpy", "scipy", "sympy", "torch", "transformers", "triton"})
_INSTALLED = frozenset({"dist-packages", "site-packages"})
# What pytest and the gate themselves change, and torch where it compiles, which reads it only then.
_OWN = ("PYTEST_", "STACKWISE_GATE_", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Where some of these look for their device as they are imported, no fork can use it.
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/accel")


class EarlyImports:
    """Which installed modules of this process the twins of later rounds may import before they are forked.

    Made before any code of the tests or their plugins is loaded, which may set variables that libraries read
    as they are imported: what they set and leave set is seen.
    """

    def __init__(self) -> None:
        self._began = _environment()
        # Where twins look for them; folders of PYTHONPATH are among them where they are of this kind.
        self._places = [place for place in sys.path if not _INSTALLED.isdisjoint(Path(place).parts)]
        self._told: set[str] = set()
        self._never = any(Path(device).exists() for device in _DEVICES)

    def forbid(self) -> None:
        """None of them from now on: an import may be what is measured."""
        self._never = True

    def new(self) -> list[str] | None:
        """Names that were not told before, in the order of their import; None: there are to be none."""
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
        """Whether one of them is from elsewhere, and what is imported ahead could find another one."""
        others = [n for n in _SLOW if n in sys.modules and not self._is_installed(sys.modules[n])]
        return any(PathFinder.find_spec(name, self._places) for name in others)

    def _is_installed(self, module: object) -> bool:
        file = file_of(module)
        return file is not None and any(file.startswith(place + os.sep) for place in self._places)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
