"""What bench.gate makes of what the tools said."""

import math

import pytest

from bench.gate.effects import SAME
from bench.gate.findings import advantage, bars, compared, curves, least_share, self_checks, summary, together
from bench.gate.tools import OURS, TOOLS
from bench.gate.tools.share_rule import judged
from bench.gate.tools.tool import Outcome
from tests.bench.gate.made_runs import RULES, ours, run_of, theirs, whole_block


class TestBars:
    def found(self, runs):
        return {bar.name: bar for bar in bars(runs, {})}

    def test_alarms_are_no_rate_before_there_are_enough(self):
        found = self.found([run_of(0, OURS, SAME, {"gemm": ours("PASS")})])
        assert found["A/A decisions"].value == 1
        assert (
            found["A/A alarms"].verdict == found["A/A alarms before confirmation"].verdict == "NOT MEASURED"
        )

    def test_alarms_before_and_after_confirmation(self):
        runs = [run_of(i, OURS, SAME, {"gemm": ours("PASS")}) for i in range(995)]
        runs += [run_of(995 + i, OURS, SAME, {"gemm": ours("PASS", flagged="REGRESSED")}) for i in range(9)]
        runs += [run_of(1004, OURS, SAME, {"gemm": ours("REGRESSED")})]
        found = self.found(runs)
        assert found["A/A alarms before confirmation"].value == pytest.approx(10 / 1005)
        assert found["A/A alarms"].value == pytest.approx(1 / 1005)
        assert found["A/A alarms before confirmation"].verdict == "PASS"
        assert found["A/A alarms"].verdict == "PASS"

    def test_an_alarm_of_another_metric_counts(self):
        runs = [run_of(i, OURS, SAME, {"gemm": ours("PASS")}) for i in range(999)]
        runs.append(run_of(999, OURS, SAME, {"gemm": ours("PASS", others={"memory": "REGRESSED"})}))
        assert self.found(runs)["A/A alarms"].value == 0.001

    def test_found_by_effect(self):
        runs = [run_of(i, OURS, "up02", {"gemm": ours("REGRESSED" if i else "PASS")}) for i in range(10)]
        found = self.found(runs)
        assert found["found, 2%"].value == 0.9
        assert found["found, 2%"].verdict == "PASS"
        assert found["found, 5%"].verdict == "NOT MEASURED"

    def test_no_answer_by_condition_without_what_nothing_is_promised_of(self):
        runs = [
            run_of(0, OURS, SAME, {"gemm": ours("INCONCLUSIVE")}),
            run_of(1, OURS, "up05", {"gemm": ours("REGRESSED")}),
            run_of(2, OURS, "up01", {"gemm": ours("INCONCLUSIVE")}),
            run_of(3, OURS, SAME, {"gemm": ours("PASS")}, condition="bursts"),
        ]
        found = self.found(runs)
        assert found["INCONCLUSIVE, idle"].value == 0.5
        assert found["INCONCLUSIVE, under noise"].value == 0.0

    def test_runs_that_failed(self):
        runs = [
            run_of(0, OURS, SAME, {"gemm": ours("PASS")}),
            run_of(1, OURS, SAME, {}, error="it crashed"),
        ]
        assert self.found(runs)["runs of ours that failed"].value == 0.5

    def test_imbalance(self):
        runs = [run_of(0, OURS, SAME, {"gemm": ours("PASS", balance=0.46)})]
        bar = self.found(runs)["|pairs with base first - 50 %|"]
        assert (bar.value, bar.verdict) == (pytest.approx(0.04), "SHORT")

    def test_seconds_are_of_a_test(self):
        outcomes = {name: ours("PASS") for name in ("gemm", "memory")}
        runs = [run_of(0, OURS, SAME, outcomes, seconds=28.0)]
        assert self.found(runs)["seconds per test"].value == 14.0


