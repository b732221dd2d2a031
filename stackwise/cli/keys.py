"""Keys: allowed values, default and description of each key of a configuration, as help and as pages."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import TypeAdapter

from stackwise.config import BlockConfig, ModelConfig, StackWiseConfig
from stackwise.config.section import Section, section_in
from stackwise.support.markdown import markdown_table

__all__ = [
    "Key",
    "configuration_keys",
    "configuration_pages",
    "described_keys",
    "keys_of_a_kind",
    "write_pages",
]


class Key(NamedTuple):
    """Key of a configuration that is not a section.

    Attributes:
        allowed: type and range in words.
        default: default value in YAML. None: the key is required in its section.
        meaning: description in one line.
    """

    allowed: str
    default: str | None
    meaning: str


@cache
def configuration_keys() -> dict[str, Key]:
    """Return every key by its dotted path, in the order of the sections. `N` is an index of `per_stack`."""
    keys = {}
    for path, section in _sections():
        properties = section.model_json_schema()["properties"]
        for name, field in section.model_fields.items():
            if section_in(field.annotation) is None:
                # pydantic has no schema for a key with a custom validator, but has one for its type.
                known = properties[name].keys() & {"type", "anyOf", "enum"}
                kind: Any = field.annotation
                schema = properties[name] if known else TypeAdapter(kind).json_schema()
                full = f"{path}.{name}"
                default = None if field.is_required() else field.get_default(call_default_factory=True)
                shown = None if field.is_required() else _yaml(default)
                meaning = section.descriptions()[name] + _only_for(section, name)
                keys[full] = Key(_allowed(schema), shown, meaning)
    return keys


@cache
def keys_of_a_kind() -> dict[str, tuple[str, tuple[object, ...]]]:
    """Return the keys that need a value of another key: key -> (other key, values)."""
    return {
        f"{path}.{name}": (f"{path}.{other}", values)
        for path, section in _sections()
        for name, (other, values) in section.applies.items()
    }


def described_keys() -> str:
    """Return the text that `stackwise train --help` adds."""
    lines = ["keys of the configuration, as --KEY VALUE or --KEY=VALUE, with VALUE in YAML. The command line"]
    lines += [
        "overrides the file, and the file the defaults. If you change a key named `kind`, the file's keys"
    ]
    lines += ["for the old kind are ignored:", ""]
    for path, key in configuration_keys().items():
        default = "no default" if key.default is None else f"default {key.default}"
        lines += [f"  --{path}: {key.allowed}; {default}", f"      {key.meaning}"]
    return "\n".join(lines)


def configuration_pages() -> dict[str, str]:
    """Return the pages of `docs/reference` with every key and the docstring of each section, by file name."""
    chapters = {"configuration.md": [_INTRODUCTION], "configuration-training.md": [_TRAINING]}
    for path, section in _sections():
        page = "configuration-training.md" if path.startswith("training") else "configuration.md"
        chapters[page].append("\n\n".join([f"## {path}", *_prose(section), _table(path, section)]))
    return {page: "\n\n".join(parts) + "\n" for page, parts in chapters.items()}


def write_pages(folder: str | Path) -> None:
    """Write the pages into the folder of the reference."""
    for name, text in configuration_pages().items():
        Path(folder, name).write_text(text, encoding="utf-8")


def _table(path: str, section: type[Section]) -> str:
    """Return the keys of a section. The section of a key that is a section follows as a chapter."""
    rows = []
    for name, field in section.model_fields.items():
        key = configuration_keys().get(f"{path}.{name}")
        if key is not None:
            rows.append([f"`{name}`", key.allowed, _code(key.default), key.meaning])
            continue
        inner = f"{path}.{name}" + ".N" * (get_origin(field.annotation) is dict)
        is_optional = type(None) in get_args(field.annotation)
        allowed = f"section `{inner}`" + " | null" * is_optional
        meaning = section.descriptions()[name] + _only_for(section, name)
        rows.append([f"`{name}`", allowed, _code("null") if is_optional else "its defaults", meaning])
    return markdown_table(["Key", "Allowed", "Default", "Description"], rows)


_INTRODUCTION = """\
# Configuration

This page lists every key of `model` and `data` in a `StackWiseConfig`, by section.
[Configuration of the training](configuration-training.md) lists the keys of `training`.
`StackWiseConfig.from_yaml("run.yaml")` reads a file. `stackwise train run.yaml --training.optimizer.lr 3e-4`
sets keys on the command line. The command line overrides the file, and the file the defaults.
`--print-config` prints the result. If you change a key named `kind` on the command line, the file's keys for
the old kind are ignored: `--training.recompute.kind none` ignores `training.recompute.budget`. Numbers are
those of YAML 1.2, so `3e-4` is a number.

One error lists all problems: keys that are misspelt, have another type or are out of range. A key that has
no effect with the other keys is an error as well. [Training](training.md) explains the keys of `training` and
`data` together. `examples/` has a file for each kind of training.

`make pages` generates this page from the fields of `stackwise.config`."""

_TRAINING = """\
# Configuration of the training

This page lists every key of `training` in a `StackWiseConfig`, by section. [Configuration](configuration.md)
explains files, command line and errors. [Training](training.md) explains the keys together.

`make pages` generates this page from the fields of `stackwise.config`."""


def _sections() -> Iterator[tuple[str, type[Section]]]:
    """Yield the path and class of each section, outer sections first."""

    def inside(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
        if path:
            yield path, section
        for name, field in section.model_fields.items():
            inner = section_in(field.annotation)
            if inner is not None:
                # Sections in a mapping have an index.
                index = ".N" if get_origin(field.annotation) is dict else ""
                yield from inside(f"{path}.{name}{index}".lstrip("."), inner)

    return inside("", StackWiseConfig)


def _only_for(section: type[Section], name: str) -> str:
    """Return the condition of a key in brackets, or ""."""
    if name not in section.applies:
        return ""
    other, values = section.applies[name]
    return f" ({other}: {', '.join(map(_yaml, values))})"


def _allowed(schema: dict[str, Any]) -> str:
    """Return a JSON schema in words."""
    if "anyOf" in schema:
        return " | ".join(_allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "values" in schema:
        return " | ".join(schema["values"])
    match schema["type"]:
        case "array":
            count = f"{schema['minItems']} " if schema.get("minItems") else ""
            return f"list of {count}({_allowed(schema['items'])})"
        case "string":
            return "text"
        case "boolean":
            return "true | false"
        case "null":
            return "null"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    signs["multipleOf"] = "multiple of"
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if schema.get(key, 2**63) < 2**63]
    return " ".join([schema["type"], " and ".join(bounds)]).strip()


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _code(default: str | None) -> str:
    return "none: must be given" if default is None else f"`{default}`"


def _prose(section: type[Section]) -> list[str]:
    prose = [inspect.cleandoc(section.__doc__ or "")]
    if section is ModelConfig:  # most of its keys are keys of a Block
        prose += inspect.cleandoc(BlockConfig.__doc__ or "").split("\n\n")[1:]
    return prose
