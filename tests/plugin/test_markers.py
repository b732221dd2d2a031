"""Markers: known to pytest, validated before a test runs, refused where nothing reads them."""

import ast
import dataclasses
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from pytest_stackwise.markers import (
    gate_of,
    gated_metrics,
    max_memory_of,
    min_tokens_per_second_of,
    no_memory_growth_of,
    quality_of,
    throughput_of,
)
from stackwise.gate.limit import Limit, Limits

FAULTS = ("nan_injection", "gradient_explosion", "gradient_scale", "loss_spike", "logit_growth")
FAULTS += ("embedding_explosion", "bit_flip", "half_overflow")
FAULTS += ("label_corruption", "corrupt_sample", "unreadable_sample", "worker_death", "out_of_memory")
FAULTS += ("slow_rank", "dead_rank", "process_signal", "disk_full", "short_write", "bit_rot")
NAMES = ("gpu", "stability", "recovers", *FAULTS, "seq_lengths", "throughput")
NAMES += ("max_memory", "min_tokens_per_second", "max_latency", "no_memory_growth", "quality", "gate")
INT_FROM_0, INT_FROM_1 = "an integer >= 0", "an integer >= 1"
TARGETS = "'loss', 'activation[:PATTERN]', 'gradient[:PATTERN]', 'weight[:PATTERN]'"


def marked(pytester, marker, fixture):
    pytester.makepyfile(
        test_it=f"""
        import models, pathlib, pytest
        @pytest.mark.{marker}
        def test_marked({fixture}): pathlib.Path("ran").touch()
        """
    )


def refused(result, *texts):
    assert result.ret == pytest.ExitCode.INTERRUPTED
    (line,) = [line for line in result.outlines if line.startswith("test_it.py::test_marked")]
    for text in texts:
        assert text in line
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    assert "pluggy/" not in result.stderr.str() + result.stdout.str()


@pytest.mark.parametrize("name", NAMES)
def test_marker_is_listed(run, name):
    result = run("--markers")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"@pytest.mark.{name}[(:]*"])


