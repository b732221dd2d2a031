"""Makefile: where `.venv` gets torch and the other packages from."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def pip_installs(*variables):
    """Return the arguments of each `pip install` of `make .venv`, in their order."""
    command = ["make", "--dry-run", "--always-make", "--directory", str(ROOT), ".venv", *variables]
    # `make test` passes its own variables to this process.
    of_make = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "TORCH_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in of_make}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = [shlex.split(line) for line in done.stdout.splitlines() if "-m pip install" in line]
    return [line[line.index("install") + 1 :] for line in lines]


@pytest.fixture
def index(tmp_path):
    """URL of a package index with one package: an empty torch of the constrained version."""
    [version] = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    name = f"torch-{version}+tiny"
    folder = tmp_path / "simple" / "torch"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}+tiny\n"
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{name}-py3-none-any.whl">{name}</a>')
    return folder.parent.as_uri()


def test_torch_index_is_used_for_torch_alone():
    tools, torch, project = pip_installs("TORCH_INDEX=https://example.org/cpu")
    assert torch[-1] == "torch" and "--no-deps" in torch
    assert torch[torch.index("--index-url") + 1] == "https://example.org/cpu"
    assert "--index-url" not in tools + project
    assert project[-1] == ".[dev]"


def test_without_torch_index_one_index_is_used_for_all():
    tools, project = pip_installs()
    assert (tools[-1], project[-1]) == ("setuptools", ".[dev]")
    assert "--index-url" not in tools + project


def test_torch_of_the_index_meets_the_constraints(index):
    _, torch, _ = pip_installs(f"TORCH_INDEX={index}")
    torch.remove("--quiet")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", *torch]
    done = subprocess.run(
        command, env=environment | {"PIP_CONFIG_FILE": os.devnull}, cwd=ROOT, capture_output=True, text=True
    )
    assert re.search(r"^Would install torch-.*\+tiny$", done.stdout, re.MULTILINE), done.stderr
