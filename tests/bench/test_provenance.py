"""Result files name the commit that they were measured of, and it is one of this history."""

import json
import subprocess

import pytest

from bench.claim import RESULTS, is_commit
from bench.marked_tables import ROOT

FILES = {str(path.relative_to(RESULTS)): path for path in sorted(RESULTS.rglob("*.json"))}
FILES = {name: path for name, path in FILES.items() if not path.stem.endswith("-quick")}

# Measured of files that had changed since the commit. What is measured anew leaves the list, and nothing
# comes to it.
CHANGED: dict[str, set[str]] = {}
# Measured of commits that are not in the history. The same holds of these.
GONE = {
    "cpu/prototype.json": {"07525d4"},
}


def commits(path):
    """What a file names, for all of it and for each of its rows."""
    record = json.loads(path.read_text())
    return {record["commit"], *(each["commit"] for each in record.get("measured", {}).values())}


def git(*arguments):
    try:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.strip()


@pytest.fixture(scope="module")
def history():
    """Every commit that leads here."""
    if git("rev-parse", "--show-prefix") != "":
        pytest.skip("needs git, and a checkout")
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the whole history")
    return git("rev-list", "HEAD").split()


def test_exceptions_are_files():
    assert CHANGED.keys() | GONE.keys() <= FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_result_names_a_commit(name):
    named = {commit for commit in commits(FILES[name]) if not is_commit(commit)}
    assert named <= CHANGED.get(name, set()), "commit what has changed, and measure again"
    assert named == CHANGED.get(name, set()), "measured anew: take it out of CHANGED"


@pytest.mark.parametrize("name", FILES)
def test_the_commit_is_one_of_the_history(name, history):
    named = {commit for commit in commits(FILES[name]) if is_commit(commit)}
    gone = {commit for commit in named if not any(each.startswith(commit) for each in history)}
    assert gone <= GONE.get(name, set()), "measure again, of a commit that is to stay"
    assert gone == GONE.get(name, set()), "measured anew: take it out of GONE"
