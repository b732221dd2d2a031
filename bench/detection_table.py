"""`python -m bench.detection_table`: what `bench.detection` wrote, put into README.md and docs/.

Each table stands between two marks, which `MARKS` names. docs/background/zoo.md lists tests/zoo.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from bench.detection import without_head, zoo
from bench.marked_tables import ROOT, bar_rows, recorded, replaced
from bench.reports import SAMPLES, first_results, found, modules, report_names
from bench.source_mutants.measure import by_operator

__all__ = ["MARKS", "written"]


def families(record: Mapping[str, Any]) -> str:
    """One row a family: mutants, caught by the family, caught by any."""
    rows = ["| family | mutants | caught by it | caught by any |", "| --- | --- | --- | --- |"]
    total: Counter[str] = Counter()
    for family, row in record["figures"]["catalogue"]["families"].items():
        total.update(row)
        rows.append(f"| {family} | {row['mutants']} | {row['caught']} | {row['by_any']} |")
    rows.append(f"| all | {total['mutants']} | {total['caught']} | {total['by_any']} |")
    return "\n".join(rows)


def rivals(record: Mapping[str, Any]) -> str:
    """Return a table with one row per tool, stackwise first: bugs and false alarms."""
    figures = record["figures"]
    names = ("caught", "missed", "cannot be asked", "alarms on clean twins")
    mutants, twins = (figures["catalogue"][kind].values() for kind in ("mutants", "twins"))
    unasked = sum(mutant["error"] is not None for mutant in mutants)
    caught = sum(bool(mutant["caught_by"]) for mutant in mutants)
    ours = {
        "caught": caught,
        "missed": len(mutants) - caught - unasked,
        "cannot be asked": unasked,
        "alarms on clean twins": sum(bool(twin["statuses"].get("failed")) for twin in twins),
    }
    header = ("caught", "missed", "not supported", "false alarms")
    rows = [f"| | {' | '.join(header)} |", "| --- " * (1 + len(header)) + "|"]
    others = figures.get("rivals", {})
    for tool, row in {"stackwise": ours, **others.get("table", {})}.items():
        n_twins = len(twins) if tool == "stackwise" else len(others["twins"])
        cells = [*(str(row[name]) for name in names[:-1]), f"{row[names[-1]]} of {n_twins}"]
        rows.append(f"| {tool} | {' | '.join(cells)} |")
    return "\n".join(rows)


def samples(record: Mapping[str, Any]) -> str:
    """Return a table with one row per sample of bug reports: how many were found at first sight, and now."""
    rows = ["| sample | reports | found at first sight | found now |", "| --- | ---: | ---: | ---: |"]
    for sample, path in SAMPLES.items():
        first = json.loads(path.read_text())
        names = report_names(first)
        counts = (_count(figures, names) for figures in (first, record["figures"]["reports"]))
        rows.append(f"| {sample} | {len(names)} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)


def unseen(_record: Mapping[str, Any]) -> str:
    """Return a sentence about all samples: how many reports were found at first sight."""
    firsts = [json.loads(path.read_text()) for path in SAMPLES.values()]
    n_reports = sum(len(report_names(first)) for first in firsts)
    n_found = sum(_count(first, report_names(first)) for first in firsts)
    page = "docs/reference/detection.md#public-bug-reports"
    return (
        f"These bugs are known to the checks. Of {n_reports} public bug reports that were new to them, "
        f"stackwise\nfound {n_found} at first sight ([by sample]({page}))."
    )


def _count(figures: Mapping[str, Any], names: Iterable[str]) -> int:
    return sum(found(figures, "failed", name) for name in names)


def third_party(record: Mapping[str, Any]) -> str:
    """Return a table with one row per library, the reason of each failure, and the number of warnings."""
    figures = record["figures"]["third_party"]
    statuses = ("passed", "warned", "not applicable", "failed", "error")
    rows = [f"| library | models | {' | '.join(statuses)} |", "| --- " * (2 + len(statuses)) + "|"]
    libraries: dict[str, Counter[str]] = {}
    for name, model in figures["models"].items():
        libraries.setdefault(name.partition("/")[0], Counter()).update(model["statuses"], models=1)
    for library, row in libraries.items():
        version = figures["versions"].get(library, "")
        counts = " | ".join(str(row[status]) for status in statuses)
        rows.append(f"| {library} {version} | {row['models']} | {counts} |")
    failed: dict[tuple[str, str], list[str]] = {}
    for name, model in figures["models"].items():
        reasons = figures["explained"].get(without_head(name), {})
        for each in model["others"]:
            if each["status"] in ("failed", "error"):
                reason = reasons.get(each["family"], "not explained")
                failed.setdefault((reason, each["check"]), []).append(name)
    lines = [f"- `{check}`: {reason} ({', '.join(names)})" for (reason, check), names in failed.items()]
    warned = Counter(
        each["check"]
        for model in figures["models"].values()
        for each in model["others"]
        if each["status"] == "warned"
    )
    listed = ", ".join(f"`{name}` {count}" for name, count in warned.most_common())
    return "\n".join([*rows, "", "Failed:", "", *sorted(lines), "", f"Warned: {listed}."])


def reports(record: Mapping[str, Any]) -> str:
    """Return a table with one row per public report: what is wrong, first result, present result."""
    first, now = first_results(), record["figures"]["reports"]
    rows = ["| report | bug | first result | now |", "| --- " * 4 + "|"]
    for name, module in modules().items():
        title = " ".join((module.__doc__ or "").split("\n\n")[0].split())
        report, _, text = title.partition(": ")
        results = (_result(figures, name) for figures in (first, now))
        rows.append(f"| {report.partition(' (')[0]} | {text.replace('|', '/')} | {' | '.join(results)} |")
    return "\n".join(rows)


def _result(figures: Mapping[str, Any], name: str) -> str:
    """Return the worst status of a buggy form, and "declared" if only that form has it."""
    if f"{name}:buggy" not in figures:
        return "not measured"
    undeclared = {key: value for key, value in figures.items() if not key.endswith("_declared")}
    for status, text in (("failed", "FAIL"), ("warned", "WARN")):
        if found(undeclared, status, name):
            return text
        if found(figures, status, name):
            return f"{text}, declared"
    return "-"


def cost(record: Mapping[str, Any]) -> str:
    """Return a row for each size: parameters, seconds of the fast suite, and its memory."""
    rows = ["| model | parameters | seconds | slowest check | memory, MB |", "| --- " * 5 + "|"]
    for name, row in record["figures"]["cost"].items():
        slowest, seconds = row["slowest"][0]
        memory = f"{row['megabytes']:.0f}" if row.get("megabytes") else "-"
        rows.append(
            f"| {name} | {row['parameters']:,} | {row['median']:.2f} | `{slowest}` {seconds:.2f} | {memory} |"
        )
    return "\n".join(rows)


def mutations(record: Mapping[str, Any]) -> str:
    """One row a group of random mutations: how many, found, rate with its interval, more that warned."""
    figures = record["figures"]["mutations"]
    rows = ["| mutations | drawn | found | rate [95 % interval] | more warned |", "| --- " * 5 + "|"]
    groups = {
        **{name: row for name, row in figures["detection"].items() if not name.startswith("rule")},
        "false alarms on clean twins": figures["false_alarms"],
    }
    for name, row in groups.items():
        low, high = row["interval"]
        rate = "-" if row["rate"] is None else f"{row['rate']:.3f} [{low:.3f}, {high:.3f}]"
        rows.append(f"| {name} | {row['n']} | {row['hits']} | {rate} | {row['warned']} |")
    return "\n".join(rows)


def source_mutants(record: Mapping[str, Any]) -> str:
    """Return a table with one row per operator: mutants, those that are decidable, those that are found."""
    counts = by_operator(record["figures"].get("source_mutants", {}).get("mutants", {}))
    columns = ("drawn", "changes", "decidable", "found at first sight", "found", "raises in a way", "crashes")
    header = (
        *("drawn", "changes an answer", "decidable", "found at first sight", "found now"),
        *("raises in one way", "crashes"),
    )
    rows = [f"| operator | {' | '.join(header)} |", "| --- " * (1 + len(header)) + "|"]
    for name, row in counts.items():
        rows.append(f"| {name.replace('_', ' ')} | {' | '.join(str(row.get(key, 0)) for key in columns)} |")
    return "\n".join(rows)


def catalogue(_: Mapping[str, Any]) -> str:
    """One row a mutant: what is wrong, the family that is to FAIL, where it was seen."""
    rows = ["| id | bug | what is wrong | family | seen |", "| --- " * 5 + "|"]
    for mutant in sorted(zoo().values(), key=lambda each: (_number(each.id), each.name)):
        summary = mutant.summary.replace("|", "\\|")
        family = " or ".join(mutant.family)
        rows.append(f"| {mutant.id} | `{mutant.name}` | {summary} | {family} | {mutant.source} |")
    return "\n".join(rows)


def _number(name: str) -> tuple[str, int]:
    digits = "".join(c for c in name if c.isdigit())
    return name.rstrip("0123456789"), int(digits or 0)


# page -> mark -> what stands there
MARKS: dict[str, dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "README.md": {"rivals": rivals, "unseen": unseen},
    "docs/reference/detection.md": {
        "detection": bar_rows,
        "families": families,
        "rivals": rivals,
        "third_party": third_party,
        "samples": samples,
        "reports": reports,
        "cost": cost,
        "mutations": mutations,
        "source_mutants": source_mutants,
    },
    "docs/background/zoo.md": {"catalogue": catalogue},
}


def written(page: str) -> str:
    """A page's text with its tables anew."""
    record = recorded("detection")
    return replaced(page, {mark: partial(table, record) for mark, table in MARKS[page].items()})


if __name__ == "__main__":
    for name in MARKS:
        (ROOT / name).write_text(written(name))
