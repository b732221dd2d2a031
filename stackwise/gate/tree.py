"""Trees: copies of the files of base and head, in two folders with paths of equal length.

The length of a path affects the memory layout of a process, and so its speed. No worktree, branch or index is
registered in the repository, so nothing has to be cleaned up in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stackwise.gate.git import run_git
from stackwise.gate.overlay import (
    files_of,
    installed_packages,
    is_same,
    lay_over,
    overlay_parts,
    replace_place,
    test_files,
    test_functions,
)
from stackwise.support.temporary_folder import temporary_folder

__all__ = [
    "NOTHING_DIFFERS",
    "TEMPORARY",
    "Renamed",
    "Tree",
    "both_trees",
    "is_pointer",
    "repository_of",
    "revision_name",
]

TEMPORARY = "stackwise-gate-"  # start of the names of temporary folders
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
    f"{TEMPORARY}*",
)
NOTHING_DIFFERS = (
    "nothing but tests differs between base and head: the same code was compared with itself; "
    "the base of a committed change is HEAD~1"
)
# Small files in the place of data that git-lfs or git-annex has not fetched.
_POINTERS = (b"version https://git-lfs.github.com/spec/", b"/annex/objects/")
_LARGEST_POINTER = 1024  # bytes
_SHOWN = 3


@dataclass(frozen=True)
class Tree:
    """Copy of the files of one side.

    Attributes:
        folder: root of the copy.
        name: name for messages: a revision with its commit, a folder or a wheel.
        commit: commit of the files; None if the files are not exactly a commit.
        notes: notes for the report, for example on missing submodules.
        tests: files and folders that both sides take from head, relative to `folder`.
        hidden: changed modules of the base that were replaced by the head's, relative to `folder`; empty for
            the head.
    """

    folder: Path
    name: str
    commit: str | None = None
    notes: tuple[str, ...] = ()
    tests: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Renamed:
    """Test of the base that the head does not have.

    Attributes:
        old: its function, as FILE::NAME.
        new: new function of the head with the same body; None if the head has no such function, or several.
    """

    old: str
    new: str | None


def repository_of(folder: Path) -> Path | None:
    """Return the root of the git repository that contains `folder`, or None."""
    if shutil.which("git") is None:
        return None
    done = run_git(folder, "rev-parse", "--show-toplevel")
    return Path(done.stdout.strip()).resolve() if done.returncode == 0 else None


def revision_name(repository: Path, revision: str) -> str:
    """Return the full commit hash of a revision.

    Raises:
        ValueError: the revision does not exist.
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
    conftests: Sequence[Path] = (),
) -> Iterator[tuple[Tree, Tree, list[Renamed]]]:
    """Yield the trees of base and head, and the tests that the head no longer has. Then remove the trees.

    Both trees take from head: the test files, the folders of tests that contain them, and the conftests and
    configuration files above them.

    Args:
        against: base: a revision, a folder, a wheel, or REVISION... for the merge base with the head.
        root: folder with the files of the head: the root of a git repository, or any other folder.
        tests: test files, below `root`.
        head: revision of the head; None: the current files, including untracked files that git does not
            ignore.
        build: shell command that runs in each tree, for example to compile extensions.
        start: folder that a relative path of a base folder or a wheel starts from; None: the working
            directory.
        settings: configuration file of pytest, which both trees take from head; None: pytest finds one
            itself.
        conftests: conftests of other folders, below `root`, which both trees take from head.

    Raises:
        ValueError: the revision, folder or wheel does not exist, or a command failed in one of the trees.
    """
    named, against = against, _merge_base(root, against, head)
    relative = [test.relative_to(root) for test in tests]
    place = (start or Path.cwd()) / against
    is_wheel = against.endswith(".whl")
    with temporary_folder(TEMPORARY) as folder:
        head_tree = _head(folder / "head", root, head)
        like = folder / "head" if head is None else None
        base_tree = _base(folder / "base", against, root=root, head=head_tree, place=place, like=like)
        notes = base_tree.notes
        if against != named:
            base_tree = replace(base_tree, name=f"{named} ({against[:9]})")
        elif base_tree.commit is not None:
            notes += tuple(_not_an_ancestor(root, named, base_tree.commit, head))
        old = files_of(base_tree.folder)
        old_tests = _texts(base_tree.folder, relative)
        if build is not None and not is_wheel:
            _build(build, base_tree)
        packages = installed_packages(root) | (_in_wheel(place) if is_wheel else frozenset())
        with_conftests = [*relative, *(conftest.relative_to(root) for conftest in conftests)]
        parts = overlay_parts(head_tree.folder, with_conftests, packages)
        if settings is not None and settings.is_relative_to(root):
            parts.append(settings.relative_to(root))
        hidden = lay_over(head_tree.folder, base_tree.folder, parts, relative, old)
        files = old | files_of(head_tree.folder)
        names = (base_tree.name, head_tree.name)
        notes += _check_pointers(base_tree.folder, head_tree.folder, names, files)
        differs = not all(is_same(base_tree.folder / file, head_tree.folder / file) for file in files)
        renamed = _renamed(old_tests, _texts(head_tree.folder, relative))
        if build is not None:
            _build(build, head_tree)
        elif not differs:
            notes += (NOTHING_DIFFERS,)
        base_tree = replace(base_tree, hidden=tuple(hidden), notes=notes)
        yield replace(base_tree, tests=tuple(parts)), replace(head_tree, tests=tuple(parts)), renamed


