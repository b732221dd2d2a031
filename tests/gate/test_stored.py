"""Stored baselines: verdicts over saved runs of pytest-benchmark, wide where nothing is known, and honest."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from stackwise.gate.limit import Limit, Limits
from stackwise.gate.report import markdown
from stackwise.gate.result import GateResult
from stackwise.gate.sequential import Rule
from stackwise.gate.stored import compare_stored
from stackwise.gate.verdict import Verdict

MACHINE = {
    "machine": "x86_64",
    "system": "Linux",
    "python_implementation": "CPython",
    "python_version": "3.11.7",
    "cpu": {"brand_raw": "Some CPU", "count": 2, "arch": "X86_64", "hz_actual_friendly": "2.6 GHz"},
}
TEST = "bench/test_a.py::test_step"


@pytest.fixture
def save(tmp_path):
    """A file of a run: seconds by test, or the whole of `stats` and `extra_info`."""

    def make(name, tests, machine=MACHINE, options=None):
        benchmarks = [
            {
                "fullname": test,
                "stats": {"min": found} if isinstance(found, float) else found[0],
                "extra_info": {} if isinstance(found, float) else found[1],
                "options": options or {"timer": "perf_counter", "disable_gc": False},
            }
            for test, found in tests.items()
        ]
        content = {"machine_info": machine, "commit_info": {"id": name}, "benchmarks": benchmarks}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        return path

    return make


@pytest.fixture
def saved(save):
    """Ten runs that differ by 1 %."""
    seconds = np.exp(np.random.default_rng(3).normal(math.log(0.01), 0.01, 10)).tolist()
    return [save(f"old{number}", {TEST: each}) for number, each in enumerate(seconds)], seconds


def decision(result, metric="time"):
    [test] = result.tests
    return test.trials[metric].decision


def test_a_file_of_pytest_benchmark_itself(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # it saves nothing in a worker
    pytester.makepyfile("def test_sum(benchmark): benchmark(sum, range(100))")
    pytester.runpytest("--benchmark-json=run.json", "--benchmark-max-time=0.01", "-p", "no:xdist")
    path = pytester.path / "run.json"
    result = compare_stored(path, path)
    [test] = result.tests
    content = json.loads(path.read_text())["benchmarks"][0]
    assert test.nodeid == content["fullname"] and test.trials["time"].base == (content["stats"]["min"],)
    assert decision(result).verdict is Verdict.INCONCLUSIVE
    assert GateResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_of_one_saved_run_only_a_large_change_is_told(save):
    base = save("base", {TEST: 0.010})
    found = {
        change: decision(compare_stored(base, save("new", {TEST: 0.010 * (1 + change)})))
        for change in (0.0, 0.05, 0.15, 0.5, -0.5)
    }
    verdicts = [each.verdict.value for each in found.values()]
    assert verdicts == ["INCONCLUSIVE"] * 3 + ["REGRESSED", "IMPROVED"]
    assert "that runs differ by 4.0% is assumed, as 1 saved runs do not say it" in found[0.05].reason
    # Student's t with 4 degrees of freedom and a standard deviation of 4 % on either side.
    half = stats.t.ppf(0.99, 4) * 0.04 * math.sqrt(2)
    assert found[0.05].high == pytest.approx(1.05 * math.exp(half) - 1)
    assert found[0.05].low == pytest.approx(1.05 * math.exp(-half) - 1)


def test_of_several_the_spread_is_their_own(save, saved):
    paths, seconds = saved
    new = save("new", {TEST: 0.0112})
    found = compare_stored(paths, new)
    logs = np.log(seconds)
    low, high = stats.t.interval(
        0.98, 9, loc=math.log(0.0112) - logs.mean(), scale=logs.std(ddof=1) * math.sqrt(1.1)
    )
    assert (decision(found).low, decision(found).high) == pytest.approx((math.expm1(low), math.expm1(high)))
    assert decision(found).verdict is Verdict.REGRESSED and not decision(found).confirmed
    assert "10 saved runs differ by" in decision(found).reason
    assert "base was not measured beside head" in found.notes[0]
    assert found.exit_code == 1


def test_several_new_runs_make_the_interval_narrower(save, saved):
    one = decision(compare_stored(saved[0], save("new", {TEST: 0.0102})))
    news = [save(f"new{number}", {TEST: 0.0102 * (1 + 0.01 * math.sin(number))}) for number in range(6)]
    several = decision(compare_stored(saved[0], news))
    assert several.high - several.low < 0.7 * (one.high - one.low)
    assert several.rounds == 6


def test_runs_that_repeat_themselves_are_not_believed_to_the_end(save):
    paths = [save(f"old{number}", {TEST: 0.01}) for number in range(5)]
    found = decision(compare_stored(paths, save("new", {TEST: 0.01 * 1.001})))
    half = stats.t.ppf(0.99, 4) * 0.005 * math.sqrt(1.2)
    assert found.high == pytest.approx(1.001 * math.exp(half) - 1)


def test_many_tests_are_corrected_together(save):
    tests = {f"test_{number}": 0.01 for number in range(100)}
    widths = {}
    for some in (dict(list(tests.items())[:1]), tests):
        result = compare_stored(save("old", some), save("new", some))
        first = result.tests[0].trials["time"].decision
        widths[len(some)] = -math.log1p(first.low)
    wanted = stats.t.ppf(1 - 0.01 / 100, 4) / stats.t.ppf(0.99, 4)
    assert widths[100] / widths[1] == pytest.approx(wanted)


def test_runs_of_another_machine_are_not_compared(save):
    other = MACHINE | {"cpu": MACHINE["cpu"] | {"brand_raw": "Another CPU"}}
    mine, theirs = save("mine", {TEST: 0.01}), save("theirs", {TEST: 0.001}, machine=other)
    found = compare_stored(theirs, mine)
    assert decision(found).verdict is Verdict.INCONCLUSIVE
    assert "no saved run is of this machine" in decision(found).reason
    assert found.notes[1] == ("theirs.json is of another machine: cpu brand_raw Another CPU and not Some CPU")
    both = compare_stored([mine, theirs], save("new", {TEST: 0.01}))
    [test] = both.tests
    assert test.trials["time"].base == (0.01,) and len(both.notes) == 2
    with pytest.raises(ValueError, match=r"current: got 'theirs.json'; allowed: runs of one machine"):
        compare_stored(mine, [mine, theirs])


def test_the_clock_of_the_moment_is_no_other_machine(save):
    faster = MACHINE | {"cpu": MACHINE["cpu"] | {"hz_actual_friendly": "3.1 GHz"}, "node": "runner-7"}
    found = compare_stored(save("old", {TEST: 0.01}), save("new", {TEST: 0.02}, machine=faster))
    assert decision(found).verdict is Verdict.REGRESSED


def test_the_fingerprint_of_this_plugin_counts(save, tmp_path):
    def with_torch(version):
        return MACHINE | {"stackwise": {"cpu": "Some CPU", "torch": version}}

    old = save("old", {TEST: 0.01}, machine=with_torch("2.12.0"))
    found = compare_stored(old, save("new", {TEST: 0.02}, machine=with_torch("2.13.0")))
    assert decision(found).verdict is Verdict.INCONCLUSIVE
    assert "torch 2.12.0 and not 2.13.0" in found.notes[1]


def test_another_timer_is_not_compared(save):
    old = save("old", {TEST: 0.01}, options={"timer": "process_time", "disable_gc": False})
    found = decision(compare_stored(old, save("new", {TEST: 0.05})))
    assert found.verdict is Verdict.INCONCLUSIVE and "process_time" in found.reason


def test_memory_is_judged_where_both_have_it(save):
    def peak(n_bytes):
        return {TEST: ({"min": 0.01}, {"peak_memory_bytes": n_bytes})}

    old = save("old", peak(10**8))
    for n_bytes, verdict in ((10**8, Verdict.PASS), (11 * 10**7, Verdict.REGRESSED)):
        result = compare_stored(old, save("new", peak(n_bytes)))
        assert decision(result, "memory").verdict is verdict
        assert result.tests[0].trials["memory"].unit == "B"
    [test] = compare_stored(save("older", {TEST: 0.01}), save("new", peak(10**8))).tests
    assert list(test.trials) == ["time"]


def test_a_lost_metric_is_told(save):
    old = save("old", {TEST: ({"min": 0.01}, {"peak_memory_bytes": 10**8})})
    result = compare_stored(old, save("new", {TEST: 0.01}))
    assert decision(result, "memory").verdict is Verdict.INCONCLUSIVE
    assert decision(result, "memory").reason == "saved runs have a memory of it, and the new ones have none"
    assert result.outcome == "inconclusive"
    assert "the new ones have none" in markdown(result)


def test_tests_that_one_side_does_not_have(save):
    result = compare_stored(save("old", {"gone": 1.0}), save("new", {"here": 1.0}), missing="warn")
    assert {test.nodeid: test.status for test in result.tests} == {
        "here": "missing on base",
        "gone": "missing on head",
    }
    assert result.outcome == "inconclusive"  # nothing was compared


def test_limits_are_those_of_the_test(save):
    both = {"a": 0.01, "b": 0.01}
    paths = [save(f"old{number}", both) for number in range(6)]
    limits = {"a": Limits(time=Limit(0.5)), "b": Limits(time=None)}
    a, b = compare_stored(paths, save("new", {"a": 0.012, "b": 0.012}), limits).tests
    assert a.trials["time"].decision.verdict is Verdict.PASS
    assert (b.status, b.trials) == ("skipped", {})


@pytest.mark.parametrize(
    "content, said",
    [
        (b"\xff\xfe", "is no JSON of pytest-benchmark"),
        (b"[]", "is no JSON of pytest-benchmark"),
        (b'{"benchmarks": []}', "no 'machine_info'"),
        (b'{"benchmarks": [], "machine_info": {}}', "machine_info: got {}"),
        (
            b'{"benchmarks": [{"fullname": "a", "stats": {"min": 0}}], "machine_info": {"machine": "x"}}',
            "time of a: got 0; allowed: a number > 0",
        ),
        (
            b'{"benchmarks": [{"fullname": "a", "stats": {"min": NaN}}], "machine_info": {"machine": "x"}}',
            "time of a: got nan",
        ),
    ],
    ids=["bytes", "list", "no machine", "empty machine", "zero", "nan"],
)
def test_a_file_of_something_else_is_named(tmp_path, save, content, said):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"x.json: is no JSON of pytest-benchmark") as told:
        compare_stored(tmp_path / "x.json", save("new", {TEST: 0.01}))
    assert said in str(told.value)


def test_no_files_are_refused(save):
    with pytest.raises(ValueError, match="baseline: got"):
        compare_stored([], save("new", {TEST: 0.01}))


def test_false_alarms_are_as_rare_as_promised_and_large_changes_found(save):
    random = np.random.default_rng(4)
    tests = [f"test_{number}" for number in range(40)]

    def run(name, factor):
        seconds = factor * np.exp(random.normal(0, 0.02, len(tests)))
        return save(name, dict(zip(tests, seconds.tolist(), strict=True)))

    # So that what is divided among forty tests is 1 % for each.
    rule = Rule(alpha=0.01, run_alpha=0.4)
    found = {1.0: Counter(), 1.15: Counter()}
    for factor, verdicts in found.items():
        for _ in range(8):
            result = compare_stored(
                [run(f"old{number}", 1.0) for number in range(6)], run("new", factor), rule=rule
            )
            verdicts.update(test.verdict for test in result.tests)
    # 3.2 of 320 are expected; more than 10 with a chance of 0.1 %.
    assert found[1.0][Verdict.REGRESSED] <= 10
    assert found[1.15][Verdict.REGRESSED] >= 275
