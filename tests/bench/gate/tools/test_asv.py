"""asv in bench.gate: its table."""

import math

import pytest

from bench.gate.repository import BASE
from bench.gate.tools.asv import Asv
from tests.bench.gate.tools.answers import NAMES, write


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
