"""Whose code a side has imported."""

import subprocess
import sys

import pytest

from stackwise.gate.side.imports import Imports

LOOK = """
import sys
sys.path[:0] = [{paths}]
{imports}
from stackwise.gate.side.imports import Imports
print(Imports({tree!r}, ["bench", "conftest.py"], [{foreign!r}]).look())
"""


@pytest.fixture
def look(tmp_path):
    files = {
        "tree/engine/__init__.py": "",
        "tree/src/inner.py": "",
        "tree/json.py": "",
        "tree/bench/sizes.py": "",
        "tree/conftest.py": "",
        "other/engine/__init__.py": "",
        "other/inner.py": "",
        "other/elsewhere.py": "",
        "other/venv/lib/site-packages/package.py": "",
        "link.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "linked").symlink_to(tmp_path / "other")

    def of(imports, *paths):
        program = LOOK.format(
            paths=", ".join(repr(str(tmp_path / path)) for path in paths),
            imports=imports,
            tree=str(tmp_path / "tree"),
            foreign=str(tmp_path / "other"),
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        own, stray = eval(done.stdout)
        return own, stray.replace(str(tmp_path), "")

    return of


@pytest.mark.parametrize(
    ("imports", "paths", "own", "stray"),
    [
        ("", ["tree"], False, ""),
        ("import engine", ["tree"], True, ""),
        ("import inner", ["tree/src"], True, ""),
        ("import sizes, conftest", ["tree/bench", "tree"], False, ""),
        ("import engine", ["other"], False, "engine from /other/engine/__init__.py, though its tree has one"),
        ("import inner", ["other"], False, "inner from /other/inner.py, though its tree has one"),
        ("import elsewhere", ["other"], False, "/other/elsewhere.py"),
        ("import elsewhere", ["linked"], False, "/other/elsewhere.py"),
        ("import package", ["other/venv/lib/site-packages"], False, ""),
        ("import json", [], False, ""),
        (
            "import types; sys.modules['odd'] = m = types.ModuleType('odd'); m.__file__ = '_odd.py'",
            [],
            False,
            "",
        ),
    ],
)
def test_whose_code(look, imports, paths, own, stray):
    assert look(imports, *paths) == (own, stray)


def test_modules_of_the_gate_itself_are_no_strays(tmp_path, monkeypatch):
    (tmp_path / "project" / "gate").mkdir(parents=True)
    (tmp_path / "project" / "gate" / "of_the_gate.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "project" / "gate")
    __import__("of_the_gate")
    project, tree = str(tmp_path / "project"), str(tmp_path / "tree")
    assert Imports(tree, [], [project]).look()[1] == f"{project}/gate/of_the_gate.py"
    assert Imports(tree, [], [project], [f"{project}/gate"]).look()[1] == ""
    del sys.modules["of_the_gate"]


def test_without_trees_all_is_its_own():
    assert Imports(None, [], []).look() == (True, "")
