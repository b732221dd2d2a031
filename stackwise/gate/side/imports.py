"""Imports: check that the measured code belongs to this side."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from .own_packages import own_packages

__all__ = ["Imports", "file_of", "is_installed"]

_HERE = Path(__file__).resolve().parent
_PREFIXES = {
    Path(place).resolve() for place in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())
}


def is_installed(path: Path, project: Path | None = None) -> bool:
    """Return True if a path belongs to Python or to an environment, which may be inside of a project.

    A prefix that contains the project is ignored for the files of the project. For example, a project in
    /usr/src is inside of the prefix of the system's Python.
    """
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    around = set() if project is None else {project, *project.parents}
    return any(path.is_relative_to(prefix) for prefix in _PREFIXES - around)


def file_of(module: object) -> str | None:
    """Return the `__file__` of a value of `sys.modules`, or None if it has none.

    No code of the module runs: on access to an attribute, a lazy module may raise any error or import its
    files.
    """
    file = inspect.getattr_static(module, "__file__", None)
    return file if isinstance(file, str) else None


class Imports:
    """Origin of the modules of this process.

    Args:
        tree: folder of the files of this side; None: both sides use the same files.
        tests: files and folders of the tests, which are the same on both sides, relative to the tree.
        foreign: folders whose modules must not be imported: the tree of the other side, and the project
            itself.
        own: folders inside of these whose modules may be imported, such as the program of a side in this
            project.
    """

    def __init__(
        self, tree: str | None, tests: Sequence[str], foreign: Sequence[str], own: Sequence[str] = ()
    ) -> None:
        self._tree = None if tree is None else Path(tree).resolve()
        self._tests = [self._tree / test for test in tests] if self._tree is not None else []
        self._foreign = [Path(folder).resolve() for folder in foreign]
        self._ours = [_HERE, *(Path(folder).resolve() for folder in own)]
        self._packages = frozenset[str]() if self._tree is None else own_packages(self._tree, self._tests)
        self._looked_at: set[str] = set()
        self._own, self._stray = False, ""
        self._new: list[str] = []

    def look(self) -> tuple[bool, str]:
        """Inspect new modules for code of this side and for stray modules.

        Returns:
            True if a module apart from tests belongs to this side; a text on a module that should belong to
            this side and does not, or "".
        """
        if self._tree is None:
            return True, ""
        for name, module in list(sys.modules.items()):
            file = file_of(module)
            # torch.ops and similar modules have the relative path "_ops.py".
            if file is not None and Path(file).is_absolute() and file not in self._looked_at:
                self._looked_at.add(file)
                self._look_at(name, Path(os.path.realpath(file)))
        return self._own, self._stray

    def new(self) -> list[str]:
        """Return the modules of the tree that `look` has found since the last call, relative to the tree."""
        found, self._new = self._new, []
        return found

    def _look_at(self, name: str, path: Path) -> None:
        assert self._tree is not None
        if path.is_relative_to(self._tree):
            self._new.append(str(path.relative_to(self._tree)))
            self._own = self._own or not any(path.is_relative_to(test) for test in self._tests)
        elif name in self._packages and not self._of_python(path):
            self._stray = f"{name} from {path}, although its tree has {name}"
        elif any(path.is_relative_to(folder) for folder in self._ours):
            return  # this package; trees may be inside of the project if TMPDIR is
        elif any(path.is_relative_to(f) and not is_installed(path, f) for f in self._foreign):
            self._stray = str(path)

    def _of_python(self, path: Path) -> bool:
        """Return True if a path is of the standard library, which may share a name with the project."""
        standard = Path(sysconfig.get_paths()["stdlib"]).resolve()
        return path.is_relative_to(standard) and "site-packages" not in path.parts