def _merge_base(root: Path, against: str, head: str | None) -> str:
    """Return the merge base of `A...B`, with the head for an empty B; for other texts return `against`.

    Raises:
        ValueError: the revisions have no common ancestor that this clone knows.
    """
    one, dots, other = against.partition("...")
    if not dots or against.startswith((".", "/")) or repository_of(root) is None:
        return against
    commits = [revision_name(root, name) for name in (one, other or head or "HEAD")]
    done = run_git(root, "merge-base", *commits)
    if done.returncode:
        names = f"{one} and {other or head or 'HEAD'}"
        allowed = f"revisions with a common ancestor, and {names} have none{_if_shallow(root)}"
        raise ValueError(f"against: got {against!r}; allowed: {allowed}{_said(done)}")
    return done.stdout.strip()


def _not_an_ancestor(root: Path, name: str, base: str, head: str | None) -> list[str]:
    """Return a note if the base has commits that the head does not have."""
    tip = revision_name(root, head or "HEAD")
    # A shallow clone does not know which commits are ancestors.
    if _if_shallow(root) or run_git(root, "merge-base", "--is-ancestor", base, tip).returncode != 1:
        return []
    count = run_git(root, "rev-list", "--count", f"{tip}..{base}").stdout.strip()
    note = (
        f"{name} is not an ancestor of the head: its commits that the head lacks ({count}) are compared too"
    )
    return [f"{note}; to compare with their merge base: {name}..."]


def _if_shallow(repository: Path) -> str:
    """Return advice for a shallow clone, as the end of a sentence; "" for a complete clone."""
    shallow = run_git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    return "; this clone is shallow: fetch more (actions/checkout: fetch-depth: 0)" if shallow else ""


def _head(folder: Path, root: Path, revision: str | None) -> Tree:
    if revision is not None:
        return _checked_out(folder, root, revision)
    if not (root / ".git").exists():
        _copy_folder(root, folder)
        return Tree(folder, str(root))
    _copy_files(root, folder, _known_files(root))
    commit = run_git(root, "rev-parse", "HEAD").stdout.strip()
    status = run_git(root, "status", "--porcelain", "--untracked-files=normal")  # regardless of its settings
    changed = bool(status.stdout.strip() or _not_looked_at(root))
    name = f"working tree at {commit[:9]}{' with changes' if changed else ''}"
    return Tree(folder, name, None if changed else commit, _submodules(root))


