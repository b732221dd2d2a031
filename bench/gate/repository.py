"""Repository: a git repository made for `bench.gate`, where each commit adds something to the same calls."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat

from bench.gate import command

__all__ = ["BASE", "SUITE", "Added", "Repository"]

SUITE = Path(__file__).parent / "suite"
BASE = "base"
_CONFIGURATION = """\
[project]
name = "subject"
version = "0.1.0"

[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
packages = ["subject"]

[tool.pytest.ini_options]
pythonpath = ["."]
addopts = ["-p", "no:cacheprovider"]
"""


@dataclass(frozen=True)
class Added:
    """What a commit adds to each call, by its name: iterations of its own work, or seconds of sleep."""

    iterations: Mapping[str, int] = field(default_factory=dict)
    sleep_seconds: Mapping[str, float] = field(default_factory=dict)

    def source(self, names: Sequence[str], note: str = "") -> str:
        """The text of subject/effect.py, where these calls are measured."""
        return (
            '"""What this commit adds to each call."""\n\n'
            f"NAMES: tuple[str, ...] = {tuple(names)}\n"
            f"ITERATIONS: dict[str, int] = {pformat(dict(self.iterations))}\n"
            f"SLEEP_SECONDS: dict[str, float] = {pformat(dict(self.sleep_seconds))}\n{note}"
        )


class Repository:
    """The origin in `folder/origin`, and of each branch a clone in `folder/BRANCH`.

    Every commit but the first is a child of that. Names of clones are equally long, as a path is part of what
    a process starts with.

    Args:
        folder: where it lies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.origin = folder / "origin"

    @classmethod
    def create(cls, folder: Path, branches: Mapping[str, Added], names: Sequence[str]) -> Repository:
        """A new one, in place of what `folder` has of one.

        Args:
            folder: where to.
            branches: by name, beside `BASE`, to which nothing is added.
            names: of the calls that are measured.

        Raises:
            ValueError: a name that is not as long as that of `BASE`.
            CommandFailedError: git failed.
        """
        for name in branches:
            if len(name) != len(BASE):
                raise ValueError(f"branches: got {name!r}; allowed: names of {len(BASE)} characters")
        made = cls(folder)
        for name in ("origin", BASE, *branches):
            shutil.rmtree(folder / name, ignore_errors=True)
        made.origin.mkdir(parents=True)
        made._git("init", "--quiet", f"--initial-branch={BASE}")
        made._write_files(names)
        made._commit("The calls")
        for name, added in branches.items():
            made._git("switch", "--quiet", "--create", name, BASE)
            # A commit that adds nothing differs by a comment.
            made._effect().write_text(added.source(names, f"# {name}\n"))
            made._commit(f"What {name} adds")
        made._git("switch", "--quiet", BASE)
        for name in (BASE, *branches):
            made._git("clone", "--quiet", "--branch", name, str(made.origin), str(folder / name))
            # Each clone knows the base by its name.
            if name != BASE:
                made._git("branch", "--quiet", BASE, f"origin/{BASE}", where=folder / name)
        return made

    def tree(self, branch: str) -> Path:
        """The clone that has this branch.

        Raises:
            ValueError: there is none.
        """
        path = self.folder / branch
        if not path.is_dir():
            raise ValueError(f"branch: got {branch!r}; allowed: one that the repository was created with")
        return path

    def _write_files(self, names: Sequence[str]) -> None:
        shutil.copytree(
            SUITE / "subject", self.origin / "subject", ignore=shutil.ignore_patterns("__pycache__")
        )
        self._effect().write_text(Added().source(names))
        (self.origin / "pyproject.toml").write_text(_CONFIGURATION)
        (self.origin / ".gitignore").write_text("__pycache__/\n.benchmarks/\n.codspeed/\n")
        for source, target in (
            ("speed.py", "bench/test_speed.py"),
            ("asv_speed.py", "asv_benchmarks/speed.py"),
            ("pyperf_speed.py", "pyperf_speed.py"),
        ):
            path = self.origin / target
            path.parent.mkdir(exist_ok=True)
            shutil.copy(SUITE / source, path)
        (self.origin / "asv_benchmarks" / "__init__.py").touch()

    def _effect(self) -> Path:
        return self.origin / "subject" / "effect.py"

    def _commit(self, message: str) -> None:
        self._git("add", "--all")
        self._git("commit", "--quiet", "--message", message)

    def _git(self, *arguments: str, where: Path | None = None) -> None:
        # What the user has configured (signatures, hooks, a template) is none of it.
        who = {
            f"GIT_{role}_{key}": value
            for role in ("AUTHOR", "COMMITTER")
            for key, value in (("NAME", "bench.gate"), ("EMAIL", "gate@bench.invalid"))
        }
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        command.run(["git", *arguments], where or self.origin, environment={**settings, **who})
