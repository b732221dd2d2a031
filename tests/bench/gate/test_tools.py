"""What bench.gate hears from the tools, by what they print and write."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gate import command
from bench.gate.repository import BASE, Added, Repository
from bench.gate.tools import TOOLS, missing_tools
from bench.gate.tools.asv import Asv
from bench.gate.tools.codspeed import Codspeed
from bench.gate.tools.pyperf import Pyperf
from bench.gate.tools.pytest_benchmark import PytestBenchmark, failed_rules
from bench.gate.tools.share_rule import judged
from bench.gate.tools.stackwise import Stackwise, first_flag
from bench.gate.tools.tool import ToolFailedError
from bench.marked_tables import ROOT
from stackwise.gate.limit import Limit
from stackwise.gate.result import GateResult, TestResult, TrialResult
from stackwise.gate.verdict import Decision, Verdict

NAMES = ("python", "memory")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    added = {"up10": Added({"python": 20_000})}  # as much again
    return Repository.create(tmp_path_factory.mktemp("gate") / "repository", added, NAMES)


@pytest.fixture
def commands(monkeypatch):
    """What is asked of command lines; what they answer is made by a function of the command."""
    asked = []

    def answer_by(make):
        def run(line, folder, **limits):
            asked.append(line)
            return make(line) or ""

        monkeypatch.setattr(command, "run", run)
        return asked

    return answer_by


def option(line, name):
    [value] = [part.partition("=")[2] for part in line if part.startswith(f"{name}=")]
    return value


def write(path, values):
    Path(path).write_text(json.dumps(values))


class TestPytestBenchmark:
    def numbers(self, factor):
        stats = {"mean": 2.0, "median": 2.0, "min": 1.0, "stddev": 0.1}
        slower = {key: value * factor for key, value in stats.items()} | {"rounds": 9}
        return {
            "benchmarks": [
                {"name": "test_speed[python]", "stats": slower},
                {"name": "test_speed[memory]", "stats": stats | {"rounds": 9}},
            ]
        }

    def test_its_word_counts(self, repository, commands):
        printed = (
            "Performance has regressed:\n"
            "\ttest_speed[python] (0001_base) - Field 'mean' has failed PercentageRegressionCheck: "
            "7.000000000 > 5.000000000\n"
            "\ttest_speed[python] (0001_base) - Field 'min' has failed PercentageRegressionCheck: "
            "7.000000000 > 5.000000000\n"
        )

        def answer(line):
            is_head = "--benchmark-compare-fail" in line
            write(option(line, "--benchmark-json"), self.numbers(1.07 if is_head else 1.0))
            return printed if is_head else ""

        asked = commands(answer)
        found = PytestBenchmark().compare(repository, "up10", NAMES, 3.0, 90.0)
        said = {rule for rule, verdict in found["python"].verdicts.items() if verdict == "REGRESSED"}
        assert said == {"mean:5%", "min:5%"}  # not the median, of which it said nothing
        assert set(found["memory"].verdicts.values()) == {"PASS"}
        assert found["python"].estimates["median:5%"] == pytest.approx(0.07)
        assert found["python"].raw["head"]["rounds"] == 9
        base, head = asked
        assert "--benchmark-max-time=3.0" in base and "--benchmark-max-time=3.0" in head
        assert head[-6:] == list(PytestBenchmark.rules)

    @pytest.mark.slow
    def test_its_own_comparison_says_the_same_of_the_same_numbers(self, repository):
        found = PytestBenchmark().compare(repository, "up10", NAMES, 0.3, 120.0)
        for outcome in found.values():
            assert judged(outcome.raw, PytestBenchmark.rules).verdicts == outcome.verdicts
        assert found["python"].verdicts["min:10%"] == "REGRESSED"

    def test_lines_of_other_calls_are_not_heard(self):
        line = "\ttest_speed[gemm] (x) - Field 'mean' has failed PercentageRegressionCheck: 6.1 > 5.000000000"
        assert failed_rules("gemm", line) == {("mean", 5.0)}
        assert failed_rules("memory", line) == set()

    def test_no_numbers(self, repository, commands):
        def answer(line):
            if "--benchmark-compare-fail" not in line:
                write(option(line, "--benchmark-json"), self.numbers(1.0))
            return "it crashed"

        commands(answer)
        with pytest.raises(ToolFailedError, match="it crashed"):
            PytestBenchmark().compare(repository, "up10", NAMES, 3.0, 90.0)


def test_threshold_of_a_rule():
    raw = {"base": {"mean": 100.0, "min": 90.0}, "head": {"mean": 106.0, "min": 90.0}}
    found = judged(raw, ("mean:5%", "mean:10%", "min:5%"))
    assert found.verdicts == {"mean:5%": "REGRESSED", "mean:10%": "PASS", "min:5%": "PASS"}
    assert found.estimates == pytest.approx({"mean:5%": 0.06, "mean:10%": 0.06, "min:5%": 0.0})


def test_codspeed(repository, commands):
    def answer(line):
        folder = repository.tree(BASE if not asked[1:] else "up10") / ".codspeed"
        folder.mkdir()
        slower = 1.12 if asked[1:] else 1.0
        names = [f"bench/test_speed.py::test_speed[{name}]" for name in NAMES]
        stats = {"min_ns": 1e6 * slower, "mean_ns": 2e6}
        write(folder / "results_1.json", {"benchmarks": [{"name": name, "stats": stats} for name in names]})

    asked = commands(answer)
    found = Codspeed().compare(repository, "up10", NAMES, 1.5, 90.0)
    assert found["memory"].verdicts == {
        "min:10%": "REGRESSED",
        "min:5%": "REGRESSED",
        "mean:10%": "PASS",
        "mean:5%": "PASS",
    }
    assert found["memory"].raw["head"]["min"] == pytest.approx(1.12e-3)
    assert option(asked[0], "--codspeed-max-time") == "1.5"
    assert option(asked[0], "--codspeed-warmup-time") == "0.5"


class TestPyperf:
    def answer(self, significant):
        def answer(line):
            if "compare_to" in line:
                said = [
                    "Significant (t=-6.99)" if name in significant else "Not significant!" for name in NAMES
                ]
                blocks = [
                    f"{name}\n{'=' * len(name)}\n\nMean +- std dev: ...\n{text}\n"
                    for name, text in zip(NAMES, said, strict=True)
                ]
                return "\n".join(blocks)
            value = 1.2 if "head" in option(line, "--output") else 1.0
            runs = [{"metadata": {}}, {"values": [value, value]}, {"values": [value]}]
            named = [{"metadata": {"name": name}, "runs": runs} for name in NAMES]
            write(option(line, "--output"), {"benchmarks": named})
            return ""

        return answer

    def test_it_has_to_be_significant(self, repository, commands):
        commands(self.answer({"python"}))
        found = Pyperf().compare(repository, "up10", NAMES, 2.0, 90.0)
        assert found["python"].verdicts == {"significant": "REGRESSED", "significant, 5%": "REGRESSED"}
        assert found["memory"].verdicts == {"significant": "PASS", "significant, 5%": "PASS"}
        assert found["memory"].estimates["significant"] == -math.inf
        assert found["python"].raw["values"] == {BASE: 3, "head": 3}

    @pytest.mark.parametrize(
        ("effort", "processes", "values"), [(2.0, "2", "5"), (2.5, "2", "6"), (7.9, "7", "6")]
    )
    def test_effort_is_processes_first(self, repository, commands, effort, processes, values):
        asked = commands(self.answer(set()))
        Pyperf().compare(repository, "up10", NAMES, effort, 90.0)
        assert option(asked[0], "--processes") == processes
        assert option(asked[0], "--values") == values

    def test_nothing_said(self, repository, commands):
        plain = self.answer(set())
        commands(lambda line: "no such thing" if "compare_to" in line else plain(line))
        with pytest.raises(ToolFailedError, match="pyperf says nothing of python: no such thing"):
            Pyperf().compare(repository, "up10", NAMES, 2.0, 90.0)


class TestAsv:
    TABLE = (
        "| Change   | Before [51bb3c65] <base> | After [b3242bac] <up10> | Ratio   | Benchmark |\n"
        "|----------|--------------------------|-------------------------|---------|-----------|\n"
    )

    def answer(self, repository, at_its_factor, sure):
        def row(mark, name):
            return f"| {mark:8} | 4.11±0.8ms | 7.87±2ms | 1.92 | speed.Speed.time_call('{name}') |\n"

        def answer(line):
            if line[:2] == ["git", "rev-parse"]:
                return {BASE: "a" * 40, "up10": "b" * 40}[line[2]]
            if "continuous" in line:
                folder = repository.folder / "asv" / "results" / "machine"
                folder.mkdir(parents=True)
                for commit, result in (("a", [1.0, 1.0]), ("b", [1.08, 1.2])):
                    record = {
                        "result_columns": ["result", "params", "version", "samples"],
                        "results": {
                            "speed.Speed.time_call": [
                                result,
                                [["'python'", "'memory'"]],
                                "1",
                                [[1.0, 1.0], [1.0]],
                            ]
                        },
                    }
                    write(folder / f"{commit * 8}-virtualenv.json", record)
                return self.TABLE + "".join(row(mark, name) for name, mark in at_its_factor.items())
            if "compare" in line:
                return self.TABLE + "".join(row(mark, name) for name, mark in sure.items())
            return ""

        return answer

    def test_it_has_to_be_sure(self, repository, commands):
        asked = commands(self.answer(repository, {"memory": "+"}, {"python": "+", "memory": "+"}))
        found = Asv().compare(repository, "up10", NAMES, 0.5, 90.0)
        assert found["python"].verdicts == {"factor 1.1": "PASS", "factor 1.05": "REGRESSED"}
        assert found["memory"].verdicts == {"factor 1.1": "REGRESSED", "factor 1.05": "REGRESSED"}
        assert found["python"].estimates["factor 1.1"] == pytest.approx(0.08)
        assert found["python"].raw[BASE] == {"median": 1.0, "samples": 2}
        assert any("repeat=(2,100000,0.500)" in line for line in asked)

    def test_a_difference_that_may_be_none_is_below_each_threshold(self, repository, commands):
        commands(self.answer(repository, {}, {"python": "", "memory": "-"}))
        found = Asv().compare(repository, "up10", NAMES, 0.5, 90.0)
        assert found["python"].estimates["factor 1.05"] == -math.inf
        assert set(found["python"].verdicts.values()) == {"PASS"}


class TestStackwise:
    def decision(self, verdict, estimate, confirmed=False):
        return Decision(verdict, estimate, estimate - 0.01, estimate + 0.01, 0.98, 4, confirmed, "so it is")

    def result(self, **decisions):
        tests = [
            TestResult(
                f"bench/test_speed.py::test_speed[{name}]",
                trials={
                    "time": TrialResult(decision, "s", 0.02, 0.01, differences, (1.0,) * 4, (1.0,) * 4),
                },
                seconds=3.0,
            )
            for name, (decision, differences) in decisions.items()
        ]
        return GateResult("base", "head", tuple(tests), 20.0, 4, order_bias=0.01, balance=0.5)

    def compare(self, repository, commands, result):
        def answer(line):
            write(option(line, "--stackwise-gate-report"), result.to_dict())

        asked = commands(answer)
        return Stackwise().compare(repository, "up10", NAMES, 1.0, 90.0), asked

    def test_verdicts_and_what_they_were_made_of(self, repository, commands):
        quiet, rising = (0.0001, -0.0002, 0.0001, 0.0), (0.05, 0.051, 0.049, 0.05)
        result = self.result(
            python=(self.decision(Verdict.REGRESSED, 0.05, confirmed=True), rising * 2),
            memory=(self.decision(Verdict.PASS, 0.0), quiet),
        )
        found, [line] = self.compare(repository, commands, result)
        assert found["python"].verdicts == {"gate": "REGRESSED", "flagged": "REGRESSED"}
        assert found["memory"].verdicts == {"gate": "PASS", "flagged": "PASS"}
        assert found["python"].estimates == pytest.approx({"gate": 0.04, "flagged": 0.05})
        assert found["memory"].raw["balance"] == 0.5
        assert found["memory"].raw["seconds"] == 20.0
        assert option(line, "--stackwise-against") == BASE
        assert option(line, "--stackwise-gate-seconds") == "90.0"

    def test_a_flag_that_was_not_confirmed(self, repository, commands):
        first, second = (0.05, 0.051, 0.049, 0.05), (0.0, 0.0001, -0.0001, 0.0)
        result = self.result(
            python=(self.decision(Verdict.PASS, 0.0, confirmed=False), (*first, *second)),
            memory=(self.decision(Verdict.PASS, 0.0), second),
        )
        found, _ = self.compare(repository, commands, result)
        assert found["python"].verdicts == {"gate": "PASS", "flagged": "REGRESSED"}

    def test_a_test_that_was_not_measured(self, repository, commands):
        tests = [
            TestResult(f"test_speed[{name}]", "crashed on head", detail="no more memory") for name in NAMES
        ]
        with pytest.raises(ToolFailedError, match="crashed on head: no more memory"):
            self.compare(repository, commands, GateResult("base", "head", tuple(tests)))

    def test_a_call_that_no_time_was_left_for(self, repository, commands):
        measured = self.result(python=(self.decision(Verdict.PASS, 0.0), (0.0, 0.0001, -0.0001, 0.0)))
        left = TestResult("bench/test_speed.py::test_speed[memory]", "not begun", detail="too late")
        found, _ = self.compare(repository, commands, replace(measured, tests=(*measured.tests, left)))
        assert found["python"].verdicts["gate"] == "PASS"
        assert found["memory"].verdicts == {"gate": "INCONCLUSIVE", "flagged": "INCONCLUSIVE"}
        assert found["memory"].estimates == {"gate": -math.inf, "flagged": -math.inf}
        assert found["memory"].raw["balance"] == 0.5

    def test_no_report(self, repository, commands):
        commands(lambda line: "usage error")
        with pytest.raises(ToolFailedError, match="usage error"):
            Stackwise().compare(repository, "up10", NAMES, 1.0, 90.0)

    @pytest.mark.slow
    def test_by_its_command_line(self, repository):
        found = Stackwise().compare(repository, "up10", NAMES, 1.0, 120.0)
        assert found["python"].raw["rounds"] >= 4
        assert found["python"].raw["estimate"] > 0.2
        assert abs(found["memory"].raw["balance"] - 0.5) < 0.02


def test_first_flag_is_of_what_is_slower():
    slower, faster, same = (
        [0.05, 0.051, 0.049, 0.05],
        [-0.05, -0.051, -0.049, -0.05],
        [0.0, 0.001, -0.001, 0.0],
    )
    assert first_flag(slower, Limit(), 1)
    assert not first_flag(faster, Limit(), 1)
    assert not first_flag(same, Limit(), 1)
    assert not first_flag(slower[:2], Limit(), 1)


def test_tools_by_their_names():
    assert len({tool.name for tool in TOOLS}) == len(TOOLS)
    assert "stackwise" not in missing_tools()


def test_pins_are_of_the_tools():
    pins = (ROOT / "bench" / "gate" / "rivals.txt").read_text().lower()
    for tool in TOOLS[2:]:
        for package in tool.packages:
            assert f"\n{package}==" in pins
