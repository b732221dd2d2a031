"""Packages: names of the packages that a project installs, from its metadata."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

__all__ = ["declared_packages", "installed_packages", "is_project"]

_BACKENDS = ("flit", "hatch", "maturin", "pdm", "poetry", "scikit-build", "setuptools", "uv")
_KEYS = ("packages", "include", "module", "module-name", "name")
_OTHER_KEYS = ("sdist", "exclude", "where", "from")  # an sdist has tests too


def declared_packages(project: Path) -> frozenset[str]:
    """Return the top-level packages that the pyproject.toml of a folder declares.

    The result includes the name of the project: build backends use a package of this name by default.
    """
    settings = _pyproject(project)
    tools = settings.get("tool", {})
    names = [settings.get("project", {}).get("name", ""), *_texts([tools.get(b) for b in _BACKENDS], False)]
    # A path ("src/perf"), the name of a distribution ("acme-perf") or of a module ("perf._core").
    return frozenset(re.sub(r"[-.]+", "_", name.strip("/").split("/")[-1]).lower() for name in names) | {
        name.partition(".")[0] for name in names
    }


def installed_packages(root: Path) -> frozenset[str]:
    """Return the top-level packages of the installed distributions whose source is below `root`."""
    found: set[str] = set()
    for distribution in distributions():
        if _is_of(distribution, root):
            top_level = distribution.read_text("top_level.txt")
            if top_level is None:
                files = [file for file in distribution.files or () if file.suffix == ".py"]
                found.update(file.parts[0] for file in files if len(file.parts) > 1)
            else:
                found.update(top_level.split())
    return frozenset(found)


def is_project(folder: Path) -> bool:
    """Return True if a folder has a setup.py, or a pyproject.toml that declares a project."""
    return (folder / "setup.py").exists() or not {"project", "build-system"}.isdisjoint(_pyproject(folder))


def _is_of(distribution: Distribution, root: Path) -> bool:
    origin = distribution.read_text("direct_url.json") or ""
    if re.search(rf"file://{re.escape(str(root))}[/\"]", origin):
        return True
    place = Path(str(distribution.locate_file(""))).resolve()  # an egg-info lies next to its source
    return place.is_relative_to(root) and "site-packages" not in place.parts


def _pyproject(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is missing, or pytest has refused it
        return {}


def _texts(value: object, named: bool) -> Iterator[str]:
    """Yield the strings that name packages in the settings of build backends."""
    if isinstance(value, str) and named:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, named)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in _OTHER_KEYS:
                yield from _texts(inner, named or key in _KEYS)
