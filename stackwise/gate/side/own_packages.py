"""Own packages: names of the packages of a tree, including the projects of a monorepo."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["own_packages"]

_PACKAGING = frozenset({"pyproject.toml", "setup.cfg", "setup.py"})
_SOURCES = ("src", "python", "lib")
_DEEPEST = 4  # levels of folders in which projects are searched
# Folders with projects and packages that are copies or examples, or that an installation does not have.
_OTHER = frozenset(
    {
        *("benchmark", "benchmarks", "doc", "docs", "example", "examples", "test", "testing", "tests"),
        *("_vendor", "_vendored", "extern", "external", "third_party", "thirdparty", "vendor", "vendored"),
        *("build", "dist", "dist-packages", "node_modules", "site-packages"),
    }
)


def own_packages(tree: Path, tests: Sequence[Path] = ()) -> frozenset[str]:
    """Return the names by which the packages and modules of a tree are imported.

    They are in the root of the tree and in its `src`, in folders of `sys.path` inside of the tree, and in
    each project below the tree: a folder with a packaging file. For a project, the packages in its folder
    count, and the packages and modules in its `src`, `python` and `lib`. A folder without a packaging file
    does not count, since its packages may be copies: docs, vendored packages, data.

    Args:
        tree: absolute path of the root.
        tests: absolute paths of files and folders whose packages do not count.
    """
    names = {*_names(tree, modules=True), *_names(tree / "src", modules=True)}
    for entry in map(Path, sys.path):
        place = Path(os.path.realpath(entry))
        if (
            place.is_relative_to(tree)
            and _OTHER.isdisjoint(place.relative_to(tree).parts)
            and not any(place.is_relative_to(test) for test in tests)
        ):
            names.update(_names(place, modules=True))
    for project in _projects(tree, tests):
        names.update(name for name in _names(project, modules=False) if name.lower() not in _OTHER)
        for source in _SOURCES:
            if not (project / source / "__init__.py").exists():
                names.update(_names(project / source, modules=True, namespaces=source == "src"))
    return frozenset(names)


def _projects(folder: Path, tests: Sequence[Path], depth: int = 0) -> Iterator[Path]:
    """Yield all folders with a packaging file, from `folder` down, but none inside of a package."""
    files, folders = _listed(folder)
    if not _PACKAGING.isdisjoint(files):
        yield folder
    if depth == _DEEPEST or "__init__.py" in files:
        return
    for name in folders:
        inner = folder / name
        if not name.startswith(".") and name.lower() not in _OTHER and inner not in tests:
            yield from _projects(inner, tests, depth + 1)


def _names(place: Path, *, modules: bool, namespaces: bool = False) -> Iterator[str]:
    """Yield the names of the packages and modules that are imported from a folder.

    Args:
        place: folder, which may be missing.
        modules: True to yield modules in single files too.
        namespaces: True to yield packages of namespace packages too, such as `acme.core`.
    """
    files, folders = _listed(place)
    if modules:
        yield from (file.removesuffix(".py") for file in files if file.endswith(".py"))
    for name in folders:
        if (place / name / "__init__.py").exists():
            yield name
        elif namespaces and name.isidentifier():
            yield from (f"{name}.{inner}" for inner in _names(place / name, modules=True))


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the folders in a folder, without links to folders."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:  # missing, a file, or not readable
        return [], []
    return [name for name, is_dir in found if not is_dir], [name for name, is_dir in found if is_dir]
