"""Blocks of bench.gate in their order, and how much each tool does in them."""

import itertools
from collections import Counter

import pytest

from bench.gate.effects import EFFECTS, SAME
from bench.gate.noise import CONDITIONS
from bench.gate.plan import Plan, blocks, fair_seconds, next_effort, tools_of
from bench.gate.runs import Run
from bench.gate.tools import OURS, TOOLS
from bench.gate.tools.stackwise import Stackwise
from tests.bench.gate.made_runs import ours, run_of, theirs


class TestBlocks:
    def test_a_cycle_has_every_combination(self):
        plan = Plan()
        size = len(plan.conditions) * (plan.same + len(plan.effects))
        for cycle in range(3):
            made = list(itertools.islice(blocks(plan), cycle * size, (cycle + 1) * size))
            assert [block.number for block in made] == list(range(cycle * size, (cycle + 1) * size))
            counts = Counter((block.condition, block.effect) for block in made)
            wanted = {(c, e): plan.same if e == SAME else 1 for c in CONDITIONS for e in EFFECTS}
            assert counts == wanted

    def test_they_are_the_same_again_and_differ_by_cycle(self):
        plan = Plan()
        size = len(plan.conditions) * (plan.same + len(plan.effects))
        first, again = (list(itertools.islice(blocks(plan), 2 * size)) for _ in range(2))
        assert first == again
        order = [[(b.condition, b.effect) for b in part] for part in (first[:size], first[size:])]
        assert order[0] != order[1]

    def test_rivals_come_in_every_nth_cycle_and_the_order_is_by_chance(self):
        plan, cycles = Plan(), 6
        size = len(plan.conditions) * (plan.same + len(plan.effects))
        made = list(itertools.islice(blocks(plan), cycles * size))
        come = {block: [tool.name for tool in tools_of(block, TOOLS, 3)] for block in made}
        full = {block: names for block, names in come.items() if names != [OURS]}
        assert all(sorted(names) == sorted(tool.name for tool in TOOLS) for names in full.values())
        found = Counter((block.cycle, block.condition, block.effect) for block in full)
        assert found == {(i, c, e): 1 for i in (2, 5) for c in CONDITIONS for e in (SAME, "up02", "up05")}
        assert len({names.index(OURS) for names in full.values()}) > 1


class TestEffort:
    tool = next(tool for tool in TOOLS if tool.name == "pytest-benchmark")

    def run(self, effort, seconds):
        return Run(0, self.tool.name, "idle", SAME, seconds, effort, "", "", {"gemm": theirs(0)})

    def test_first_it_is_the_tools_own(self):
        assert next_effort(self.tool, [], 90.0) == self.tool.effort

    def test_it_comes_to_the_seconds_asked_for(self):
        # Of 90 s, 30 go into what effort does not change.
        runs, effort = [], self.tool.effort
        for _ in range(30):
            runs.append(self.run(effort, 30 + 12 * effort))
            effort = next_effort(self.tool, runs, 90.0)
        assert 30 + 12 * effort == pytest.approx(90, rel=0.01)

    def test_it_is_never_less_than_can_be_compared_with(self):
        assert next_effort(self.tool, [self.run(0.2, 900.0)], 90.0) == self.tool.least_effort

    def test_a_run_that_failed_says_nothing_unless_it_took_too_long(self):
        def failed(seconds):
            return Run(0, self.tool.name, "idle", SAME, seconds, 3.0, "", "", {}, "it was ended")

        assert next_effort(self.tool, [failed(1.0)], 90.0) == self.tool.effort
        assert next_effort(self.tool, [failed(360.0)], 90.0) == 0.75

    def test_the_gate_has_its_own(self):
        runs = [Run(0, OURS, "idle", SAME, 10.0, 1.0, "", "", {"gemm": ours("PASS")})]
        assert next_effort(Stackwise(), runs, 90.0) == 1.0


def test_rivals_have_no_less_than_the_gate_took():
    assert fair_seconds([], 90.0) == 90.0
    runs = [
        run_of(i, OURS, SAME, {"gemm": ours("PASS")}, seconds=seconds) for i, seconds in enumerate((60, 80))
    ]
    assert fair_seconds(runs, 90.0) == 90.0
    assert fair_seconds([*runs, run_of(2, OURS, SAME, {"gemm": ours("PASS")}, seconds=190)], 90.0) == 110.0
