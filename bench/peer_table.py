"""`python -m bench.peer_table`: the table of the README, from what `bench.peers` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.claim import RESULTS


def table(record: dict[str, Any]) -> str:
    """One row a bar that was measured, in Markdown."""
    rows = [
        "| | fastest other library | stackwise | times faster | target |",
        "| --- | --- | --- | --- | --- |",
    ]
    figures = record["figures"]
    for bar in record["bars"]:
        kind = bar["name"].split()[0]
        if kind in ("train", "forward"):
            figure = figures[bar["name"]]
            ours = next(name for name in figure["seconds"] if name.startswith("stackwise"))
            rates = [
                figure["tokens"] / _median(figure["seconds"][name]) for name in (figure["best_peer"], ours)
            ]
            cells = [f"{figure['best_peer']}, {rates[0]:,.0f} tokens/s", f"{rates[1]:,.0f} tokens/s"]
        elif kind == "decode":
            figure = figures["decode"]
            ours = "stackwise" if bar["name"] == "decode bf16" else "stackwise int8"
            rates = [figure["figures"][name]["tokens_per_second"] for name in (figure["best_peer"], ours)]
            cells = [f"{figure['best_peer']} bf16, {rates[0]:.0f} tokens/s", f"{rates[1]:.0f} tokens/s"]
        elif kind == "window":
            figure = figures["window"]
            times = [_median(figure["seconds"][name]) for name in (figure["masked"], "sliced compiled")]
            cells = [f"masked, {1e3 * times[0]:.0f} ms", f"{1e3 * times[1]:.0f} ms"]
        else:
            continue
        target = f"{bar['limit']:.2f}" + ("" if bar["verdict"] == "PASS" else ", short")
        rows.append(f"| {bar['name']} | {cells[0]} | {cells[1]} | {bar['value']:.2f} | {target} |")
    return "\n".join(rows)


def recorded(path: Path = RESULTS / "cpu" / "peers.json") -> dict[str, Any]:
    """The last full run on the CPU."""
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    print(table(recorded()))
