"""pytest-benchmark with our samples: each of its options, its files, and who reads them.

Where a nested run judges times, its clock is turned by the test: no real time is looked at.
"""

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec

import pytest

from stackwise.benchmark.timing import measurement
from tests.forked import HANG_SECONDS

# Calls take what the file `speed` says, in ms; the clock that says so is ours.
TURNED = """
import itertools, pathlib, pytest, torch
from stackwise.benchmark.timing import clock

def speed():
    path = pathlib.Path("speed")
    return float(path.read_text()) / 1e3 if path.exists() else 1e-3

@pytest.fixture(autouse=True)
def _turned(monkeypatch):
    factors = itertools.cycle([1.0, 1.1, 0.9, 1.05, 0.95])
    def sample(self, call, count, *, repeats=1, before=None):
        for _ in range(count):
            call()
        return [speed() * next(factors) for _ in range(count)]
    monkeypatch.setattr(clock.HostClock, "sample", sample)
"""
BENCHMARKS = """
import models, pytest
QUICK = {**models.QUICK, "min_calls": 10}
@pytest.mark.benchmark(group="small")
@pytest.mark.parametrize("seq_len", [4, 8])
def test_small(throughput, seq_len): throughput(models.plain, seq_len=seq_len, **QUICK)
@pytest.mark.benchmark(group="large")
def test_large(throughput): throughput(models.conv, mode="train", **QUICK)
def test_theirs(benchmark): benchmark.pedantic(sum, ([1],), rounds=3)
def test_ordinary(): pass
"""


ONE = ("-k", "large")  # of the benchmarks, where a run is made again
SLOW = pytest.mark.slow  # pytest-benchmark's own reading of an option that another value has shown


@pytest.fixture
def measured(pytester, run):
    """The nested run of BENCHMARKS with options, at a speed in ms a call."""
    pytester.makeconftest(TURNED)
    pytester.makepyfile(test_it=BENCHMARKS)

    def measured(*options, speed=1.0):
        (pytester.path / "speed").write_text(str(speed))
        return run(*options)

    return measured


def stored(folder, pattern=".benchmarks/*/*.json"):
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def test_only(measured):
    measured("--benchmark-only").assert_outcomes(passed=4, skipped=1)


def test_skip(measured):
    result = measured("--benchmark-skip")
    result.assert_outcomes(passed=1, skipped=4)
    assert "tokens/s" not in result.stdout.str()


def test_disable(measured, folder):
    result = measured("--benchmark-disable", "--benchmark-json=bench.json")
    result.assert_outcomes(passed=5)
    assert result.stdout.str().count("called once, not measured") == 3
    assert not (folder / "bench.json").exists(), "one call is no measurement, and none is saved"


def test_enable_wins(measured):
    result = measured("--benchmark-disable", "--benchmark-enable")
    result.assert_outcomes(passed=5)
    assert "not measured" not in result.stdout.str()


def test_save(measured, folder):
    measured("--benchmark-save=first").assert_outcomes(passed=5)
    [path] = folder.glob(".benchmarks/*/0001_first.json")
    entries = {entry["name"]: entry for entry in json.loads(path.read_text())["benchmarks"]}
    assert set(entries) == {"test_small[4]", "test_small[8]", "test_large", "test_theirs"}
    assert "data" not in entries["test_large"]["stats"]
    assert entries["test_large"]["stats"]["median"] == pytest.approx(1e-3)
    assert entries["test_small[8]"]["params"] == {"seq_len": 8}


def test_save_with_data(measured, folder):
    measured("--benchmark-save=first", "--benchmark-save-data").assert_outcomes(passed=5)
    [run] = stored(folder)
    for entry in run["benchmarks"][:3]:
        assert len(entry["stats"]["data"]) == entry["stats"]["rounds"] == 10


def test_autosave(measured, folder):
    for _ in range(2):
        measured("--benchmark-autosave", *ONE).assert_outcomes(passed=1, deselected=4)
    assert [path.name[:4] for path in sorted(folder.glob(".benchmarks/*/*.json"))] == ["0001", "0002"]


def test_storage(measured, folder):
    store = "--benchmark-storage=file://./kept"
    measured(store, "--benchmark-save=first", *ONE).assert_outcomes(passed=1, deselected=4)
    assert len(stored(folder, "kept/*/*.json")) == 1
    assert not (folder / ".benchmarks").exists()
    result = measured(store, "--benchmark-compare", *ONE)
    result.stdout.fnmatch_lines(["*test_large*0001_first*"])


