"""Overlay: test files of the head that replace the base's test files, and the changes that this hides."""

from __future__ import annotations

import ast
import filecmp
import os
import re
import shutil
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

__all__ = [
    "declared_packages",
    "files_of",
    "installed_packages",
    "is_project",
    "is_same",
    "lay_over",
    "overlay_parts",
    "test_files",
    "test_functions",
]

_CONFIGURATION = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)
_ALWAYS_TESTS = re.compile(r"tests?", re.IGNORECASE)
_PERHAPS_TESTS = re.compile(r"testing|bench(es|marks?)?|perf|performance", re.IGNORECASE)
# Names of packages in the settings of build backends.
_BACKENDS = ("flit", "hatch", "maturin", "pdm", "poetry", "scikit-build", "setuptools", "uv")
_KEYS = ("packages", "include", "module", "module-name", "name")
_OTHER_KEYS = ("sdist", "exclude", "where", "from")  # an sdist has tests too


def overlay_parts(head: Path, tests: Sequence[Path], packages: Collection[str]) -> list[Path]:
    """Return the files and folders that both trees take from head: tests, their helpers and configuration.

    For a folder of tests, this is the whole folder. For another folder, such as a package with tests next to
    its modules, these are the test files only. Otherwise head would be compared with itself.

    Args:
        head: tree of head.
        tests: test files, relative to the tree.
        packages: top-level packages that the project installs. Their folders are not folders of tests.
    """
    parts: dict[Path, None] = {}
    for test in tests:
        whole = next((above for above in test.parents if _is_for_tests(above, head, packages)), None)
        if whole is not None:
            parts[whole] = None
        else:
            parts |= dict.fromkeys([test, *_beside(head, test)])
        for above in test.parents:
            for name in ("conftest.py", *_CONFIGURATION):
                parts[above / name] = None
    return [part for part in parts if not any(above in parts for above in part.parents)]


def lay_over(
    head: Path, base: Path, parts: Iterable[Path], tests: Collection[Path], old: Collection[Path]
) -> list[Path]:
    """Replace parts of the base by parts of the head. Files that a build has created in the base remain.

    Args:
        head: tree of head.
        base: tree of base.
        parts: files and folders to replace, relative to the trees.
        tests: test files, relative to the trees.
        old: files that the base had before its build, relative to the tree.

    Returns:
        changed modules that were replaced, relative to the trees: their change is not compared. Test files
        and conftests are not included.
    """
    hidden = []
    for part in parts:
        for file in sorted(files_of(head, part) | (files_of(base, part) & set(old))):
            source, target = head / file, base / file
            is_module = file.suffix == ".py" and file.name != "conftest.py" and file not in tests
            if is_module and source.is_file() and target.is_file() and not is_same(source, target):
                hidden.append(file)
            replace_place(source, target)
    return hidden


