"""`python -m bench.gate --only adoption`: the gate in projects of many kinds.

Each project of `layouts` is compared with its first commit twice: with a head that differs by a comment, and
with one whose benchmark is 30 % slower. A wrong verdict is a failure of the equal head or a pass of the
slower one. A project that may be refused has to be told the remedy. Results are kept, and with `--resume` no
project is tried again.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.claim import Bar, Claim
from bench.gate.layouts import LAYOUTS, Layout, site_packages
from bench.marked_tables import ROOT

__all__ = ["Attempt", "adoption", "judge"]

FOLDER = ROOT / "build" / "gate-adoption"
LIMIT_SECONDS = 90
HEADS = ("equal", "slower")
TIME_LIMIT = "time limit"  # name of the run below
_MOST_SECONDS = 60
_OVERRUN = 6  # seconds that a run may take beyond its limit
_MANY_TESTS = """\
import time
import pytest

@pytest.mark.parametrize("number", range(60))
def test_sleep(benchmark, number):
    benchmark(time.sleep, 0.01)
"""
_DECIDED = {"equal": {0}, "slower": {1}}
_TRACEBACK = re.compile(r"INTERNALERROR|Traceback \(most recent call last\)")
_VERDICT = re.compile(r"^(PASS|IMPROVED|REGRESSED|FAILED|ERROR|INCONCLUSIVE): .* against ", re.MULTILINE)


@dataclass(frozen=True)
class Attempt:
    """One run of the gate in one project.

    Attributes:
        layout: name of the project.
        head: "equal" or "slower".
        code: exit code.
        verdict: headline of the gate; "": none.
        kind: "decided", "wrong", "refused" (as the project may be, with the remedy), "undecided" or "broken".
        seconds: that it took.
        end: end of the output, if it was not decided.
    """

    layout: str
    head: str
    code: int
    verdict: str
    kind: str
    seconds: float
    end: str


def judge(layout: Layout, head: str, code: int, printed: str) -> tuple[str, str]:
    """Return the verdict and the kind of an attempt, see `Attempt`."""
    found = _VERDICT.findall(printed)
    verdict = found[-1] if found else ""
    wrong = {"equal": ("REGRESSED", "IMPROVED"), "slower": ("PASS", "IMPROVED")}[head]
    if verdict in wrong or (code == 0 and head == "slower"):
        return verdict, "wrong"
    if code in _DECIDED[head] and verdict in ("PASS", "REGRESSED"):
        return verdict, "decided"
    if _TRACEBACK.search(printed):
        return verdict, "broken"
    if layout.refusal is not None and layout.refusal in printed and code in (4, 5, 7):
        return verdict, "refused"
    return verdict, "undecided" if code == 7 else "broken"


def adoption(quick: bool, resume: bool, only: str | None = None) -> int:
    """Try the projects, write the results and return the exit code.

    Args:
        quick: every tenth project.
        resume: keep the attempts on file.
        only: name of a project to try again, or `TIME_LIMIT`.
    """
    claim = Claim("gate-adoption", quick)
    if resume:
        claim.resume()
    known = [Attempt(**each) for each in claim.figures.get("attempts", []) if each["layout"] != only]
    python = _environment()
    chosen = [each for each in LAYOUTS if each.name == only] if only else LAYOUTS[:: 10 if quick else 1]
    for layout, head in itertools.product(chosen, HEADS):
        if any((each.layout, each.head) == (layout.name, head) for each in known):
            continue
        # Outside of this repository, whose configuration pytest would find.
        with tempfile.TemporaryDirectory(prefix="stackwise-adoption-") as place:
            attempt = _attempt(layout, head, python, Path(place))
        known.append(attempt)
        told = f"{attempt.kind} ({attempt.verdict or attempt.code}, {attempt.seconds:.0f} s)"
        print(f"{layout.name}, {head}: {told}", flush=True)
        claim.figures["attempts"] = [asdict(each) for each in known]
        claim.bars = bars(known, claim.figures.get(TIME_LIMIT))
        claim.write()
    if not quick and only in (None, TIME_LIMIT):
        with tempfile.TemporaryDirectory(prefix="stackwise-adoption-") as place:
            claim.figures[TIME_LIMIT] = _seconds_of_limited_run(python, Path(place))
        claim.bars = bars(known, claim.figures[TIME_LIMIT])
        claim.write()
    return claim.conclude()


def bars(attempts: Sequence[Attempt], limited_seconds: float | None = None) -> list[Bar]:
    """Return the bars of all attempts, and of the run with a time limit."""
    kinds = Counter(attempt.kind for attempt in attempts)
    of_layout: dict[str, list[str]] = {}
    for attempt in attempts:
        of_layout.setdefault(attempt.layout, []).append(attempt.kind)
    decided = sum(each == ["decided", "decided"] for each in of_layout.values())
    return [
        Bar("adoption: wrong verdicts", kinds["wrong"], 0, at_most=True),
        Bar("adoption: broken runs", kinds["broken"], 0, at_most=True),
        Bar("adoption: undecided runs", kinds["undecided"], len(attempts) // 20, at_most=True),
        Bar("adoption: projects", len(of_layout), 40, full_size=True),
        Bar("adoption: share decided on both heads", decided / max(1, len(of_layout)), 0.8),
        Bar(
            f"adoption: seconds of a run with a limit of {_MOST_SECONDS} s",
            limited_seconds,
            _MOST_SECONDS + _OVERRUN,
            at_most=True,
            full_size=True,
        ),
    ]


def _environment() -> Path:
    """Return the Python of an environment that has the plugins beside what is installed here."""
    place = FOLDER / "venv"
    python = place / "bin" / "python"
    requirements, installed = Path(__file__).with_name("adoption.txt"), place / "installed.txt"
    if not installed.exists() or installed.read_text() != requirements.read_text():
        venv.create(place, clear=True, with_pip=True)
        here = [path for path in sys.path if path.endswith("site-packages")]
        (site_packages(place) / "outer.pth").write_text("".join(f"{path}\n" for path in [*here, str(ROOT)]))
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements)]
        subprocess.run(install, check=True)
        shutil.copyfile(requirements, installed)
    return python


def _attempt(layout: Layout, head: str, python: Path, place: Path) -> Attempt:
    """Make the project in a folder, its head and an environment of its own, and run the gate."""
    folder = place / re.sub(r"\W+", "-", layout.name)
    folder.mkdir(parents=True)
    _git(folder, "init", "-q", "-b", "main")
    for path, text in layout.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    code = folder / layout.code
    code.parent.mkdir(parents=True, exist_ok=True)
    code.write_text(layout.base)
    if layout.prepare is not None:
        layout.prepare(folder)
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "base")
    _git(folder, "tag", "base")
    mark = "//" if code.suffix == ".c" else "#"
    code.write_text(layout.slower if head == "slower" else f"{layout.base}{mark} a comment\n")
    own = folder.with_name(f"{folder.name}-venv")
    venv.create(own, symlinks=True)
    (site_packages(own) / "outer.pth").write_text(
        f"{site_packages(python.parents[1])}\n" + (site_packages(python.parents[1]) / "outer.pth").read_text()
    )
    if layout.install is not None:
        layout.install(folder, site_packages(own))
    _git(folder, "commit", "-qam", "head")
    plugins = ["pytest_stackwise.plugin", "pytest_benchmark.plugin", *layout.plugins]
    options = [
        *(part for plugin in plugins for part in ("-p", plugin)),
        "--stackwise-against=base",
        f"--stackwise-gate-seconds={LIMIT_SECONDS}",
        *layout.options,
    ]
    command: list[str] = []
    for part in layout.command or ("{python}", "-m", "pytest", "{options}"):
        command += options if part == "{options}" else [part.replace("{python}", str(own / "bin" / "python"))]
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "GIT_", "PYTHON"))
    }
    variables |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    variables |= {"VIRTUAL_ENV": str(own), "PATH": f"{own / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder / layout.place,
        env=variables,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=10 * LIMIT_SECONDS,
        check=False,
    )
    printed = done.stdout + done.stderr
    verdict, kind = judge(layout, head, done.returncode, printed)
    end = "" if kind == "decided" else printed[-3000:]
    return Attempt(layout.name, head, done.returncode, verdict, kind, time.monotonic() - began, end)


def _seconds_of_limited_run(python: Path, folder: Path) -> float:
    """Return the time of a run of 60 tests that need more time than the limit."""
    _git(folder, "init", "-q", "-b", "main")
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (folder / "work.py").write_text("")
    (folder / "test_work.py").write_text(f"import work\n{_MANY_TESTS}")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "base")
    (folder / "work.py").write_text("# a comment\n")
    began = time.monotonic()
    command = [str(python), "-m", "stackwise.cli", "gate", "main", "--seconds", str(_MOST_SECONDS)]
    subprocess.run(command, cwd=folder, check=False, capture_output=True, stdin=subprocess.DEVNULL)
    return time.monotonic() - began


def _git(folder: Path, *arguments: str) -> None:
    """Call git without the configuration of the user."""
    who = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", "bench.gate"), ("EMAIL", "gate@bench.invalid"))
    }
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    environment = {**os.environ, **settings, **who}
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, env=environment)
