"""Import of Optuna, an optional dependency, when a search starts, and suppression of its messages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["import_optuna", "quiet_optuna"]


def import_optuna() -> ModuleType:
    """Return the package.

    Raises:
        ImportError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ImportError("a search needs Optuna: pip install 'stackwise[search]'") from None
    return optuna


@contextmanager
def quiet_optuna() -> Iterator[ModuleType]:
    """Context with Optuna's log at the level of warnings, without warnings about experimental features."""
    optuna = import_optuna()
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(level, optuna.logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(level)