def replace_place(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`, a file, link or folder. Remove it if there is no source."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif os.path.lexists(target):
        target.unlink()
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    elif os.path.lexists(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def is_same(one: Path, other: Path) -> bool:
    """Return True if two files have the same content, two links have the same target, or neither exists."""
    # With `Path`, a name that is too long for a file would raise OSError.
    if os.path.islink(one) or os.path.islink(other):  # noqa: PTH114
        return os.path.islink(one) and os.path.islink(other) and one.readlink() == other.readlink()  # noqa: PTH114
    exist = {os.path.isfile(path) for path in (one, other)}  # noqa: PTH113
    return exist == {False} or (exist == {True} and filecmp.cmp(one, other, shallow=False))


def files_of(tree: Path, part: Path = Path()) -> set[Path]:
    """Return the files below a folder of a tree, or `part` itself if it is a file, relative to the tree."""
    place = tree / part
    if place.is_symlink() or place.is_file():
        return {part}
    found: set[Path] = set()
    for folder, folders, files in os.walk(place):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        found.update((Path(folder) / name).relative_to(tree) for name in (*files, *links))
    return found


def test_files(tree: Path, tests: Iterable[Path]) -> list[Path]:
    """Return the files in the folders of these tests whose names match tests, relative to the tree."""
    found: dict[Path, None] = {}
    for test in tests:
        for pattern in ("test_*.py", "*_test.py"):
            for file in sorted((tree / test.parent).glob(pattern)):
                found[file.relative_to(tree)] = None
    return list(found)


def test_functions(files: dict[str, str]) -> dict[str, str]:
    """Return the body of each test function, without its name, by FILE::NAME."""
    found = {}
    for file, text in files.items():
        try:
            module = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                body = [ast.dump(part) for part in (node.args, *node.decorator_list, *node.body)]
                found[f"{file}::{node.name}"] = "\n".join(body)
    return found


test_files.__test__ = test_functions.__test__ = False  # type: ignore[attr-defined] # for pytest


def _is_for_tests(folder: Path, head: Path, packages: Collection[str]) -> bool:
    """Return True if a folder is a folder of tests: by its name, and not a package or another project."""
    if _ALWAYS_TESTS.fullmatch(folder.name):
        return True
    if not _PERHAPS_TESTS.fullmatch(folder.name) or is_project(head / folder):
        return False
    if folder.parent.name == "src" or (head / folder.parent / "__init__.py").exists():
        return False
    declared = [declared_packages(head / above) for above in folder.parents]
    return folder.name not in frozenset(packages).union(*declared)


def _beside(head: Path, test: Path) -> list[Path]:
    """Return the test files in the folder of a test, without modules such as t_test.py that have no tests."""
    found = []
    for file in test_files(head, [test]):
        text = (head / file).read_text(errors="replace")
        if file.name.startswith("test_") or test_functions({str(file): text}):
            found.append(file)
    return found


def declared_packages(project: Path) -> frozenset[str]:
    """Return the top-level packages that the pyproject.toml of a folder declares.

    The result includes the name of the project: build backends use a package of this name by default.
    """
    settings = _pyproject(project)
    tools = settings.get("tool", {})
    names = [settings.get("project", {}).get("name", ""), *_texts([tools.get(b) for b in _BACKENDS], False)]
    # A path ("src/perf"), the name of a distribution ("acme-perf") or of a module ("perf._core").
    return frozenset(re.sub(r"[-.]+", "_", name.strip("/").split("/")[-1]).lower() for name in names) | {
        name.partition(".")[0] for name in names
    }


def installed_packages(root: Path) -> frozenset[str]:
    """Return the top-level packages of the installed distributions whose source is below `root`."""
    found: set[str] = set()
    for distribution in distributions():
        if _is_of(distribution, root):
            top_level = distribution.read_text("top_level.txt")
            if top_level is None:
                files = [file for file in distribution.files or () if file.suffix == ".py"]
                found.update(file.parts[0] for file in files if len(file.parts) > 1)
            else:
                found.update(top_level.split())
    return frozenset(found)


def is_project(folder: Path) -> bool:
    """Return True if a folder has a setup.py, or a pyproject.toml that declares a project."""
    return (folder / "setup.py").exists() or not {"project", "build-system"}.isdisjoint(_pyproject(folder))


def _is_of(distribution: Distribution, root: Path) -> bool:
    origin = distribution.read_text("direct_url.json") or ""
    if re.search(rf"file://{re.escape(str(root))}[/\"]", origin):
        return True
    place = Path(str(distribution.locate_file(""))).resolve()  # an egg-info lies next to its source
    return place.is_relative_to(root) and "site-packages" not in place.parts


def _pyproject(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is missing, or pytest has refused it
        return {}


def _texts(value: object, named: bool) -> Iterator[str]:
    """Yield the strings that name packages in the settings of build backends."""
    if isinstance(value, str) and named:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, named)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in _OTHER_KEYS:
                yield from _texts(inner, named or key in _KEYS)
