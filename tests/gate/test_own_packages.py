"""Names of the packages that a tree has."""

import sys

import pytest

from stackwise.gate.side.own_packages import own_packages


@pytest.fixture
def names(tmp_path):
    """Names of the packages of a tree with these files: names(*files, tests=())."""

    def names(*files, tests=()):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        return own_packages(tmp_path, [tmp_path / test for test in tests])

    return names


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["core/__init__.py"], "core"),
        (["core.py"], "core"),
        (["src/core/__init__.py"], "core"),
        (["libs/core/pyproject.toml", "libs/core/src/core/__init__.py"], "core"),
        (["libs/core/setup.py", "libs/core/core/__init__.py"], "core"),
        (["sdk/a/b/setup.cfg", "sdk/a/b/core/__init__.py"], "core"),
        (["pyproject.toml", "python/core/__init__.py"], "core"),
        (["bindings/pyproject.toml", "bindings/python/core.py"], "core"),
        (["setup.py", "lib/core/__init__.py"], "core"),
        (["libs/core/pyproject.toml", "libs/core/src/acme/core/__init__.py"], "acme.core"),
    ],
)
def test_package_of_the_tree_has_a_name(names, files, name):
    assert name in names(*files)


@pytest.mark.parametrize(
    "files",
    [
        ["docs/numpy/__init__.py"],
        ["docs/conf/pyproject.toml", "docs/conf/numpy/__init__.py"],
        ["vendor/numpy/pyproject.toml", "vendor/numpy/numpy/__init__.py"],
        ["pyproject.toml", "pkg/__init__.py", "pkg/_vendor/numpy/__init__.py"],
        ["pkg/__init__.py", "pkg/template/setup.py", "pkg/template/numpy/__init__.py"],
        ["libs/core/pyproject.toml", "libs/core/numpy.py"],
        ["libs/core/pyproject.toml", "libs/core/data/numpy/__init__.py"],
        ["pyproject.toml", "lib/__init__.py", "lib/numpy/__init__.py"],
        ["python/numpy/__init__.py"],
        ["checks/pyproject.toml", "checks/numpy/__init__.py"],
        [".venv/lib/site-packages/setup.py", ".venv/lib/site-packages/numpy/__init__.py"],
    ],
)
def test_copy_or_helper_has_no_name(names, files):
    assert "numpy" not in names(*files, tests=["checks"])


def test_tests_of_a_project_are_no_package(names):
    assert names("libs/core/setup.py", "libs/core/tests/__init__.py", "libs/core/conftest.py") == set()


def test_folder_of_sys_path_has_names_unless_it_is_of_tests_or_copies(names, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("engine", "checks", "vendor")])
    assert names("engine/core.py", "checks/helper.py", "vendor/numpy.py", tests=["checks"]) == {"core"}
