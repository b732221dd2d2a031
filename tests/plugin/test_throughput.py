"""Throughput as tests: our samples, pytest-benchmark's files and options."""

import json
import re
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
            assert len(measurement.seconds) >= 5
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
    [
        ("mode='backward'", "'backward'"),
        ("batch_size=0", "batch_size: got 0"),
        ("speed=1", "'speed'"),
        (
            "batchsize=2",
            "throughput: got an unexpected keyword argument 'batchsize'; allowed: mode, *, min_seconds, ",
        ),
        (
            "mode='generate', cache='cold'",
            "throughput: got an unexpected keyword argument 'cache'; allowed: mode, ",
        ),
        ("device='meta'", "device: got 'meta'; allowed: auto, cpu, cuda, cuda:N"),
    ],
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
    result.stdout.fnmatch_lines(
        ["*::test_speed  plain  train 2 x 8 float32 on cpu  called once, not measured*"]
    )
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
            "  *::test_speed[[]T4]  plain  forward 2 x 4 float32 on cpu  * tokens/s, median *, warm cache",
            "  *::test_speed[[]T8]  plain  forward 2 x 8 float32 on cpu  * tokens/s, median *, warm cache",
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


@pytest.mark.parametrize("mode", ["prefill", "decode", "generate"])
def test_other_modes(pytester, folder, run, report, mode):
    pytester.makepyfile(
        f"""
        import models, pytest
        @pytest.mark.throughput(mode="{mode}", batch_size=2, seq_len=6, new_tokens=3)
        def test_speed(throughput): throughput(models.rack, **models.QUICK)
        """
    )
    run("--benchmark-json=bench.json", "--stackwise-report=out.json").assert_outcomes(passed=1)
    [record] = report()["throughput"]
    [entry] = json.loads((folder / "bench.json").read_text())["benchmarks"]
    assert (record["mode"], record["batch_size"], record["seq_len"]) == (mode, 2, 6)
    assert record["new_tokens"] == (3 if mode == "generate" else None)
    assert entry["stats"]["median"] == pytest.approx(record["median_seconds"], rel=1e-9)
    assert ("latencies" in record) == (mode == "generate")


def test_generation_is_told_in_the_summary(pytester, run):
    pytester.makepyfile(
        """
        import models
        def test_speed(throughput):
            found = throughput(models.rack, mode="generate", seq_len=4, new_tokens=3, **models.QUICK)
            assert len(found.itl) == 6 and found.prefill_tokens_per_second > 0
        """
    )
    result = run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["  *  rack  generate 1 x 4 + 3 float32 on cpu  * tokens/s, *, TTFT * ?s, ITL * ?s, TPOT * ?s*"]
    )


def test_default_length_leaves_room_for_what_is_to_come(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        from stackwise import ModelSpec
        spec = ModelSpec.of(models.plain, max_length=12)
        @pytest.mark.parametrize("mode", ["forward", "decode", "generate"])
        def test_speed(throughput, mode): throughput(spec, mode=mode, new_tokens=5, **models.QUICK)
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=3)
    assert [record["seq_len"] for record in report()["throughput"]] == [12, 11, 7]


