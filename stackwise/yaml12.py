"""YAML, read safely and with the numbers of YAML 1.2: `1e-4` is one, `010` is ten, `1:30` is text."""

from __future__ import annotations

import re
from typing import Any

import yaml

__all__ = ["dump_yaml", "load_yaml"]


def load_yaml(content: bytes) -> Any:
    """The value that a UTF-8 document describes; None for an empty one.

    Raises:
        ValueError: it is no UTF-8, no YAML, repeats a key, or asks for anything but plain values.
    """
    try:
        return yaml.load(content.decode("utf-8"), Loader=_Loader)  # noqa: S506  it is a SafeLoader
    except Exception as error:  # PyYAML lets KeyError, IndexError and others out on malformed scalars
        raise ValueError(" ".join(str(error).split()) or repr(error)) from None


def dump_yaml(value: Any) -> str:
    """Text that `load_yaml` reads back as an equal value; mappings keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys."""

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