def test_compare(measured):
    measured("--benchmark-save=first", *ONE)
    result = measured("--benchmark-compare=0001", *ONE, speed=2.0)
    result.assert_outcomes(passed=1, deselected=4)
    lines = [line.split() for line in result.stdout.lines if line.startswith("test_large")]
    # Of both runs the median in the table, and the slower as a ratio to the faster.
    assert {line[1] for line in lines} == {"(0001_first)", "(NOW)"}
    [now] = [line for line in result.stdout.lines if line.startswith("test_large (NOW)")]
    assert "(2.0" in now or "(2.00)" in now


@pytest.mark.parametrize(
    ("expression", "fails"),
    [("mean:50%", True), ("median:150%", False), pytest.param("min:0.0001", True, marks=SLOW)],
)
def test_compare_fail(measured, expression, fails):
    measured("--benchmark-save=first", *ONE)
    result = measured("--benchmark-compare", f"--benchmark-compare-fail={expression}", *ONE, speed=2.0)
    assert ("Performance has regressed" in "\n".join(result.errlines + result.outlines)) == fails
    assert (result.ret != 0) == fails
    same = measured("--benchmark-compare", f"--benchmark-compare-fail={expression}", *ONE, speed=1.0)
    assert same.ret == 0


def test_json(measured, folder):
    measured("--benchmark-json=bench.json", "--stackwise-report=out.json").assert_outcomes(passed=5)
    [run] = stored(folder, "bench.json")
    records = {row["test"]: row for row in json.loads((folder / "out.json").read_text())["throughput"]}
    for entry in run["benchmarks"][:3]:
        stats, record = entry["stats"], records[entry["fullname"]]
        assert stats["median"] == pytest.approx(record["median_seconds"], rel=1e-9)
        assert stats["ops"] == pytest.approx(1 / statistics.mean(stats["data"]), rel=1e-9)
        assert entry["extra_info"]["tokens_per_second"] == record["tokens_per_second"]


@pytest.mark.parametrize(
    ("group_by", "groups"),
    [
        ("group", ["benchmark 'large': 1 tests", "benchmark 'small': 2 tests", "benchmark: 1 tests"]),
        pytest.param("name", ["benchmark 'test_large': 1 tests"], marks=SLOW),
        pytest.param(
            "func", ["benchmark 'test_small': 2 tests", "benchmark 'test_large': 1 tests"], marks=SLOW
        ),
        pytest.param("fullfunc", ["benchmark 'test_it.py::test_small': 2 tests"], marks=SLOW),
        ("param", ["benchmark '4': 1 tests", "benchmark '8': 1 tests"]),
    ],
    ids=["group", "name", "func", "fullfunc", "param"],
)
def test_group_by(measured, group_by, groups):
    result = measured(f"--benchmark-group-by={group_by}")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines_random([f"*{group}*" for group in groups])


def test_group_by_a_parameter(measured):
    result = measured("--benchmark-group-by=param:seq_len", "-k", "small")
    result.assert_outcomes(passed=2, deselected=3)
    result.stdout.fnmatch_lines_random(["*'seq_len=4': 1 tests*", "*'seq_len=8': 1 tests*"])


@pytest.mark.slow
def test_histogram(pytester, folder, run_apart):
    """In a process of its own: what draws replaces how Python finds packages."""
    if find_spec("pygal") is None:
        pytest.skip("pygal is not there: pip install 'pytest-benchmark[histogram]'")
    pytester.makeconftest(TURNED)
    pytester.makepyfile(test_it=BENCHMARKS)
    run_apart("--benchmark-histogram=drawn", "--benchmark-group-by=group").assert_outcomes(passed=5)
    assert sorted(path.name for path in folder.glob("drawn*.svg")) == [
        "drawn-large.svg",
        "drawn-small.svg",
        "drawn.svg",
    ]


def test_display(measured):
    result = measured("--benchmark-sort=mean", "--benchmark-columns=median,ops", "--benchmark-verbose")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["*test_large*"])


FREE = """
import models, pytest
{marker}
def test_it(throughput): throughput(models.plain, seq_len=4, {call})
"""


