"""What bench.gate does in which order, and what it makes of what the tools said."""

import contextlib
import itertools
import math
from collections import Counter

import pytest
import torch

from bench import claim as claim_module
from bench.claim import Claim
from bench.gate import __main__ as command
from bench.gate.__main__ import main
from bench.gate.ablation import DESIGNS
from bench.gate.effects import EFFECTS, SAME, Effect, branches, worst_deviation
from bench.gate.findings import advantage, bars, compared, curves, least_share, self_checks, summary, together
from bench.gate.noise import CONDITIONS
from bench.gate.plan import Plan, blocks, fair_seconds, next_effort, tools_of
from bench.gate.runs import Run, RunLog
from bench.gate.tools import OURS, TOOLS
from bench.gate.tools.share_rule import judged
from bench.gate.tools.stackwise import Stackwise
from bench.gate.tools.tool import Outcome, ToolFailedError

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
        first, again = (list(itertools.islice(blocks(plan), 54)) for _ in range(2))
        assert first == again
        order = [[(b.condition, b.effect) for b in part] for part in (first[:27], first[27:])]
        assert order[0] != order[1]

    def test_rivals_come_in_every_nth_and_the_order_is_by_chance(self):
        plan = Plan()
        made = list(itertools.islice(blocks(plan), 40))
        names = [[tool.name for tool in tools_of(block, TOOLS, 4)] for block in made]
        assert all(each == [OURS] for number, each in enumerate(names) if number % 4)
        full = [each for number, each in enumerate(names) if number % 4 == 0]
        assert all(sorted(each) == sorted(tool.name for tool in TOOLS) for each in full)
        assert len({each.index(OURS) for each in full}) > 1


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


class TestEffects:
    def test_branches_add_what_was_calibrated(self):
        def of(branch, effect):
            return {
                "iterations": 0 if effect.sleeps else round(1000 * effect.share),
                "sleep_seconds": 0.01 if effect.sleeps else 0.0,
                "change": effect.share,
            }

        found = {"gemm": {"effects": {branch: of(branch, effect) for branch, effect in EFFECTS.items()}}}
        made = branches(found)
        assert made["up02"].iterations == {"gemm": 20}
        assert made["up02"].sleep_seconds == {}
        assert made["wait"].sleep_seconds == {"gemm": 0.01}
        assert made[SAME].iterations == {"gemm": 0}
        assert worst_deviation(found) == 0.0
        found["gemm"]["effects"]["up05"]["change"] = 0.06
        assert worst_deviation(found) == pytest.approx(0.2)

    def test_names(self):
        assert [str(effect) for effect in EFFECTS.values()] == [
            "A/A",
            "1%",
            "2%",
            "5%",
            "10%",
            "5% of sleep",
        ]
        assert str(Effect(0.02)) == "2%"


