"""A slowdown of this project's past, before the gate of today."""

import subprocess

import pytest

from bench.gate.own_history import FAST, SLOW, compare_own_history
from bench.marked_tables import ROOT


def has_history():
    found = subprocess.run(
        ["git", "cat-file", "-e", f"{SLOW}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    )
    return found.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_history(), reason="needs the history of the project")
def test_the_slowdown_is_seen():
    # A round or more: not always a verdict.
    found = compare_own_history(seconds=10.0)
    assert (found["base"], found["head"]) == (FAST, SLOW)
    assert found["rounds"] >= 1
    # It computes three times what it computed once: far beyond the noise of any machine.
    assert found["estimate"] > 0.3
    assert found["verdict"] in ("REGRESSED", "INCONCLUSIVE")


def test_a_repository_without_the_commits(tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    with pytest.raises(RuntimeError, match="git checkout"):
        compare_own_history(tmp_path)
