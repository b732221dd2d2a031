"""Throughput as tests: our samples, pytest-benchmark's files and options."""

import json
import statistics

import pytest

CALL = """
import json, models, pathlib, pytest
def test_speed(throughput):
    measurement = throughput(models.plain, mode="train", batch_size=2, seq_len=8, **models.QUICK)
    pathlib.Path("measured.json").write_text(json.dumps(
        {"seconds": measurement.seconds, **measurement.to_dict()}
    ))
"""
GROUPED = """
import models, pytest
@pytest.mark.benchmark(group="small")
@pytest.mark.throughput(seq_len=4)
def test_small(throughput): throughput(models.plain, **models.QUICK)
@pytest.mark.benchmark(group="large")
def test_large(throughput): throughput(models.conv, **models.QUICK)
def test_ordinary(): pass
"""


def saved(folder):
    (path,) = folder.glob(".benchmarks/*/*.json")
    return json.loads(path.read_text())["benchmarks"]


def test_marker_alone_says_what_is_measured(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.throughput(mode="train", batch_size=3, seq_len=8)
        def test_speed(throughput):
            measurement = throughput(models.plain)
            assert measurement.tokens == 24
            assert sum(measurement.seconds) >= 1.0
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    (record,) = report()["throughput"]
    assert (record["mode"], record["batch_size"], record["seq_len"], record["device"]) == (
        "train",
        3,
        8,
        "cpu",
    )
    assert record["measured"] is True
    assert record["calls"] >= 5


@pytest.mark.parametrize(
    ("marker", "call", "shape"),
    [
        ("throughput()", "", ("forward", 1, 128)),
        ("throughput", "seq_len=4", ("forward", 1, 4)),
        ("throughput(seq_len=8)", "seq_len=4, mode='train'", ("train", 1, 4)),
        ("throughput(batch_size=2, mode='train')", "batch_size=3", ("train", 3, 128)),
        ("seq_lengths(16)", "", ("forward", 1, 16)),
    ],
)
def test_call_wins_over_marker_over_default(pytester, run, report, marker, call, shape):
    pytester.makepyfile(
        f"""
        import models, pytest
        @pytest.mark.{marker}
        def test_speed(throughput): throughput(models.plain, {call + "," if call else ""} **models.QUICK)
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    (record,) = report()["throughput"]
    assert (record["mode"], record["batch_size"], record["seq_len"]) == shape


def test_default_length_stays_within_the_model(pytester, run, report):
    pytester.makepyfile(
        """
        import models
        from stackwise import ModelSpec
        def test_speed(throughput): throughput(ModelSpec.of(models.plain, max_length=12), **models.QUICK)
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    assert report()["throughput"][0]["seq_len"] == 12


@pytest.mark.parametrize(
    ("call", "text"),
    [("mode='backward'", "'backward'"), ("batch_size=0", "batch_size: got 0"), ("speed=1", "'speed'")],
)
def test_call_with_nonsense_fails(pytester, run, call, text):
    pytester.makepyfile(f"import models\ndef test_speed(throughput): throughput(models.plain, {call})")
    result = run()
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines([f"E *{text}*"])


def test_one_test_per_length(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.seq_lengths(4, 8)
        @pytest.mark.throughput(mode="train", batch_size=2)
        def test_speed(throughput): throughput(models.plain, **models.QUICK)
        """
    )
    result = run("-v", "--stackwise-report=out.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::test_speed[[]T4] PASSED*", "*::test_speed[[]T8] PASSED*"])
    assert [record["seq_len"] for record in report()["throughput"]] == [4, 8]
    assert [record["batch_size"] for record in report()["throughput"]] == [2, 2]


def test_file_of_benchmark_holds_our_samples(pytester, folder, run, report):
    pytester.makepyfile(CALL)
    run(
        "--benchmark-json=bench.json", "--benchmark-save-data", "--stackwise-report=out.json"
    ).assert_outcomes(passed=1)
    measured = json.loads((folder / "measured.json").read_text())
    (entry,) = json.loads((folder / "bench.json").read_text())["benchmarks"]
    assert entry["stats"]["data"] == pytest.approx(measured["seconds"], rel=1e-9)
    assert entry["stats"]["rounds"] == len(measured["seconds"])
    assert entry["stats"]["iterations"] == 1
    assert entry["stats"]["median"] == pytest.approx(statistics.median(measured["seconds"]), rel=1e-9)
    assert entry["options"]["timer"].endswith("replayed_samples")
    extra = entry["extra_info"]
    assert extra["tokens_per_second"] == measured["tokens_per_second"]
    assert extra["peak_memory_bytes"] == measured["peak_memory_bytes"]
    assert (extra["model"], extra["mode"], extra["batch_size"], extra["seq_len"]) == ("plain", "train", 2, 8)
    (record,) = report()["throughput"]
    assert {key: record[key] for key in extra} == extra


def test_saving_and_comparing(pytester, folder, run):
    pytester.makepyfile(CALL)
    run("--benchmark-save=first").assert_outcomes(passed=1)
    (entry,) = saved(folder)
    assert entry["extra_info"]["tokens_per_second"] > 0
    result = run("--benchmark-compare=0001", "--benchmark-autosave")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_speed (*0001_first*)*"])
    assert len(list(folder.glob(".benchmarks/*/*.json"))) == 2


@pytest.mark.parametrize(
    ("argument", "counts"),
    [
        ("--benchmark-only", {"passed": 2, "skipped": 1}),
        ("--benchmark-skip", {"passed": 1, "skipped": 2}),
        ("--benchmark-enable", {"passed": 3}),
    ],
)
def test_selecting(pytester, run, argument, counts):
    pytester.makepyfile(GROUPED)
    run(argument).assert_outcomes(**counts)


def test_disabled_benchmarks_are_called_once_and_say_so(pytester, folder, run, report):
    pytester.makepyfile(CALL)
    result = run("--benchmark-disable", "--stackwise-report=out.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*plain  train 2 x 8 on cpu  called once, not measured*"])
    assert len(json.loads((folder / "measured.json").read_text())["seconds"]) == 1
    assert report()["throughput"][0]["measured"] is False


def test_groups_of_the_user_are_kept(pytester, folder, run):
    pytester.makepyfile(GROUPED)
    result = run("--benchmark-group-by=group", "--benchmark-json=bench.json")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines_random(["*benchmark 'small': 1 tests*", "*benchmark 'large': 1 tests*"])
    entries = json.loads((folder / "bench.json").read_text())["benchmarks"]
    assert {entry["name"]: entry["group"] for entry in entries} == {
        "test_small": "small",
        "test_large": "large",
    }
    assert all(entry["options"]["timer"].endswith("replayed_samples") for entry in entries)


def test_ordinary_benchmarks_keep_their_clock(pytester, folder, run):
    pytester.makepyfile(
        test_it="import models\n"
        "def test_ours(throughput): throughput(models.plain, **models.QUICK)\n"
        "def test_theirs(benchmark): benchmark.pedantic(sum, ([1],), rounds=2)\n"
    )
    run("--benchmark-json=bench.json").assert_outcomes(passed=2)
    entries = json.loads((folder / "bench.json").read_text())["benchmarks"]
    timers = {entry["name"]: entry["options"]["timer"] for entry in entries}
    assert timers["test_ours"].endswith("replayed_samples")
    assert timers["test_theirs"] == "perf_counter"


@pytest.mark.parametrize("plugins", [[], ["-p", "no:benchmark"]], ids=["with benchmark", "alone"])
def test_second_call_is_a_clear_error(pytester, run, report, plugins):
    pytester.makepyfile(
        """
        import models
        def test_speed(throughput):
            throughput(models.plain, **models.QUICK)
            throughput(models.conv, **models.QUICK)
        """
    )
    result = run(*plugins, "--stackwise-report=out.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *throughput*once*"])
    assert [record["model"] for record in report()["throughput"]] == ["plain"]


def test_without_benchmark_the_summary_is_still_there(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.seq_lengths(4, 8)
        @pytest.mark.throughput(batch_size=2)
        def test_speed(throughput): throughput(models.plain, **models.QUICK)
        """
    )
    result = run("-p", "no:benchmark", "--stackwise-report=out.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "*= stackwise =*",
            "throughput",
            "  plain  forward 2 x 4 on cpu  * tokens/s, median * ms of 3 calls*",
            "  plain  forward 2 x 8 on cpu  * tokens/s, median * ms of 3 calls*",
            "verdict: PASS (throughput: 2 measured)",
        ]
    )
    assert all(record["measured"] for record in report()["throughput"])


@pytest.mark.parametrize("device", ["'cpu'", "torch.device('cpu')"])
def test_device_of_the_call_can_be_written(pytester, run, report, device):
    pytester.makepyfile(
        f"""
        import models, torch
        def test_speed(throughput): throughput(models.plain, device={device}, **models.QUICK)
        """
    )
    result = run("--stackwise-report=out.json", "--benchmark-json=bench.json")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    assert report()["throughput"][0]["device"] == "cpu"


def test_fixture_that_is_not_called_is_no_record(pytester, run, report):
    pytester.makepyfile("def test_speed(throughput): pass")
    run("--stackwise-report=out.json", "-W", "ignore").assert_outcomes(passed=1)
    assert report()["throughput"] == []


def test_device_and_seed_of_the_run(pytester, run, driven):
    pytester.makepyfile(CALL)
    run("--stackwise-seed=6").assert_outcomes(passed=1)
    assert driven == [("cpu", 6)]


@pytest.mark.parametrize("plugins", [(), ("-p", "no:benchmark")])
def test_marked_test_that_measures_nothing(pytester, run, plugins):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.throughput(mode="train")
        def test_speed(throughput): pass
        """
    )
    result = run("-W", "default", *plugins)
    result.assert_outcomes(failed=1, warnings=0 if plugins else 1)
    result.stdout.fnmatch_lines(["*the test is marked throughput but never called throughput*"])


def test_length_that_contradicts_the_test(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.seq_lengths(8, 16)
        def test_stable(stability_run): stability_run(models.plain, steps=1, seq_len=8)
        """
    )
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *seq_len: got 8; the test is parametrized with 16"])
