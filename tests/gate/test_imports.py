"""Whose code a side has imported."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from stackwise.gate.side.imports import Imports, file_of, is_installed

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


ALTHOUGH = "although its tree has"


@pytest.mark.parametrize(
    ("imports", "paths", "own", "stray"),
    [
        ("", ["tree"], False, ""),
        ("import engine", ["tree"], True, ""),
        ("import inner", ["tree/src"], True, ""),
        ("import sizes, conftest", ["tree/bench", "tree"], False, ""),
        ("import engine", ["other"], False, f"engine from /other/engine/__init__.py, {ALTHOUGH} engine"),
        ("import inner", ["other"], False, f"inner from /other/inner.py, {ALTHOUGH} inner"),
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


class Lazy(ModuleType):
    """A module whose optional dependency is missing."""

    def __getattr__(self, name):
        raise ImportError("the optional dependency is not installed")


class Slotted:
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError("not initialized")


@pytest.mark.parametrize("kind", [lambda: Lazy("lazy"), Slotted, lambda: SimpleNamespace(__file__=1), object])
def test_module_without_a_file_has_none(kind):
    assert file_of(kind()) is None


def test_file_of_a_lazy_module_does_not_load_it(tmp_path):
    (tmp_path / "later.py").write_text("raise ValueError('loaded')")
    spec = importlib.util.spec_from_file_location("later", tmp_path / "later.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert file_of(module) == str(tmp_path / "later.py")
    with pytest.raises(ValueError, match="loaded"):
        _ = module.anything


def test_lazy_module_does_not_stop_the_search(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    assert Imports(str(tmp_path), [], []).look() == (False, "")


def test_project_inside_a_prefix_of_python_is_not_installed():
    """As a project in /usr/src is, with the Python of the system."""
    project = Path(sys.prefix).resolve() / "src" / "project"
    assert is_installed(project / "pkg")
    assert not is_installed(project / "pkg", project)
    assert is_installed(project / "lib/dist-packages/pkg", project)
