"""The gate between two revisions of a repository that holds a popular model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

FOLDER = Path(__file__).parent


BENCHMARK = """
import pytest
import torch
from tests.popular import nanochat, nanogpt, vit

@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield

def test_nanogpt(benchmark):
    benchmark(nanogpt.tiny().eval(), torch.zeros(64, 32, dtype=torch.long))

def test_nanochat(benchmark):
    benchmark(nanochat.tiny().eval(), torch.zeros(64, 32, dtype=torch.long))

def test_vit(benchmark):
    benchmark(vit.tiny().eval(), torch.zeros(64, 3, 16, 16))

def test_unchanged(benchmark):
    benchmark(torch.nn.Linear(64, 64), torch.zeros(64, 64))
"""
CHANGES = [
    # Scores are written out instead of a fused kernel.
    (
        "nanogpt.py",
        "class GPT(nn.Module):\n    attention = CausalSelf",
        "class GPT(nn.Module):\n    attention = Manual",
    ),
    # The activation is computed twice.
    ("nanochat.py", "F.relu(self.c_fc(x)).square()", "F.relu(h := self.c_fc(x)) * F.relu(h)"),
    # Softmax is computed in float64.
    ("vit.py", ".softmax(dim=-1))", ".softmax(dim=-1, dtype=torch.float64).to(q.dtype))"),
]


def git(folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True, env=environment)


@pytest.fixture
def repository(tmp_path):
    """A repository with the three models. Its second commit makes each of them need more memory."""
    folder = tmp_path / "project"
    models = folder / "tests" / "popular"
    models.mkdir(parents=True)
    for name, _, _ in CHANGES:
        shutil.copy(FOLDER / name, models)
    (folder / "bench").mkdir()
    (folder / "bench" / "test_models.py").write_text(BENCHMARK)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\ntestpaths = bench\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    git(folder, "tag", "base")
    for name, before, after in CHANGES:
        text = (models / name).read_text()
        assert text.count(before) == 1, name
        (models / name).write_text(text.replace(before, after))
    git(folder, "commit", "-qam", "head")
    return folder


@pytest.mark.slow
def test_gate_finds_models_that_need_more_memory(repository):
    command = [sys.executable, "-m", "stackwise.cli", "gate", "base", "--limits", "time=none,memory=1%"]

    finished = subprocess.run(
        [*command, "--report", "gate.json"], cwd=repository, capture_output=True, text=True, check=False
    )

    tests = json.loads((repository / "gate.json").read_text())["tests"]
    verdicts = {test["nodeid"].partition("::")[2]: test["verdict"] for test in tests}
    expected = {f"test_{name}": "REGRESSED" for name in ("nanogpt", "nanochat", "vit")}
    assert verdicts == expected | {"test_unchanged": "PASS"}, finished.stdout
    assert finished.returncode == 1