def test_markers_are_known_to_strict_runs(pytester, run):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.gpu
        def test_gpu(): pass
        @pytest.mark.nan_injection(step=1)
        @pytest.mark.gradient_explosion(step=6)
        @pytest.mark.seq_lengths(4)
        def test_faults(stability_run): pass
        @pytest.mark.throughput(seq_len=4)
        def test_speed(throughput): pass
        """
    )
    result = run("--strict-markers", "--strict-config", "--collect-only", "-q", "-W", "error")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*::test_gpu", "*::test_faults[[]T4]", "*::test_speed"])


@pytest.mark.parametrize(
    ("marker", "fixture", "texts"),
    [
        ("nan_injection", "stability_run", ["nan_injection", "missing", "'step'"]),
        ("nan_injection(step=-1)", "stability_run", ["nan_injection: step: got -1", INT_FROM_0]),
        ("nan_injection(step=1.5)", "stability_run", ["nan_injection: step: got 1.5", INT_FROM_0]),
        ("nan_injection(step=True)", "stability_run", ["nan_injection: step: got True", INT_FROM_0]),
        ("nan_injection(step='3')", "stability_run", ["nan_injection: step: got '3'", INT_FROM_0]),
        ("nan_injection(step=1, duration=0)", "stability_run", ["duration: got 0", INT_FROM_1]),
        ("nan_injection(step=1, target='activations')", "stability_run", ["'activations'", TARGETS]),
        ("nan_injection(step=1, target='loss:head')", "stability_run", ["'loss:head'", TARGETS]),
        ("nan_injection(step=1, target='gradient:')", "stability_run", ["'gradient:'", TARGETS]),
        ("nan_injection(step=1, target=None)", "stability_run", ["target: got None", TARGETS]),
        ("nan_injection(step=1, kind='NaN')", "stability_run", ["kind: got 'NaN'", "'nan'", "'inf'"]),
        (
            "nan_injection(step=1, place='loss')",
            "stability_run",
            ["nan_injection: key: got 'place'; allowed: ", "'target'"],
        ),
        ("nan_injection(3)", "stability_run", ["nan_injection", "keyword arguments only"]),
        ("gradient_explosion", "stability_run", ["gradient_explosion", "missing", "'step'"]),
        ("gradient_explosion(step=6, factor=0.5)", "stability_run", ["factor: got 0.5", "> 1"]),
        ("gradient_explosion(step=6, factor=1)", "stability_run", ["factor: got 1;", "> 1"]),
        ("gradient_explosion(step=6, factor='x')", "stability_run", ["factor: got 'x'", "> 1"]),
        ("gradient_explosion(step=6, factor=float('inf'))", "stability_run", ["factor: got inf", "> 1"]),
        ("gradient_explosion(6, 10)", "stability_run", ["gradient_explosion", "keyword arguments only"]),
        (
            "gradient_explosion(step=6, scale=2)",
            "stability_run",
            ["gradient_explosion: key: got 'scale'; allowed: ", "'factor'"],
        ),
        ("recovers", "stability_run", ["recovers", "missing", "'within'", "'loss_tolerance'"]),
        ("recovers(within=0, loss_tolerance=1)", "stability_run", ["recovers: within: got 0", INT_FROM_1]),
        ("recovers(within=2, loss_tolerance=0)", "stability_run", ["loss_tolerance: got 0", "> 0"]),
        ("recovers(2, 0.1)", "stability_run", ["recovers", "keyword arguments only"]),
        ("dead_rank(step=1, rank=-1)", "run_processes", ["dead_rank: rank: got -1", INT_FROM_0]),
        ("process_signal(step=1, kind='INT')", "run_processes", ["kind: got 'INT'", "'SIGTERM', 'SIGKILL'"]),
        ("process_signal(step=1, folder='a')", "run_processes", ["folder: got 'a'", 'moment "save"']),
        ("disk_full(after=-1)", "broken_storage", ["disk_full: after: got -1", INT_FROM_0]),
        ("short_write(folder=3)", "broken_storage", ["short_write: folder: got 3", "a path"]),
        ("seq_lengths()", "stability_run", ["seq_lengths()", INT_FROM_1.replace("an integer", "integers")]),
        ("seq_lengths(16, -1)", "stability_run", ["seq_lengths(16, -1)", "integers >= 1"]),
        ("seq_lengths(0)", "seq_len", ["seq_lengths(0)", "integers >= 1"]),
        ("seq_lengths('16')", "throughput", ["seq_lengths('16')", "integers >= 1"]),
        ("seq_lengths([16, 32])", "stability_run", ["seq_lengths([16, 32])", "integers >= 1"]),
        ("seq_lengths(16, step=2)", "stability_run", ["seq_lengths(16, step=2)", "integers >= 1"]),
        ("throughput(mode='backward')", "throughput", ["mode: got 'backward'", "'forward', 'train'"]),
        ("throughput(batch_size=0)", "throughput", ["throughput: batch_size: got 0", INT_FROM_1]),
        ("throughput(seq_len=2.0)", "throughput", ["throughput: seq_len: got 2.0", INT_FROM_1]),
        ("throughput(batch=2)", "throughput", ["throughput: key: got 'batch'; allowed: 'mode', "]),
        ("throughput(seed=3)", "throughput", ["throughput: key: got 'seed'; allowed: 'mode', "]),
        ("throughput('train')", "throughput", ["throughput", "keyword arguments only"]),
    ],
)
def test_bad_arguments_stop_the_run(pytester, folder, run, marker, fixture, texts):
    marked(pytester, marker, fixture)
    refused(run(), *texts)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("marker", "fixture", "wanted"),
    [
        ("nan_injection(step=1)", "tmp_path", "stability_run or inject_faults or run_processes"),
        ("gradient_explosion(step=6)", "throughput", "stability_run or inject_faults or run_processes"),
        ("recovers(within=1, loss_tolerance=1)", "inject_faults", "stability_run"),
        ("worker_death(step=1)", "stability_run", "inject_faults or run_processes"),
        ("dead_rank(step=1)", "inject_faults", "run_processes"),
        ("disk_full()", "stability_run", "broken_storage or inject_faults or run_processes"),
        ("seq_lengths(16)", "tmp_path", "stability_run or throughput or seq_len or length_sweep"),
        ("throughput(seq_len=4)", "stability_run", "throughput"),
    ],
)
def test_marker_that_nothing_reads_is_refused(pytester, folder, run, marker, fixture, wanted):
    marked(pytester, marker, fixture)
    refused(run(), marker.partition("(")[0], f"the test does not use {wanted}")
    assert not (folder / "ran").exists()


LABELS = """
import pytest
@pytest.mark.throughput
@pytest.mark.disk_full
def test_sorting_speed(): sorted([3, 1, 2])
@pytest.mark.quality
@pytest.mark.recovers
class TestQuality:
    @pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.seq_lengths)])
    def test_it(self, n): pass
