"""pytest plugin of stackwise. It contains no numerics, and imports torch only when a test needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_stackwise.findings import StackwiseWarning

if TYPE_CHECKING:
    from pytest_stackwise.checks import parametrize_with_checks as parametrize_with_checks

__all__ = ["StackwiseWarning", "parametrize_with_checks"]


def __getattr__(name: str) -> Any:
    if name == "parametrize_with_checks":
        from pytest_stackwise import checks

        return checks.parametrize_with_checks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
