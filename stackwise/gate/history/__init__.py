"""History of gate results: a store, its change points, and the judgement of new results by stored ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stackwise.gate.history.store_url import HistoryError

if TYPE_CHECKING:
    from stackwise.gate.history.store import Store

__all__ = ["HistoryError", "open_store"]


def open_store(place: str | Path, *, create: bool = True) -> Store:
    """Open the store at a path or URL; see `stackwise.gate.history.store.Store`.

    Raises:
        ValueError: `place` is not the path or URL of a store.
        HistoryError: the store cannot be opened, or SQLAlchemy is not installed.
    """
    try:
        from stackwise.gate.history.store import Store
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sqlalchemy":
            raise
        raise HistoryError("a history needs SQLAlchemy: pip install 'stackwise[history]'") from None
    return Store(place, create=create)