@pytest.mark.max_latency
@pytest.mark.min_tokens_per_second
@pytest.mark.gate
@pytest.mark.nan_injection
def test_other(): pass
"""
OF_LABELS = ("throughput", "disk_full", "seq_lengths", "max_latency", "min_tokens_per_second", "gate")


def test_labels_of_a_project_that_have_our_names(pytester, run):
    """Nothing of ours is used: they are for `-m`, and each may have been meant for us."""
    pytester.makepyfile(test_it=LABELS)
    result = run("-W", "always")
    result.assert_outcomes(passed=4, warnings=7)
    for name in (*OF_LABELS, "nan_injection"):
        result.stdout.fnmatch_lines(
            [f"*PytestWarning: marker {name} does nothing here: the test does not use *"]
        )
    run("-W", "always", "-m", "quality").assert_outcomes(passed=2, deselected=2, warnings=1)


def test_labels_that_a_project_registers_are_its_own(pytester, run):
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"    {name}: ours\n" for name in OF_LABELS))
    pytester.makepyfile(test_it=LABELS)
    run("-W", "error", "--strict-markers", "--deselect", "test_it.py::test_other").assert_outcomes(
        passed=3, deselected=1
    )
    # Of the one that is not registered the warning is an error of its own test.
    run("-W", "error").assert_outcomes(passed=3, errors=1)


def test_a_label_beside_a_fixture_of_ours_is_meant_for_it(pytester, run):
    marked(pytester, "throughput", "peak_memory")
    refused(run(), "throughput does nothing here")


OWN = """
import pytest
@pytest.fixture
def quality(): return "high"
@pytest.mark.throughput
@pytest.mark.parametrize("seq_len", [8, 16])
def test_parameters(seq_len): assert seq_len
@pytest.mark.throughput
def test_fixture(quality): assert quality == "high"
"""


def test_a_label_beside_a_parameter_or_fixture_that_has_our_name(pytester, run):
    pytester.makeini("[pytest]\nmarkers =\n    throughput: ours\n")
    pytester.makepyfile(test_it=OWN)
    run("-W", "error").assert_outcomes(passed=3)


def test_a_label_beside_lengths_of_ours_is_meant_for_them(pytester, folder, run):
    marked(pytester, "throughput\n        @pytest.mark.seq_lengths(8, 16)", "seq_len")
    refused(run(), "throughput does nothing here")
    assert not (folder / "ran").exists()


def test_lengths_of_a_class_are_for_those_of_its_tests_that_read_them(pytester, run):
    pytester.makeini("[pytest]\nmarkers =\n    throughput: ours\n")
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.seq_lengths(8, 16)
        class TestSpeed:
            @pytest.mark.throughput
            def test_other(self): pass
            def test_length(self, seq_len): assert seq_len
        """
    )
    run("-W", "error").assert_outcomes(passed=3)


def test_a_label_with_arguments_of_ours_is_refused_all_the_same(pytester, folder, run):
    pytester.makeini("[pytest]\nmarkers =\n    throughput: ours\n")
    marked(pytester, "throughput(seq_len=4)", "tmp_path")
    refused(run(), "throughput does nothing here: the test does not use throughput")
    assert not (folder / "ran").exists()


WRONG = """
import pytest
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.throughput(batch_size=0)
def test_speed(n, throughput): raise AssertionError("ran")
@pytest.mark.max_memory("lots")
def test_memory(): raise AssertionError("ran")
def test_sound(): pass
"""


