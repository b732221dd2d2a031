"""Factories: load the object that a command line names: MODULE:FACTORY, path/to/file.py:FACTORY or hf:NAME.

`TRUST` is the environment variable that allows code of the Hugging Face Hub.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["TRUST", "load_factory"]

# Environment variable that allows code of the Hugging Face hub. Child processes inherit it.
TRUST = "STACKWISE_TRUST_REMOTE_CODE"


def load_factory(target: str, *, search: Path | None = None) -> Any:
    """Load the object named by `target`.

    Args:
        target: "package.module:name", "path/to/file.py:name", or a model of transformers as
            "hf:NAME_OR_FOLDER" or "hf-tiny:NAME_OR_FOLDER" (`stackwise.subject.hf_model`).
        search: folder to import from, besides the installed packages, and of relative folders.

    Raises:
        ValueError: the text has another form, or there is no such module, name or configuration. An exception
            of the module during its import is the cause.
    """
    if target.startswith(("hf:", "hf-tiny:")):
        from stackwise.subject.hf_model import load_hf_model

        return load_hf_model(target, search=search, trust_remote_code=os.environ.get(TRUST) == "1")
    module_name, separator, attribute = target.rpartition(":")
    if not (separator and module_name and attribute):
        wanted = "MODULE:FACTORY, path/to/file.py:FACTORY, hf:NAME_OR_FOLDER or hf-tiny:NAME_OR_FOLDER"
        raise ValueError(f"got {target!r}; wanted {wanted}")
    if search is not None and str(search) not in sys.path:
        sys.path.insert(0, str(search))
    try:
        if module_name.endswith(".py"):
            module = _load_file((search or Path()) / module_name)
        else:
            module = importlib.import_module(module_name)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit and pytest's Skipped are no Exceptions
        said = " ".join(str(error).split())
        raise ValueError(f"{target}: cannot import {module_name}: {type(error).__name__}: {said}") from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            defined = ", ".join(_defined(module)) or "no callable"
            raise ValueError(f"{target}: {module_name} has no {attribute}; it defines {defined}")
        found = getattr(found, part)
    return found


def _defined(module: ModuleType) -> list[str]:
    """Return the public names of the callables that a module defines and does not only import."""
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]


def _load_file(path: Path) -> Any:
    """Return the module in a file. Its folder joins `sys.path`, as when Python runs the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules.get(path.stem)
    if (
        module is None and path.stem.isidentifier()
    ):  # through all import hooks, such as pytest's for assertions
        module = importlib.import_module(path.stem)
    if module is not None and getattr(module, "__file__", None) == str(path):
        return module
    # Another module has the name already.
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
