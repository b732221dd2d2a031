"""Trees: the files of both sides, in two folders whose paths are equally long.

How long a path is moves what a process keeps in memory, and with it its speed. Nothing is registered in the
repository: no worktree, no branch, no index of it is touched, so that nothing of it has to be cleaned up.
"""

from __future__ import annotations

import ast
import filecmp
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stackwise.gate.temporary_folder import PREFIX, temporary_folder

__all__ = ["Renamed", "Tree", "both_trees", "repository_of", "revision_name"]

_NOT_COPIED = (
    ".git",
    ".venv",
    "venv",
    ".tox",
    ".nox",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    "node_modules",
    f"{PREFIX}*",
)
_CONFIGURATION = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)
_OF_TESTS = re.compile(r"tests?|testing|bench(es|marks?)?|perf|performance", re.IGNORECASE)
_NOTHING_DIFFERS = "nothing but tests differs between base and head: the same code was compared with itself"


@dataclass(frozen=True)
class Tree:
    """The files of a side.

    Attributes:
        folder: where they lie.
        name: for people: a revision with its commit, a folder, a wheel.
        commit: of a revision; None: it is none, or files differ from it.
        notes: what was not done as one might expect.
        tests: what in it is the head's on both sides: files and folders, relative to it.
    """

    folder: Path
    name: str
    commit: str | None = None
    notes: tuple[str, ...] = ()
    tests: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Renamed:
    """A test of the base that the head does not have.

    Attributes:
        old: its function, as FILE::NAME.
        new: a function of the head, new to it, with the same body; None: there is none, or are several.
    """

    old: str
    new: str | None


def repository_of(folder: Path) -> Path | None:
    """The top folder of the git repository that `folder` lies in; None where it lies in none."""
    if shutil.which("git") is None:
        return None
    done = _run_git(folder, "rev-parse", "--show-toplevel")
    return Path(done.stdout.strip()).resolve() if done.returncode == 0 else None


def revision_name(repository: Path, revision: str) -> str:
    """The full commit that a revision means.

    Raises:
        ValueError: there is no such revision.
    """
    done = _look_up(repository, revision)
    if done.returncode:
        allowed = f"a revision of {repository}, ./FOLDER, a wheel, 'callable'"
        raise ValueError(
            f"against: got {revision!r}; allowed: {allowed}{_if_shallow(repository)}{_said(done)}"
        )
    return done.stdout.strip()


@contextmanager
def both_trees(
    against: str,
    *,
    root: Path,
    tests: Sequence[Path],
    head: str | None = None,
    build: str | None = None,
    start: Path | None = None,
    settings: Path | None = None,
) -> Iterator[tuple[Tree, Tree, list[Renamed]]]:
    """The trees of base and head, for as long as this lasts; and the tests that the head no longer has.

    The files of the tests, with all that lies in their folders and the conftests and configuration above, are
    the head's in both trees.

    Args:
        against: of the base: a revision, a folder, a wheel, or REVISION... for the merge base with the head.
        root: the folder whose files the head is: the top of a git repository, or any.
        tests: files with tests, below `root`.
        head: of the head, a revision; None: the files as they are now, also those that git was not told of.
        build: a command for the shell that is run in each tree, to compile extensions, say.
        start: the folder that the name of a folder or wheel starts from; None: that of the process.
        settings: configuration file of pytest, which is the head's in both trees; None: one of those that
            pytest finds by itself.

    Raises:
        ValueError: there is no such revision, folder or wheel; a command failed in one of the trees.
    """
    named, against = against, _merge_base(root, against, head)
    with temporary_folder() as folder:
        head_tree = _head(folder / "head", root, head)
        base_tree, old_files = _base(
            folder / "base",
            against,
            root=root,
            head=head_tree,
            tests=tests,
            build=build,
            start=start or Path.cwd(),
        )
        if against != named:
            base_tree = replace(base_tree, name=f"{named} ({against[:9]})")
        elif base_tree.commit is not None:
            notes = _not_an_ancestor(root, named, base_tree.commit, head)
            base_tree = replace(base_tree, notes=(*base_tree.notes, *notes))
        renamed = _renamed(old_files, head_tree.folder, [t.relative_to(root) for t in tests])
        if build is not None:
            _build(build, head_tree)
        elif _same(base_tree.folder, head_tree.folder):
            base_tree = replace(base_tree, notes=(*base_tree.notes, _NOTHING_DIFFERS))
        parts = tuple(_overlay(head_tree.folder, [test.relative_to(root) for test in tests]))
        if settings is not None and settings.is_relative_to(root):
            parts += (settings.relative_to(root),)
            _replace(head_tree.folder / parts[-1], base_tree.folder / parts[-1])
        yield replace(base_tree, tests=parts), replace(head_tree, tests=parts), renamed


