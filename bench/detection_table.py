"""`python -m bench.detection_table`: tables for README and docs, of what `bench.detection` wrote."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bench.claim import RESULTS

__all__ = ["family_table", "recorded", "rival_table", "summary"]


def summary(record: dict[str, Any]) -> str:
    """One row a bar, in Markdown."""
    rows = ["| | measured | aim |", "| --- | --- | --- |"]
    for bar in record["bars"]:
        sign = "<=" if bar["at_most"] else ">="
        aim = f"{sign} {bar['limit']:g}" + ("" if bar["verdict"] == "PASS" else ", short")
        value = "-" if bar["value"] is None else f"{bar['value']:.3g}"
        rows.append(f"| {bar['name']} | {value} | {aim} |")
    return "\n".join(rows)


def family_table(record: dict[str, Any]) -> str:
    """One row a family: mutants, caught by the family, caught by any."""
    rows = ["| family | mutants | caught by it | caught by any |", "| --- | --- | --- | --- |"]
    families = record["figures"]["catalogue"]["families"]
    total: Counter[str] = Counter()
    for family, row in families.items():
        total.update(row)
        rows.append(f"| {family} | {row['mutants']} | {row['caught']} | {row['by_any']} |")
    rows.append(f"| all | {total['mutants']} | {total['caught']} | {total['by_any']} |")
    return "\n".join(rows)


def rival_table(record: dict[str, Any]) -> str:
    """One row a tool, stackwise first: caught, missed, cannot be asked, alarms on clean twins."""
    figures = record["figures"]
    names = ("caught", "missed", "cannot be asked", "alarms on clean twins")
    mutants = figures["catalogue"]["mutants"].values()
    ours = {
        "caught": sum(bool(mutant["caught_by"]) for mutant in mutants),
        "missed": sum(not mutant["caught_by"] for mutant in mutants),
        "cannot be asked": 0,
        "alarms on clean twins": sum(
            bool(twin["statuses"].get("failed")) for twin in figures["catalogue"]["twins"].values()
        ),
    }
    rows = [f"| | {' | '.join(names)} |", "| --- " * (1 + len(names)) + "|"]
    for tool, row in {"stackwise": ours, **figures.get("rivals", {}).get("table", {})}.items():
        rows.append(f"| {tool} | {' | '.join(str(row[name]) for name in names)} |")
    return "\n".join(rows)


def recorded(path: Path = RESULTS / "cpu" / "detection.json") -> dict[str, Any]:
    """The last full run on the CPU."""
    record: dict[str, Any] = json.loads(path.read_text())
    return record


if __name__ == "__main__":
    found = recorded()
    print(summary(found), family_table(found), rival_table(found), sep="\n\n")
