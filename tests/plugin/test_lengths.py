"""`length_sweep` and `first_unstable_length` as fixtures: arguments, messages, and rows of the report."""

import pytest

MODELS = """
import math, models
from stackwise import ModelSpec

class BreaksFrom(models.Plain):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, ids):
        out = super().forward(ids)
        return out * math.nan if ids.shape[1] >= self.first and self.training else out

def broken():
    return BreaksFrom(12)

BROKEN = ModelSpec.of(broken, causal=True)
SOUND = ModelSpec.of(models.plain, causal=True)
"""


@pytest.fixture(autouse=True)
def _lengths(pytester):
    pytester.makepyfile(lengths=MODELS)


def test_sweep_takes_tokens_and_seeds(pytester, run, report):
    pytester.makepyfile(
        """
        import pytest
        from lengths import SOUND
        @pytest.mark.seq_lengths(4, 8)
        def test_it(length_sweep):
            sweep = length_sweep(SOUND, tokens_per_step=16, seeds=3, steps=3)
            assert sweep.first_unstable is None
            assert sweep.problems == []
            assert [point.batch_size for point in sweep.points] == [4, 2]
            assert [len(point.runs) for point in sweep.points] == [3, 3]
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    rows = report()["stability"]
    assert [(row["model"], row["seq_len"], row["verdict"]) for row in rows] == [
        ("plain", 4, "stable"),
        ("plain", 8, "stable"),
    ]
    assert [len(row["length"]["seeds"]) for row in rows] == [3, 3]
    assert all({"gradient_median", "step_seconds", "peak_bytes"} <= row["length"].keys() for row in rows)
    assert report()["verdict"] == "PASS"


def test_seed_and_device_of_the_options(pytester, run, driven):
    pytester.makepyfile(
        """
        from lengths import SOUND
        def test_it(length_sweep, first_unstable_length):
            assert [r.seed for r in length_sweep(SOUND, [4], seeds=[1, 2], steps=1).points[0].runs] == [1, 2]
            assert length_sweep(SOUND, [4], steps=1).points[0].runs[0].seed == 7
            found = first_unstable_length(SOUND, 4, 5, seeds=1, steps=1)
            assert [r.seed for r in found.point(4).runs] == [7]
        """
    )
    run("--stackwise-seed=7").assert_outcomes(passed=1)
    assert {seed for _, seed in driven} == {1, 2, 7}


def test_failure_names_the_first_unstable_length(pytester, run, report):
    pytester.makepyfile(
        """
        import pytest
        from lengths import BROKEN
        @pytest.mark.seq_lengths(4, 8, 16, 32)
        def test_sweep(length_sweep):
            assert length_sweep(BROKEN, steps=2).first_unstable is None
        def test_search(first_unstable_length):
            assert first_unstable_length(BROKEN, 4, 32, seeds=1, steps=1).first is None
        """
    )
    result = run("--stackwise-report=out.json")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*assert 16 is None",
            "E*where 16 = <LengthSweep of broken: T=4 stable, T=8 stable, T=16 unstable, T=32 unstable>*",
            "E*assert 12 is None",
            "E*where 12 = <FirstUnstable of broken: unstable from 12 on (*",
        ]
    )
    searched = [row for row in report()["stability"] if row["test"].endswith("test_search")]
    assert [row["seq_len"] for row in searched] == [4, 11, 12, 14, 18, 32]
    assert [row["verdict"] for row in searched] == ["stable"] * 2 + ["unstable"] * 4


def test_memory_that_ends_is_a_row_of_the_report(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest, torch
        from stackwise import ModelSpec

        class Full(models.Plain):
            def forward(self, ids):
                if ids.shape[1] > 8:
                    raise torch.OutOfMemoryError("no room")
                return super().forward(ids)

        @pytest.mark.seq_lengths(8, 16, 32)
        def test_it(length_sweep):
            sweep = length_sweep(ModelSpec.of(Full, causal=True, seq_len=4), steps=8)
            assert sweep.problems == ["T=16: out of memory", "T=32: not run"]
            assert sweep.notes == []
        """
    )
    result = run("--stackwise-report=out.json")
    result.assert_outcomes(passed=1)
    assert [row["verdict"] for row in report()["stability"]] == ["stable", "out of memory", "not run"]
    assert report()["verdict"] == "WARN"
    result.stdout.fnmatch_lines(["*out of memory Full*", "*not run*Full*"])
