"""A git repository of two commits, and a run of the gate in it."""

import json
import os
import subprocess
import sys

from tests.forked import HANG_SECONDS, ROOT

BUSY = """
def work():
    total = 0
    for i in range({}):
        total += i * i
    return total
"""
FAST, SLOW = BUSY.format(5000), BUSY.format(20000)
ONE_ROUND = "--stackwise-gate-seconds=0.001"


def git(folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(root, files, tag=None):
    """Write files of the repository `root`, which is made if it is not there, and commit everything."""
    write(root, files)
    if not (root / ".git").exists():
        git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "x", "--allow-empty")
    if tag is not None:
        git(root, "tag", tag)


def run_gate(root, *options, tests="bench", **variables):
    """Compare the working tree with the tag `base`. Returns the exit code, the report and the output."""
    report = root.parent / "report.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", tests, "--stackwise-against=base", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--stackwise-gate-report={report}", *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": ROOT, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    result = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, result, done.stdout + done.stderr
