"""Lengths: whether planted instabilities are found at their length, and none in attention that is healthy.

Each mechanism of `bench.planted_lengths` is planted at several lengths and searched for by
`first_unstable_length` between bounds that know nothing of it, down to a single position. Healthy models are
searched in the same way, and looked at by `length_sweep` at each of the planted lengths as well. Every search
is held to the same number of tokens per step at all lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table

from bench.claim import Bar
from bench.planted_lengths import PLANTED, planted_spec, window_rack
from bench.prototype.part import Part, Work
from stackwise import ModelSpec
from stackwise.stability.lengths import first_unstable_length, length_sweep

__all__ = ["HEALTHY", "Plan", "healthy_spec", "look_at_healthy", "measure", "rows", "search_planted"]

_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
# Kind of attention: keys of ModelConfig.
HEALTHY: dict[str, dict[str, Any]] = {
    "mha": {"attention_type": "mha"},
    "gqa": {"attention_type": "gqa", "n_kv_heads": 1},
    "mla": {"attention_type": "mla", "latent": _LATENT},
    "sliding window": {"attention_type": "mha", "sliding_window": 128},
    "kernel": {"attention_type": "kernel", "kernel": {"feature_map": "elu"}},
}


@dataclass(frozen=True)
class Plan:
    """What is searched, and how.

    Attributes:
        planted: the lengths at which something is planted.
        low: the shortest length of every search.
        high: the longest.
        seeds: of each length; as many fresh ones around a find.
        steps: of each short training.
        tokens_per_step: at all lengths.
        mechanisms: that are planted.
        kinds: of healthy attention.
    """

    planted: tuple[int, ...] = (192, 640, 1536)
    low: int = 64
    high: int = 2048
    seeds: int = 3
    steps: int = 20
    tokens_per_step: int = 2048
    mechanisms: tuple[str, ...] = tuple(PLANTED)
    kinds: tuple[str, ...] = tuple(HEALTHY)


QUICK = Plan((24,), 8, 64, 3, 12, 128, tuple(PLANTED), ("mha", "kernel"))


def measure(work: Work) -> Part:
    """Search what is missing, and compare what was found with what was planted."""
    plan = QUICK if work.quick else Plan()
    runs = {
        f"planted; {mechanism}; {length}": partial(search_planted, mechanism, length, plan)
        for mechanism in plan.mechanisms
        for length in plan.planted
    }
    runs |= {f"healthy; {kind}": partial(look_at_healthy, kind, plan) for kind in plan.kinds}
    found = work.complete(runs, asdict(plan) | {"planted": list(plan.planted)})
    planted = {name: run for name, run in found.items() if name.startswith("planted")}
    healthy = {name: run for name, run in found.items() if name.startswith("healthy")}
    figures = {"plan": asdict(plan), "planted": list(planted.values()), "healthy": list(healthy.values())}
    whole = not work.missing
    return Part(figures, bars(figures, whole=whole), table(figures), tuple(work.missing))


def search_planted(mechanism: str, length: int, plan: Plan) -> Iterator[dict[str, Any]]:
    """Where `first_unstable_length` finds an instability that is planted at a length."""
    torch.set_num_threads(1)
    yield {
        "mechanism": mechanism,
        "planted": length,
        **_search(planted_spec(mechanism, length), plan),
    }


def look_at_healthy(kind: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """What is found in a healthy model: by the search, and at each of the planted lengths."""
    torch.set_num_threads(1)
    spec = healthy_spec(kind)
    swept = length_sweep(
        spec,
        sorted({plan.low, *plan.planted, plan.high}),
        tokens_per_step=plan.tokens_per_step,
        seeds=plan.seeds,
        steps=plan.steps,
    )
    yield {
        "kind": kind,
        **_search(spec, plan),
        "unstable_lengths": [point.seq_len for point in swept.points if point.verdict == "unstable"],
        "verdicts": {str(point.seq_len): point.verdict for point in swept.points},
    }


def healthy_spec(kind: str) -> ModelSpec:
    """Two Blocks of a kind of attention, of the width of the planted models."""
    make = partial(window_rack, None, initialization="normal", **HEALTHY[kind])
    return ModelSpec.of(make, name=kind, causal=True)


def _search(spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    found = first_unstable_length(
        spec,
        plan.low,
        plan.high,
        seeds=plan.seeds,
        tokens_per_step=plan.tokens_per_step,
        steps=plan.steps,
    )
    return {
        "first": found.first,
        "verdict": found.verdict,
        "looks": len(found.order),
        "order": list(found.order),
        "notes": list(found.notes),
    }


def exactly_found(planted: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of what was planted that was found at its very length."""
    return sum(run["first"] == run["planted"] for run in planted) / len(planted) if planted else None


def false_finds(healthy: Sequence[Mapping[str, Any]]) -> int:
    """Healthy models in which the search found a length, or the sweep one that is unstable."""
    return sum(run["first"] is not None or bool(run["unstable_lengths"]) for run in healthy)


def bars(figures: Mapping[str, Any], *, whole: bool) -> tuple[Bar, ...]:
    """Over all mechanisms and lengths, and over all healthy kinds; None before all are there."""
    planted, healthy = figures["planted"], figures["healthy"]
    return (
        Bar("lengths: planted, found exactly", exactly_found(planted) if whole else None, 1.0),
        Bar(
            "lengths: healthy, found all the same",
            float(false_finds(healthy)) if whole else None,
            0.0,
            at_most=True,
        ),
    )


def table(figures: Mapping[str, Any]) -> Table:
    """One row a search."""
    shown = Table("model", "planted at", "found at", "lengths looked at")
    for run in figures["planted"]:
        cells = (str(run["planted"]), str(run["first"]), str(run["looks"]))
        shown.add_row(run["mechanism"], *cells)
    for run in figures["healthy"]:
        unstable = ", ".join(map(str, [run["first"] or "none", *run["unstable_lengths"]]))
        shown.add_row(run["kind"], "-", unstable, str(run["looks"]))
    return shown


def rows(figures: Mapping[str, Any]) -> str:
    """A Markdown table for the documentation: one row a mechanism, or kind of healthy attention."""
    lengths = figures["plan"]["planted"]
    head = ["", *(f"planted at {length}" for length in lengths), "lengths looked at"]
    lines = [f"| {' | '.join(head)} |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for mechanism in figures["plan"]["mechanisms"]:
        of = {run["planted"]: run for run in figures["planted"] if run["mechanism"] == mechanism}
        cells = [f"found at {of[length]['first']}" if length in of else "-" for length in lengths]
        looks = [run["looks"] for run in of.values()]
        lines.append(f"| {mechanism} | {' | '.join(cells)} | {_span(looks)} |")
    for run in figures["healthy"]:
        said = (
            "none found" if not false_finds([run]) else f"found at {run['first'] or run['unstable_lengths']}"
        )
        cells = [said, *[""] * (len(lengths) - 1)]
        lines.append(f"| {run['kind']}, healthy | {' | '.join(cells)} | {run['looks']} |")
    return "\n".join(lines)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low} to {high}"