class TestSettings:
    """What was chosen is followed, or there is a note that says why not; never is it silently left alone."""

    @pytest.fixture
    def recorded(self, pytester, run, report, monkeypatch):
        """The record of one test under options: recorded(*options, call=its keywords, marker=its own)."""
        pytester.makeconftest(TURNED)
        measure, self.asked = measurement.measure, {}

        def watched(workload, **how):
            """No real time passes by what is asked for: that is looked at itself."""
            self.asked = how
            return measure(workload, **how | {"min_seconds": 0.0})

        monkeypatch.setattr(measurement, "measure", watched)

        def recorded(*options, call="", marker=""):
            pytester.makepyfile(test_it=FREE.format(call=call, marker=marker))
            result = run(*options, "--stackwise-report=out.json")
            result.assert_outcomes(passed=1)
            [row] = report()["throughput"]
            told = [line.strip() for line in result.outlines if "note: " in line]
            assert told == [f"note: {note}" for note in row["notes"]]
            return row

        return recorded

    def test_defaults(self, recorded):
        row = recorded()
        assert (row["samples"], row["notes"], self.asked) == (5, [], {})
        assert row["warmup_calls"] > 3

    @pytest.mark.parametrize("way", ["command line", "marker", "addopts", "environment"])
    def test_rounds_and_time(self, recorded, pytester, monkeypatch, way):
        option = "--benchmark-min-rounds=11"
        if way == "addopts":
            pytester.makeini(f"[pytest]\naddopts = {option} --benchmark-max-time=0.001")
        if way == "environment":
            monkeypatch.setenv("PYTEST_ADDOPTS", f"{option} --benchmark-max-time=0.001")
        row = recorded(
            *([option, "--benchmark-max-time", "0.001"] if way == "command line" else []),
            marker="@pytest.mark.benchmark(min_rounds=11, max_time=0.001)" if way == "marker" else "",
        )
        assert (row["samples"], row["notes"]) == (11, [])
        assert self.asked == {"min_calls": 11, "min_seconds": 0.001}

    @pytest.mark.parametrize(
        ("option", "calls"),
        [("--benchmark-warmup=off", 3), ("--benchmark-warmup=on", None), ("--benchmark-warmup=auto", None)],
    )
    def test_warmup(self, recorded, option, calls):
        row = recorded(option)
        assert row["notes"] == []
        # Without it there is the first window, of three calls.
        assert row["warmup_calls"] == calls if calls else row["warmup_calls"] > 3

    def test_what_cannot_be_followed_is_told(self, recorded):
        told = {
            "--benchmark-min-time=0.1": "calls_per_sample",
            "--benchmark-timer=time.process_time": "the clock is 'host' or 'device'",
            "--benchmark-calibration-precision=20": "nothing is calibrated",
            "--benchmark-warmup-iterations=7": "the time of a call has settled",
            "--benchmark-cprofile=tottime": "samples are replayed",
        }
        row = recorded(*told)
        for note, (option, text) in zip(row["notes"], told.items(), strict=True):
            assert note.startswith(f"{option.partition('=')[0]} is not followed: ")
            assert text in note
        assert row["samples"] == 5

    def test_precision_does_not_cut_the_samples_short(self, recorded, pytester, folder):
        """pytest-benchmark 5.3 ends as soon as the mean is known well enough: a replay is of all samples."""
        pytest.importorskip("pytest_benchmark.plugin")
        if "--benchmark-precision" not in pytester.runpytest("--help").stdout.str():
            pytest.skip("this pytest-benchmark has no --benchmark-precision")
        options = ("--benchmark-precision=0.5", "--benchmark-json=b.json")
        row = recorded(*options, call="min_calls=50")
        assert "--benchmark-precision is not followed" in row["notes"][0]
        [entry] = stored(folder, "b.json")[0]["benchmarks"]
        assert entry["stats"]["rounds"] == row["samples"] == 50

    def test_the_call_wins_and_that_is_told(self, recorded):
        row = recorded("--benchmark-min-rounds=11", call="min_calls=7")
        assert row["samples"] == 7
        assert row["notes"] == ["--benchmark-min-rounds is not followed: the test itself says min_calls=7"]

    def test_the_marker_wins_over_the_command_line(self, recorded):
        row = recorded(
            "--benchmark-min-rounds=11",
            marker="@pytest.mark.benchmark(min_rounds=8, timer=len)",
        )
        assert row["samples"] == 8
        [note] = row["notes"]
        assert note.startswith("benchmark(timer=<built-in function len>) is not followed: ")


@pytest.mark.slow
def test_two_workers(pytester, run_apart, report):
    """pytest-benchmark turns itself off under xdist; nothing may look like a measurement."""
    pytester.makepyfile(test_it=BENCHMARKS)
    result = run_apart("-n", "2", "-W", "ignore", "--stackwise-report=out.json")
    result.assert_outcomes(passed=5)
    assert [row["measured"] for row in report()["throughput"]] == [False] * 3


