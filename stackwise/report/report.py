"""Report: the records of a run, as text, Markdown and JSON, and one verdict over them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from stackwise.amount import byte_text
from stackwise.argument import require
from stackwise.markdown import markdown_table
from stackwise.text_file import write_whole

__all__ = ["Report", "report_files"]

_SECTIONS = ("checks", "stability", "throughput", "memory", "quality")
_LATENCIES = ("ttft", "itl", "tpot")
_TAILS = ("p95", "p99")
_SHARES = ("mfu", "hfu", "mbu")
_PROCESS = "process "  # before the bytes of a whole process
# What `execution` says of most work, and a reader takes for granted.
_USUAL = {
    "attention": "sdpa",
    "compile": "1 graph",
    "prefill": "into an empty cache",
    "decode": "with a cache",
    "generate": "greedy, with the cache of the model",
}
_MARKS = {
    "passed": "PASS",
    "failed": "FAIL",
    "warned": "WARN",
    "error": "ERROR",
    "not applicable": "n/a",
    "expected failure": "XFAIL",
}


@dataclass
class Report:
    """What a run found out.

    Attributes:
        checks: CheckResults as dicts.
        stability: StabilityRuns as dicts.
        throughput: Measurements and GenerationMeasurements as dicts, with their shape.
        memory: peaks of memory ("peak") and what steps leave behind ("growth"), each with its test.
        quality: what models were at tasks, each with its test.
        training: what a training run did, or None.
        environment: the machine's fingerprint, or None.
        failed_tests: names of the tests that failed, whatever they were about.
        noun: what these are: "test", or "check" where checks are asked without tests.
        complete: whether the run came to its end.
        created: ISO 8601, UTC.
    """

    checks: list[dict[str, Any]] = field(default_factory=list)
    stability: list[dict[str, Any]] = field(default_factory=list)
    throughput: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    quality: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    failed_tests: list[str] = field(default_factory=list)
    noun: str = "test"
    complete: bool = True
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def add(self, section: str, **record: Any) -> None:
        """Enter one record in "checks", "stability", "throughput", "memory" or "quality"."""
        if section not in _SECTIONS:
            raise ValueError(f"section: got {section!r}; allowed: {', '.join(_SECTIONS)}")
        getattr(self, section).append(record)

    @property
    def verdict(self) -> str:
        """The whole in a word; never a silent pass.

        FAIL: a test failed. INCOMPLETE: the run was cut short. EMPTY: nothing was found out. WARN: all
        tests passed, but among the findings is one that no sound model gives. PASS: none of these.
        """
        if self.failed_tests:
            return "FAIL"
        if not self.complete:
            return "INCOMPLETE"
        if not (any(getattr(self, section) for section in _SECTIONS) or self.training):
            return "EMPTY"
        doubtful = any(check["status"] in ("failed", "error") for check in self.checks)
        doubtful |= any(run["verdict"] not in ("stable", "caught", "recovered") for run in self.stability)
        doubtful |= any(row["verdict"] not in ("within", "read", "not told", "flat") for row in self.memory)
        doubtful |= any(row["verdict"] != "met" for row in self.quality)
        return "WARN" if doubtful else "PASS"

    def summary(self) -> str:
        """The verdict and what it rests on, in one line."""
        parts = []
        if self.checks:
            counts = Counter(c["status"] for c in self.checks)
            parts.append("checks: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
        if self.stability:
            counts = Counter(r["verdict"] for r in self.stability)
            parts.append("stability: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
        if self.throughput:
            counts = Counter("measured" if r["measured"] else "only called" for r in self.throughput)
            parts.append("throughput: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
        if self.memory:
            counts = Counter(row["verdict"] for row in self.memory)
            parts.append("memory: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
        if self.quality:
            counts = Counter(row["verdict"] for row in self.quality)
            parts.append("quality: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
        if self.failed_tests:
            plural = "" if len(self.failed_tests) == 1 else "s"
            parts.append(f"{len(self.failed_tests)} {self.noun}{plural} failed")
        return f"verdict: {self.verdict} ({'; '.join(parts) or 'nothing was found out'})"

    def training_line(self) -> str:
        """What the training run did, in one line; "" where there was none."""
        run = self.training
        if run is None:
            return ""
        return (
            f"training: {run['parameters']:,} parameters, {run['num_batches']} steps in "
            f"{run['seconds']:.0f} s ({run['tokens_per_second']:,.0f} tokens/s), "
            f"loss {run['first_loss']:.3f} -> {run['final_loss']:.3f}, "
            f"validation {run['validation_loss']:.3f} nats per byte"
        )

    def lines(self) -> Iterator[str]:
        """Plain text, for a terminal."""
        if self.training:
            yield self.training_line()
        for model, rows in _grouped(self.checks):
            yield f"checks of {model}"
            asked, not_asked = _apart(rows)
            width = max((len(row["check"]) for row in asked), default=0)
            wide = max((len(_measured(row)) for row in asked), default=0)
            for row in asked:
                text = f"{_measured(row):{wide}}  {_words(row)}" if wide else _words(row)
                yield f"  {_MARKS[row['status']]:5} {row['check']:{width}}  {text}".rstrip()
            for words, names in not_asked.items():
                yield f"  {_MARKS['not applicable']:5} {names}  {words}".rstrip()
        if self.stability:
            yield "stability"
            for run in self.stability:
                yield f"  {run['verdict']:13} {run['model']}  {_fault_text(run)}"
                for alarm in run["alarms"][:3]:
                    yield f"  {'':13} {alarm['text']}"
        if self.throughput:
            yield "throughput"
            for row in self.throughput:
                test = f"{row['test']}  " if row.get("test") else ""
                yield f"  {test}{row['model']}  {_shape_text(row)}  {_rate_text(row)}"
                for note in row.get("notes") or ():
                    yield f"    note: {note}"
        if self.memory:
            yield "memory"
            for row in self.memory:
                yield f"  {row['verdict']:11}  {row['test']}  {_memory_text(row)}"
                for line in _growth_lines(row):
                    yield f"  {'':11}  {line}"
        if self.quality:
            yield "quality"
            for row in self.quality:
                yield f"  {row['verdict']:12}  {row['test']}  {row['task']}: {row['reason']}"
        yield self.summary()

    def markdown(self) -> str:
        """A page for people."""
        blocks = [f"# stackwise report\n\n**{self.summary()}**"]
        blocks.append(f"{self.created}, stackwise {version('stackwise')}")
        if self.environment:
            blocks.append("\n".join(f"- {key}: {value}" for key, value in self.environment.items()))
        if self.training:
            blocks.append(f"## Training\n\n{self.training_line()}")
        for model, rows in _grouped(self.checks):
            asked, not_asked = _apart(rows)
            table = [
                [_MARKS[r["status"]], r["check"], _number(r["value"]), _number(r["limit"]), _words(r)]
                for r in asked
            ]
            table += [[_MARKS["not applicable"], names, "", "", words] for words, names in not_asked.items()]
            header = ["", "check", "measured", "limit", "what it says"]
            blocks.append(f"## Checks of {model}\n\n{markdown_table(header, table)}")
        if self.stability:
            table = [
                [
                    run["verdict"],
                    run["model"],
                    _fault_text(run),
                    "; ".join(a["text"] for a in run["alarms"]) or "none",
                ]
                for run in self.stability
            ]
            blocks.append(f"## Stability\n\n{markdown_table(['verdict', 'model', 'run', 'alarms'], table)}")
        if self.throughput:
            header, table = _throughput_table(self.throughput)
            blocks.append(f"## Throughput\n\n{markdown_table(header, table)}")
        if self.memory:
            table = [
                [row["verdict"], row["test"], _memory_text(row), "; ".join(_growth_lines(row))]
                for row in self.memory
            ]
            header = ["verdict", "test", "bytes", "what it says"]
            blocks.append(f"## Memory\n\n{markdown_table(header, table)}")
        if self.quality:
            table = [[row["verdict"], row["test"], row["task"], row["reason"]] for row in self.quality]
            header = ["verdict", "test", "task", "what it says"]
            blocks.append(f"## Quality\n\n{markdown_table(header, table)}")
        if self.failed_tests:
            blocks.append(
                f"## Failed {self.noun}s\n\n" + "\n".join(f"- `{name}`" for name in self.failed_tests)
            )
        return "\n\n".join(blocks) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; in a file, NaN and infinities are the strings "nan", "inf" and "-inf"."""
        return {
            "stackwise": version("stackwise"),
            "created": self.created,
            "verdict": self.verdict,
            "environment": self.environment,
            "training": self.training,
            "checks": self.checks,
            "stability": self.stability,
            "throughput": self.throughput,
            "memory": self.memory,
            "quality": self.quality,
            "failed_tests": self.failed_tests,
            "noun": self.noun,
            "complete": self.complete,
        }

    def write(self, path: str | Path) -> None:
        """Write Markdown or JSON, by the ending of `path`; a reader never sees half a file.

        Raises:
            ValueError: another ending.
            OSError: the file cannot be written.
        """
        path = Path(path)
        match path.suffix:
            case ".md":
                text = self.markdown()
            case ".json":
                text = json.dumps(_plain(self.to_dict()), indent=1, allow_nan=False) + "\n"
            case _:
                raise ValueError(f"report: got {path.name!r}; allowed endings: .md, .json")
        write_whole(path, text)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read what `write` wrote to a .json file."""
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{key: stored[key] for key in cls.__dataclass_fields__ if key in stored})


def report_files(path: str | Path) -> list[Path]:
    """The files that `path` asks for: itself, or both kinds where it has no ending. Makes its folder.

    Raises:
        ValueError: another ending than .md or .json.
        OSError: the folder cannot be made.
    """
    path = Path(path)
    require(
        path.suffix in (".md", ".json", ""), "report", str(path), "a name ending in .md, .json, or neither"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return [path] if path.suffix else [path.with_suffix(".md"), path.with_suffix(".json")]


def _plain(value: Any) -> Any:
    """The same with non-finite numbers as text, which JSON has no numbers for."""
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _grouped(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    models = dict.fromkeys(row["model"] for row in rows)
    return [(model, [row for row in rows if row["model"] == model]) for model in models]


def _apart(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The checks that could be asked; and for each reason why one could not, their names."""
    asked, not_asked = [], dict[str, str]()
    for row in rows:
        if row["status"] == "not applicable":
            names = not_asked.get(_words(row))
            not_asked[_words(row)] = f"{names}, {row['check']}" if names else row["check"]
        else:
            asked.append(row)
    return asked, not_asked


