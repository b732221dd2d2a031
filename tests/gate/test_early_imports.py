"""What twins of later rounds may import ahead: of which modules a process of a side tells."""

import importlib
import sys
from types import ModuleType

import pytest

from stackwise.gate.side import early_imports
from stackwise.gate.side.early_imports import EarlyImports


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What is told of modules that lie in folders, where the interpreter began with those of `path`."""
    monkeypatch.setattr(early_imports, "_DEVICES", ())

    def of(path, loaded, files=()):
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        # What was looked up before may have been noted within the same tick of the file system's clock.
        importlib.invalidate_caches()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(tmp_path / place) for place in path])
            early = EarlyImports()
            for name in early_imports._SLOW & set(sys.modules):
                patch.delitem(sys.modules, name)
            sys.path.insert(0, str(tmp_path / "late/site-packages"))
            for name, place in loaded.items():
                module = ModuleType(name)
                module.__file__ = str(tmp_path / place / name / "__init__.py")
                patch.setitem(sys.modules, name, module)
            found = early.new()
        return None if found is None else {name for name in found if name in loaded}

    return of


def test_installed_modules_are_reported_as_early_imports(told):
    assert told(["lib/site-packages"], {"numpy": "lib/site-packages", "email": "lib/site-packages"}) == {
        "numpy"
    }
    # As environment modules have it in PYTHONPATH: twins look there too.
    path = ["overlay/lib/site-packages", "lib/site-packages"]
    loaded = {"numpy": "overlay/lib/site-packages", "torch": "lib/site-packages"}
    assert told(path, loaded, ["lib/site-packages/numpy/__init__.py"]) == {"numpy", "torch"}


@pytest.mark.parametrize("place", ["deps", "late/site-packages"])
def test_no_early_imports_if_twins_would_find_another_installation(told, place):
    """torch would import the installed NumPy, and the sides be left with it."""
    path, loaded = ["deps", "lib/site-packages"], {"numpy": place, "torch": "lib/site-packages"}
    assert told(path, loaded, ["lib/site-packages/torch/__init__.py"]) == {"torch"}
    assert told(path, loaded, ["lib/site-packages/numpy/__init__.py"]) is None


def test_on_an_accelerator_none_is_made_ahead(monkeypatch, tmp_path):
    monkeypatch.setattr(early_imports, "_DEVICES", (str(tmp_path / "nvidiactl"),))
    assert EarlyImports().new() is not None
    (tmp_path / "nvidiactl").touch()
    assert EarlyImports().new() is None
