"""The action of GitHub, its script run by bash with commands that write down what they were given."""

import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

ACTION = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())
STEP = ACTION["runs"]["steps"][0]
ZEROS = "0" * 40


class Job:
    """A job in a folder of its own, whose python ends with a code of choice, and whose git knows commits.

    Without `commits` it is the real one, in the folder `checkout`.
    """

    def __init__(self, folder, commits=("abc",)):
        self.folder, self.output, self.place = folder, folder / "output", None
        self.command(
            "python",
            f'printf "%s\\n" "$@" > {folder}/given; exit "$(cat {folder}/code 2>/dev/null || echo 0)"',
        )
        if not commits:
            self.place = folder / "checkout"
            return
        known = " | ".join(f'*" {commit}^{{commit}}"' for commit in commits)
        self.command(
            "git",
            f'echo "$@" >> {folder}/git.log\n'
            f'case "$*" in {known}) exit 0 ;; *FETCH_HEAD) echo fetched ;; rev-parse*) exit 1 ;; esac',
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
            cwd=self.place,
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
    job.run(
        base="abc",
        tests="bench\n  tests/b.py tests/c.py\n",
        limits="time=3%",
        seconds="600",
        build="make ext",
    )
    assert job.given[8:] == [
        *("--limits", "time=3%", "--seconds", "600", "--build", "make ext", "--tests"),
        *("bench", "tests/b.py", "tests/c.py"),
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


@pytest.fixture(scope="module")
def pull_request(tmp_path_factory):
    """A repository with a pull request into which its base was merged once, and its commits by name."""
    root = tmp_path_factory.mktemp("origin")
    git = partial(run_git, root)

    def commit(name):
        git("commit", "--quiet", "--allow-empty", "-m", name)
        return git("rev-parse", "HEAD")

    git("init", "--quiet", "--initial-branch", "main")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    commit("first")
    git("checkout", "--quiet", "-b", "change")
    commit("a change")
    git("checkout", "--quiet", "main")
    commits = {"opened": commit("of others")}
    git("checkout", "--quiet", "change")
    git("merge", "--quiet", "--no-edit", "main")
    commits["head"] = git("rev-parse", "HEAD")
    git("checkout", "--quiet", "main")
    commits["tip"] = commit("of others again")
    git("checkout", "--quiet", "--detach")
    git("merge", "--quiet", "--no-edit", "--no-ff", "change")
    commits["merged"] = git("rev-parse", "HEAD")
    git("checkout", "--quiet", "main")
    return root, commits


def run_git(folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("depth", [1, 100])
@pytest.mark.parametrize(
    "checked_out, given, base",
    [
        ("merged", "", "tip"),  # newer than what the event tells of
        ("head", "", "opened"),  # and not its first parent, which is of the change itself
        ("merged", "opened", "opened"),
    ],
)
def test_a_pull_request_is_compared_with_what_it_was_merged_into(
    tmp_path, pull_request, checked_out, given, base, depth
):
    origin, commits = pull_request
    job = Job(tmp_path, ())
    job.place.mkdir()
    run_git(job.place, "init", "--quiet")
    run_git(job.place, "remote", "add", "origin", f"file://{origin}")
    run_git(job.place, "fetch", "--quiet", "--no-tags", f"--depth={depth}", "origin", commits[checked_out])
    run_git(job.place, "checkout", "--quiet", commits[checked_out])
    told = {"GIVEN": given, "GITHUB_EVENT_NAME": "pull_request", "GITHUB_SHA": commits["merged"]}
    done = job.run(base=commits["opened"], environment=told)
    assert (done.returncode, done.stderr) == (0, "")
    assert job.given[3] == commits[base]
    assert not run_git(job.place, "status", "--porcelain")


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
    page = (Path(__file__).parents[2] / "docs" / "reference" / "gate.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page[page.index("| input | default |") :], re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(rows))) == set(ACTION["inputs"])
