"""MODULE:FACTORY: the object that it names, and the errors."""

import json
import sys

import pytest

from stackwise.subject.factory import load_factory


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    (tmp_path / "shelf_of_models.py").write_text(
        "from json import dumps\nclass Family:\n    member = staticmethod(lambda: 'member')\n"
        "def small():\n    return 'small'\n"
        "def _hidden():\n    return 'hidden'\n"
        "size = 3\n"
    )
    (tmp_path / "broken_models.py").write_text("def small(): pass\nraise OSError('disk on fire')\n")
    yield tmp_path
    for name in set(sys.modules) - known:
        if name in ("shelf_of_models", "broken_models", "models"):
            del sys.modules[name]


@pytest.mark.parametrize("module", ["shelf_of_models", "shelf_of_models.py"])
def test_load_by_module_and_by_file(folder, module):
    assert load_factory(f"{module}:small", search=folder)() == "small"
    assert load_factory(f"{module}:Family.member", search=folder)() == "member"
    assert load_factory(f"{module}:_hidden", search=folder)() == "hidden"
    assert load_factory(f"{module}:size", search=folder) == 3


def test_load_by_a_path_with_a_colon(folder):
    (folder / "a:b").mkdir()
    (folder / "a:b" / "behind_a_colon.py").write_text("small = 'small'\n")
    assert load_factory(f"{folder}/a:b/behind_a_colon.py:small") == "small"


def test_load_by_path(folder, monkeypatch):
    assert load_factory(f"{folder}/shelf_of_models.py:small")() == "small"
    monkeypatch.chdir(folder)
    assert load_factory("shelf_of_models.py:small")() == "small"


def test_load_of_an_installed_module():
    assert load_factory("json:dumps") is json.dumps
    assert load_factory("json:JSONEncoder.encode") is json.JSONEncoder.encode


def test_load_of_two_files_with_one_name(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "models.py").write_text(f"def which():\n    return {name!r}\n")
    assert load_factory("a/models.py:which", search=folder)() == "a"
    assert load_factory("b/models.py:which", search=folder)() == "b"


@pytest.mark.parametrize("target", ["", ":", "module", "module:", ":factory", "module.factory"])
def test_load_of_another_form_is_refused(target):
    with pytest.raises(ValueError, match="wanted MODULE:FACTORY") as raised:
        load_factory(target)
    assert repr(target) in str(raised.value)


@pytest.mark.parametrize("target", ["no_such_module_here:f", "no_such_file_here.py:f", "json.no_such:f"])
def test_load_of_a_missing_module(folder, target):
    with pytest.raises(ValueError, match=f"cannot import {target[:-2]}: ") as raised:
        load_factory(target, search=folder)
    assert isinstance(raised.value.__cause__, ModuleNotFoundError | FileNotFoundError)


@pytest.mark.parametrize("attribute", ["large", "Family.other", "small.a.b"])
def test_load_of_a_missing_name_lists_the_callables(folder, attribute):
    with pytest.raises(ValueError, match=f"has no {attribute}; it defines Family, small$"):
        load_factory(f"shelf_of_models:{attribute}", search=folder)


@pytest.mark.parametrize("module", ["broken_models", "broken_models.py"])
def test_load_of_a_module_that_raises(folder, module):
    with pytest.raises(ValueError, match=r"cannot import .*OSError: disk on fire") as raised:
        load_factory(f"{module}:small", search=folder)
    assert isinstance(raised.value.__cause__, OSError)
    # Otherwise the next import would find an incomplete module.
    assert "broken_models" not in sys.modules
