"""Optuna, which is an extra: imported when a search begins, and without its remarks on itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["import_optuna", "quiet_optuna"]


def import_optuna() -> ModuleType:
    """The package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ImportError("a search needs Optuna: pip install 'stackwise[search]'") from None
    return optuna


@contextmanager
def quiet_optuna() -> Iterator[ModuleType]:
    """Optuna, without what it logs below a warning, and without calling experimental what is used here."""
    optuna = import_optuna()
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(level, optuna.logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(level)
