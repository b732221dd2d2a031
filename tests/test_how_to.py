"""How-to pages: every command prints what the page shows, and the index lists every page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/how-to"
PAGES = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "index.md")
FILE = re.compile(r"```python\n(# (\S+\.py)\n.*?)```", re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
SLOW = {"gate-a-pull-request.md", "test-throughput-and-memory.md"}
WITH_COMMANDS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
    for name in PAGES
    if CONSOLE.search((FOLDER / name).read_text())
]


def commands(page):
    """Commands of the console blocks, each with the output that the page shows."""
    for block in CONSOLE.findall(page):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = step.partition("\n")
            yield command, output


def normalized(text):
    """Text without numbers and layout, which differ between machines and terminals."""
    return re.sub(r"[\d.]+", "N", " ".join(text.split()))


@pytest.fixture
def environment():
    """Environment of a user: the interpreter's commands, an identity for git, no options of this test run."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "STACKWISE_"))}
    person = {"NAME": "a", "EMAIL": "a@localhost"}
    kept |= {f"GIT_{role}_{key}": each for role in ("AUTHOR", "COMMITTER") for key, each in person.items()}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_commands_print_what_the_page_shows(name, tmp_path, environment):
    page = (FOLDER / name).read_text()
    for text, file in FILE.findall((FOLDER / "index.md").read_text()) + FILE.findall(page):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    for command, output in commands(page):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        printed = normalized(done.stdout + done.stderr)
        for part in re.split(r"(?:^| )\.\.\.$", output, flags=re.MULTILINE):
            found = printed.find(normalized(part))
            assert found >= 0, f"{command}\nshown: {normalized(part)}\nprinted: {printed}"
            printed = printed[found + len(normalized(part)) :]


@pytest.mark.parametrize("name", PAGES)
def test_page_is_short_and_in_the_index(name):
    page, index = (FOLDER / name).read_text(), (FOLDER / "index.md").read_text()
    assert f"]({name})" in index
    assert re.search(rf"^{name.removesuffix('.md')}$", index, re.MULTILINE)
    assert len(page.splitlines()) <= 80
    assert "\n## Example\n" in page and "\n## Variations\n" in page and "\n## Limits\n" in page
    assert "\nReference: " in page
