"""Set-up errors: failures of tests that are due to the copies of the project, not to its code."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stackwise.gate.git import run_git
from stackwise.gate.round import SIDES, Ended

__all__ = ["SetupErrors"]

_FAILED = frozenset({"failed", "crashed", "not collected", "not started", "missing"})
_BEFORE_THE_TEST = frozenset({"not collected", "not started", "missing"})
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_NAME = re.compile(r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'")
_PATH = re.compile(r"""['"]([^'"\n]+)['"]|(?:^|\s)([\w./-]+): cannot open shared object file""")
# A line of an error about a missing file, with any word in quotes or only a word that looks like a path.
_NO_FILE = re.compile(r"No such file|cannot open shared object file")
_FILE_ERROR = re.compile(r"\b(FileNotFound|NotADirectory|ModuleNotFound|Import|OS)Error\b")
_OF_THE_CODE = re.compile(r"(E\s+)?(AssertionError|assert|KeyError)\b")
# Parts of an error that may differ between two sides that fail alike.
_VARYING = re.compile(r"0x[0-9a-f]+|(?<=\.py:)\d+")
_COMPILED = (".so", ".pyd", ".dylib")
_ONLY_IN_THE_TREE = (
    "your run collected it, but the copy of the head could not: a file may be missing in the copy because "
    "git ignores it (see git status --ignored). Make the file with --stackwise-build=COMMAND"
)
_RUN_IT_PLAIN = "run it with pytest, without the gate, to see whether it fails in your folder"
_VARYING_NAME = (
    "your run collected it: its name may differ between processes, for example if it contains the time or "
    "the order of a set. Give it a fixed name (pytest.param(..., id=NAME))"
)


@dataclass(frozen=True)
class SetupErrors:
    """Detector of set-up errors among the failures of tests.

    Attributes:
        root: folder of the project in the user's run.
        trees: tree of each side, by role.
        place: folder in which the sides are started, relative to the trees.
        imports: folders from which packages are imported, relative to the trees.
        own_head: True if the head is a copy of the current files in `root`.
    """

    root: Path
    trees: dict[str, Path]
    place: Path = Path()
    imports: tuple[Path, ...] = ()
    own_head: bool = False

    def explained(self, ended: Ended, *, first: bool = False) -> Ended:
        """Return `ended` with "refused" and advice for each side that failed because of its set-up.

        The set-up is the reason in three cases:

        - The error names a file that `root` has and that is part of no tree.
        - The user's run has collected the test from the files in `root`, and a copy of these files cannot
          collect it. The cause is then the copy, not the code.
        - The test fails with the same error on both sides in its first round. The cause is then not the
          change.

        If the base fails because it lacks a file that the head has, its result becomes "missing".

        Args:
            ended: result of a test that was not measured.
            first: True if the test was not measured before.
        """
        how, detail = dict(ended.how), dict(ended.detail)
        for role, word in ended.how.items():
            if word not in _FAILED:
                continue
            said = ended.detail.get(role, "")
            advice = self._advice(role, word, said)
            if advice:
                how[role], detail[role] = "refused", f"{said}; {advice}"
            elif role == "base" and any(map(self._has_head_only, self._named(role, said))):
                how[role] = "missing"
        if first and how == ended.how and self._fails_alike(ended):
            said = ended.detail.get("base", "")
            of_git = "the trees are no git repositories; " if re.search(r"\bgit\b", said) else ""
            text = f"{said}; it fails on both sides, in the gate's copies: {of_git}{_RUN_IT_PLAIN}"
            how, detail = dict.fromkeys(SIDES, "refused"), dict.fromkeys(SIDES, text)
        return replace(ended, how=how, detail=detail)

    def _fails_alike(self, ended: Ended) -> bool:
        """Return True if both sides, in trees of their own, failed with the same error."""
        if ended.how != dict.fromkeys(SIDES, "failed") or self.trees["base"] == self.trees["head"]:
            return False
        # The paths of both sides differ by the name of the side.
        errors = {_VARYING.sub("", re.sub(rf"\b{role}\b", "", ended.detail.get(role, ""))) for role in SIDES}
        return len(errors) == 1

    def _advice(self, role: str, word: str, detail: str) -> str:
        """Return advice, or an empty string if the failure is not a set-up error."""
        missing = next((path for path in self._named(role, detail) if self._is_left_out(role, path)), None)
        if missing is not None:
            return self._command(role, missing)
        if role == "head" and self.own_head and word in _BEFORE_THE_TEST:
            return _VARYING_NAME if word == "missing" else _ONLY_IN_THE_TREE
        return ""

    def _is_left_out(self, role: str, path: Path) -> bool:
        """Return True if `root` has a path that is part of no tree, and the tree of the side lacks it."""
        if path == Path() or ".." in path.parts:
            return False
        if not _exists(self.root / path) or self._has(role, path):
            return False
        return not any(self._has(other, path) for other in self.trees) or self._is_ignored(path)

    def _has_head_only(self, path: Path) -> bool:
        return ".." not in path.parts and self._has("head", path) and not self._has("base", path)

    def _has(self, role: str, path: Path) -> bool:
        here, there = self.root / path, self.trees[role] / path
        # A submodule is an empty folder in the tree.
        return _exists(there) and not (_is_empty(there) and _exists(here) and not _is_empty(here))

    def _is_ignored(self, path: Path) -> bool:
        if shutil.which("git") is None:
            return False
        return run_git(self.root, "check-ignore", "--quiet", "--", str(path)).returncode == 0

    def _named(self, role: str, detail: str) -> Iterator[Path]:
        """Yield the paths that an error about a missing file names, relative to the trees."""
        if _OF_THE_CODE.match(detail):
            return
        modules = [match[1] for match in _NO_MODULE.finditer(detail)]
        modules += [f"{match[2]}.{match[1]}" for match in _NO_NAME.finditer(detail)]
        for module in modules:
            yield from self._files_of(module)
        for path in _paths(detail):
            if not path.is_absolute():
                yield from (self.place / path, path)
            elif path.is_relative_to(self.trees[role]):
                yield path.relative_to(self.trees[role])

    def _files_of(self, module: str) -> Iterator[Path]:
        """Yield the paths below `root` that a module may have: a source file, a folder or a compiled file."""
        below = PurePosixPath(*filter(None, module.split(".")))
        if not below.name:
            return
        for folder in dict.fromkeys((*self.imports, Path(), Path("src"))):
            place = folder / below
            yield from (place.with_suffix(".py"), place)
            above = self.root / place.parent
            with_suffix = above.glob(f"{place.name}.*") if _is_folder(above) else iter(())
            yield from (found.relative_to(self.root) for found in with_suffix if found.suffix in _COMPILED)

    def _command(self, role: str, path: Path) -> str:
        """Return advice with the command that creates a file in both trees."""
        if path.suffix in _COMPILED:
            build = "python setup.py build_ext --inplace"
            return (
                f"{path} is in no tree, since git ignores it; compile it in both: "
                f"--stackwise-build={build!r}, or your project's own command"
            )
        # Topmost missing path: a submodule, or a file or folder that git ignores.
        parts = itertools.accumulate(path.parts, lambda above, part: f"{above}/{part}")
        top = next(Path(part) for part in parts if self._is_left_out(role, Path(part)))
        source = shlex.quote(str(self.root / top))
        folder = shlex.quote(str(top.parent))
        why = "a file or folder that git ignores" if self._is_ignored(top) else "a file or folder"
        if _exists(self.root / top / ".git"):
            why = "a submodule"
        make = "" if top.parent == Path() else f"mkdir -p {folder} && "
        build = f"{make}cp -R {source} {folder}/"
        return f"{top} is {why}, which is in no tree; copy it into both: --stackwise-build={build!r}"


def _paths(detail: str) -> Iterator[Path]:
    """Yield the paths in the lines of an error that are about a missing file."""
    for line in detail.splitlines():
        any_word = _NO_FILE.search(line) is not None
        if not (any_word or _FILE_ERROR.search(line)) or _OF_THE_CODE.match(line):
            continue
        for match in _PATH.finditer(line):
            path = Path(match[1] or match[2])
            if any_word or path.suffix or len(path.parts) > 1:
                yield path


def _exists(path: Path) -> bool:
    """Return True if a path exists. For a text that is too long for a path, `Path.exists` raises OSError."""
    return os.path.exists(path)  # noqa: PTH110


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - as in `_exists`


def _is_empty(folder: Path) -> bool:
    return _is_folder(folder) and not any(folder.iterdir())
