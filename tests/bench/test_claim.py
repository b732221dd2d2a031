"""A claim on file: bars, figures, and a row that is measured again."""

import json
import shutil
import subprocess

import pytest

from bench import claim as claim_module
from bench.claim import Bar, Claim, commit_of, interleave, is_commit, ratio


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "value, at_most, verdict",
    [(1.2, False, "PASS"), (1.19, False, "SHORT"), (1.19, True, "PASS"), (1.21, True, "SHORT")],
)
def test_verdict(value, at_most, verdict):
    assert Bar("speed", value, 1.2, at_most).verdict == verdict


def test_what_was_not_measured_is_neither():
    assert Bar("speed", None, 1.2).verdict == "NOT MEASURED"


@pytest.mark.parametrize(
    ("quick", "full_size", "value", "verdict", "code"),
    [
        (False, True, 1.0, "SHORT", 1),
        (True, True, 1.0, "not judged", 0),
        (True, True, 1.3, "not judged", 0),
        (True, False, 1.0, "SHORT", 1),
        (True, False, 1.3, "PASS", 0),
        (True, True, None, "NOT MEASURED", 0),
    ],
)
def test_quick_run_judges_only_bars_of_any_size(results, capsys, quick, full_size, value, verdict, code):
    claim = Claim("speed", quick)
    claim.enter(Bar("a", value, 1.2, full_size=full_size))
    assert claim.conclude() == code
    assert capsys.readouterr().out.splitlines()[0].endswith(f" >= 1.2    {verdict}")
    [path] = results.rglob("*.json")
    assert [bar["verdict"] for bar in json.loads(path.read_text())["bars"]] == [verdict]


def test_bar_that_was_not_judged_stays_so_after_resume(results):
    Claim("speed", quick=True).enter(Bar("a", 1.0, 1.2, full_size=True))
    resumed = Claim("speed", quick=True)
    resumed.resume()
    assert resumed.bars == [Bar("a", 1.0, 1.2, full_size=True)]
    assert resumed.conclude() == 0


def test_a_row_measured_again_replaces_its_own_and_no_other(results):
    first = Claim("speed", quick=False, commit="one")
    first.enter(Bar("a", 1.0, 1.2), {"seconds": [1]})
    first.enter(Bar("b", 2.0, 1.2), {"seconds": [2]})
    assert first.conclude() == 1

    again = Claim("speed", quick=False, commit="two")
    again.resume()
    again.enter(Bar("a", 1.3, 1.2), {"seconds": [3]})
    assert again.conclude() == 0

    [path] = results.rglob("speed.json")
    record = json.loads(path.read_text())
    assert [(bar["name"], bar["value"], bar["verdict"]) for bar in record["bars"]] == [
        ("a", 1.3, "PASS"),
        ("b", 2.0, "PASS"),
    ]
    assert record["figures"] == {"a": {"seconds": [3]}, "b": {"seconds": [2]}}
    assert {name: each["commit"] for name, each in record["measured"].items()} == {"a": "two", "b": "one"}


def test_nothing_to_resume_is_a_beginning(results):
    claim = Claim("speed", quick=True)
    claim.resume()
    assert (claim.bars, claim.figures) == ([], {})


def test_a_row_is_on_file_as_soon_as_it_is_measured(results):
    Claim("speed", quick=True).enter(Bar("a", 1.0, 1.2))
    [path] = results.rglob("speed-quick.json")
    assert json.loads(path.read_text())["bars"][0]["value"] == 1.0


def test_ratio_is_of_a_round():
    # The machine slows down by two from round to round; the ratio does not.
    assert ratio([3.0, 6.0, 12.0], [1.0, 2.0, 4.0])["median"] == 3.0


def test_each_call_is_sampled_once_a_round():
    made = []
    samples = interleave({name: lambda n=name: made.append(n) for name in "ab"}, rounds=3, seconds=0.0)
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    rounds = [set(made[4 + 2 * i : 6 + 2 * i]) for i in range(3)]  # after two of each to warm up
    assert rounds == [{"a", "b"}] * 3


@pytest.mark.parametrize(
    "commit, quick, warned",
    [
        ("ae9a3b8", False, False),
        ("ae9a3b8-dirty", False, True),
        ("unknown", False, True),
        ("ae9a3b8-dirty", True, False),
    ],
)
def test_a_full_run_of_what_is_no_commit_says_so(results, capsys, commit, quick, warned):
    Claim("speed", quick, commit=commit).conclude()
    assert (f"WARNING: measured of {commit}, " in capsys.readouterr().out) == warned


def test_a_row_of_what_is_no_commit_is_told_as_long_as_it_is_there(results, capsys):
    Claim("speed", quick=False, commit="ae9a3b8-dirty").enter(Bar("a", 1.0, 1.2))
    again = Claim("speed", quick=False, commit="bae9a38")
    again.resume()
    again.enter(Bar("b", 1.0, 1.2))
    again.conclude()
    assert "WARNING: measured of ae9a3b8-dirty, " in capsys.readouterr().out
    again.enter(Bar("a", 1.0, 1.2))
    again.conclude()
    assert "WARNING" not in capsys.readouterr().out


def test_what_is_judged_again_was_measured_when_it_was(results):
    first = Claim("speed", quick=False, commit="ae9a3b8", figures={"seconds": 2.0})
    path = first.write()
    before = json.loads(path.read_text())
    again = Claim("speed", quick=False, commit="bae9a38")
    assert again.judge_again([Bar("a", 1.0, 1.2)], {"more": 3}) == 1
    after = json.loads(path.read_text())
    assert [bar["verdict"] for bar in after.pop("bars")] == ["SHORT"]
    assert after.pop("figures") == {"seconds": 2.0, "more": 3}
    assert after == {key: value for key, value in before.items() if key not in ("bars", "figures")}
    assert again.judge_again([Bar("a", 1.3, 1.2)], {}) == 0


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with a commit of code and a result."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # as set inside a hook
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "repository"
    (folder / "bench" / "results").mkdir(parents=True)
    (folder / "code.py").write_text("1")
    (folder / "bench" / "results" / "speed.json").write_text("{}")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True)
    return folder


def test_results_that_changed_are_no_other_code(repository):
    commit = commit_of(repository / "bench")
    assert is_commit(commit)
    (repository / "bench" / "results" / "speed.json").write_text("{1: 2}")
    (repository / "new.txt").write_text("")
    assert commit_of(repository / "bench") == commit
    (repository / "code.py").write_text("2")
    assert commit_of(repository / "bench") == f"{commit}-dirty"


def test_files_of_no_commit(repository, monkeypatch):
    assert commit_of(repository.parent) == "unknown"
    monkeypatch.setenv("PATH", "")
    assert commit_of(repository) == "unknown"
    assert not is_commit("unknown")
