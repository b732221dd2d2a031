"""Findings: what the runs of `bench.gate` come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

from rich.table import Table

from bench.claim import Bar
from bench.gate.effects import EFFECTS, SAME, worst_deviation
from bench.gate.noise import CONDITIONS, IDLE
from bench.gate.rates import Point, Rate, at_false_alarms, rate, roc
from bench.gate.runs import Decided, Run, decisions
from bench.gate.tools import OURS, TOOLS
from bench.gate.tools.share_rule import judged

__all__ = ["bars", "compared", "curves", "own_history_bar", "self_checks", "summary", "table"]

GATE, FLAGGED = "gate", "flagged"
OWN_HISTORY = "slowdown of this project's past found"
LEAST_DECISIONS = 1000  # about nothing, before a rate of them is claimed


def bars(runs: list[Run], figures: Mapping[str, Any]) -> list[Bar]:
    """What is claimed, of all runs, and of figures: what was calibrated, what was found of the past."""
    said = list(decisions(runs))
    ours = [each for each in said if each.tool == OURS and each.rule == GATE]
    nothing = [each for each in ours if each.effect == SAME]
    flagged = [each for each in said if each.tool == OURS and each.rule == FLAGGED and each.effect == SAME]
    enough = len(nothing) >= LEAST_DECISIONS
    held = [
        Bar("A/A decisions", float(len(nothing)), LEAST_DECISIONS, full_size=True),
        Bar("A/A alarms before confirmation", rate(flagged, _alarmed).value if enough else None, 0.01, True),
        Bar("A/A alarms", rate(nothing, _alarmed).value if enough else None, 0.001, True),
    ]
    for branch, least in (("up02", 0.9), ("up05", 0.99), ("up10", 0.99), ("wait", 0.99)):
        detected = rate([each for each in ours if each.effect == branch], lambda each: each.alarmed)
        held.append(Bar(f"found, {EFFECTS[branch]}", detected.value, least, full_size=True))
    for name, conditions, most in (
        ("idle", (IDLE,), 0.05),
        ("under noise", tuple(c for c in CONDITIONS if c != IDLE), 0.15),
    ):
        # Of a change below the tolerance and above the least effect nothing is promised.
        counted = [each for each in ours if each.condition in conditions and each.effect != "up01"]
        value = rate(counted, _is_inconclusive).value
        held.append(Bar(f"INCONCLUSIVE, {name}", value, most, at_most=True, full_size=True))
    taken = [run.seconds / len(run.outcomes) for run in runs if run.tool == OURS and run.error is None]
    held.append(Bar("seconds per test", mean(taken) if taken else None, 15.0, at_most=True))
    # The four runs of a quick mode take between 4 and 21 s of one rival.
    held.append(Bar("seconds of a rival / ours, least", least_share(runs), 1.0, full_size=True))
    failed = rate_of_errors(runs).value
    held.append(Bar("runs of ours that failed", failed, 0.0, at_most=True))
    balances = [abs(each.raw["balance"] - 0.5) for each in ours if each.raw["balance"] is not None]
    held.append(Bar("|pairs with base first - 50 %|", max(balances, default=None), 0.02, at_most=True))
    calls = figures.get("calibrated", {}).get("calls")
    deviation = worst_deviation(calls) if calls else None
    held.append(Bar("effects, off by a share of", deviation, 0.2, at_most=True, full_size=True))
    for branch in ("up02", "up05"):
        gain = advantage(runs, branch)
        held.append(Bar(f"{EFFECTS[branch]} at 1 % alarms, - best rival", gain, 0.0, full_size=True))
    held.append(own_history_bar(figures.get(OWN_HISTORY)))
    return held


def own_history_bar(found: Mapping[str, Any] | None) -> Bar:
    """Whether the slowdown of `bench.gate.own_history` was found; None: it was not looked for."""
    return Bar(OWN_HISTORY, None if found is None else float(found["verdict"] == "REGRESSED"), 1.0)


def _alarmed(each: Decided) -> bool:
    # A test fails by any of its metrics.
    return each.alarmed or "REGRESSED" in each.raw.get("others", {}).values()


def _is_inconclusive(each: Decided) -> bool:
    return each.verdict == "INCONCLUSIVE"


def together(runs: list[Run]) -> list[Run]:
    """Those of blocks that every tool has come through."""
    names = {tool.name for tool in TOOLS}
    through: dict[int, set[str]] = {}
    for run in runs:
        if run.error is None:
            through.setdefault(run.block, set()).add(run.tool)
    return [run for run in runs if through.get(run.block, set()) >= names]


def least_share(runs: list[Run]) -> float | None:
    """The mean seconds of the rival that took least, over those of ours."""
    compared = together(runs)
    of = {tool.name: [run.seconds for run in compared if run.tool == tool.name] for tool in TOOLS}
    if not all(of.values()):
        return None
    return min(mean(seconds) for name, seconds in of.items() if name != OURS) / mean(of[OURS])


def rate_of_errors(runs: list[Run]) -> Rate:
    """Runs of ours without an answer."""
    ours = [run for run in runs if run.tool == OURS]
    return Rate.of(sum(run.error is not None for run in ours), len(ours))


def rules_of(said: Sequence[Decided]) -> list[tuple[str, str]]:
    """Tool and rule of all decisions, ours first."""
    order = [tool.name for tool in TOOLS]
    found = dict.fromkeys((each.tool, each.rule) for each in said)
    return sorted(found, key=lambda names: order.index(names[0]))


def compared(runs: list[Run]) -> list[Decided]:
    """All decisions of the blocks that every tool has come through, those against a stored baseline too."""
    shared = together(runs)
    return [*decisions(shared), *stored(shared)]


def stored(runs: list[Run]) -> Iterator[Decided]:
    """pytest-benchmark's rules against the baseline that the first block under the condition has measured.

    That its own comparison says the same of the same numbers is tested.
    """
    name = "pytest-benchmark"
    baselines: dict[str, Run] = {}
    for run in runs:
        if run.tool != name:
            continue
        first = baselines.setdefault(run.condition, run)
        if first is run:
            continue
        for workload, outcome in run.outcomes.items():
            raw = {"base": first.outcomes[workload].raw["base"], "head": outcome.raw["head"]}
            rules = tuple(outcome.verdicts)
            for rule, verdict in judged(raw, rules).verdicts.items():
                estimate = judged(raw, rules).estimates[rule]
                share = run.seconds / len(run.outcomes)
                yield Decided(
                    run.block,
                    name,
                    run.condition,
                    run.effect,
                    f"stored, {rule}",
                    workload,
                    verdict,
                    estimate,
                    share,
                    raw,
                )


def curves(runs: list[Run], branch: str) -> dict[tuple[str, str], list[Point]]:
    """By tool and rule what moving the threshold does, for an effect. Rules of the same numbers come once."""
    said = compared(runs)
    found: dict[tuple[str, str], list[Point]] = {}
    for tool, rule in rules_of(said):
        of = [each for each in said if (each.tool, each.rule) == (tool, rule)]
        nothing = [each.estimate for each in of if each.effect == SAME]
        something = [each.estimate for each in of if each.effect == branch]
        if nothing and something:
            points = roc(nothing, something)
            if points not in found.values():
                found[tool, rule] = points
    return found


def advantage(runs: list[Run], branch: str) -> float | None:
    """What the gate finds with 1 % of false alarms, less what the best rule of a rival finds then."""
    best = {names: at_false_alarms(points, 0.01).detected for names, points in curves(runs, branch).items()}
    rivals = [detected for (tool, _), detected in best.items() if tool != OURS]
    if (OURS, GATE) not in best or not rivals:
        return None
    return best[OURS, GATE] - max(rivals)


def summary(runs: list[Run]) -> list[dict[str, Any]]:
    """One row for each rule: alarms about nothing, what it finds of each effect, what it cannot say, seconds.

    Of the gate by all blocks, since its rates are claimed; of the others by those in which all were.
    """
    everything, shared = list(decisions(runs)), compared(runs)
    rows = []
    for tool, rule in rules_of([*everything, *shared]):
        source = everything if tool == OURS else shared
        of = [each for each in source if (each.tool, each.rule) == (tool, rule)]
        if not of:
            continue
        rows.append(
            {
                "tool": tool,
                "rule": rule,
                "rates": {
                    branch: rate([each for each in of if each.effect == branch], _alarmed).to_dict()
                    for branch in EFFECTS
                },
                "alarms_by_condition": {
                    condition: rate(
                        [each for each in of if each.effect == SAME and each.condition == condition], _alarmed
                    ).to_dict()
                    for condition in CONDITIONS
                },
                "inconclusive": {
                    condition: rate(
                        [each for each in of if each.condition == condition], _is_inconclusive
                    ).to_dict()
                    for condition in CONDITIONS
                },
                "found_faster": rate(
                    [each for each in of if each.effect == SAME], lambda each: each.verdict == "IMPROVED"
                ).to_dict(),
                "seconds": mean(each.seconds for each in of),
            }
        )
    return rows


def self_checks(runs: list[Run]) -> dict[str, Any]:
    """What the gate says of its own order, over all runs."""
    checks = [next(iter(run.outcomes.values())).raw for run in runs if run.tool == OURS and run.error is None]
    biases = [check["order_bias"] for check in checks if check["order_bias"] is not None]
    return {
        "runs": len(checks),
        "order_bias": {"median": median(biases), "largest": max(biases, key=abs)} if biases else None,
        "rounds": mean(check["rounds"] for check in checks) if checks else None,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of `summary`."""
    shown = Table("tool", "rule", *(f"{effect}" for effect in EFFECTS.values()), "no answer", "s/test")
    for row in rows:
        undecided = [Rate.of(each["hits"], each["n"]) for each in row["inconclusive"].values()]
        unsaid = Rate.of(sum(each.hits for each in undecided), sum(each.n for each in undecided))
        cells = [
            "-" if each["value"] is None else f"{each['value']:.1%} ({each['n']})"
            for each in row["rates"].values()
        ]
        shown.add_row(row["tool"], row["rule"], *cells, f"{unsaid.value or 0.0:.1%}", f"{row['seconds']:.1f}")
    return shown
