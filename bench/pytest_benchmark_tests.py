"""`python -m bench.pytest_benchmark_tests`: pytest-benchmark's own tests, beside our plugin and without it.

They are those of the version that is installed here, and run in a virtual environment of their own that has
what they need. Our package is installed there without what it depends on, since nothing of that is to be
loaded where no test asks for it. A test that fails beside our plugin has to fail without it, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from bench.claim import Bar, Claim

ROOT = Path(__file__).parent.parent
# Of its own extras, and of the group `dev` in its pyproject.toml.
NEEDS = (
    "aspectlib",
    "elasticsearch",
    "pygal",
    "pygaljs",
    "setuptools>=80",
    "freezegun>=1.5.5",
    "nbmake>=1.5.5",
    "pytest-xdist>=3.6",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two of its files")
    arguments = parser.parse_args()
    claim = Claim("pytest_benchmark_tests", quick=arguments.quick)
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder) / "venv")
        suite = source(Path(folder), python)
        chosen = ["tests/test_skip.py", "tests/test_pedantic.py"] if arguments.quick else []
        pip(python, "install", "--no-deps", str(ROOT))
        beside = outcomes(python, suite, chosen)
        pip(python, "uninstall", "--yes", "stackwise")
        without = outcomes(python, suite, [*chosen, "--last-failed", "--last-failed-no-failures=none"])
    claim.figures = figures(beside, without)
    for name in claim.figures["broken"]:
        print(f"passes without the plugin alone: {name}")
    claim.bars = [
        Bar("tests that pass beside the plugin", len(claim.figures["passed"]), 1),
        Bar("tests that the plugin breaks", len(claim.figures["broken"]), 0, at_most=True),
    ]
    return claim.conclude()


def environment(folder: Path) -> Path:
    """The interpreter of a new virtual environment with pytest-benchmark and what its tests need."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pinned = [f"{name}=={version(name)}" for name in ("pytest", "pytest-benchmark")]
    pip(python, "install", *pinned, *NEEDS)
    return python


def source(folder: Path, python: Path) -> Path:
    """The source distribution, unpacked."""
    wanted = f"pytest-benchmark=={version('pytest-benchmark')}"
    pip(
        python,
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
        "-d",
        str(folder),
        wanted,
    )
    [archive] = folder.glob("pytest_benchmark-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def outcomes(python: Path, suite: Path, chosen: list[str]) -> dict[str, str]:
    """By name: "passed", "failure", "error" or "skipped"."""
    report = suite / "report.xml"
    report.unlink(missing_ok=True)
    # Its own configuration runs it so; its command lines are found beside the interpreter.
    settings = {
        "COLUMNS": "80",
        "PYTHONPATH": str(suite / "tests"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    # Names of the same file within the suite would shadow what is installed.
    options = ["--ignore=src", "--import-mode=importlib", f"--junitxml={report}"]
    subprocess.run(
        [python, "-m", "pytest", "-q", *options, *chosen],
        cwd=suite,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return read_outcomes(report)


def read_outcomes(report: Path) -> dict[str, str]:
    """Of a JUnit file."""
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def figures(beside: dict[str, str], without: dict[str, str]) -> dict[str, Any]:
    """What the run beside our plugin says, and that of what failed there, without it."""
    failed = [name for name, outcome in sorted(beside.items()) if outcome in ("failure", "error")]
    return {
        "pytest": version("pytest"),
        "pytest_benchmark": version("pytest-benchmark"),
        "passed": sorted(name for name, outcome in beside.items() if outcome == "passed"),
        "skipped": sorted(name for name, outcome in beside.items() if outcome == "skipped"),
        "failed": failed,
        # One that is gone where it was asked for has not failed.
        "broken": [name for name in failed if without.get(name) not in ("failure", "error")],
    }


if __name__ == "__main__":
    sys.exit(main())