def _measured(row: dict[str, Any]) -> str:
    value, limit = _number(row["value"]), _number(row["limit"])
    if not (value and limit):
        return value
    return f"{value} <= {limit}" if row["status"] == "passed" else f"{value} (limit {limit})"


def _words(row: dict[str, Any]) -> str:
    shown = (row["where"], row["meaning"], row["advice"] if row["status"] != "passed" else "")
    return ". ".join(text.rstrip(".") for text in shown if text)


def _fault_text(run: dict[str, Any]) -> str:
    faults = ", ".join(run["faults"]) or "no fault"
    if run["seq_len"] is None:
        return faults
    steps = {record["step"] for record in run["records"]}  # one that was made again has several
    return f"T={run['seq_len']}, {len(steps)} steps, {faults}"


def _shape_text(row: dict[str, Any]) -> str:
    sizes = [row["batch_size"], row["seq_len"]]
    more = f" + {row['new_tokens']}" if row.get("new_tokens") else ""
    shape = "" if None in sizes else f" {sizes[0]} x {sizes[1]}{more}"
    kind = f" {row['dtype']}" if row.get("dtype") else ""
    compiled = " compiled" if row.get("compile") else ""
    return f"{row['mode']}{shape}{kind}{compiled} on {row['device']}"


def _rate_text(row: dict[str, Any]) -> str:
    if not row["measured"]:
        return "called once, not measured (benchmarks are disabled)"
    rate = f"{_rate(row)} tokens/s, " if _rate(row) else ""
    parts = [f"{rate}median {_time(row['median_seconds'])} of {row['calls']} calls"]
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


