"""Text for records of a report: lines of a terminal, and cells of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stackwise.support.units import byte_text, time_text

__all__ = [
    "MARKS",
    "asked_and_not",
    "by_model",
    "check_text",
    "fault_text",
    "finding_texts",
    "growth_lines",
    "is_finding",
    "measured_text",
    "memory_text",
    "number_text",
    "outcome",
    "rate_text",
    "record_table",
    "record_text",
    "says_something",
    "shape_text",
    "throughput_table",
]

_LATENCIES = ("ttft", "itl", "tpot")
_TAILS = ("p95", "p99")
_SHARES = ("mfu", "hfu", "mbu")
_PROCESS = "process "  # prefix of the memory of a process
# Usual values of `execution`, which are not shown.
_USUAL = {
    "attention": "sdpa",
    "compile": "1 graph",
    "prefill": "into an empty cache",
    "decode": "with a cache",
    "generate": "greedy, with the cache of the model",
}
MARKS = {
    "failed": "FAIL",
    "error": "ERROR",
    "warned": "WARN",
    "passed": "PASS",
    "expected failure": "XFAIL",
    "accepted warning": "XWARN",
    "not applicable": "n/a",
}


def is_finding(section: str, row: dict[str, Any]) -> bool:
    """Return True if a record needs the user's attention. The verdict of the report is then WARN.

    Args:
        section: "checks", "stability", "throughput", "memory" or "quality".
        row: a record of that section.
    """
    harmless = {
        "checks": ("passed", "not applicable", "expected failure", "accepted warning"),
        "stability": ("stable", "caught", "recovered"),
        "memory": ("within", "read", "not told", "flat"),
        "quality": ("met",),
    }
    return section in harmless and outcome(section, row) not in harmless[section]


def says_something(section: str, row: dict[str, Any]) -> bool:
    """Return False if a check does not apply, or if a value was not measured or could not be read."""
    return outcome(section, row) not in ("not applicable", "not measured", "not told")


def outcome(section: str, row: dict[str, Any]) -> str:
    """Return the status or verdict of a record, in one or two words."""
    if section == "throughput":
        return "measured" if row["measured"] else "not measured"
    return str(row["status" if section == "checks" else "verdict"])


def record_text(section: str, row: dict[str, Any]) -> str:
    """Return a record as text in one line: the subject, the result and the reasons."""
    match section:
        case "checks":
            measured = f"measured {measured_text(row)}" if measured_text(row) else ""
            parts = [f"{row['model']}: {row['check']} {row['status']}", measured, check_text(row)]
        case "stability":
            alarms = [alarm["text"] for alarm in row["alarms"][:3]]
            stopped = row.get("stopped", "")
            parts = [f"{row['model']}: {row['verdict']}", fault_text(row), stopped, *alarms]
        case "memory":
            parts = [f"memory {row['verdict']}", memory_text(row), *growth_lines(row)]
        case "quality":
            parts = [f"{row['task']} {row['verdict']}", row["reason"]]
        case _:
            parts = [row["model"], shape_text(row), rate_text(row)]
    return "; ".join(part for part in parts if part)


def by_model(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the rows of each model, in the order of its first row."""
    models = dict.fromkeys(row["model"] for row in rows)
    return [(model, [row for row in rows if row["model"] == model]) for model in models]


