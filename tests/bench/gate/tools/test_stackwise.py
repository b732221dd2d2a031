"""The gate in its own bench: by its functions and by its command line."""

import math
from dataclasses import replace

import pytest

from bench.gate.repository import BASE
from bench.gate.tools.stackwise import Stackwise, first_flag
from bench.gate.tools.tool import ToolFailedError
from stackwise.gate.limit import Limit
from stackwise.gate.result import GateResult, TestResult, TrialResult
from stackwise.gate.verdict import Decision, Verdict
from tests.bench.gate.tools.answers import NAMES, option, write


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
