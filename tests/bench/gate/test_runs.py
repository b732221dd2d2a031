"""Runs on file, and the decisions in them."""

import math

from bench.gate.runs import Run, RunLog, decisions
from bench.gate.tools.tool import Outcome


def a_run(block, tool="asv", error=None, **outcomes):
    return Run(block, tool, "idle", "up05", 12.0, 1.5, "2026-01-01", "abc", outcomes, error)


SURE = Outcome({"a": "REGRESSED", "b": "PASS"}, {"a": 0.1, "b": -math.inf}, {"base": [1.0, 2.0]})


def test_what_is_written_is_read(tmp_path):
    log = RunLog(tmp_path / "folder" / "runs.jsonl")
    runs = [a_run(0, gemm=SURE, memory=SURE), a_run(1, error="it crashed\nat once")]
    assert log.read() == []
    for run in runs:
        log.append(run)
    assert log.read() == runs
    assert "Infinity" not in log.path.read_text()


def test_a_line_that_was_cut_off_is_not_read_and_spoils_no_other(tmp_path):
    log = RunLog(tmp_path / "runs.jsonl")
    log.append(a_run(0, gemm=SURE))
    whole = log.path.read_text()
    log.path.write_text(whole + whole[: len(whole) // 2])
    assert [run.block for run in log.read()] == [0]
    log.append(a_run(1, gemm=SURE))
    assert [run.block for run in log.read()] == [0, 1]


def test_of_two_of_one_block_the_later_counts(tmp_path):
    log = RunLog(tmp_path / "runs.jsonl")
    log.append(a_run(0, error="it crashed"))
    log.append(a_run(0, gemm=SURE))
    log.append(a_run(0, "pyperf", gemm=SURE))
    assert [(run.tool, run.error) for run in log.read()] == [("asv", None), ("pyperf", None)]


def test_decisions_are_of_each_call_and_rule():
    found = list(decisions([a_run(3, gemm=SURE, memory=SURE), a_run(4, error="it crashed")]))
    assert len(found) == 4
    first = found[0]
    assert (first.block, first.tool, first.condition, first.effect) == (3, "asv", "idle", "up05")
    assert (first.workload, first.rule, first.verdict, first.estimate) == ("gemm", "a", "REGRESSED", 0.1)
    assert first.seconds == 6.0
    assert [each.alarmed for each in found] == [True, False, True, False]
    assert first.raw == {"base": [1.0, 2.0]}
