"""`python -m bench.prototype.table`: what `bench.prototype` wrote, as tables in the pages and as plots.

Plots go beside the pages, as docs/prototype-PART.svg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.marked_tables import ROOT, Record, bar_rows, recorded, replaced
from bench.prototype import lengths, ranks, search, sensitivity, transfer

__all__ = ["DRAWN", "MARKS", "draw_all", "part_bars", "part_tables", "written"]

Figures = Mapping[str, Any]
ROWS: dict[str, Callable[[Figures], str]] = {
    "ranks": ranks.rows,
    "transfer": transfer.rows,
    "sensitivity": sensitivity.rows,
    "lengths": lengths.rows,
    "search": search.rows,
}
DRAWN: dict[str, Callable[[Figures, Path], None]] = {
    "ranks": ranks.draw,
    "transfer": transfer.draw,
    "sensitivity": sensitivity.draw,
}


def part_tables(part: str, record: Record) -> str:
    """What a part found, and its bars.

    Raises:
        ValueError: the last full run was without it.
    """
    if part not in record["figures"]:
        raise ValueError(f"bench.prototype: no figures of {part}; `python -m bench.prototype --only {part}`")
    return f"{ROWS[part](record['figures'][part]).rstrip()}\n\n{part_bars(part, record)}"


def part_bars(part: str, record: Record) -> str:
    """The bars of a part, one row each."""
    return bar_rows({"bars": [bar for bar in record["bars"] if bar["name"].startswith(f"{part}:")]})


# page -> mark -> what stands there
MARKS: dict[str, dict[str, Callable[[Record], str]]] = {
    "docs/reference/prototype.md": {
        f"prototype {part}": partial(part_tables, part)
        for part in ("ranks", "transfer", "sensitivity", "lengths", "search")
    },
}


def written(page: str) -> str:
    """A page's text with its tables anew."""
    record = recorded("prototype")
    return replaced(page, {mark: partial(table, record) for mark, table in MARKS[page].items()})


def draw_all(record: Record, folder: Path) -> list[Path]:
    """A plot of each part that has one, of those that the record has."""
    made = []
    for part, draw in DRAWN.items():
        if part in record["figures"]:
            made.append(folder / f"prototype-{part}.svg")
            draw(record["figures"][part], made[-1])
    return made


if __name__ == "__main__":
    draw_all(recorded("prototype"), ROOT / "docs" / "reference")
    for page_name in MARKS:
        (ROOT / page_name).write_text(written(page_name))