def test_what_a_share_leaves_out_is_told_beside_it(pytester, run, report):
    """And nothing of shares that are not known at all, as of any CPU."""
    pytester.makepyfile(
        """
        import models, pytest
        from stackwise import ModelSpec
        from stackwise.benchmark.flops.peak_rate import PeakRate
        from stackwise.benchmark.workload import workload

        def replaced():
            rack = models.rack()
            rack.stacks[0].forward = rack.stacks[0].forward
            return rack

        @pytest.mark.parametrize("known", [True, False])
        def test_speed(throughput, monkeypatch, known):
            peak = PeakRate("here", "published", {"float32": 1e9}, 1e8, {})
            monkeypatch.setattr(workload, "published_peak", lambda device: peak if known else None)
            throughput(ModelSpec.of(replaced), mode="train", seq_len=4, **models.QUICK)
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=2)
    told = [[note for note in each["notes"] if "recomputes" in note] for each in report()["throughput"]]
    assert told == [["what the backward pass recomputes is not known"], []]


def test_dtype_and_compile_are_settings_like_any_other(pytester, run, report):
    pytester.makepyfile(
        """
        import functools, models, pytest, torch
        @pytest.mark.parametrize(("dtype", "compile"), [("float64", False), ("bfloat16", True)])
        def test_speed(throughput, monkeypatch, dtype, compile):
            monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
            throughput(models.rack, seq_len=4, dtype=dtype, compile=compile, **models.QUICK)
        """
    )
    result = run("--stackwise-report=out.json")
    result.assert_outcomes(passed=2)
    records = report()["throughput"]
    assert [(r["dtype"], r["compile"]) for r in records] == [("float64", False), ("bfloat16", True)]
    assert ["compile" in record["execution"] for record in records] == [False, True]
    result.stdout.fnmatch_lines(["  *  rack  forward 1 x 4 bfloat16 compiled on cpu  *"])


def test_training_step_of_anybodys_loop(pytester, run, report):
    pytester.makepyfile(
        """
        import models
        def test_speed(throughput):
            assert throughput(models.loop_spec(), seq_len=5, **models.QUICK).tokens == 10
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    [record] = report()["throughput"]
    assert (record["model"], record["mode"], record["batch_size"], record["seq_len"]) == (
        "loop",
        "train",
        2,
        5,
    )


def test_anything_that_can_be_called(pytester, run, report):
    pytester.makepyfile(
        """
        import models
        from stackwise.benchmark.workload import callable_workload
        def test_speed(throughput): throughput(callable_workload(list, name="nothing"), **models.QUICK)
        """
    )
    result = run("--stackwise-report=out.json")
    result.assert_outcomes(passed=1)
    [record] = report()["throughput"]
    assert (record["model"], record["mode"], record["batch_size"]) == ("nothing", "call", None)
    assert record["calls_per_sample"] > 1
    result.stdout.fnmatch_lines(["  *  nothing  call on cpu  median *"])


def test_short_calls_are_replayed_with_their_iterations(pytester, folder, run):
    """Of calls below 50 us a sample is the mean of several, which pytest-benchmark calls iterations."""
    pytester.makepyfile(
        """
        import json, models, pathlib
        from stackwise.benchmark.workload import callable_workload
        def test_speed(throughput):
            found = throughput(callable_workload(list), **models.QUICK)
            pathlib.Path("measured.json").write_text(json.dumps([found.seconds, found.calls_per_sample]))
        """
    )
    run("--benchmark-json=bench.json").assert_outcomes(passed=1)
    seconds, calls = json.loads((folder / "measured.json").read_text())
    stats = json.loads((folder / "bench.json").read_text())["benchmarks"][0]["stats"]
    assert (stats["rounds"], stats["iterations"]) == (len(seconds), calls)
    assert stats["data"] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("subject", "key"),
    [
        ("callable_workload(list)", "mode"),
        ("callable_workload(list)", "dtype"),
        ("models.loop_spec()", "mode"),
    ],
    ids=["workload", "workload dtype", "trainer"],
)
def test_settings_that_the_subject_has_itself(pytester, run, subject, key):
    pytester.makepyfile(
        f"""
        import models
        from stackwise.benchmark.workload import callable_workload
        def test_speed(throughput): throughput({subject}, {key}="float32" if "{key}" == "dtype" else "train")
        """
    )
    result = run()
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines([f"E *{key}: got *; allowed: none here, a * has its own*"])