class TestMain:
    """With tools that answer at once."""

    @pytest.fixture
    def tools(self, monkeypatch, tmp_path):
        asked = []

        class Made:
            packages, effort, least_effort = (), 1.0, 0.1

            def __init__(self, name):
                self.name = name

            def prepare(self, repository):
                asked.append(("prepare", self.name))

            def compare(self, repository, head, names, effort, seconds):
                asked.append((self.name, head))
                assert repository.tree(head).is_dir()
                if self.name == "pyperf" and head == "up10":
                    raise ToolFailedError("it crashed")
                if self.name == OURS:
                    return {name: ours("PASS" if head == SAME else "REGRESSED", 0.1) for name in names}
                return {name: theirs(0.0) for name in names}

        made = tuple(Made(tool.name) for tool in TOOLS)
        effects = {
            branch: {"iterations": 0, "sleep_seconds": 0.0, "change": effect.share}
            for branch, effect in EFFECTS.items()
        }
        monkeypatch.setattr(claim_module, "RESULTS", tmp_path / "results")
        monkeypatch.setattr(command, "TOOLS", made)
        monkeypatch.setattr(command, "missing_tools", list)
        monkeypatch.setattr(command, "calibrate", lambda name, seconds: {"effects": effects})
        monkeypatch.setattr(command, "QUICK", Plan(("idle",), ("up10",), 1, ("python",), 8.0, 0.5))
        threads = torch.get_num_threads()
        yield asked
        torch.set_num_threads(threads)

    def test_quick_is_resumed_where_it_was(self, tools, tmp_path, capsys):
        folder = ["--folder", str(tmp_path / "repository")]
        assert main(["--quick", "--blocks", "1", *folder]) == 1  # too few decisions for the first bar
        first = [each for each in tools if each[0] != "prepare"]
        assert sorted(name for name, _ in first) == sorted(tool.name for tool in TOOLS)
        tools.clear()
        main(["--quick", "--resume", "--blocks", "1", *folder])
        second = [each for each in tools if each[0] != "prepare"]
        assert len(second) == len(TOOLS)
        assert {head for _, head in first} | {head for _, head in second} == {SAME, "up10"}
        claim = Claim("gate", quick=True)
        claim.resume()
        assert {bar.name: bar for bar in claim.bars}["found, 10%"].value == 1.0
        [log] = (tmp_path / "results").rglob("gate-quick-runs.jsonl")
        assert len(log.read_text().splitlines()) == 2 * len(TOOLS)
        assert "it crashed" in log.read_text()
        assert "pyperf" in capsys.readouterr().out

    def test_runs_on_file_are_not_thrown_away(self, tools, tmp_path, capsys):
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--blocks", "1", *folder])
        with pytest.raises(SystemExit):
            main(["--blocks", "1", *folder])
        assert "--resume" in capsys.readouterr().err

    def test_no_block_begins_that_would_end_too_late(self, tools, tmp_path):
        main(["--quick", "--minutes", "0.01", "--folder", str(tmp_path / "repository")])
        assert [each for each in tools if each[0] != "prepare"] == []

    def test_ablations_go_on_where_they_were(self, tools, tmp_path, monkeypatch):
        made = []

        def series(repository, names, condition, number):
            made.append((condition, number))
            return {design: {"python": [0.0, 0.001] * 5} for design in DESIGNS}

        monkeypatch.setattr(command, "series", series)
        folder = ["--folder", str(tmp_path / "repository")]
        assert main(["--quick", "--resume", "--ablations", "1", *folder]) == 0
        assert main(["--quick", "--resume", "--ablations", "2", *folder]) == 0
        assert made == [("idle", 0), ("idle", 1)]
        claim = Claim("gate", quick=True)
        claim.resume()
        found = claim.figures["ablations"]["idle"]
        assert found["series"] == 2
        assert set(found["designs"]) == set(DESIGNS)
        assert len(found["designs"]["in turns"]["differences"]["python"]) == 20
        assert found["designs"]["in turns"]["calls"]["python"]["rounds"] == 20

    def test_instructions_of_each_call(self, tools, tmp_path, monkeypatch):
        asked = []

        def count(name, iterations):
            asked.append((name, iterations))
            return {"call": 1000.0, "added": 100.0, "share": 0.1}

        monkeypatch.setattr(command, "count_instructions", count)
        arguments = ["--quick", "--count-instructions", "--folder", str(tmp_path / "repository")]
        assert main(arguments) == 0
        assert asked == [("python", 0)]
        monkeypatch.setattr(command, "count_instructions", lambda name, iterations: None)
        assert main(arguments) == 1

    def test_own_history_has_to_regress(self, tools, monkeypatch):
        monkeypatch.setattr(command, "compare_own_history", lambda: {"verdict": "REGRESSED"})
        assert main(["--quick", "--own-history"]) == 0
        claim = Claim("gate", quick=True)
        claim.resume()
        [bar] = claim.bars
        assert bar.verdict == "PASS"
        assert bars([], claim.figures)[-1] == bar
        monkeypatch.setattr(command, "compare_own_history", lambda: {"verdict": "INCONCLUSIVE"})
        assert main(["--quick", "--own-history"]) == 1

    def test_another_machine_is_refused(self, tools, tmp_path, monkeypatch):
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--quick", "--blocks", "1", *folder])
        monkeypatch.setattr(command, "fingerprint", lambda: {"cpu": "another"})
        with pytest.raises(RuntimeError, match="of another machine"):
            main(["--quick", "--resume", *folder])

    def test_another_plan_is_refused(self, tools, tmp_path, monkeypatch):
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--quick", "--blocks", "2", *folder])
        monkeypatch.setattr(command, "QUICK", Plan(("idle",), ("up05",), 1, ("python",), 8.0, 0.5))
        with pytest.raises(RuntimeError, match="runs of another plan"):
            main(["--quick", "--resume", *folder])

    def test_only_some_conditions_and_the_others_later(self, tools, tmp_path, monkeypatch):
        monkeypatch.setattr(command, "QUICK", Plan(("idle", "phases"), ("up10",), 1, ("python",), 8.0, 0.5))
        monkeypatch.setattr(command, "noise", lambda condition, seed: contextlib.nullcontext())
        folder = ["--folder", str(tmp_path / "repository")]
        main(["--quick", "--conditions", "phases", "--blocks", "2", *folder])
        [path] = (tmp_path / "results").rglob("gate-quick-runs.jsonl")
        assert {run.condition for run in RunLog(path).read()} == {"phases"}
        main(["--quick", "--resume", "--blocks", "2", *folder])
        runs = RunLog(path).read()
        assert {run.block for run in runs} == {0, 1, 2, 3}
        assert {(run.condition, run.effect) for run in runs} == {
            (condition, effect) for condition in ("idle", "phases") for effect in (SAME, "up10")
        }

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--conditions", "idle,storm"], "got storm; allowed: idle, bursts, phases"),
            (["--seconds", "0"], "got 0.0; allowed: a number > 0"),
            (["--rivals-every", "0"], "got 0; allowed: an integer >= 1"),
        ],
        ids=["conditions", "seconds", "rivals"],
    )
    def test_arguments_are_checked(self, tools, arguments, told, capsys):
        with pytest.raises(SystemExit):
            main(arguments)
        assert told in capsys.readouterr().err

    def test_what_is_not_installed_is_told(self, tools, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(command, "missing_tools", lambda: ["asv"])
        with pytest.raises(SystemExit):
            main(["--quick", "--folder", str(tmp_path / "repository")])
        assert "make gate-rivals" in capsys.readouterr().err


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
