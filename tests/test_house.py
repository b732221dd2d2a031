"""The house keeps its order: who may import whom, and docs/background/design.md shows every file."""

import ast
import re
from pathlib import Path

import pytest

from tests.long_tests import listed

ROOT = Path(__file__).parent.parent
ROOMS = ["support", "report", "config", "subject", "checkpoint", "benchmark", "stability", "checks", "gate"]
ROOMS += ["quality", "data", "model", "training", "prototype", "cli"]
FILES = sorted([*(ROOT / "stackwise").rglob("*.py"), *(ROOT / "pytest_stackwise").rglob("*.py")])


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def room_of(path):
    return path.relative_to(ROOT / "stackwise").parts[0].removesuffix(".py")


def test_every_room_is_in_the_order():
    rooms = {room_of(path) for path in FILES if path.is_relative_to(ROOT / "stackwise")} - {"__init__"}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_rooms_above_it(path):
    for module in imported_modules(path):
        if path.is_relative_to(ROOT / "stackwise"):
            assert not module.startswith("pytest_stackwise"), module
            if path.name == "__init__.py" and path.parent.name == "stackwise":
                continue
            parts = module.split(".")
            if parts[0] == "stackwise" and len(parts) > 1:
                assert ROOMS.index(parts[1]) <= ROOMS.index(room_of(path)), module


@pytest.mark.parametrize("room", ["checks", "stability", "checkpoint", "benchmark", "gate", "quality"])
def test_the_questions_know_nothing_of_our_own_model(room):
    for path in (ROOT / "stackwise" / room).rglob("*.py"):
        for module in imported_modules(path):
            assert not module.startswith(("stackwise.model", "stackwise.training")), (path, module)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_says_in_its_first_line_what_it_is_about(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, path
    assert len(docstring.splitlines()[0]) <= 110


def test_design_shows_every_file_and_no_other():
    page = (ROOT / "docs" / "background" / "design.md").read_text()
    picture = re.search(r"```text\n(stackwise/.*?)```", page, re.DOTALL)[1]
    shown = set(re.findall(r"\b(\w+\.py)\b", picture))
    assert shown == {path.name for path in FILES if path.name != "__init__.py"}


def test_listed_long_tests_exist():
    for nodeid in listed():
        file, *_, function = nodeid.partition("[")[0].split("::")
        assert re.search(rf"\bdef {function}\b", (ROOT / file).read_text()), nodeid
