"""What was measured before: a store of results, their change points, and new results judged by old ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stackwise.gate.history.store_url import HistoryError

if TYPE_CHECKING:
    from stackwise.gate.history.store import Store

__all__ = ["HistoryError", "open_store"]


def open_store(place: str | Path, *, create: bool = True, timeout_seconds: float = 60.0) -> Store:
    """The store at a path or URL; see `stackwise.gate.history.store.Store`.

    Raises:
        ValueError: `place` names no store.
        HistoryError: it cannot be opened, or SQLAlchemy is not installed, which it needs.
    """
    try:
        from stackwise.gate.history.store import Store
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sqlalchemy":
            raise
        raise HistoryError("a history needs SQLAlchemy: pip install 'stackwise[history]'") from None
    return Store(place, create=create, timeout_seconds=timeout_seconds)
