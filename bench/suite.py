"""`python -m bench.suite`: all throughput suites, `bench/test_*.py`, into one result file of this device.

Each is a test of its own as well: `pytest bench -k decode`. Nothing is compared here; figures of two runs
differ by what the machine does beside.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.claim import Claim

SUITES = ("training", "prefill", "decode", "attention", "recompute", "scopes")
# Of a test, what it was.
KEPT = (
    "device",
    "dtype",
    "model",
    "mode",
    "batch_size",
    "seq_len",
    "tokens_per_second",
    "peak_memory_bytes",
    "steady",
    "throttled",
    "notes",
    "mfu",
    "hfu",
    "mbu",
    "floor_seconds",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.suite", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one call of each: it runs, and proves nothing")
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"some of them, else all: {', '.join(SUITES)}"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"suite: got {', '.join(sorted(unknown))}; allowed: {', '.join(SUITES)}")
    claim = Claim("suite", options.quick)
    if options.suites:
        claim.resume()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmark.json"
        files = [str(Path(__file__).parent / f"test_{name}.py") for name in options.suites or SUITES]
        how = ["--benchmark-disable"] if options.quick else ["--benchmark-only", f"--benchmark-json={path}"]
        gpu = ["--gpu"] if torch.cuda.is_available() else []
        code = pytest.main([*files, *how, *gpu, "-q", "-p", "no:cacheprovider"])
        if path.exists() and path.stat().st_size:
            claim.figures |= rows_of(json.loads(path.read_text()))
    Console(width=140).print(table(claim.figures))
    return claim.conclude() or int(code)


def rows_of(record: dict[str, Any]) -> dict[str, Any]:
    """Of what pytest-benchmark wrote, one row for each test."""
    return {
        each["fullname"].rpartition("/")[2]: {
            "group": each["group"],
            **{key: each["extra_info"].get(key) for key in KEPT},
            **{key: each["stats"].get(key) for key in ("median", "iqr", "rounds", "p50", "p95", "p99")},
        }
        for each in record["benchmarks"]
    }


def table(rows: dict[str, Any]) -> Table:
    """Name, speed, time and memory of each."""
    shown = Table("test", "tokens/s", "median, ms", "peak, MiB", "MFU", "HFU", "MBU", "floor, ms")
    for name, row in rows.items():
        cells = (
            _or_none(row["tokens_per_second"], lambda rate: f"{rate:,.0f}"),
            f"{1e3 * row['median']:.2f}",
            _or_none(row["peak_memory_bytes"], lambda b: f"{b / 2**20:,.0f}"),
            *(_or_none(row.get(key), lambda share: f"{share:.1%}") for key in ("mfu", "hfu", "mbu")),
            _or_none(row.get("floor_seconds"), lambda seconds: f"{1e3 * seconds:.2f}"),
        )
        shown.add_row(escape(name), *cells)
    return shown


def _or_none(value: Any, show: Any) -> str:
    return "-" if value is None else str(show(value))


if __name__ == "__main__":
    sys.exit(main())