class TestComparison:
    def test_only_blocks_that_all_have_come_through(self):
        runs = whole_block(0, SAME, ours("PASS"), 0.0)
        alone = run_of(1, OURS, SAME, {"gemm": ours("PASS")})
        partly = whole_block(2, SAME, ours("PASS"), 0.0)
        partly[-1] = run_of(2, partly[-1].tool, SAME, {}, error="it crashed")
        assert together([*runs, alone, *partly]) == runs

    def test_seconds_of_the_rival_that_had_least(self):
        runs = whole_block(0, SAME, ours("PASS"), 0.0, seconds=30.0)
        assert least_share(runs) == 2.0
        assert least_share([]) is None

    def test_stored_baseline_is_that_of_the_first_block_of_the_condition(self):
        first = whole_block(0, SAME, ours("PASS"), 0.0)
        # The machine is 20 % slower now, on both sides.
        raw = {"base": {"mean": 1.2}, "head": {"mean": 1.2}}
        later = [
            run_of(
                1, run.tool, SAME, {"gemm": judged(raw, tuple(RULES)) if run.tool != OURS else ours("PASS")}
            )
            for run in first
        ]
        said = {
            (each.block, each.rule): each
            for each in compared([*first, *later])
            if each.tool == "pytest-benchmark"
        }
        assert said[1, "mean:5%"].verdict == "PASS"
        assert said[1, "stored, mean:5%"].verdict == "REGRESSED"
        assert said[1, "stored, mean:5%"].estimate == pytest.approx(0.2)
        assert (0, "stored, mean:5%") not in said

    def test_advantage_at_one_percent_of_false_alarms(self):
        runs = []
        for i in range(10):
            # The rivals' estimates are the same with and without the effect, ours are apart.
            runs += whole_block(2 * i, SAME, ours("PASS", low=-0.01), 0.01 * i)
            runs += whole_block(2 * i + 1, "up02", ours("REGRESSED", low=0.01), 0.01 * i)
        assert advantage(runs, "up02") == 1.0
        assert advantage(runs, "up05") is None

    def test_rules_of_the_same_numbers_are_one_curve(self):
        runs = whole_block(0, SAME, ours("PASS"), 0.0) + whole_block(1, "up05", ours("REGRESSED", 0.1), 0.1)
        names = {tool for tool, _ in curves(runs, "up05")}
        assert OURS in names
        assert len(curves(runs, "up05")) < len({(d.tool, d.rule) for d in compared(runs)})

    def test_summary_counts_ours_everywhere_and_others_together(self):
        runs = whole_block(0, SAME, ours("PASS"), 0.2)
        runs.append(run_of(1, OURS, SAME, {"gemm": ours("INCONCLUSIVE")}, condition="phases"))
        rows = {(row["tool"], row["rule"]): row for row in summary(runs)}
        gate = rows[OURS, "gate"]
        assert (gate["rates"][SAME]["n"], gate["rates"][SAME]["hits"]) == (2, 0)
        assert gate["inconclusive"]["phases"]["value"] == 1.0
        assert gate["alarms_by_condition"]["idle"]["n"] == 1
        rival = rows["pytest-benchmark", "mean:5%"]
        assert (rival["rates"][SAME]["n"], rival["rates"][SAME]["hits"]) == (1, 1)
        assert rival["rates"]["up10"]["value"] is None

    def test_self_checks(self):
        runs = [run_of(0, OURS, SAME, {"gemm": ours("PASS"), "memory": ours("PASS")})]
        found = self_checks(runs)
        assert found == {"runs": 1, "order_bias": {"median": 0.01, "largest": 0.01}, "rounds": 4}


def test_an_estimate_without_certainty_is_below_each_threshold():
    runs = [
        run_of(i, tool.name, effect, {"gemm": ours("PASS", value) if tool.name == OURS else unsure})
        for i, (effect, value) in enumerate([(SAME, -math.inf), ("up05", 0.05), ("up05", -math.inf)])
        for tool in TOOLS
        for unsure in [Outcome({"rule": "PASS"}, {"rule": -math.inf}, {"base": {}, "head": {}})]
        if tool.name != "pytest-benchmark"
    ]
    runs += [
        run_of(i, "pytest-benchmark", SAME if i == 0 else "up05", {"gemm": theirs(0.0)}) for i in range(3)
    ]
    points = curves(runs, "up05")[OURS, "gate"]
    assert [(point.false_alarms, point.detected) for point in points] == [(0.0, 0.0), (0.0, 0.5)]
    # Nothing that a threshold could be moved over: it never alarms.
    assert advantage(runs, "up05") == 0.5
