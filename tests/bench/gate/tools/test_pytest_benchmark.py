"""pytest-benchmark in bench.gate: its files, its rules, and its failures."""

import pytest

from bench.gate.tools.pytest_benchmark import PytestBenchmark, failed_rules
from bench.gate.tools.share_rule import judged
from bench.gate.tools.tool import ToolFailedError
from tests.bench.gate.tools.answers import NAMES, option, write


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