def _throughput_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows; of columns that are not of every record those that say something."""
    columns: dict[str, list[str]] = {
        "test": [row.get("test") or "" for row in rows],
        "model": [row["model"] for row in rows],
        "workload": [_shape_text(row) for row in rows],
        "median": [_time(row["median_seconds"]) for row in rows],
        "p95": [_percentile(row, "p95") for row in rows],
        "p99": [_percentile(row, "p99") for row in rows],
        "tokens/s": [_rate(row) for row in rows],
        "peak memory": [_peak(row) for row in rows],
        **{name.upper(): [_share(row, name) for row in rows] for name in _SHARES},
        "floor": [_floor(row) for row in rows],
        "bound": [row.get("bound") or "" for row in rows],
        **{f"{name.upper()} p50": [_latency(row, name) for row in rows] for name in _LATENCIES},
        **{f"ITL {name}": [_latency(row, "itl", name) for row in rows] for name in _TAILS},
        "calls": [str(row["calls"]) for row in rows],
        "clock, cache": [f"{row.get('clock', 'host')}, {row.get('cache', 'warm')}" for row in rows],
        "execution": [_execution(row) for row in rows],
        "steady": [
            ("yes" if row["steady"] else f"no{_unsteady(row)}") if row["measured"] else "not measured"
            for row in rows
        ],
        "throttled": [_throttled(row) for row in rows],
        "notes": ["; ".join(row.get("notes") or ()) for row in rows],
    }
    always = {"model", "workload", "median", "tokens/s", "peak memory", "calls", "clock, cache", "steady"}
    header = [name for name, cells in columns.items() if name in always or any(cells)]
    return header, [[columns[name][place] for name in header] for place in range(len(rows))]


def _percentile(row: dict[str, Any], name: str) -> str:
    """With its unit; "" where it is withheld."""
    return _percentile_time(row.get("percentiles"), name)


def _latency(row: dict[str, Any], name: str, percentile: str = "p50") -> str:
    """A percentile of a latency of generation; "" where there is none, or it is withheld."""
    return _percentile_time((row.get("latencies") or {}).get(name), percentile)


def _throttled(row: dict[str, Any]) -> str:
    """What held the GPU's clocks down, and in how many readings; "" where nothing did."""
    gpu = row.get("gpu") or {}
    return ", ".join(f"{why} in {n} of {gpu['readings']}" for why, n in (gpu.get("throttled") or {}).items())


