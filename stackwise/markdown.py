"""Markdown: tables whose cells stay cells, whatever is in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["markdown_table"]


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()
) -> str:
    """A table, without a line end behind its last row. White space becomes a space, a pipe is escaped.

    Args:
        header: names of the columns.
        rows: as many cells each.
        right: names of the columns that are aligned to the right.
    """
    rule = ["---:" if name in right else "---" for name in header]
    return "\n".join(map(_line, [header, rule, *rows]))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
