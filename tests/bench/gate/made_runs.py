"""Runs of bench.gate, made up."""

from bench.gate.runs import Run
from bench.gate.tools import OURS, TOOLS
from bench.gate.tools.share_rule import judged
from bench.gate.tools.tool import Outcome

RULES = {"mean:5%": "mean"}


def ours(verdict, low=0.0, flagged=None, others=None, balance=0.5):
    raw = {"others": others or {}, "balance": balance, "order_bias": 0.01, "rounds": 4, "seconds": 20.0}
    verdicts = {"gate": verdict, "flagged": flagged or verdict}
    return Outcome(verdicts, {"gate": low, "flagged": low}, raw)


def theirs(change):
    raw = {"base": {"mean": 1.0}, "head": {"mean": 1.0 + change}}
    return judged(raw, tuple(RULES))


def run_of(block, tool, effect, outcomes, *, condition="idle", seconds=30.0, error=None):
    return Run(block, tool, condition, effect, seconds, 1.0, "2026-01-01", "abc", outcomes, error)


def whole_block(block, effect, our_outcome, change, *, condition="idle", seconds=30.0):
    """A block in which all tools were."""
    return [
        run_of(
            block,
            tool.name,
            effect,
            {"gemm": our_outcome if tool.name == OURS else theirs(change)},
            condition=condition,
            seconds=seconds if tool.name == OURS else 2 * seconds,
        )
        for tool in TOOLS
    ]
