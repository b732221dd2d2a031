"""The action of GitHub, its script run by bash with commands that write down what they were given."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ACTION = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())
STEP = ACTION["runs"]["steps"][0]
ZEROS = "0" * 40


class Job:
    """A job in a folder of its own, whose python ends with a code of choice."""

    def __init__(self, folder, commits=("abc",)):
        self.folder, self.output = folder, folder / "output"
        self.command(
            "python",
            f'printf "%s\\n" "$@" > {folder}/given; exit "$(cat {folder}/code 2>/dev/null || echo 0)"',
        )
        known = " | ".join(f'*" {commit}^{{commit}}"' for commit in commits)
        self.command(
            "git",
            f'echo "$@" >> {folder}/git.log\n'
            f'case "$*" in {known}) exit 0 ;; *FETCH_HEAD) echo fetched ;; *"HEAD^1") echo parent ;; '
            "rev-parse*) exit 1 ;; esac",
        )

    def command(self, name, text):
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def run(self, code=0, environment=None, **inputs):
        (self.folder / "code").write_text(str(code))
        given = {key: each.get("default", "") for key, each in ACTION["inputs"].items()} | inputs
        names = {name: re.search(r"inputs\.(\w+)", value)[1] for name, value in STEP["env"].items()}
        values = {name: given[key] for name, key in names.items()} | (environment or {})
        self.output.write_text("")
        script = self.folder / "script"
        script.write_text(STEP["run"])
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            env={
                "PATH": f"{self.folder}:{os.environ['PATH']}",
                "GITHUB_OUTPUT": str(self.output),
                "GITHUB_SHA": "merged",
                **values,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def given(self):
        return (self.folder / "given").read_text().splitlines()


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_every_input_is_used_and_every_used_one_is_there():
    used = set(re.findall(r"inputs\.(\w+)", str(ACTION["runs"]) + str(ACTION["outputs"])))
    assert used == set(ACTION["inputs"])
    assert "${{" not in STEP["run"]  # what others write into an event is never a part of the script


def test_defaults(job):
    done = job.run(base="abc")
    assert (done.returncode, done.stderr) == (0, "")
    assert job.given == [
        *("-m", "stackwise.cli", "gate", "abc", "--missing", "warn", "--report", "stackwise-gate.json")
    ]
    assert job.output.read_text() == "verdict=PASS\n"


def test_all_inputs(job):
    job.run(base="abc", tests="bench tests/b.py", limits="time=3%", seconds="600", build="make ext")
    assert job.given[8:] == [
        *("--limits", "time=3%", "--seconds", "600", "--build", "make ext", "--tests", "bench", "tests/b.py")
    ]


@pytest.mark.parametrize(
    ("code", "inconclusive", "verdict", "returned"),
    [
        (0, "fail", "PASS", 0),
        (1, "warn", "REGRESSED", 1),
        (7, "fail", "INCONCLUSIVE", 7),
        (7, "warn", "INCONCLUSIVE", 0),
        (4, "warn", "ERROR", 4),
        (5, "warn", "ERROR", 5),
    ],
)
def test_exit_codes(job, code, inconclusive, verdict, returned):
    done = job.run(code, base="abc", inconclusive=inconclusive)
    assert done.returncode == returned
    assert job.output.read_text() == f"verdict={verdict}\n"
    assert ("::warning" in done.stdout) == (code == 7 and inconclusive == "warn")
    assert ("nothing was compared" in done.stdout) == (code == 5)


def test_a_base_that_was_not_checked_out_is_fetched(job):
    job.run(base="main")
    assert "fetch --quiet --no-tags --depth=1 origin main" in (job.folder / "git.log").read_text()
    assert job.given[3] == "fetched"


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("asked", ["", "abc"])
def test_a_pull_request_is_compared_with_what_it_was_merged_into(tmp_path, merged, asked):
    job = Job(tmp_path, ("abc", "parent", *(["HEAD^2"] if merged else [])))
    done = job.run(base="abc", environment={"GIVEN": asked, "GITHUB_EVENT_NAME": "pull_request"})
    assert (done.returncode, done.stderr) == (0, "")
    assert job.given[3] == ("parent" if merged and not asked else "abc")


@pytest.mark.parametrize("base", ["./old", "/old", "dist/p-1-py3-none-any.whl", "callable"])
def test_what_is_no_revision_is_not_fetched(job, base):
    job.run(base=base)
    assert job.given[3] == base and not (job.folder / "git.log").exists()


@pytest.mark.parametrize("base", ["", ZEROS], ids=["none", "zeros"])
def test_no_base_is_an_error(job, base):
    done = job.run(base=base)
    assert done.returncode == 2 and "set the input base" in done.stdout
    assert not (job.folder / "given").exists()


def test_an_unknown_choice_is_an_error(job):
    done = job.run(base="abc", inconclusive="pass")
    assert done.returncode == 2 and "inconclusive: got 'pass'; allowed: fail, warn" in done.stdout


def test_the_page_describes_every_input():
    page = (Path(__file__).parents[2] / "docs" / "gate.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page[page.index("| input | default |") :], re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(rows))) == set(ACTION["inputs"])