def _merge_base(root: Path, against: str, head: str | None) -> str:
    """Return the commit that `A...B` names, where B is the head if it is empty; otherwise `against`.

    Raises:
        ValueError: the revisions have no common ancestor that this clone knows.
    """
    one, dots, other = against.partition("...")
    if not dots or against.startswith((".", "/")) or repository_of(root) is None:
        return against
    commits = [revision_name(root, name) for name in (one, other or head or "HEAD")]
    done = _run_git(root, "merge-base", *commits)
    if done.returncode:
        names = f"{one} and {other or head or 'HEAD'}"
        allowed = f"revisions with a common ancestor, and {names} have none{_if_shallow(root)}"
        raise ValueError(f"against: got {against!r}; allowed: {allowed}{_said(done)}")
    return done.stdout.strip()


def _not_an_ancestor(root: Path, name: str, base: str, head: str | None) -> list[str]:
    """Return a note if the base has commits that the head does not have."""
    tip = revision_name(root, head or "HEAD")
    # A shallow clone does not know which commits are ancestors.
    if _if_shallow(root) or _run_git(root, "merge-base", "--is-ancestor", base, tip).returncode != 1:
        return []
    count = _run_git(root, "rev-list", "--count", f"{tip}..{base}").stdout.strip()
    note = f"{name} is no ancestor of the head: commits that the head lacks ({count}) are compared too"
    return [f"{note}; to compare with the commit where both part: {name}..."]


def _if_shallow(repository: Path) -> str:
    """Return what helps if a clone does not have all commits, to end a sentence with."""
    shallow = _run_git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    return "; this clone is shallow: fetch more (actions/checkout: fetch-depth: 0)" if shallow else ""


def _head(folder: Path, root: Path, revision: str | None) -> Tree:
    if revision is not None:
        return _checked_out(folder, root, revision)
    if not (root / ".git").exists():
        _copy_folder(root, folder)
        return Tree(folder, str(root))
    _copy_files(root, folder, _known_files(root))
    commit = _run_git(root, "rev-parse", "HEAD").stdout.strip()
    changed = bool(_run_git(root, "status", "--porcelain").stdout.strip())
    name = f"working tree at {commit[:9]}{' with changes' if changed else ''}"
    return Tree(folder, name, None if changed else commit, _submodules(root))


def _base(
    folder: Path,
    against: str,
    *,
    root: Path,
    head: Tree,
    tests: Sequence[Path],
    build: str | None,
    start: Path,
) -> tuple[Tree, dict[str, str]]:
    """The base, with the tests of the head; and the text of the test files that it had itself."""
    place = start / against
    relative = [test.relative_to(root) for test in tests]
    if against.endswith(".whl"):
        if not place.is_file():
            raise ValueError(f"against: got {against!r}; allowed: a wheel that exists")
        _copy_folder(head.folder, folder)
        return _of_wheel(folder, place, head), {}
    in_repository = (root / ".git").exists()
    is_revision = (
        in_repository and not against.startswith((".", "/")) and _look_up(root, against).returncode == 0
    )
    if place.is_dir() and not is_revision:
        if (place / ".git").exists():
            _copy_files(place, folder, _known_files(place))
        else:
            _copy_folder(place, folder)
        tree = Tree(folder, str(place))
    else:
        if not in_repository:
            has_git = shutil.which("git") is not None
            said = _said(_run_git(root, "rev-parse")) if has_git else "; git is not installed"
            why = f"since {root} is no git repository{said}"
            raise ValueError(f"against: got {against!r}; allowed: a folder (./NAME) or a wheel, {why}")
        tree = _checked_out(folder, root, against)
    old = {str(file): (folder / file).read_text(errors="replace") for file in _test_files(folder, relative)}
    if build is not None:
        _build(build, tree)
    for part in _overlay(head.folder, relative):
        _replace(head.folder / part, folder / part)
    return tree, old


def _checked_out(folder: Path, root: Path, revision: str) -> Tree:
    """The files of a revision, as a checkout would write them."""
    commit = revision_name(root, revision)
    folder.mkdir(parents=True)
    index = folder.parent / f"{folder.name}.index"
    _require_git(root, "read-tree", commit, index=index)
    _require_git(root, "checkout-index", "--all", "--force", f"--prefix={folder}{os.sep}", index=index)
    index.unlink()
    name = commit[:9] if commit.startswith(revision) else f"{revision} ({commit[:9]})"
    return Tree(folder, name, commit, _submodules(root))


def _submodules(root: Path) -> tuple[str, ...]:
    if not (root / ".gitmodules").exists():
        return ()
    return ("submodules are not part of the trees: their files are missing on both sides",)