def _floor(row: dict[str, Any]) -> str:
    """The least time that the work can take; "" where that is not known."""
    seconds = row.get("floor_seconds")
    return "" if seconds is None else _time(seconds)


def _unsteady(row: dict[str, Any]) -> str:
    """Why the warm-up ended before the time had settled, in brackets; "" where that is not known."""
    reason = (row.get("warmup") or {}).get("reason")
    return f" ({reason})" if reason else ""


def _execution(row: dict[str, Any]) -> str:
    """How the work was done, where that says more than the usual."""
    told = {key: how for key, how in (row.get("execution") or {}).items() if _USUAL.get(key) != how}
    return ", ".join(how if key == row["mode"] else f"{key}: {how}" for key, how in told.items())


def _peak(row: dict[str, Any]) -> str:
    """The peak of memory: on a GPU that of tensors, else of the whole process, and it says so."""
    count = row["peak_memory_bytes"]
    if count is None:
        return "not available"
    return byte_text(count) if row["device"].startswith("cuda") else f"{_PROCESS}{byte_text(count)}"


def _memory_text(row: dict[str, Any]) -> str:
    if row["kind"] == "growth":
        return f"{row['bytes_per_step']:+,.0f} bytes a step over {row['steps']} steps"
    if not row["peaks"]:
        return "not told by this system"
    limit = "" if row["limit"] is None else f", at most {byte_text(row['limit'])}"
    return ", ".join(f"{byte_text(size)} {where}" for where, size in row["peaks"].items()) + limit


def _growth_lines(row: dict[str, Any]) -> list[str]:
    """Why memory grows, and of what there is more."""
    if row["kind"] != "growth" or row["verdict"] == "flat":
        return []
    types = [f"{each['name']}: {each['count_per_step']:+.3g} a step" for each in row["types"][:3]]
    return [*row["reasons"], *types]


def _percentile_time(percentiles: dict[str, Any] | None, name: str) -> str:
    value = ((percentiles or {}).get(name) or {}).get("value")
    return "" if value is None else _time(value)


def _time(seconds: float) -> str:
    """With three digits, in us, ms or s: the largest of which it is one at least."""
    rounded = float(f"{seconds:.3g}")
    scale, unit = (1.0, "s") if rounded >= 1 else (1e3, "ms") if rounded >= 1e-3 else (1e6, "us")
    value = seconds * scale
    digits = f"{value:.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")
    return f"{digits} {unit}"


def _rate(row: dict[str, Any]) -> str:
    """Tokens per second; "" of work that has none."""
    return f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else ""


def _share(row: dict[str, Any], name: str) -> str:
    """A utilisation; "" where it is not known, and of HFU where nothing is recomputed: it is MFU then."""
    value = row.get(name)
    return "" if value is None or (name == "hfu" and value == row.get("mfu")) else f"{value:.1%}"


def _number(value: float | str | None) -> str:
    return "" if value is None else f"{float(value):.3g}"
