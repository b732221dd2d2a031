"""Section: base class of the parts of a configuration. Every error names its key.

An invalid assignment raises ConfigError and changes nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
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

from stackwise.support.arguments import shown

__all__ = [
    "NOT_NULL",
    "Applies",
    "ConfigError",
    "Count",
    "Keys",
    "Problems",
    "Section",
    "Size",
    "only_with",
    "section_in",
]

Size = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Applies = dict[str, tuple[str, tuple[object, ...]]]
Problems = Iterator[tuple[str, str]]


class _NotNull(tuple[object, ...]):
    """Every value except null. Iteration yields only the text for error messages."""

    def __contains__(self, value: object) -> bool:
        return value is not None


NOT_NULL = _NotNull(("not null",))


class Keys(dict[str, Any]):
    """Valid keys of a section, as attributes."""

    def __getattr__(self, key: str) -> Any:
        if key not in self:
            raise _InvalidKeyError(key)
        return self[key]


class _InvalidKeyError(Exception):
    """Key that a rule needs. Its value is invalid, so that the rule cannot be checked."""


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


class Section(BaseModel):
    """Part of a configuration: typed keys with validation. The docstring of a field describes its key.

    Attributes:
        applies: fields that have an effect only if an earlier field has one of the listed values, or is
            `NOT_NULL`. Otherwise they must have their default, so that no key is silently ignored.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )
    applies: ClassVar[Applies] = {}

    if not TYPE_CHECKING:  # type checkers know the keywords of pydantic's own constructor

        def __init__(self, /, **values: Any) -> None:
            with _config_errors(type(self), type(self).__name__):
                super().__init__(**values)

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

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:  # noqa: ARG003  for subclasses
        """Yield keys that do not fit together, each with the values allowed. Sections override this method.

        Args:
            key: field that was validated last. Only rules that need no later field are checked.
            given: this field and the valid ones before it.
        """
        yield from ()

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any, info: ValidationInfo) -> Any:
        key = str(info.field_name)
        given = Keys(info.data)
        given[key] = value
        problems = cls._without_effect(key, given) if key in cls.applies else []
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and "\0" in text for text in texts):
            problems = [(key, "allowed: text without NUL characters")]
        if not problems:
            with suppress(_InvalidKeyError):
                problems += cls._rules(key, given)
        if problems:
            raise _KeysRefusedError(problems, given)
        return value

    @classmethod
    def _without_effect(cls, key: str, given: Keys) -> list[tuple[str, str]]:
        """Return a problem for each key in `key` with a value that `applies` excludes."""
        other, allowed = cls.applies[key]
        if other not in given or given[other] in allowed:
            return []
        value, default = given[key], cls.model_fields[key].get_default(call_default_factory=True)
        reason = only_with(other, allowed, given[other])
        if isinstance(value, Section):
            return [(f"{key}.{name}", reason) for name, each in value if each != getattr(default, name)]
        return [] if value == default else [(key, reason)]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Return the section with the values of nested mappings. Missing keys have their defaults.

        Raises:
            ConfigError: names every unknown key and every invalid value.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError([f"got {_show(mapping)}; allowed: a mapping of keys"], source)
        with _config_errors(cls, source):
            return cls.model_validate(mapping)

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Return the section with values loaded from JSON. Keys such as "0" become integers.

        Raises:
            ConfigError: names every unknown key and every invalid value.
        """
        return cls.from_dict(_numbered(loaded), source=source)

    @classmethod
    def put_away(cls, content: dict[str, Any]) -> None:
        """Reset keys that `applies` makes ineffective to their defaults, in nested mappings, in place."""
        for name, field in cls.model_fields.items():
            other, allowed = cls.applies.get(name, ("", ()))
            if other and content.get(other, cls.model_fields[other].default) not in allowed:
                default = field.get_default(call_default_factory=True)
                content[name] = default.to_dict() if isinstance(default, Section) else default
            inner = section_in(field.annotation)
            if inner is not None and isinstance(content.get(name), dict):
                inner.put_away(content[name])

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the description of each field: its docstring, also from base classes."""
        found = dict[str, str]()
        for each in reversed(cls.__mro__):
            fields = each.model_fields if issubclass(each, Section) else {}
            found |= {name: field.description for name, field in fields.items() if field.description}
        return {name: found[name].removesuffix(".") for name in cls.model_fields}

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, from which `from_dict` builds an equal section."""
        return self.model_dump(mode="python")

    def __setattr__(self, name: str, value: Any) -> None:
        with _config_errors(type(self)):
            checked = type(self).model_validate({**dict(self), name: value})
        super().__setattr__(name, getattr(checked, name))


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section in a type such as `Section`, `Section | None` or `dict[int, Section]`."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def only_with(other: str, values: Iterable[object], now: object) -> str:
    """Return the text for a key that needs one of `values` of another key, whose value is `now`."""

    def text(value: object) -> str:
        return "null" if value is None else repr(value)

    needed = " or ".join(map(text, values)) if values is not NOT_NULL else "not null"
    return f"has an effect only with {other}={needed}; now {other}={text(now)}"


class _KeysRefusedError(ValueError):
    """Keys that do not fit together, each with the values allowed, and the valid keys of the section."""

    def __init__(self, problems: list[tuple[str, str]], given: Keys) -> None:
        self.problems, self.given = problems, given
        super().__init__()


def _numbered(loaded: Any) -> Any:
    """Convert keys such as "0" to integers. No section has such a key."""
    if not isinstance(loaded, Mapping):
        return loaded
    numbers = {key: int(key) for key in loaded if str(key).isascii() and str(key).isdigit()}
    return {numbers.get(key, key): _numbered(value) for key, value in loaded.items()}


@contextmanager
def _config_errors(section: type[Section], source: str = "configuration") -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ConfigError(_problems(section, error), source) from None


def _problems(section: type[Section], error: ValidationError) -> list[str]:
    lines = []
    for detail in error.errors(include_url=False, include_context=True):
        place, seen = detail["loc"], detail["input"]
        path = ".".join(map(str, place)) or "(top level)"
        match detail["type"]:
            case "extra_forbidden":
                allowed = _fields_at(section, place[:-1])
                near = difflib.get_close_matches(str(place[-1]), allowed, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                lines.append(f"{path}: unknown key; {hint}allowed: {', '.join(allowed)}")
            case "value_error":
                refused = detail["ctx"]["error"]
                for key, rule in refused.problems:
                    path = ".".join(map(str, (*place[:-1], key)))
                    first, *inner = key.split(".")
                    value = seen if key == place[-1] else reduce(getattr, inner, refused.given[first])
                    lines.append(f"{path}: got {_show(value)}; {rule}")
            case "missing":
                lines.append(f"{path}: required key is missing")
            case _:
                wanted = re.sub(r"^\w+ should (be )?", "", detail["msg"])
                if detail["type"] == "string_pattern_mismatch":
                    wanted = _values_at(section, place)
                if isinstance(seen, str) and detail["type"] in ("float_type", "int_type"):
                    wanted += ", not text"
                if place[-1:] == ("[key]",):
                    path, wanted = path.removesuffix(".[key]"), f"as a key {wanted}"
                lines.append(f"{path}: got {_show(seen)}; allowed: {wanted}")
    return lines


def _fields_at(section: type[Section], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = section.model_fields.get(str(part))
        if field is not None:  # None: an index in a mapping of sections
            section = section_in(field.annotation) or section
    return list(section.model_fields)


def _values_at(section: type[Section], path: tuple[int | str, ...]) -> str:
    """Return the allowed texts of a field with a pattern, in words."""
    for part in path[:-1]:
        section = section_in(section.model_fields[str(part)].annotation) or section
    extra = section.model_fields[str(path[-1])].json_schema_extra
    assert isinstance(extra, dict)
    return ", ".join(map(str, extra["values"]))  # type: ignore[arg-type]


def _show(value: object) -> str:
    if isinstance(value, BaseModel):
        return type(value).__name__
    return f"{shown(value, 60)} ({type(value).__name__})"