def asked_and_not(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the rows of checks that apply; and for each reason, the names of checks that do not apply."""
    asked, not_asked = [], dict[str, str]()
    for row in rows:
        if row["status"] == "not applicable":
            names = not_asked.get(check_text(row))
            not_asked[check_text(row)] = f"{names}, {row['check']}" if names else row["check"]
        else:
            asked.append(row)
    return asked, not_asked


def measured_text(row: dict[str, Any]) -> str:
    """Return the measured value and the limit, or "" if nothing was measured."""
    value, limit = number_text(row["value"]), number_text(row["limit"])
    if not (value and limit):
        return value
    return f"{value} <= {limit}" if row["status"] == "passed" else f"{value} (limit {limit})"


def check_text(row: dict[str, Any]) -> str:
    """Return the description of the problem, its location in brackets, and the advice."""
    meaning, where = row["meaning"].rstrip("."), row["where"]
    found = f"{meaning} [{where}]" if meaning and where else meaning or where
    shown = (found, row["advice"].rstrip(".") if row["status"] != "passed" else "")
    return ". ".join(text for text in shown if text)


def finding_texts(row: dict[str, Any]) -> list[str]:
    """Return the message of a failed check, the place and the advice, one paragraph each."""
    found = [row["meaning"], f"where: {row['where']}" if row["where"] else "", row["advice"]]
    return [text if text.endswith((".", "!", "?", ")", "]")) else f"{text}." for text in found if text]


def fault_text(run: dict[str, Any]) -> str:
    """Return sequence length, steps and faults of a run."""
    faults = ", ".join(run["faults"]) or "no fault"
    if run["seq_len"] is None:
        return faults
    steps = {record["step"] for record in run["records"]}  # a replayed step has several records
    return f"T={run['seq_len']}, {len(steps)} steps, {faults}"


def shape_text(row: dict[str, Any]) -> str:
    """Return mode, sizes and device of a measurement."""
    sizes = [row["batch_size"], row["seq_len"]]
    more = f" + {row['new_tokens']}" if row.get("new_tokens") else ""
    shape = "" if None in sizes else f" {sizes[0]} x {sizes[1]}{more}"
    kind = f" {row['dtype']}" if row.get("dtype") else ""
    compiled = " compiled" if row.get("compile") else ""
    return f"{row['mode']}{shape}{kind}{compiled} on {row['device']}"


def rate_text(row: dict[str, Any]) -> str:
    """Return the measured speed and its conditions in one line."""
    if not row["measured"]:
        return "called once, not measured (benchmarks are disabled)"
    rate = f"{_rate(row)} tokens/s, " if _rate(row) else ""
    parts = [f"{rate}median {time_text(row['median_seconds'], 3)} of {row['calls']} calls"]
    parts += [f"{name} {value}" for name in ("p95", "p99") if (value := _percentile(row, name))]
    if not row["steady"]:
        parts.append(f"not steady{_unsteady(row)}")
    if _throttled(row):
        parts.append(f"throttled ({_throttled(row)})")
    parts += [_execution(row)] if _execution(row) else []
    memory = _peak(row)
    parts.append(memory if memory.startswith(_PROCESS) else f"peak memory {memory}")
    parts += [f"{name.upper()} {value}" for name in _SHARES if (value := _share(row, name))]
    if _floor(row):
        parts.append(f"no faster than {_floor(row)}, {row['bound']}-bound")
    parts += [f"{name.upper()} {value}" for name in _LATENCIES if (value := _latency(row, name))]
    parts += [f"ITL {name} {value}" for name in _TAILS if (value := _latency(row, "itl", name))]
    if "cache" in row:
        parts.append(f"{row['cache']} cache")
    if row.get("clock", "host") != "host":
        parts.append(f"{row['clock']} clock")
    return ", ".join(parts)


def record_table(section: str, rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of records. Records of checks have their own tables."""
    match section:
        case "stability":
            alarms = ["; ".join(alarm["text"] for alarm in row["alarms"]) for row in rows]
            runs = [[row["verdict"], row["model"], fault_text(row)] for row in rows]
            table = [[*run, text or "none"] for run, text in zip(runs, alarms, strict=True)]
            return ["verdict", "model", "run", "alarms"], table
        case "throughput":
            return throughput_table(rows)
        case "memory":
            table = [
                [row["verdict"], row["test"], memory_text(row), "; ".join(growth_lines(row))] for row in rows
            ]
            return ["verdict", "test", "memory", "details"], table
    table = [[row["verdict"], row["test"], row["task"], row["reason"]] for row in rows]
    return ["verdict", "test", "task", "details"], table


def throughput_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, without optional columns that have no values."""
    lines = [_throughput_cells(row) for row in rows]
    always = {"model", "workload", "median", "tokens/s", "peak memory", "calls", "clock, cache", "steady"}
    header = [name for name in lines[0] if name in always or any(cells[name] for cells in lines)]
    return header, [[cells[name] for name in header] for cells in lines]


def _throughput_cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column."""
    return {
        "test": row.get("test") or "",
        "model": row["model"],
        "workload": shape_text(row),
        "median": time_text(row["median_seconds"], 3),
        "p95": _percentile(row, "p95"),
        "p99": _percentile(row, "p99"),
        "tokens/s": _rate(row),
        "peak memory": _peak(row),
        **{name.upper(): _share(row, name) for name in _SHARES},
        "floor": _floor(row),
        "bound": row.get("bound") or "",
        **{f"{name.upper()} p50": _latency(row, name) for name in _LATENCIES},
        **{f"ITL {name}": _latency(row, "itl", name) for name in _TAILS},
        "calls": str(row["calls"]),
        "clock, cache": f"{row.get('clock', 'host')}, {row.get('cache', 'warm')}",
        "execution": _execution(row),
        "steady": _steady(row),
        "throttled": _throttled(row),
        "notes": "; ".join(row.get("notes") or ()),
    }


def _percentile(row: dict[str, Any], name: str) -> str:
    """Return a percentile with its unit, or "" if it is withheld."""
    return _percentile_time(row.get("percentiles"), name)


def _latency(row: dict[str, Any], name: str, percentile: str = "p50") -> str:
    """Return a percentile of a latency of a generation, or "" if it is missing or withheld."""
    return _percentile_time((row.get("latencies") or {}).get(name), percentile)


def _throttled(row: dict[str, Any]) -> str:
    """Return the reasons for reduced GPU clocks, with the number of readings of each, or ""."""
    gpu = row.get("gpu") or {}
    return ", ".join(f"{why} in {n} of {gpu['readings']}" for why, n in (gpu.get("throttled") or {}).items())


def _floor(row: dict[str, Any]) -> str:
    """Return the shortest time that the work can take, or "" if it is not known."""
    seconds = row.get("floor_seconds")
    return "" if seconds is None else time_text(seconds, 3)


def _steady(row: dict[str, Any]) -> str:
    if not row["measured"]:
        return "not measured"
    return "yes" if row["steady"] else f"no{_unsteady(row)}"


def _unsteady(row: dict[str, Any]) -> str:
    """Return the reason for an unsteady warm-up in brackets, or "" if it is not known."""
    reason = (row.get("warmup") or {}).get("reason")
    return f" ({reason})" if reason else ""


def _execution(row: dict[str, Any]) -> str:
    """Return the unusual values of `execution`, or "" if all values are usual."""
    told = {key: how for key, how in (row.get("execution") or {}).items() if _USUAL.get(key) != how}
    return ", ".join(how if key == row["mode"] else f"{key}: {how}" for key, how in told.items())


def _peak(row: dict[str, Any]) -> str:
    """Return peak memory: of the tensors on a GPU, otherwise of the process."""
    count = row["peak_memory_bytes"]
    if count is None:
        return "not available"
    return byte_text(count) if row["device"].startswith("cuda") else f"{_PROCESS}{byte_text(count)}"


def memory_text(row: dict[str, Any]) -> str:
    """Return memory use and limit."""
    if row["kind"] == "growth":
        return f"{row['bytes_per_step']:+,.0f} bytes a step over {row['steps']} steps"
    if not row["peaks"]:
        return "not told by this system"
    limit = "" if row["limit"] is None else f", at most {byte_text(row['limit'])}"
    return ", ".join(f"{byte_text(size)} {where}" for where, size in row["peaks"].items()) + limit


def growth_lines(row: dict[str, Any]) -> list[str]:
    """Return the reasons for growth, and the types that grow."""
    if row["kind"] != "growth" or row["verdict"] == "flat":
        return []
    types = [f"{each['name']}: {each['count_per_step']:+.3g} a step" for each in row["types"][:3]]
    return [*row["reasons"], *types]


def _percentile_time(percentiles: dict[str, Any] | None, name: str) -> str:
    value = ((percentiles or {}).get(name) or {}).get("value")
    return "" if value is None else time_text(value, 3)


def _rate(row: dict[str, Any]) -> str:
    """Return tokens per second, or "" for work without tokens."""
    return f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else ""


def _share(row: dict[str, Any], name: str) -> str:
    """Return a utilization, or "" if it is not known. HFU is "" if it equals MFU (without recomputation)."""
    value = row.get(name)
    return "" if value is None or (name == "hfu" and value == row.get("mfu")) else f"{value:.1%}"


def number_text(value: float | str | None) -> str:
    """Return a number with three digits, or "" for None."""
    return "" if value is None else f"{float(value):.3g}"
