"""Overlay: the test files of head, which the base gets too, and the changes that are hidden by this."""

from __future__ import annotations

import ast
import filecmp
import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from stackwise.gate.packages import declared_packages, is_project

__all__ = ["files_of", "lay_over", "overlay_parts", "test_files", "test_functions"]

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


def overlay_parts(head: Path, tests: Sequence[Path], packages: Collection[str]) -> list[Path]:
    """Return the files and folders of head that both trees get: tests, what they need, and configuration.

    That is the whole folder of a test if all of it is for tests. In another folder, such as a package that
    has its tests beside its modules, it is the test files alone: otherwise head is compared with itself.

    Args:
        head: tree of head.
        tests: test files, relative to the tree.
        packages: top-level packages that the project installs: their modules are never part of it.
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
    """Replace parts of the base by those of head, but keep what a build has made in it.

    Args:
        head: tree of head.
        base: tree of base.
        parts: files and folders, relative to both.
        tests: test files, relative to both.
        old: files that the base had before it was built, relative to it.

    Returns:
        modules that differed before, relative to the trees: their change is not compared. Test files and
        conftests are not among them.
    """
    hidden = []
    for part in parts:
        for file in sorted(files_of(head, part) | (files_of(base, part) & set(old))):
            source, target = head / file, base / file
            is_module = file.suffix == ".py" and file.name != "conftest.py" and file not in tests
            in_both = source.is_file() and target.is_file()
            if is_module and in_both and not filecmp.cmp(source, target, shallow=False):
                hidden.append(file)
            replace_place(source, target)
    return hidden


def replace_place(source: Path, target: Path) -> None:
    """Put a file, a link or a folder in the place of another; remove the other if there is no source."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif os.path.lexists(target):
        target.unlink()
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    elif os.path.lexists(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def files_of(tree: Path, part: Path = Path()) -> set[Path]:
    """Return the files of a tree below a part of it, or the part if it is a file, relative to the tree."""
    place = tree / part
    if place.is_symlink() or place.is_file():
        return {part}
    found: set[Path] = set()
    for folder, folders, files in os.walk(place):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        found.update((Path(folder) / name).relative_to(tree) for name in (*files, *links))
    return found


def test_files(tree: Path, tests: Iterable[Path]) -> list[Path]:
    """Return the files that are named like tests in the folders of these tests, relative to the tree."""
    found: dict[Path, None] = {}
    for test in tests:
        for pattern in ("test_*.py", "*_test.py"):
            for file in sorted((tree / test.parent).glob(pattern)):
                found[file.relative_to(tree)] = None
    return list(found)


def test_functions(files: dict[str, str]) -> dict[str, str]:
    """Return FILE::NAME of each test function, with its body without its name."""
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
    """Return True if all of a folder is for tests, by its name and by what the project installs."""
    if _ALWAYS_TESTS.fullmatch(folder.name):
        return True
    if not _PERHAPS_TESTS.fullmatch(folder.name) or is_project(head / folder):
        return False
    if folder.parent.name == "src" or (head / folder.parent / "__init__.py").exists():
        return False
    declared = [declared_packages(head / above) for above in folder.parents]
    return folder.name not in frozenset(packages).union(*declared)


def _beside(head: Path, test: Path) -> list[Path]:
    """Return the test files in the folder of a test. A module such as t_test.py has no tests in it."""
    found = []
    for file in test_files(head, [test]):
        text = (head / file).read_text(errors="replace")
        if file.name.startswith("test_") or test_functions({str(file): text}):
            found.append(file)
    return found