def _base(
    folder: Path, against: str, *, root: Path, head: Tree, place: Path, like: Path | None = None
) -> Tree:
    """Return the tree of the base, with its own tests.

    Args:
        folder: folder of the new tree.
        against: base, as in `both_trees`.
        root: folder with the files of the head.
        head: tree of the head.
        place: path of the base if it is a folder or a wheel.
        like: tree of the head if the head is the working tree.
    """
    if against.endswith(".whl"):
        if not place.is_file():
            raise ValueError(f"against: got {against!r}; allowed: a wheel that exists")
        _copy_folder(head.folder, folder)
        return _of_wheel(folder, place, head)
    in_repository = (root / ".git").exists()
    is_revision = (
        in_repository and not against.startswith((".", "/")) and _look_up(root, against).returncode == 0
    )
    if place.is_dir() and not is_revision:
        if (place / ".git").exists():
            _copy_files(place, folder, _known_files(place))
        else:
            _copy_folder(place, folder)
        return Tree(folder, str(place))
    if not in_repository:
        has_git = shutil.which("git") is not None
        said = _said(run_git(root, "rev-parse")) if has_git else "; git is not installed"
        why = f"since {root} is no git repository{said}"
        raise ValueError(f"against: got {against!r}; allowed: a folder (./NAME) or a wheel, {why}")
    return _checked_out(folder, root, against, like)


def _checked_out(folder: Path, root: Path, revision: str, like: Path | None = None) -> Tree:
    """Return the tree of a revision, as a checkout would write it.

    Args:
        folder: folder of the new tree.
        root: repository.
        revision: name of the revision.
        like: copy of the working tree. A file that is unmodified in the working tree is copied from it, since
            a filter of git (LFS, line endings) may produce other bytes in a new checkout. None: git writes
            all files.
    """
    commit = revision_name(root, revision)
    folder.mkdir(parents=True)
    index = folder.parent / f"{folder.name}.index"
    _require_git(root, "read-tree", commit, index=index)
    files = _entries(_require_git(root, "ls-files", "--stage", "-z", index=index))
    same: frozenset[str] = frozenset()
    if like is not None:
        same = _unmodified(root, files)
        for name in same:
            replace_place(like / name, folder / name)
    given = "".join(f"{name}\0" for name in files if name not in same)
    prefix = f"--prefix={folder}{os.sep}"
    _require_git(root, "checkout-index", "--force", prefix, "-z", "--stdin", index=index, given=given)
    index.unlink()
    name = commit[:9] if commit.startswith(revision) else f"{revision} ({commit[:9]})"
    return Tree(folder, name, commit, _submodules(root))


def _entries(listed: str) -> dict[str, str]:
    """Return the mode and the blob of each file in the output of `git ls-files --stage -z`."""
    lines = (line.partition("\t") for line in listed.split("\0") if line)
    return {name: entry for entry, _, name in lines}