def test_all_that_is_wrong_is_told_and_each_once(pytester, run):
    pytester.makepyfile(test_it=WRONG)
    result = run("--junitxml=out.xml")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        [
            "*ERROR collecting test_it.py*",
            "test_it.py::test_speed*: marker throughput: batch_size: got 0*",
            "*ERROR collecting test_it.py*",
            "test_it.py::test_memory: marker max_memory: limit: got 'lots'*",
            "*Interrupted: 2 errors during collection*",
        ]
    )
    errors = [
        each.get("name") for each in ET.parse("out.xml").iter("testcase") if each.find("error") is not None
    ]
    assert [name.partition("[")[0] for name in errors] == ["test_speed", "test_memory"]


def test_what_is_sound_runs_where_pytest_is_told_to_go_on(pytester, run):
    pytester.makepyfile(test_it=WRONG)
    result = run("--continue-on-collection-errors")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, errors=2)


def test_one_that_is_not_asked_for_is_told_too(pytester, run):
    pytester.makepyfile(test_it=WRONG)
    result = run("-k", "sound")
    assert result.ret == pytest.ExitCode.INTERRUPTED


@pytest.mark.slow
def test_bad_arguments_are_named_under_xdist_too(pytester, folder, run_apart):
    marked(pytester, "nan_injection(step=-1)", "stability_run")
    result = run_apart("-n", "1")
    assert result.ret not in (pytest.ExitCode.OK, pytest.ExitCode.INTERNAL_ERROR)
    text = result.stdout.str() + result.stderr.str()
    assert "test_it.py::test_marked: marker nan_injection: step: got -1" in text
    assert not (folder / "ran").exists()


def test_stability_is_set_where_the_fixture_is_used(pytester, run):
    pytester.makepyfile(
        """
        import pytest
        def test_direct(stability_run): pass
        @pytest.fixture
        def short_run(stability_run): return stability_run
        def test_through_a_fixture(short_run): pass
        @pytest.mark.stability
        def test_by_hand(): pass
        def test_ordinary(): pass
        """
    )
    run("-m", "stability").assert_outcomes(passed=3, deselected=1)
    run("-m", "not stability").assert_outcomes(passed=1, deselected=3)


@pytest.mark.parametrize("level", ["class", "module", "class attribute"])
def test_marker_on_many_tests(pytester, run, report, level):
    marker = "pytest.mark.nan_injection(step=2)"
    pytester.makepyfile(
        f"""
        import models, pytest
        {f"pytestmark = {marker}" if level == "module" else ""}
        {f"@{marker}" if level == "class" else ""}
        class TestIt:
            {f"pytestmark = {marker}" if level == "class attribute" else ""}
            def test_one(self, stability_run):
                assert stability_run(models.plain, steps=4).alarm_steps == [2]
            @pytest.mark.nan_injection(step=3, target="loss")
            def test_two(self, stability_run):
                assert stability_run(models.plain, steps=5).alarm_steps == [2, 3]
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=2)
    faults = [record["faults"] for record in report()["stability"]]
    assert faults == [
        ["nan_injection(step=2, target='activation:head')"],
        ["nan_injection(step=2, target='activation:head')", "nan_injection(step=3, target='loss')"],
    ]


@pytest.mark.parametrize("marker", ["nan_injection(step=1)", "gradient_explosion(step=6)"])
def test_faults_that_no_run_saw_are_an_error(pytester, run, marker):
    marked(pytester, marker, "stability_run")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the test declares faults but never called stability_run"])


def test_no_faults_and_no_run_is_fine(pytester, run):
    pytester.makepyfile("def test_it(stability_run): pass")
    run().assert_outcomes(passed=1)


def test_test_that_skips_itself_need_not_run(pytester, run):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.nan_injection(step=1)
        def test_it(stability_run): pytest.importorskip("no_such_library")
        """
    )
    run().assert_outcomes(skipped=1)


def test_test_that_fails_before_its_run_fails_once(pytester, run):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.nan_injection(step=1)
        def test_it(stability_run): raise KeyError("before")
        """
    )
    run().assert_outcomes(failed=1)


def test_markers_of_other_projects_with_our_names(pytester, run):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.stability("flaky", owner="them")
        def test_theirs(): pass
        """
    )
    run().assert_outcomes(passed=1)


