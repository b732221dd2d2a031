"""Start and How-to pages: the commands of a page run in its order, and print the output that it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stackwise.gate.result import EXIT_INCONCLUSIVE

ROOT = Path(__file__).parent.parent
HOW_TO = ROOT / "docs/how-to"
TASKS = sorted(path for path in HOW_TO.glob("*.md") if path.name != "index.md")
PAGES = [*sorted((ROOT / "docs/start").glob("*.md")), *TASKS]
LONG = {"ten-minutes.md", "gate-a-pull-request.md", "test-throughput-and-memory.md"}
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
FILE = re.compile(r"```python\n(# (\S+\.py)\n.*?)```", re.DOTALL)
WITH_COMMANDS = [
    pytest.param(page, id=page.name, marks=[pytest.mark.long] * (page.name in LONG))
    for page in PAGES
    if CONSOLE.search(page.read_text())
]


def steps(page):
    """Commands of a page, each with the output that the page shows."""
    for block in CONSOLE.findall(page.read_text()):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = step.partition("\n")
            yield command, output


def normalized(text):
    """Text without numbers and layout, which differ between machines and terminals."""
    return re.sub(r"[\d.]+", "N", " ".join(text.split()))


@pytest.fixture
def shell(tmp_path):
    """Function that runs a command in the current folder of a user's shell: exit code and printed text."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "STACKWISE_"))}
    person = {"NAME": "a", "EMAIL": "a@localhost"}
    kept |= {f"GIT_{role}_{key}": each for role in ("AUTHOR", "COMMITTER") for key, each in person.items()}
    kept |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    folder = tmp_path

    def run(command):
        nonlocal folder
        if command.startswith("cd "):
            folder = folder / command.removeprefix("cd ")
            return 0, ""
        done = subprocess.run(
            command, shell=True, cwd=folder, env=kept, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_print_what_the_page_shows(page, shell, tmp_path):
    for text, file in FILE.findall((HOW_TO / "index.md").read_text()) + FILE.findall(page.read_text()):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    for command, output in steps(page):
        code, text = shell(command)
        if command.startswith("stackwise gate") and code == EXIT_INCONCLUSIVE:
            continue  # a busy machine
        assert code == 0 or output, f"{command}: exit code {code}\n{text}"
        printed = normalized(text)
        for part in re.split(r"(?:^| )\.\.\.$", output, flags=re.MULTILINE):
            found = printed.find(normalized(part))
            assert found >= 0, f"{command}\nshown: {normalized(part)}\nprinted: {printed}"
            printed = printed[found + len(normalized(part)) :]


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.name)
def test_task_has_an_example_variations_and_limits_on_a_short_page(page):
    text = page.read_text()
    assert len(text.splitlines()) <= 100
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert {"Example", "Variations", "Limits"} <= set(headings)
    assert "\nReference: " in text
