"""Marked tables: pages whose tables stand between two marks, and are made from what a bench has written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.claim import RESULTS

__all__ = ["ROOT", "Record", "bar_rows", "recorded", "replaced"]

ROOT = Path(__file__).parent.parent
Record = Mapping[str, Any]


def recorded(name: str) -> dict[str, Any]:
    """The last full run of `python -m bench.NAME` on the CPU."""
    record: dict[str, Any] = json.loads((RESULTS / "cpu" / f"{name}.json").read_text())
    return record


def replaced(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page's text with its tables anew, by their marks.

    Raises:
        ValueError: a mark is missing.
    """
    text = (ROOT / page).read_text()
    for mark, table in tables.items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{page}: no {begin.strip()} ... {end}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table()}\n\n{end}{rest.partition(end)[2]}"
    return text


def bar_rows(record: Record) -> str:
    """One row a bar."""
    rows = ["| | measured | target |", "| --- | --- | --- |"]
    for bar in record["bars"]:
        sign = "at most" if bar["at_most"] else "at least"
        target = f"{sign} {bar['limit']:g}" + (
            "" if bar["verdict"] == "PASS" else f", {bar['verdict'].lower()}"
        )
        value = "-" if bar["value"] is None else _figure(bar["value"])
        if bar["verdict"] == "SHORT" and float(value) == bar["limit"]:
            value = f"{bar['value']:.6g}"  # short of it by less than is shown
        name = bar["name"].replace("|", r"\|")
        rows.append(f"| {name} | {value} | {target} |")
    return "\n".join(rows)


def _figure(value: float) -> str:
    """Three digits; of a ratio near 1 as many behind the point, by which two of them differ."""
    return f"{value:.3f}" if 0.1 <= value < 10 and value != round(value) else f"{value:.3g}"