class TestPercentiles:
    """`stats` has those that pytest-benchmark leaves out, and none that so few samples cannot tell."""

    def test_of_many_samples(self, pytester, folder, run):
        pytester.makeconftest(TURNED)
        pytester.makepyfile(
            "import models\n"
            "def test_it(throughput): throughput(models.plain, **models.QUICK | {'min_calls': 250})"
        )
        run("--benchmark-json=bench.json", "--benchmark-save=first").assert_outcomes(passed=1)
        for pattern in ("bench.json", ".benchmarks/*/*.json"):
            [run_] = stored(folder, pattern)
            stats = run_["benchmarks"][0]["stats"]
            # The five factors in turn: the median is 1 ms, and more than 5 % are the largest.
            assert stats["p50"] == pytest.approx(1e-3)
            assert stats["p50_interval"] == pytest.approx([1e-3, 1e-3])
            assert stats["p95"] == pytest.approx(1.1e-3)
            assert stats["p99"] is None
            assert stats["p99_interval"] == [None, None]

    def test_of_others_benchmarks_there_are_none(self, measured, folder):
        measured("--benchmark-json=bench.json")
        [run] = stored(folder, "bench.json")
        named = {entry["name"]: "p50" in entry["stats"] for entry in run["benchmarks"]}
        assert named == {
            "test_small[4]": True,
            "test_small[8]": True,
            "test_large": True,
            "test_theirs": False,
        }

    def test_a_second_run_compares_with_them(self, measured):
        measured("--benchmark-save=first", *ONE)
        measured("--benchmark-compare=0001", *ONE).assert_outcomes(passed=1, deselected=4)


class TestMachineInfo:
    """What the machine is, for those who compare files; what changes from minute to minute is none of it."""

    def test_fingerprint(self, measured, folder):
        measured("--benchmark-json=bench.json")
        found = stored(folder, "bench.json")[0]["machine_info"]["stackwise"]
        assert {"cpu", "cpu_count", "torch", "gpu", "torch_threads"} <= set(found)
        assert not [
            key
            for key in found
            if any(part in key for part in ("clock", "hz", "temperature", "load", "power"))
        ]

    def test_two_runs_are_of_one_machine(self, measured):
        """pytest-benchmark warns where the whole of machine_info differs; warnings are errors here."""
        measured("--benchmark-save=first", *ONE)
        result = measured("--benchmark-compare=0001", "-W", "error", *ONE)
        result.assert_outcomes(passed=1, deselected=4)
        assert "machine_info is different" not in "\n".join(result.outlines + result.errlines)

    def test_another_machine_is_told(self, measured, folder):
        measured("--benchmark-save=first", *ONE)
        [path] = folder.glob(".benchmarks/*/*.json")
        run = json.loads(path.read_text())
        run["machine_info"]["stackwise"]["cpu"] = "another"
        path.write_text(json.dumps(run))
        result = measured("--benchmark-compare=0001", *ONE)
        assert "machine_info is different" in "\n".join(result.outlines + result.errlines)

    @pytest.mark.slow
    def test_files_of_others_stay_as_they_are(self, pytester, folder, every_check):
        """A run without our fixture has no fingerprint, compares without one, and never waits for torch."""
        pytester.makeconftest(
            "import sys\ndef pytest_unconfigure(): print('torch is', 'torch' in sys.modules)"
        )
        pytester.makepyfile("def test_theirs(benchmark): benchmark.pedantic(sum, ([1],), rounds=3)")
        for options in (["--benchmark-save=first"], ["--benchmark-compare=0001"]):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *options],
                capture_output=True,
                text=True,
                timeout=HANG_SECONDS,
            )
            assert done.returncode == 0, done.stdout
            assert "torch is False" in done.stdout
        [run] = stored(folder)
        assert "stackwise" not in run["machine_info"]


def github_action_benchmark(text):
    """What benchmark-action/github-action-benchmark reads of pytest: extractPytestResult in src/extract.ts.

    Its JSON.parse takes no NaN and no infinity.
    """
    run = json.loads(text, parse_constant=pytest.fail)
    for entry in run["benchmarks"]:
        stats = entry["stats"]
        yield {
            "name": entry["fullname"],
            "value": stats["ops"],
            "range": stats["stddev"],
            "mean": stats["mean"],
            "rounds": stats["rounds"],
        }


def test_github_action_benchmark_reads_the_file(measured, folder):
    measured("--benchmark-json=bench.json", speed=4.0)
    found = {each["name"]: each for each in github_action_benchmark((folder / "bench.json").read_text())}
    assert set(found) == {
        f"test_it.py::{name}" for name in ("test_small[4]", "test_small[8]", "test_large", "test_theirs")
    }
    ours = found["test_it.py::test_large"]
    # Ten samples of 4 ms and a tenth more or less.
    samples = [4e-3 * factor for factor in (1.0, 1.1, 0.9, 1.05, 0.95)] * 2
    assert ours["rounds"] == 10
    assert ours["mean"] == pytest.approx(4e-3)
    assert ours["value"] == pytest.approx(250.0)
    assert ours["range"] == pytest.approx(statistics.stdev(samples), rel=1e-6)
