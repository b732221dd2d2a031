"""pyperf in bench.gate: its files and its comparison."""

import math

import pytest

from bench.gate.repository import BASE
from bench.gate.tools.pyperf import Pyperf
from bench.gate.tools.tool import ToolFailedError
from tests.bench.gate.tools.answers import NAMES, option, write


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
