"""Markdown: tables with escaped cells."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["markdown_table"]


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()
) -> str:
    """Return a table without a final line end. White space becomes one space, and pipes are escaped.

    Args:
        header: names of the columns.
        rows: cells of each row, one per column.
        right: names of the right-aligned columns.
    """
    rule = ["---:" if name in right else "---" for name in header]
    return "\n".join(map(_line, [header, rule, *rows]))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