def _of_wheel(folder: Path, wheel: Path, head: Tree) -> Tree:
    """The head's tree with the packages of a wheel in the place of its own."""
    unpacked = folder.parent / "wheel"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(unpacked),
        str(wheel),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise ValueError(f"against: {wheel} cannot be installed: {done.stderr.strip()[-500:]}")
    placed = 0
    for found in sorted(unpacked.iterdir()):
        if found.suffix == ".dist-info" or found.name in ("bin", "__pycache__"):
            continue
        for place in (folder / found.name, folder / "src" / found.name):
            if (head.folder / place.relative_to(folder)).exists():
                _replace(found, place)
                placed += 1
    if not placed:
        raise ValueError(
            f"against: got {wheel}; allowed: a wheel of a package that lies in this folder or its src/"
        )
    shutil.rmtree(unpacked)
    return Tree(folder, wheel.name)


def _known_files(root: Path) -> list[str]:
    """The files of a repository as they are: what git knows, and what it was not told to leave alone."""
    listed = _require_git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    return sorted(set(filter(None, listed.split("\0"))))


def _copy_files(root: Path, folder: Path, files: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        source, target = root / name, folder / name
        if source.is_dir() and not source.is_symlink():
            continue  # a submodule
        if not os.path.lexists(source):
            continue  # deleted, and git was not told yet
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def _copy_folder(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))


def _overlay(head: Path, tests: Iterable[Path]) -> list[Path]:
    """What of the head is put over the base: the tests, what they need, and what configures them.

    The whole folder of a test where all of it is for tests. Elsewhere, as in a package that has its tests
    beside its modules, the test files alone: else the head would be compared with itself.
    """
    parts: dict[Path, None] = {}
    for test in tests:
        whole = next((above for above in test.parents if _OF_TESTS.fullmatch(above.name)), None)
        if whole is not None:
            parts[whole] = None
        else:
            parts |= dict.fromkeys([test, *_test_files(head, [test])])
        for above in test.parents:
            for name in ("conftest.py", *_CONFIGURATION):
                parts[above / name] = None
    return [part for part in parts if not any(above in parts for above in part.parents)]


def _same(one: Path, other: Path) -> bool:
    """Whether two trees have the same files with the same bytes."""
    difference = filecmp.dircmp(one, other, ignore=["__pycache__"])
    if difference.left_only or difference.right_only or difference.common_funny:
        return False
    _, unlike, unread = filecmp.cmpfiles(one, other, difference.common_files, shallow=False)
    return (
        not unlike and not unread and all(_same(one / name, other / name) for name in difference.common_dirs)
    )


def _replace(source: Path, target: Path) -> None:
    """Put `source` where `target` is; nothing there where there is no source."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif os.path.lexists(target):
        target.unlink()
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    elif os.path.lexists(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def _build(command: str, tree: Tree) -> None:
    done = subprocess.run(  # noqa: S602  # a command that the user wrote for a shell
        command, shell=True, cwd=tree.folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = (done.stdout + done.stderr).strip()[-1000:]
        raise ValueError(
            f"build: {command!r} ended with {done.returncode} in the tree of {tree.name}: {tail}"
        )


def _test_files(folder: Path, tests: Iterable[Path]) -> list[Path]:
    """The test files that a tree has in the folders of these tests, by their place in it."""
    found: dict[Path, None] = {}
    for test in tests:
        for pattern in ("test_*.py", "*_test.py"):
            for file in sorted((folder / test.parent).glob(pattern)):
                found[file.relative_to(folder)] = None
    return list(found)


def _renamed(old_files: dict[str, str], head: Path, tests: Sequence[Path]) -> list[Renamed]:
    new_files = {str(file): (head / file).read_text(errors="replace") for file in _test_files(head, tests)}
    old, new = _test_functions(old_files), _test_functions(new_files)
    fresh = {name: body for name, body in new.items() if name not in old}
    lost = []
    for name, body in old.items():
        if name not in new:
            alike = [other for other, own in fresh.items() if own == body]
            lost.append(Renamed(name, alike[0] if len(alike) == 1 else None))
    return lost


def _test_functions(files: dict[str, str]) -> dict[str, str]:
    """FILE::NAME of each test function, and its body without its name."""
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


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """What git has said, to end a sentence with: it may refuse to read what is there."""
    said = done.stderr.strip()[-500:]
    return f"; git says: {said}" if said else ""


def _look_up(repository: Path, revision: str) -> subprocess.CompletedProcess[str]:
    commit = f"{revision}^{{commit}}"
    return _run_git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", commit)


def _run_git(folder: Path, *arguments: str, index: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(folder), *arguments]
    # Where git runs a hook it says in the environment which repository it means: here it would be wrong.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # to look at a repository does not refresh its index
    if index is not None:
        environment["GIT_INDEX_FILE"] = str(index)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603


def _require_git(folder: Path, *arguments: str, index: Path | None = None) -> str:
    done = _run_git(folder, *arguments, index=index)
    if done.returncode:
        raise ValueError(f"against: git {arguments[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
