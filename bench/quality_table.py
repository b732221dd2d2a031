"""`python -m bench.quality_table`: what `bench.quality` wrote, in the pages."""

from __future__ import annotations

from functools import partial

from bench.marked_tables import ROOT, Record, bar_rows, recorded, replaced

__all__ = ["MARKS", "written"]


def speeds(record: Record) -> str:
    """One row a task: examples in a second, each way."""
    ways = ("ours", "ours, each sequence whole", "hf")
    rows = [f"| examples in a second | {' | '.join(ways)} |", "| --- " + "| ---: " * len(ways) + "|"]
    for name, found in record["figures"].items():
        if "examples/s" in name:
            rates = [f"{found['examples_per_second'][way]:.1f}" for way in ways]
            rows.append(f"| {name.partition(':')[0]} | {' | '.join(rates)} |")
    return "\n".join(rows)


MARKS = {"docs/reference/quality.md": {"bars of quality": bar_rows, "speed of scoring": speeds}}


def written(page: str) -> str:
    """A page's text with its tables anew."""
    record = recorded("quality")
    return replaced(page, {mark: partial(table, record) for mark, table in MARKS[page].items()})


if __name__ == "__main__":
    for page_name in MARKS:
        (ROOT / page_name).write_text(written(page_name))
