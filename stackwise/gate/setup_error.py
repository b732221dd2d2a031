"""Set-up errors: failures of tests because a tree lacks a file that the user's run has."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stackwise.gate.round import Ended

__all__ = ["SetupErrors"]

_FAILED = frozenset({"failed", "crashed", "not collected", "not started", "missing"})
_BEFORE_THE_TEST = frozenset({"not collected", "not started", "missing"})
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_NAME = re.compile(r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'")
_PATH = re.compile(r"""['"]([^'"\n]+)['"]|(?:^|\s)([\w./-]+): cannot open shared object file""")
_COMPILED = (".so", ".pyd", ".dylib")
_ONLY_IN_THE_TREE = (
    "your run could collect it, and its copy of the head could not: a file may be missing in the copy since "
    "git ignores it (see git status --ignored); make it by --stackwise-build=COMMAND"
)
_NAME_BY_CHANCE = (
    "your run has collected one: its name may be made by chance, as of the order of a set or of the time; "
    "give it a fixed name (pytest.param(..., id=NAME))"
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

    def explained(self, ended: Ended) -> Ended:
        """Return `ended` with "refused" and advice for each side that failed because of its set-up.

        There are two cases. Either the error names a file that `root` has and the tree of the side lacks. Or
        the user's run has collected the test from the files in `root`, and a copy of these files cannot
        collect it: then the copy is at fault, not the code.
        """
        how, detail = dict(ended.how), dict(ended.detail)
        for role, word in ended.how.items():
            advice = self._advice(role, word, ended.detail.get(role, "")) if word in _FAILED else ""
            if advice:
                how[role], detail[role] = "refused", f"{ended.detail.get(role, '')}; {advice}"
        return replace(ended, how=how, detail=detail)

    def _advice(self, role: str, word: str, detail: str) -> str:
        """Return advice, or an empty string if the failure is not a set-up error."""
        missing = next((path for path in self._named(role, detail) if self._is_left_out(role, path)), None)
        if missing is not None:
            return self._command(role, missing)
        if role == "head" and self.own_head and word in _BEFORE_THE_TEST:
            return _NAME_BY_CHANCE if word == "missing" else _ONLY_IN_THE_TREE
        return ""

    def _is_left_out(self, role: str, path: Path) -> bool:
        if path == Path() or ".." in path.parts:
            return False
        here, there = self.root / path, self.trees[role] / path
        # A submodule is an empty folder in the tree.
        return here.exists() and (not there.exists() or (_is_empty(there) and not _is_empty(here)))

    def _named(self, role: str, detail: str) -> Iterator[Path]:
        """Yield the paths that an error message names, relative to the trees."""
        modules = [match[1] for match in _NO_MODULE.finditer(detail)]
        modules += [f"{match[2]}.{match[1]}" for match in _NO_NAME.finditer(detail)]
        for module in modules:
            yield from self._files_of(module)
        for match in _PATH.finditer(detail):
            path = Path(match[1] or match[2])
            if not path.is_absolute():
                yield from (self.place / path, path)
            elif path.is_relative_to(self.trees[role]):
                yield path.relative_to(self.trees[role])

    def _files_of(self, module: str) -> Iterator[Path]:
        """Yield the paths below `root` that a module may have: a source file, a folder or a compiled file."""
        below = PurePosixPath(*module.split("."))
        for folder in dict.fromkeys((*self.imports, Path(), Path("src"))):
            place = folder / below
            yield from (place.with_suffix(".py"), place)
            with_suffix = (self.root / place.parent).glob(f"{place.name}.*")
            yield from (found.relative_to(self.root) for found in with_suffix if found.suffix in _COMPILED)

    def _command(self, role: str, path: Path) -> str:
        """Return advice with the command that makes a file in both trees."""
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
        why = "a submodule" if (self.root / top / ".git").exists() else "a file or folder that git ignores"
        make = "" if top.parent == Path() else f"mkdir -p {folder} && "
        build = f"{make}cp -R {source} {folder}/"
        return f"{top} is {why}, which is in no tree; copy it into both: --stackwise-build={build!r}"


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())
