"""Section: base class of the parts of a configuration. Every error names its key.

Sections stay valid: an assignment checks the section, and fails without an effect if the value is invalid.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import reprlib
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

__all__ = ["NOT_NULL", "Applies", "ConfigError", "Count", "KeysRefusedError", "Section", "Size"]

Size = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Applies = dict[str, tuple[str, tuple[object, ...]]]


class _NotNull(tuple[object, ...]):
    """Every value except null. Iteration yields only the text for error messages."""

    def __contains__(self, value: object) -> bool:
        return value is not None


NOT_NULL = _NotNull(("not null",))


class ConfigError(ValueError):
    """Invalid configuration.

    Attributes:
        problems: one line per problem, with the path of the key, the value seen and the values allowed.
        source: the file, or "configuration".
    """

    def __init__(self, problems: list[str], source: str = "configuration") -> None:
        self.problems, self.source = problems, source
        super().__init__(problems, source)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}"
        return f"{self.source}: {len(self.problems)} problems\n" + "\n".join(f"  {p}" for p in self.problems)


class KeysRefusedError(ValueError):
    """Invalid keys of a section, each with its value and the values allowed."""

    def __init__(self, keys: list[tuple[str, object, str]]) -> None:
        self.keys = keys
        super().__init__("; ".join(f"{key}={value} {allowed}" for key, value, allowed in keys))


class Section(BaseModel):
    """Part of a configuration: typed keys with validation. The docstring of a field describes its key.

    Attributes:
        applies: fields that have an effect only if an earlier field has one of the listed values, or is
            `NOT_NULL`. Otherwise they must have their default, so that no key is silently ignored.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)
    applies: ClassVar[Applies] = {}

    if not TYPE_CHECKING:  # type checkers know the keywords of pydantic's own constructor

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_problems(type(self), error), type(self).__name__) from None

        # With this flag, pydantic validates nested sections without this constructor.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        names = list(cls.model_fields)
        for name, (other, _values) in cls.applies.items():
            assert names.index(other) < names.index(name), f"{cls.__name__}: {other} must come before {name}"

    @model_validator(mode="before")
    @classmethod
    def _any_mapping(cls, value: Any) -> Any:
        return dict(value) if isinstance(value, Mapping) else value

    @field_validator("*")
    @classmethod
    def _without_nul(cls, value: Any) -> Any:
        texts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(text, str) and "\0" in text for text in texts):
            raise ValueError("allowed: text without NUL characters")
        return value

    @field_validator("*")
    @classmethod
    def _applies(cls, value: Any, info: ValidationInfo) -> Any:
        other, allowed = cls.applies.get(info.field_name or "", ("", ()))
        if other not in info.data or info.data[other] in allowed:
            return value
        default = cls.model_fields[info.field_name or ""].get_default(call_default_factory=True)
        if value != default:
            values = " or ".join("null" if each is None else repr(each) for each in allowed)
            reason = f"is for {other}={values} ({other}={info.data[other]!r})"
            if allowed is NOT_NULL:
                reason = f"is for {other}, which is null"
            if not isinstance(value, Section):
                raise ValueError(reason)
            keys = [(key, each) for key, each in value if each != getattr(default, key)]
            raise KeysRefusedError([(f"{info.field_name}.{key}", each, reason) for key, each in keys])
        return value

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Return the section with the values of nested mappings. Missing keys have their defaults.

        Raises:
            ConfigError: names every unknown key and every invalid value.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError([f"got {_show(mapping)}; allowed: a mapping of keys"], source)
        try:
            return cls.model_validate(dict(mapping))
        except ValidationError as error:
            raise ConfigError(_problems(cls, error), source) from None

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Return the section with values loaded from JSON. Keys such as "0" become integers.

        Raises:
            ConfigError: names every unknown key and every invalid value.
        """
        return cls.from_dict(_numbered(loaded), source=source)

    @classmethod
    def put_away(cls, content: dict[str, Any]) -> None:
        """Set keys that `applies` excludes to their defaults, in nested mappings, in place."""
        for name, field in cls.model_fields.items():
            other, allowed = cls.applies.get(name, ("", ()))
            if other and content.get(other, cls.model_fields[other].default) not in allowed:
                content[name] = field.get_default(call_default_factory=True)
                if isinstance(content[name], Section):
                    content[name] = content[name].to_dict()
            kind, value = field.annotation, content.get(name)
            for each in get_args(kind) if isinstance(kind, UnionType) else (kind,):
                if isinstance(each, type) and issubclass(each, Section) and isinstance(value, dict):
                    each.put_away(value)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the description of each field: its docstring, also from base classes."""
        found: dict[str, str] = {}
        for each in reversed(cls.__mro__):
            if issubclass(each, Section):
                found |= _field_docstrings(each)
        return {name: found[name] for name in cls.model_fields}

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, from which `from_dict` builds an equal section."""
        return self.model_dump(mode="python")

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            checked = type(self).model_validate({**dict(self), name: value})
        except ValidationError as error:
            raise ConfigError(_problems(type(self), error)) from None
        super().__setattr__(name, getattr(checked, name))


@cache
def _field_docstrings(section: type[Section]) -> dict[str, str]:
    """Return the strings after the fields in the source of a class, without the full stop."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(node, ast.ClassDef)
    return {
        field.target.id: text.value.value.removesuffix(".")
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _numbered(loaded: Any) -> Any:
    """Return the mapping with numbers for keys that are texts of numbers. No section has such a key."""
    if not isinstance(loaded, Mapping):
        return loaded
    numbers = {key: int(key) for key in loaded if str(key).isascii() and str(key).isdigit()}
    return {numbers.get(key, key): _numbered(value) for key, value in loaded.items()}


def _problems(section: type[BaseModel], error: ValidationError) -> list[str]:
    lines = []
    for detail in error.errors(include_url=False, include_context=True):
        path = ".".join(str(part) for part in detail["loc"]) or "(top level)"
        match detail["type"]:
            case "extra_forbidden":
                allowed = _fields_at(section, detail["loc"][:-1])
                near = difflib.get_close_matches(str(detail["loc"][-1]), allowed, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                lines.append(f"{path}: unknown key; {hint}allowed: {', '.join(allowed)}")
            case "value_error" if isinstance(detail["ctx"]["error"], KeysRefusedError):
                for key, value, rule in detail["ctx"]["error"].keys:
                    path = ".".join(map(str, (*detail["loc"][:-1], key)))
                    lines.append(f"{path}: got {_show(value)}; {rule}")
            case "value_error":
                lines.append(f"{path}: got {_show(detail['input'])}; {detail['ctx']['error']}")
            case "missing":
                lines.append(f"{path}: got nothing; it has no default")
            case _:
                wanted = re.sub(r"^\w+ should (be )?", "", detail["msg"])
                if detail["loc"][-1:] == ("[key]",):
                    path, wanted = path.removesuffix(".[key]"), f"as a key {wanted}"
                lines.append(f"{path}: got {_show(detail['input'])}; allowed: {wanted}")
    return lines


def _fields_at(section: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = section.model_fields.get(str(part))
        if field is None:  # the index in a mapping of sections
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        (section,) = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(section.model_fields)


def _show(value: object) -> str:
    if isinstance(value, BaseModel):
        return type(value).__name__
    try:
        text = _brief.repr(value)
    except Exception:  # the repr of the value failed
        text = object.__repr__(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxlong = _brief.maxother = 60
