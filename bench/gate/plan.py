"""Plan: what is compared, in which order, and how much each tool measures for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from bench.gate.effects import EFFECTS, SAME
from bench.gate.noise import CONDITIONS, IDLE
from bench.gate.runs import Run
from bench.gate.suite.subject.effect import NAMES
from bench.gate.tools import OURS
from bench.gate.tools.tool import Tool

__all__ = ["QUICK", "Block", "Plan", "blocks", "fair_seconds", "next_effort", "tools_of"]


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        conditions: of the machine.
        effects: branches, other than `SAME`.
        same: blocks in which nothing is added, for each one of another effect.
        shared: effects of which all tools have a block under each condition in a cycle that has rivals.
        names: calls.
        seconds: of a tool, a call.
        calibration: seconds of each measurement of what an iteration takes.
    """

    conditions: tuple[str, ...] = CONDITIONS
    effects: tuple[str, ...] = tuple(name for name in EFFECTS if name != SAME)
    same: int = 8
    shared: tuple[str, ...] = (SAME, "up02", "up05")
    names: tuple[str, ...] = NAMES
    seconds: float = 15.0
    calibration: float = 20.0


QUICK = Plan((IDLE, "bursts"), ("up10",), 1, (SAME, "up10"), ("python", "memory"), 8.0, 0.5)


@dataclass(frozen=True)
class Block:
    """An effect under a condition.

    Attributes:
        number: from 0 through all cycles.
        cycle: that it is of.
        condition: of the machine.
        effect: a branch.
        shared: whether it is for all tools, where the cycle has rivals.
    """

    number: int
    cycle: int
    condition: str
    effect: str
    shared: bool


def blocks(plan: Plan) -> Iterator[Block]:
    """Without end, each cycle of all combinations in an order of its own."""
    cells = [
        (condition, effect)
        for condition in plan.conditions
        for effect in (*[SAME] * plan.same, *plan.effects)
    ]
    for cycle in itertools.count():
        order = list(cells)
        random.Random(cycle).shuffle(order)
        last = {cell: place for place, cell in enumerate(order)}
        for place, cell in enumerate(order):
            shared = cell[1] in plan.shared and last[cell] == place
            yield Block(cycle * len(cells) + place, cycle, *cell, shared)


def tools_of(block: Block, tools: Sequence[Tool], rivals_every: int) -> list[Tool]:
    """Those that come in a block, in their order; every so many cycles have rivals."""
    all_of_them = block.shared and (block.cycle + 1) % rivals_every == 0
    chosen = [tool for tool in tools if tool.name == OURS or all_of_them]
    random.Random(f"{block.number} order").shuffle(chosen)
    return chosen


def next_effort(tool: Tool, runs: Sequence[Run], seconds: float) -> float:
    """What effort makes the tool take so many seconds, of its last runs. The gate knows that by itself."""
    if tool.name == OURS:
        return tool.effort
    # One that was ended for taking too long says what a failure of another kind does not.
    told = (run for run in runs if run.tool == tool.name and (run.error is None or run.seconds > seconds))
    last = list(told)[-5:]
    if not last:
        return tool.effort
    return max(tool.least_effort, median(run.effort * seconds / run.seconds for run in last))


def fair_seconds(runs: Sequence[Run], seconds: float) -> float:
    """What the tools are given: as much as was asked for, or as the gate has taken, if that was more."""
    taken = [run.seconds for run in runs if run.tool == OURS and run.error is None][-10:]
    return max(seconds, mean(taken)) if taken else seconds
