"""Pages for beginners: every command runs in the order of the page, and prints what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
PAGES = ["docs/start/install.md", pytest.param("docs/start/ten-minutes.md", marks=pytest.mark.slow)]


def steps(page):
    """Commands of the page's console blocks, each with the output that the page shows."""
    for block in CONSOLE.findall((ROOT / page).read_text()):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = step.partition("\n")
            yield command, output


def normalized(text):
    """Text without numbers and layout, which differ between machines and terminals."""
    return re.sub(r"[\d.]+", "N", " ".join(text.split()))


@pytest.fixture
def shell(tmp_path):
    """Runs a command in the folder that earlier commands have changed to, and returns what it prints."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    person = {"NAME": "a", "EMAIL": "a@localhost"}
    identity = {f"GIT_{role}_{key}": each for role in ("AUTHOR", "COMMITTER") for key, each in person.items()}
    environment = os.environ | identity | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in [name for name in environment if name.startswith(("PYTEST_", "STACKWISE_"))]:
        del environment[name]
    folder = tmp_path

    def run(command):
        nonlocal folder
        if command.startswith("cd "):
            folder = folder / command.removeprefix("cd ")
            return ""
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(page, shell):
    for command, output in steps(page):
        printed = normalized(shell(command))
        for part in re.split(r"(?:^| )\.\.\.$", output, flags=re.MULTILINE):
            found = printed.find(normalized(part))
            assert found >= 0, f"{command}\nshown: {normalized(part)}\nprinted: {printed}"
            printed = printed[found:]
