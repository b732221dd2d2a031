"""Mutant: one known bug in an otherwise sound model or training loop, and who is to find it.

Adding one is one function: it returns what `ModelSpec.of` or `TrainerSpec.of` understands.

    @mutant("21", twin=gpt, family="causality", source="classic")
    def mask_one_too_wide():
        \"\"\"Each position sees the next token: tril(diagonal=1).\"\"\"
        ...
        return spec_of(Mutant)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["MUTANTS", "Mutant", "mutant"]


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Attributes:
        id: of the entry in docs/background/zoo.md.
        name: of the function that makes it.
        summary: what is wrong, in one line.
        source: where it was seen: an issue, a paper, or "classic".
        family: the family of checks that is to FAIL; or several, of which one has to.
        make: makes the subject with the bug.
        twin: makes the same subject without it.
        observable: subject -> numbers that the bug moves, computed without any check.
    """

    id: str
    name: str
    summary: str
    source: str
    family: tuple[str, ...]
    make: Callable[[], Any]
    twin: Callable[[], Any]
    observable: Callable[[Any], Any]

    @property
    def twin_name(self) -> str:
        """Module and function."""
        return f"{self.twin.__module__.rpartition('.')[2]}.{self.twin.__name__}"


MUTANTS: dict[str, Mutant] = {}


def mutant(
    id: str,  # noqa: A002
    *,
    twin: Callable[[], Any],
    family: str | tuple[str, ...],
    source: str,
    observable: Callable[[Any], Any],
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter a mutant in the zoo under the function's name."""

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        name = make.__name__
        assert name not in MUTANTS, name
        assert make.__doc__, name
        families = (family,) if isinstance(family, str) else family
        summary = make.__doc__.strip().splitlines()[0]
        MUTANTS[name] = Mutant(id, name, summary, source, families, make, twin, observable)
        return make

    return enter