def test_marker_of_a_module_is_for_the_tests_that_read_it(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        pytestmark = pytest.mark.nan_injection(step=1)
        def test_fault(stability_run): assert stability_run(models.plain, steps=3).alarm_steps == [1]
        def test_helper(): pass
        """
    )
    run().assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "p50, p95, p99: got None; allowed: a time such as '20ms' for one of them at least"),
        ("p95=20", "p95: got 20; allowed: a string such as '50us': a number and one of ns, us, ms, s"),
        ("p50='0ms'", "p50: got '0ms'; allowed: a time above 0"),
        ("p50='1ms', of='first'", "of: got 'first'; allowed: 'ttft', 'itl', 'tpot', 'e2e'"),
        ("p90='1ms'", "key: got 'p90'; allowed: 'p50', 'p95', 'p99', 'of'"),
        ("'1ms'", "takes keyword arguments only"),
    ],
)
def test_max_latency_is_refused(pytester, run, arguments, text):
    marked(pytester, f"max_latency({arguments})", "throughput")
    refused(run(), "max_latency", text)


def test_of_several_markers_gate_the_closest_counts_for_each_argument(pytester):
    items = pytester.getitems(
        """
        import pytest
        pytestmark = pytest.mark.gate(time="9%", tpot="9%", memory=None)
        @pytest.mark.gate(time="3%", floor="1us")
        @pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.gate(time="5%", ttft="4%"))])
        def test_it(benchmark, n): pass
        def test_other(benchmark): pass
        """
    )
    found = [gate_of(item, Limits(ttft=Limit(0.5))) for item in items]
    of_function = Limits(Limit(0.03, floor=1e-6), None, Limit(0.5, floor=1e-6), Limit(0.09, floor=1e-6))
    assert found == [
        of_function,
        replace(of_function, time=Limit(0.05, floor=1e-6), ttft=Limit(0.04, floor=1e-6)),
        Limits(Limit(0.09), None, Limit(0.5), Limit(0.09)),
    ]
    # Of one on a module it is not known which tests it means.
    assert [gated_metrics(item) for item in items] == [("time",), ("time", "ttft"), ()]


def test_a_marker_of_a_parameter_is_closer_than_that_of_the_function(pytester):
    item, other = pytester.getitems(
        """
        import pytest
        def near(n):
            mark = pytest.mark
            return pytest.param(n, marks=[
                mark.max_memory("1 KiB"), mark.min_tokens_per_second(7), mark.throughput(mode="train"),
                mark.no_memory_growth(steps=12), mark.quality(task="mmlu", at_least=0.7),
            ])
        @pytest.mark.max_memory("1 GiB")
        @pytest.mark.min_tokens_per_second(1)
        @pytest.mark.throughput(mode="forward", seq_len=8)
        @pytest.mark.no_memory_growth(steps=8, warmup=1)
        @pytest.mark.quality(task="hellaswag", at_least=0.1)
        @pytest.mark.parametrize("n", [near(1), 2])
        def test_it(throughput, no_memory_growth, quality, n): pass
        """
    )
    assert (max_memory_of(item), max_memory_of(other)) == (2**10, 2**30)
    assert (min_tokens_per_second_of(item), min_tokens_per_second_of(other)) == (7.0, 1.0)
    assert (throughput_of(item), throughput_of(other)["mode"]) == ({"mode": "train"}, "forward")
    assert (no_memory_growth_of(item), no_memory_growth_of(other)["steps"]) == ({"steps": 12}, 8)
    assert (quality_of(item).task, quality_of(other).task) == ("mmlu", "hellaswag")


def test_help_has_every_argument_of_a_fault(pytestconfig):
    """With its default. The folder is the test's own, and a fault of storage is there from the start."""
    from stackwise.stability.faults import KNOWN_FAULTS

    told = {line.partition("(")[0]: line for line in pytestconfig.getini("markers")}
    of_storage = {"disk_full", "short_write", "bit_rot"}
    for name, fault in KNOWN_FAULTS.items():
        expected = {
            each.name: None if each.default is dataclasses.MISSING else each.default
            for each in dataclasses.fields(fault)
            if each.init
        }
        if name in of_storage:
            expected |= {"folder": ".", "step": 0}
        given = ast.parse(told[name].partition("): ")[0] + ")", mode="eval").body
        found = {each.id: None for each in given.args}
        found |= {each.arg: ast.literal_eval(each.value) for each in given.keywords}
        assert found == expected, name
