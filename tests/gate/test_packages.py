"""The packages that a project declares and installs."""

import sys

import pytest

from stackwise.gate.overlay import declared_packages, installed_packages, is_project

DISTRIBUTION = "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n"


@pytest.mark.parametrize(
    ("pyproject", "package"),
    [
        ('[project]\nname = "Acme-Perf"', "acme_perf"),
        ('[tool.setuptools]\npackages = ["perf", "perf.inner"]', "perf"),
        ('[tool.setuptools.packages.find]\ninclude = ["perf"]', "perf"),
        ('[tool.hatch.build.targets.wheel]\npackages = ["src/perf"]', "perf"),
        ('[tool.poetry]\nname = "perf"', "perf"),
        ('[tool.poetry]\npackages = [{include = "perf", from = "lib"}]', "perf"),
        ('[tool.flit.module]\nname = "perf"', "perf"),
        ('[tool.uv.build-backend]\nmodule-name = "perf"', "perf"),
        ('[tool.maturin]\nmodule-name = "perf._core"', "perf"),
    ],
)
def test_packages_are_those_that_pyproject_declares(pyproject, package, tmp_path):
    (tmp_path / "pyproject.toml").write_text(pyproject)
    assert package in declared_packages(tmp_path)


@pytest.mark.parametrize(
    "pyproject",
    [
        None,
        "not TOML",
        '[tool.mypy]\npackages = ["perf"]',
        '[tool.setuptools.packages.find]\nwhere = ["perf"]\nexclude = ["perf"]',
        '[tool.hatch.build.targets.sdist]\ninclude = ["perf"]',
    ],
)
def test_packages_of_other_tools_are_not_declared(pyproject, tmp_path):
    if pyproject is not None:
        (tmp_path / "pyproject.toml").write_text(pyproject)
    assert "perf" not in declared_packages(tmp_path)


@pytest.mark.parametrize("editable", [True, False])
def test_installed_packages_are_those_of_the_project(editable, tmp_path, monkeypatch):
    root, site = tmp_path / "project", tmp_path / "site-packages"
    place = site / "acme-1.0.dist-info" if editable else root / "acme.egg-info"
    place.mkdir(parents=True)
    (place / ("METADATA" if editable else "PKG-INFO")).write_text(DISTRIBUTION)
    (place / "top_level.txt").write_text("perf\nmore\n")
    (place / "direct_url.json").write_text(
        f'{{"url": "file://{root}", "dir_info": {{}}}}' if editable else ""
    )
    monkeypatch.setattr(sys, "path", [str(place.parent)])
    assert installed_packages(root) == {"perf", "more"}
    assert installed_packages(tmp_path / "project-of-others") == set()


def test_installed_packages_without_a_list_are_those_of_the_files(tmp_path, monkeypatch):
    place = tmp_path / "site-packages" / "acme-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(DISTRIBUTION)
    (place / "direct_url.json").write_text(f'{{"url": "file://{tmp_path}/project"}}')
    (place / "RECORD").write_text("perf/__init__.py,,\nacme-1.0.dist-info/METADATA,,\n_acme_editable.py,,\n")
    monkeypatch.setattr(sys, "path", [str(place.parent)])
    assert installed_packages(tmp_path / "project") == {"perf"}


def test_a_project_has_a_setup_or_declares_itself(tmp_path):
    assert not is_project(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    assert not is_project(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'perf'\n")
    assert is_project(tmp_path)