def test_dtype_is_that_of_the_weights_where_none_was_asked_for(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest, torch
        from stackwise.benchmark.workload import callable_workload
        def half(): return models.plain().to(torch.bfloat16)
        def mixed():
            model = models.plain()
            model.head.to(torch.float64)
            model.forward = lambda ids: model.head(model.embedding(ids).double())
            return model
        @pytest.mark.parametrize("factory", [half, mixed, models.plain])
        def test_speed(throughput, factory): throughput(factory, seq_len=4, **models.QUICK)
        def test_asked(throughput): throughput(half, dtype="float32", seq_len=4, **models.QUICK)
        def test_step(throughput): throughput(models.loop_spec(), **models.QUICK)
        def test_call(throughput): throughput(callable_workload(list), **models.QUICK)
        """
    )
    result = run("--stackwise-report=out.json")
    result.assert_outcomes(passed=6)
    found = [record["dtype"] for record in report()["throughput"]]
    assert found == ["bfloat16", "float32/float64", "float32", "float32", "float32", None]
    result.stdout.fnmatch_lines(["  *::test_speed[[]half]  half  forward 1 x 4 bfloat16 on cpu  *"])


@pytest.mark.parametrize("plugins", [(), ("-p", "no:benchmark")], ids=["with benchmark", "alone"])
def test_what_is_no_model_is_told_what_else_can_be_measured(pytester, run, plugins):
    pytester.makepyfile("def test_speed(throughput): throughput(lambda: [1.0])")
    result = run(*plugins)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *TypeError: model: got list; wanted an nn.Module*",
            "E *TrainerSpec*Workload*callable_workload(function)*",
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ("mode='generate', new_tokens=12", ["new_tokens: got 12; allowed: 1 to 11", "takes 12 positions"]),
        ("mode='generate'", ["new_tokens: got 32 (the default); allowed: 1 to 11"]),
    ],
)
def test_more_new_tokens_than_positions(pytester, run, arguments, texts):
    pytester.makepyfile(
        f"""
        import models
        from stackwise import ModelSpec
        def test_speed(throughput): throughput(ModelSpec.of(models.plain, max_length=12), {arguments})
        """
    )
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *{text}*" for text in texts[:1]])
    assert all(text in result.stdout.str() for text in texts)
    assert "seq_len: got" not in result.stdout.str()


@pytest.mark.parametrize(
    ("call", "warnings"),
    [("throughput(models.plain, mode='backward')", 0), ("throughput(3)", 0), ("pass", 1)],
)
def test_a_refusal_is_not_called_an_unused_benchmark_too(pytester, run, call, warnings):
    pytester.makepyfile(f"import models\ndef test_speed(throughput): {call}\ndef test_two(): assert True")
    result = run("-W", "default")
    assert result.parseoutcomes().get("warnings", 0) == warnings
    assert ("was not used at all" in result.stdout.str()) == bool(warnings)


class TestLimits:
    """min_tokens_per_second, max_memory and max_latency hold a measurement to a number."""

    TEST = """
        import models, pytest
        @pytest.mark.{marker}
        def test_speed(throughput): throughput(models.plain, seq_len=8, min_seconds=0, warmup_seconds=0)
        """

    @pytest.mark.parametrize("plugins", [(), ("-p", "no:benchmark")], ids=["with benchmark", "alone"])
    @pytest.mark.parametrize(
        ("marker", "told"),
        [
            ("min_tokens_per_second(1)", None),
            ("min_tokens_per_second(1e12)", "* tokens/s were measured*; wanted: at least 1,000,000,000,000"),
            ("max_memory('100 GiB')", None),
            ("max_memory('1 MiB')", "* in use *; allowed: *"),
            ("max_latency(p50='100s')", None),
            ("max_latency(p95='1ns')", "p95 was *; allowed: at most 1 ns*"),
        ],
    )
    def test_limit(self, pytester, run, plugins, marker, told):
        pytester.makepyfile(self.TEST.format(marker=marker))
        result = run(*plugins)
        if told is None:
            result.assert_outcomes(passed=1)
        else:
            result.assert_outcomes(failed=1)
            result.stdout.fnmatch_lines([f"E *{marker.partition('(')[0]}: {told}"])

    def test_what_was_measured_is_kept_beyond_the_limit(self, pytester, folder, run, report):
        pytester.makepyfile(self.TEST.format(marker="min_tokens_per_second(1e15)"))
        run("--benchmark-json=bench.json", "--stackwise-report=out.json").assert_outcomes(failed=1)
        assert report()["throughput"][0]["measured"] is True
        assert json.loads((folder / "bench.json").read_text())["benchmarks"][0]["stats"]["rounds"] > 0

    @pytest.mark.parametrize("marker", ["min_tokens_per_second(1)", "max_latency(p50='100s')"])
    def test_one_call_is_no_measurement(self, pytester, run, marker):
        """Never green: where benchmarks are disabled nothing is known of a rate."""
        pytester.makepyfile(self.TEST.format(marker=marker))
        result = run("--benchmark-disable", "-rs")
        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines([f"*{marker.partition('(')[0]}: benchmarks are disabled*"])

    @pytest.mark.parametrize(
        ("limit", "options", "samples"),
        [
            ("p50", [], 5),
            ("p95", [], 200),
            # What is chosen for all tests is no reason not to know: more calls than that are made, not fewer.
            ("p95", ["--benchmark-min-rounds=10"], 200),
            ("p50", ["--benchmark-min-rounds=10"], 10),
            ("p95", ["--benchmark-min-rounds=210"], 210),
        ],
    )
    def test_as_many_calls_are_made_as_a_percentile_takes(
        self, pytester, run, report, limit, options, samples
    ):
        pytester.makepyfile(self.TEST.format(marker=f"max_latency({limit}='100s')"))
        run(*options, "--stackwise-report=out.json").assert_outcomes(passed=1)
        (row,) = report()["throughput"]
        assert row["samples"] == samples
        assert limit == "p50" or row["calls_per_sample"] == 1
        assert row["percentiles"][limit]["value"] > 0
        assert not [note for note in row["notes"] if "min-rounds" in note]

    def test_a_percentile_that_is_not_known_is_no_pass(self, pytester, run):
        """The test itself may say how many calls are made, and is told where that is why."""
        pytester.makepyfile(
            """
            import models, pytest
            @pytest.mark.max_latency(p95="100s")
            def test_speed(throughput):
                throughput(models.plain, seq_len=8, min_calls=7, min_seconds=0, warmup_seconds=0)
            """
        )
        result = run("--benchmark-min-rounds=300")
        result.assert_outcomes(failed=1)
        why = "it takes 200, each of one call; the test itself says min_calls=7"
        result.stdout.fnmatch_lines([f"E *max_latency: p95 is not known of 7 samples: {why}*"])

    def test_limits_that_stand_together(self, pytester, run):
        """On a test, its class and its parameters: each percentile has the closest of them."""
        pytester.makepyfile(
            """
            import models, pytest
            @pytest.mark.max_latency(p50="1ns")
            class TestIt:
                @pytest.mark.max_latency(p95="100s")
                @pytest.mark.max_latency(p95="2ns", p50="3ns")
                @pytest.mark.parametrize(
                    "far", [pytest.param(1, marks=pytest.mark.max_latency(p95="50s", p50="50s")), 2, 3]
                )
                def test_speed(self, throughput, far):
                    throughput(models.plain, seq_len=8, min_seconds=0, warmup_seconds=0)

                @pytest.mark.max_latency(p95="100s")
                def test_other(self, throughput):
                    throughput(models.plain, seq_len=8, min_seconds=0, warmup_seconds=0)
            """
        )
        result = run("-rA")
        result.assert_outcomes(passed=1, failed=3)
        result.stdout.fnmatch_lines(["PASSED *test_speed?1?"])
        told = [each for each in result.outlines if each.startswith("E ") and "LatencyError" in each]
        assert len(told) == 3
        for line in told[:2]:
            assert re.search(r"p50 was .*; allowed: at most 3 ns; p95 was .*; allowed: at most 2 ns", line)
        assert re.search(r"max_latency: p50 was .*; allowed: at most 1 ns", told[2])
        assert "p95" not in told[2]

    def test_latencies_of_a_generation(self, pytester, run):
        """Several markers, one of each kind; of two of a kind the closer one counts, and no kind is ITL."""
        pytester.makepyfile(
            """
            import models, pytest
            @pytest.mark.max_latency(p50="1ns")
            @pytest.mark.max_latency(p50="1ns", of="tpot")
            class TestIt:
                @pytest.mark.max_latency(p50="2ns", of="ttft")
                @pytest.mark.max_latency(p50="100s", p95="100s", of="itl")
                def test_speed(self, throughput):
                    shape = {"mode": "generate", "seq_len": 4, "new_tokens": 21}
                    throughput(models.plain, **shape, min_seconds=0, warmup_seconds=0)
            """
        )
        result = run()
        result.assert_outcomes(failed=1)
        (line,) = [each for each in result.outlines if each.startswith("E ") and "LatencyError" in each]
        assert re.search(r"max_latency: p50 of TTFT was .*; allowed: at most 2 ns", line)
        assert re.search(r"p50 of TPOT was .*; allowed: at most 1 ns", line)
        assert "ITL" not in line

    @pytest.mark.parametrize(
        ("marker", "arguments", "text"),
        [
            ("p50='1s', of='ttft'", "mode='decode'", "of: got 'ttft'; allowed: none here, since"),
            ("p50='1s'", "mode='generate', new_tokens=1", "new_tokens: got 1; allowed: 2 or more"),
        ],
    )
    def test_a_latency_that_the_work_does_not_have(self, pytester, run, marker, arguments, text):
        pytester.makepyfile(
            f"""
            import models, pytest
            @pytest.mark.max_latency({marker})
            def test_speed(throughput): throughput(models.plain, seq_len=4, {arguments})
            """
        )
        result = run()
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"E *{text}*"])

    @pytest.mark.parametrize(("limit", "counts"), [("100 GiB", {"passed": 1}), ("1 MiB", {"failed": 1})])
    def test_memory_is_no_matter_of_time(self, pytester, run, limit, counts):
        pytester.makepyfile(self.TEST.format(marker=f"max_memory('{limit}')"))
        run("--benchmark-disable").assert_outcomes(**counts)

    @pytest.mark.parametrize("argument", ["--benchmark-enable", "--benchmark-disable"])
    def test_memory_tells_what_was_there_before(self, pytester, run, argument):
        pytester.makepyfile(self.TEST.format(marker="max_memory('1 MiB')"))
        result = run(argument)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["E *max_memory: * in use by this process at the peak, * of that before the measured call; *"]
        )

    def test_work_without_tokens(self, pytester, run):
        pytester.makepyfile(
            """
            import models, pytest
            from stackwise.benchmark.workload import callable_workload
            @pytest.mark.min_tokens_per_second(1)
            def test_speed(throughput): throughput(callable_workload(list), **models.QUICK)
            """
        )
        result = run()
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["E *min_tokens_per_second: list does not say how many tokens it handles*"]
        )

    @pytest.mark.parametrize(
        "marker", ["min_tokens_per_second(1)", "max_memory('1 GiB')", "max_latency(p50='1s')"]
    )
    def test_marked_test_that_measures_nothing(self, pytester, run, marker):
        pytester.makepyfile(
            f"""
            import pytest
            @pytest.mark.{marker}
            def test_speed(throughput): pass
            """
        )
        result = run("-W", "default")
        assert result.parseoutcomes()["failed"] == 1
        name = marker.partition("(")[0]
        result.stdout.fnmatch_lines([f"*the test is marked {name} but never called throughput*"])


def test_the_memory_of_a_replay_is_not_told(pytester, run):
    """It asks the allocator for nothing, whatever the captured call took: never green."""
    pytester.makepyfile(
        """
        import dataclasses, models, pytest
        from stackwise.benchmark.workload import callable_workload

        @pytest.mark.max_memory("100 GiB")
        def test_speed(throughput):
            replayed = dataclasses.replace(callable_workload(list), replays=list)
            throughput(replayed, **models.QUICK)
        """
    )
    run().assert_outcomes(skipped=1)


def test_one_measures_at_a_time(pytester, folder, run):
    """The device is locked from the making of the model on."""
    pytester.makeconftest(
        """
        import contextlib, pathlib
        from pytest_stackwise import device
        @contextlib.contextmanager
        def lock(name):
            with pathlib.Path("order").open("a") as file:
                file.write("locked ")
                file.flush()
                yield
                file.write("free ")
        device.lock = lock
        """
    )
    pytester.makepyfile(
        """
        import models, pathlib
        def plain():
            with pathlib.Path("order").open("a") as file: file.write("made ")
            return models.plain()
        def test_speed(throughput): throughput(plain, **models.QUICK)
        """
    )
    from pytest_stackwise import device

    lock = device.lock
    try:
        run().assert_outcomes(passed=1)
    finally:
        device.lock = lock
    order = (folder / "order").read_text().split()
    assert (order[0], order[-1], set(order[1:-1])) == ("locked", "free", {"made"})


@pytest.mark.parametrize(
    ("call", "locked"),
    [
        ("models.plain", ["cpu"]),
        ("models.plain, device='cpu:0'", ["cpu:0"]),
        ("models.plain, device='auto'", ["cpu"]),
        ("callable_workload(list, device='cpu:0')", ["cpu:0"]),
        # Nobody knows where a loop of others has its model before it is made: then the other one, not both.
        ("elsewhere()", ["cpu", "free", "cuda"]),
    ],
    ids=["of the run", "of the call", "of the call, resolved", "of the workload", "of a loop"],
)
def test_the_device_that_is_used_is_locked(pytester, folder, run, monkeypatch, call, locked):
    import contextlib

    from pytest_stackwise import device

    order = []

    @contextlib.contextmanager
    def lock(name):
        order.append(name)
        yield
        order.append("free")

    monkeypatch.setattr(device, "lock", lock)
    pytester.makepyfile(
        f"""
        import dataclasses, models, pytest
        from stackwise.benchmark import workload
        from stackwise.benchmark.timing import measurement
        from stackwise.benchmark.workload import callable_workload

        def elsewhere(): return models.loop_spec()

        def test_speed(throughput, monkeypatch):
            made = workload.trainer_workload
            monkeypatch.setattr(
                workload, "trainer_workload",
                lambda *a, **k: dataclasses.replace(made(*a, **k), device=models.torch.device("cuda")),
            )
            monkeypatch.setattr(models.torch.cuda, "synchronize", lambda device: None)
            monkeypatch.setattr(models.torch.cuda, "is_available", lambda: False)
            monkeypatch.setattr(measurement, "measure", lambda made, **how: measurement.call_once(made))
            throughput({call}, **models.QUICK)
        """
    )
    run().assert_outcomes(passed=1)
    assert order == [*locked, "free"]
    order.clear()
    run("--benchmark-disable").assert_outcomes(passed=1)
    assert order == [], "nothing is measured"