def _unmodified(root: Path, files: Mapping[str, str]) -> frozenset[str]:
    """Return the files that are the same in the working tree, according to git, by their mode and blob.

    Files with the flag assume-unchanged or skip-worktree, which git does not inspect, are excluded. Absent
    files, as in a sparse checkout, are included.
    """
    current = _entries(_require_git(root, "ls-files", "--stage", "-z"))
    status = _require_git(root, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=no")
    modified = {line[3:] for line in status.split("\0") if line[1:2].strip()}
    modified.update(_not_looked_at(root))
    same = (name for name, entry in files.items() if current.get(name) == entry)
    return frozenset(name for name in same if name not in modified)


def _not_looked_at(root: Path) -> list[str]:
    """Return the existing files that git treats as unmodified without an inspection, by `git ls-files -v`."""
    lines = _require_git(root, "ls-files", "-v", "-z").split("\0")
    names = (line[2:] for line in lines if line[:1].islower() or line[:1] == "S")
    return [name for name in names if os.path.lexists(root / name)]


def _submodules(root: Path) -> tuple[str, ...]:
    if not (root / ".gitmodules").exists():
        return ()
    return ("submodules are not part of the trees: their files are missing on both sides",)


def _of_wheel(folder: Path, wheel: Path, head: Tree) -> Tree:
    """Return the head's tree with its packages replaced by the packages of a wheel."""
    unpacked = folder.parent / "wheel"
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    except zipfile.BadZipFile as error:
        raise ValueError(f"against: {wheel} cannot be unpacked: {error}") from None
    placed = 0
    for found in sorted(unpacked.iterdir()):
        for place in (folder / found.name, folder / "src" / found.name):
            if (head.folder / place.relative_to(folder)).exists():
                replace_place(found, place)
                placed += 1
    if not placed:
        raise ValueError(
            f"against: got {wheel}; allowed: a wheel of a package that lies in this folder or its src/"
        )
    shutil.rmtree(unpacked)
    return Tree(folder, wheel.name)


def _known_files(root: Path) -> list[str]:
    """Return the current files of a repository: tracked, or untracked and not ignored by git."""
    listed = _require_git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    return sorted(set(filter(None, listed.split("\0"))))


def _copy_files(root: Path, folder: Path, files: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        source = root / name
        if source.is_symlink() or not source.is_dir():  # not a submodule
            replace_place(source, folder / name)


def _copy_folder(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))


def _in_wheel(wheel: Path) -> frozenset[str]:
    """Return the names at the top of a wheel, including its packages."""
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(name.partition("/")[0] for name in archive.namelist())


def is_pointer(path: Path) -> bool:
    """Return True if a file is a pointer of git-lfs or git-annex."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_POINTER:
        return False
    return path.read_bytes().startswith(_POINTERS)


def _check_pointers(base: Path, head: Path, names: tuple[str, str], files: Iterable[Path]) -> tuple[str, ...]:
    """Return a note on the files that are pointers in both trees, or an empty tuple if no file is one.

    Args:
        base: tree of base.
        head: tree of head.
        names: names of base and head in messages.
        files: files to check, relative to the trees.

    Raises:
        ValueError: a file is a pointer in one tree and data in the other, so the sides would read different
            data.
    """
    pointers: list[str] = []
    for file in sorted(files):
        of_base, of_head = is_pointer(base / file), is_pointer(head / file)
        other = head if of_base else base
        if of_base != of_head and (other / file).exists():
            name = names[0] if of_base else names[1]
            raise ValueError(
                f"against: {file} is a pointer of git-lfs in the tree of {name} and data in the other; "
                "run `git lfs install`, and `git lfs fetch --all` or `git lfs pull`, and try again"
            )
        if of_base and of_head:
            pointers.append(str(file))
    if not pointers:
        return ()
    shown = ", ".join(pointers[:_SHOWN]) + (
        f" and {len(pointers) - _SHOWN} more" if pointers[_SHOWN:] else ""
    )
    return (f"pointers of git-lfs, not data, on both sides: {shown}; `git lfs pull` gets the data",)


def _build(command: str, tree: Tree) -> None:
    done = subprocess.run(  # noqa: S602  # a command that the user wrote for a shell
        command, shell=True, cwd=tree.folder, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        tail = (done.stdout + done.stderr).strip()[-1000:]
        raise ValueError(
            f"build: {command!r} ended with {done.returncode} in the tree of {tree.name}: {tail}"
        )


def _texts(tree: Path, tests: Sequence[Path]) -> dict[str, str]:
    """Return the text of each test file in the folders of these tests."""
    return {str(file): (tree / file).read_text(errors="replace") for file in test_files(tree, tests)}


def _renamed(old_files: dict[str, str], new_files: dict[str, str]) -> list[Renamed]:
    old, new = test_functions(old_files), test_functions(new_files)
    fresh = {name: body for name, body in new.items() if name not in old}
    lost = []
    for name, body in old.items():
        if name not in new:
            alike = [other for other, own in fresh.items() if own == body]
            lost.append(Renamed(name, alike[0] if len(alike) == 1 else None))
    return lost


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error message of git as the end of a sentence, such as its refusal to read a repository."""
    said = done.stderr.strip()[-500:]
    return f"; git says: {said}" if said else ""


def _look_up(repository: Path, revision: str) -> subprocess.CompletedProcess[str]:
    commit = f"{revision}^{{commit}}"
    return run_git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", commit)


def _require_git(folder: Path, *arguments: str, index: Path | None = None, given: str | None = None) -> str:
    done = run_git(folder, *arguments, index=index, given=given)
    if done.returncode:
        raise ValueError(f"against: git {arguments[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
