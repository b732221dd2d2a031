"""YAML, read safely and with the numbers of YAML 1.2: `1e-4` is a number, `010` is ten, `1:30` is text."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

__all__ = ["dump_yaml", "load_yaml", "read_yaml"]

_MOST_BYTES, _MOST_VALUES, _MOST_DEPTH, _MOST_DIGITS = 1_000_000, 10_000, 50, 300


def load_yaml(content: bytes) -> Any:
    """Return the value that a UTF-8 document describes; None for an empty one.

    Aliases and merge keys are expanded before a document is measured, so a short one cannot fill the memory.

    Raises:
        ValueError: the document is not UTF-8 or YAML, repeats a key, has values other than plain ones, is
            longer than 1 MB, expands to more than 10,000 values, is nested deeper than 50 levels or contains
            itself, or has a number of more than 300 digits or a text with a NUL character.
    """
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError(f"longer than {_MOST_BYTES:,} bytes")
        return yaml.load(content.decode("utf-8"), Loader=_Loader)  # noqa: S506  it is a SafeLoader
    except Exception as error:  # PyYAML lets KeyError, IndexError and others out on malformed scalars
        raise ValueError(" ".join(str(error).split()) or repr(error)) from None


def read_yaml(path: Path) -> Any:
    """Return the value that a YAML file describes, as `load_yaml` does. Never reads more than 1 MB.

    Raises:
        ValueError: as `load_yaml`.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    return load_yaml(content)


def dump_yaml(value: Any) -> str:
    """Return text that `load_yaml` reads as an equal value. Mappings keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and documents that are too large when they are expanded."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise ValueError(f"nested deeper than {_MOST_DEPTH} levels, line {self._line()}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _measure(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. A scalar that its tag does not allow is refused with its line."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        try:
            return super().construct_object(node, deep)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, ValueError) and "line" in str(error):
                raise
            kind = node.tag.rpartition(":")[2]
            line = node.start_mark.line + 1
            raise ValueError(
                f"line {line}: got {node.value[:100]!r}; allowed: a value of type {kind}"
            ) from None

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str):
            line = node.start_mark.line + 1
            if "\0" in value:
                raise ValueError(f"text with a NUL character, line {line}")
            if len(value) > _MOST_DIGITS and node.tag in _NUMBERS:
                raise ValueError(f"number of {len(value)} characters, line {line}; allowed: {_MOST_DIGITS}")
        return value

    def _line(self) -> int:
        return int(self.get_mark().line) + 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the number of values and the depth of a node, with its aliases expanded.

    Raises:
        ValueError: one of these is too large, or the node contains itself.
    """
    key, line = id(node), node.start_mark.line + 1
    if key in known:
        found = known[key]
        if found is None:
            raise ValueError(f"a value contains itself, line {line}")
        return found
    known[key] = None
    size = depth = 1
    if isinstance(node, yaml.CollectionNode):
        children = node.value if isinstance(node, yaml.SequenceNode) else chain.from_iterable(node.value)
        for child in children:
            inner_size, inner_depth = _measure(child, known)
            size, depth = size + inner_size, max(depth, 1 + inner_depth)
    if size > _MOST_VALUES:
        raise ValueError(f"expands to more than {_MOST_VALUES:,} values, line {line}")
    if depth > _MOST_DEPTH:
        raise ValueError(f"nested deeper than {_MOST_DEPTH} levels, line {line}")
    known[key] = size, depth
    return size, depth


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which the loader would read as a number."""


_NUMBERS = {  # YAML 1.2.2, section 10.3.2, without octal and hexadecimal
    "tag:yaml.org,2002:int": r"[-+]?[0-9]+",
    "tag:yaml.org,2002:float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
for _side in (_Loader, _Dumper):
    _side.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern in _NUMBERS.items():
        _side.add_implicit_resolver(_tag, re.compile(f"^({_pattern})$"), list("-+0123456789."))
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda loader, node: int(str(loader.construct_scalar(node))),  # type: ignore[arg-type]
)
