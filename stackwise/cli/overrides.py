"""Overrides: keys of a configuration on the command line, which override the keys of the file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stackwise.cli.keys import configuration_keys, keys_of_a_kind
from stackwise.config import ConfigError, StackWiseConfig
from stackwise.config.yaml import load_yaml, read_yaml
from stackwise.support.arguments import shown

__all__ = ["OPTIONS", "Override", "load_configuration", "split_overrides"]

OPTIONS = ("--help", "--plan", "--print-config", "--progress", "--report")
_COMMAND_LINE = "command line"


class Override(NamedTuple):
    """Key on the command line.

    Attributes:
        key: dotted path of the key, as written.
        text: value, as YAML text. None: no value.
    """

    key: str
    text: str | None


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Separate `--KEY VALUE` and `--KEY=VALUE` from the other arguments, which include the `OPTIONS`.

    The argument after a key is its value, unless it starts with two dashes. In
    `--training.schedule.min_lr -1`, the value is -1, which is refused later.
    """
    others: list[str] = []
    overrides: list[Override] = []
    rest = iter(range(len(arguments)))
    for i in rest:
        name, equals, text = arguments[i].partition("=")
        if not name.startswith("--") or name.replace("_", "-") in OPTIONS:
            others.append(arguments[i])
        elif equals:
            overrides.append(Override(name[2:], text))
        elif i + 1 < len(arguments) and not arguments[i + 1].startswith("--"):
            overrides.append(Override(name[2:], arguments[next(rest)]))
        else:
            overrides.append(Override(name[2:], None))
    return others, overrides


def load_configuration(file: Path | None, overrides: Sequence[Override]) -> StackWiseConfig:
    """Return the configuration of a file with the overrides of the command line.

    The command line overrides the file, and the file overrides the defaults. If the command line selects
    another kind, the file's keys for the old kind are ignored.

    Args:
        file: YAML file. None: all keys have their defaults.
        overrides: keys, with values as YAML text.

    Raises:
        ConfigError: all problems of the file and the command line, each with the origin of its value.
        OSError: the file cannot be read.
    """
    if file is None:
        content: Any = {}
    elif not overrides:
        return StackWiseConfig.from_yaml(file)
    else:
        try:
            content = read_yaml(file)
        except ValueError as error:
            raise ConfigError([str(error)], str(file)) from None
        content = {} if content is None else content
        if not isinstance(content, Mapping):
            return StackWiseConfig.from_dict(content, source=str(file))
    source = _COMMAND_LINE if file is None else f"{file} and {_COMMAND_LINE}"
    values, problems = _read(overrides)
    merged = _without_other_kinds(content, values)
    for path, value in values.items():
        try:
            merged = _placed(merged, path, value)
        except ValueError as error:
            problems.append(f"{'.'.join(path)} ({_COMMAND_LINE}): {error}")
    try:
        config = StackWiseConfig.from_dict(merged, source=source)
    except ConfigError as error:
        told = [_with_origin(problem, str(file), content, list(values)) for problem in error.problems]
        raise ConfigError(problems + told, source) from None
    if problems:
        raise ConfigError(problems, source)
    return config


def _read(overrides: Sequence[Override]) -> tuple[dict[tuple[str, ...], Any], list[str]]:
    """Return the values by their paths, and the problems of the command line itself."""
    values: dict[tuple[str, ...], Any] = {}
    problems: list[str] = []
    for key, text in overrides:
        path, at = tuple(key.split(".")), f"{key} ({_COMMAND_LINE})"
        nested = next((".".join(other) for other in values if _is_within(path, other, either=True)), None)
        if path[0] not in StackWiseConfig.model_fields and len(path) == 1:
            problems.append(f"--{key} ({_COMMAND_LINE}): unknown option; {_near_option(key)}")
        elif nested == key:
            problems.append(f"{at}: given twice; allowed: once")
        elif nested is not None:
            problems.append(f"{at}: given beside {nested}, and one holds the other; allowed: one of them")
        elif not text:
            problems.append(
                f"{at}: got no value; allowed: --{key}=VALUE, with null for none and '\"\"' for ''"
            )
        else:
            try:
                values[path] = load_yaml(text.encode())
            except ValueError as error:
                problems.append(
                    f"{at}: got {shown(text)}, which is no YAML: {error}; text may need '\"...\"'"
                )
    return values, problems


def _without_other_kinds(content: Mapping[Any, Any], values: Mapping[tuple[str, ...], Any]) -> Any:
    """Return a copy of `content` without keys that have no effect with the values of the command line."""
    for key, (other, allowed) in keys_of_a_kind().items():
        given = values.get(tuple(other.split(".")), allowed[0])
        if given not in allowed:
            content = _without(content, tuple(key.split(".")))
    return content


def _without(content: Any, path: tuple[str, ...]) -> Any:
    if not isinstance(content, Mapping) or path[0] not in content:
        return content
    rest = {key: value for key, value in content.items() if key != path[0]}
    return rest if len(path) == 1 else {**content, path[0]: _without(content[path[0]], path[1:])}


def _placed(content: Mapping[Any, Any], path: tuple[str, ...], value: Any) -> dict[Any, Any]:
    """Return a copy of `content` with `value` at `path`. A null on the path becomes a section."""
    key: str | int = int(path[0]) if path[0].isdecimal() else path[0]
    if len(path) > 1:
        section = content.get(key)
        section = {} if section is None else section
        if not isinstance(section, Mapping):
            raise ValueError(f"the file has {section!r} for {path[0]}, which holds no keys")
        value = _placed(section, path[1:], value)
    return {**content, key: value}


def _with_origin(problem: str, file: str, content: Mapping[Any, Any], given: list[tuple[str, ...]]) -> str:
    """Return a problem with the origin of the value after its key: file, command line or default."""
    key, _, told = problem.partition(": ")
    path = tuple(key.split("."))
    if any(_is_within(path, other) for other in given):
        origin = _COMMAND_LINE
    elif _has(content, path):
        origin = file
    else:
        origin = _COMMAND_LINE if any(_is_within(other, path) for other in given) else "default"
    if told.startswith("unknown key; allowed"):
        same = [other for other in configuration_keys() if other.split(".")[-1] == path[-1]]
        if 0 < len(same) <= 3:
            told = told.replace("; ", f"; did you mean {' or '.join(map(repr, same))}? ", 1)
    return f"{key} ({origin}): {told}"


def _is_within(path: tuple[str, ...], section: tuple[str, ...], *, either: bool = False) -> bool:
    return path[: len(section)] == section or (either and section[: len(path)] == path)


def _has(content: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        found = [key for key in content if str(key) == part] if isinstance(content, Mapping) else []
        if not found:
            return False
        content = content[found[0]]
    return True


def _near_option(name: str) -> str:
    keys = list(configuration_keys())
    leaves = {key.split(".")[-1] for key in keys} | {option[2:] for option in OPTIONS}
    leaves |= set(StackWiseConfig.model_fields)
    wanted = name.replace("-", "_")
    near = difflib.get_close_matches(wanted, leaves, n=1) or difflib.get_close_matches(name, leaves, n=1)
    found = [key for key in keys if near and key.split(".")[-1] == near[0]] or near
    hint = f"did you mean {' or '.join(f'--{key}' for key in found[:3])}? " if found else ""
    return f"{hint}allowed: {', '.join(OPTIONS)}, and keys: --help lists them"
