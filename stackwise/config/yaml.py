"""YAML, read safely, with limits of size and depth, and with the numbers of YAML 1.2.

`1e-4` is a number, `010` is ten, `1:30` is text.
"""

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

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open = 0  # nodes around the current one
        self._extents: dict[int, tuple[int, int]] = {}  # number of values and depth of a complete node, by id

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node. An alias is the node that it refers to."""
        is_alias, line = self.check_event(yaml.AliasEvent), self.get_mark().line + 1
        self._open += 1
        if self._open > _MOST_DEPTH:
            raise ValueError(f"nested deeper than {_MOST_DEPTH} levels, line {line}")
        node = super().compose_node(parent, index)
        self._open -= 1
        if is_alias and id(node) not in self._extents:
            raise ValueError(f"a value contains itself, line {line}")
        if node is not None and not is_alias:
            self._extents[id(node)] = self._checked(node)
        return node

    def _checked(self, node: yaml.Node) -> tuple[int, int]:
        """Return the number of values and the depth of a node with complete children."""
        children: list[yaml.Node] = []
        if isinstance(node, yaml.ScalarNode):
            if "\0" in node.value:
                raise _refusal("text with a NUL character", node)
            if len(node.value) > _MOST_DIGITS and node.tag in _NUMBERS:
                raise _refusal(f"number of more than {_MOST_DIGITS} characters", node)
        elif isinstance(node, yaml.MappingNode):
            children = [*chain.from_iterable(node.value)]
            seen = set[str]()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise _refusal(f"key {key.value!r} is given twice", key)
                seen.add(key.value)
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        sizes, depths = zip((1, 0), *(self._extents[id(child)] for child in children), strict=True)
        if sum(sizes) > _MOST_VALUES:
            raise _refusal(f"expands to more than {_MOST_VALUES:,} values", node)
        if max(depths) >= _MOST_DEPTH:
            raise _refusal(f"nested deeper than {_MOST_DEPTH} levels", node)
        return sum(sizes), max(depths) + 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. A scalar that its tag does not allow is refused with its line."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            if not isinstance(node, yaml.ScalarNode):
                raise
            line, kind = node.start_mark.line + 1, node.tag.rpartition(":")[2]
            raise ValueError(
                f"line {line}: got {node.value[:100]!r}; allowed: a value of type {kind}"
            ) from None


def _refusal(problem: str, node: yaml.Node) -> ValueError:
    return ValueError(f"{problem}, line {node.start_mark.line + 1}")


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
