"""Compatibility: the plugin beside other plugins, without them, and under strict settings."""

import pytest

EVERYTHING = """
import models, pytest
from pytest_stackwise import parametrize_with_checks
@parametrize_with_checks([models.conv, models.leaky], checks=["causality"])
def test_model(spec, check): check(spec)
@pytest.mark.nan_injection(step=2)
@pytest.mark.seq_lengths(4, 8)
def test_fault(stability_run): assert stability_run(models.plain, steps=4).verdict == "caught"
@pytest.mark.throughput(seq_len=4)
def test_speed(throughput): throughput(models.plain, **models.QUICK)
@pytest.mark.gpu
def test_gpu(): pass
"""
IDS = [
    "test_it.py::test_model[conv-causality]",
    "test_it.py::test_model[leaky-causality]",
    "test_it.py::test_fault[T4]",
    "test_it.py::test_fault[T8]",
    "test_it.py::test_speed",
    "test_it.py::test_gpu",
]
OTHERS = ["benchmark", "hypothesispytest", "xdist", "junitxml"]


@pytest.fixture(autouse=True)
def _everything(pytester, folder):
    pytester.makepyfile(test_it=EVERYTHING)


@pytest.mark.parametrize("plugin", OTHERS)
def test_without_another_plugin(run, report, plugin):
    result = run("-p", f"no:{plugin}", "--stackwise-model=models:conv", "--stackwise-report=out.json")
    result.assert_outcomes(passed=11, failed=1, skipped=1)
    assert report()["verdict"] == "FAIL"
    assert len(report()["throughput"]) == 1


def test_without_a_terminal_the_exit_code_and_the_report_still_tell(run, report):
    result = run("-p", "no:terminal", "--stackwise-report=out.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert report()["failed_tests"] == ["test_it.py::test_model[leaky-causality]"]
    assert run("-p", "no:terminal", "-k", "conv").ret == pytest.ExitCode.OK


def test_without_the_plugin_itself_nothing_passes_by_mistake(run_apart, every_check):
    result = run_apart("-p", "no:stackwise", "--strict-markers")
    assert result.ret not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    result.stdout.fnmatch_lines(["*not found in `markers` configuration option"])


def test_strict_runs_have_no_warnings(run):
    result = run("--strict-markers", "--strict-config", "-W", "error", "--stackwise-model=models:conv")
    result.assert_outcomes(passed=11, failed=1, skipped=1, warnings=0)


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_import_modes(run, mode):
    result = run(f"--import-mode={mode}", "--stackwise-model=models:conv")
    result.assert_outcomes(passed=11, failed=1, skipped=1)


def test_collect_only_lists_ids(run):
    result = run("--collect-only", "-q", "--stackwise-model=models:conv")
    assert result.ret == pytest.ExitCode.OK
    listed = [line for line in result.outlines if "::" in line]
    assert listed[: len(IDS)] == IDS
    assert listed[len(IDS) :] == [
        f"stackwise[models:conv]::{name}"
        for name in (
            "model",
            "determinism",
            "batch_invariance",
            "causality",
            "finite_gradients",
            "finite_logits",
            "initial_loss",
        )
    ]
    assert "verdict" not in result.stdout.str()


def test_collect_only_draws_a_tree(run):
    result = run("--collect-only", "--stackwise-model=models:conv")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*<ZeroCodeCollector stackwise?models:conv?>", "*<ZeroCodeItem causality>"])


@pytest.mark.parametrize("node", IDS)
def test_each_id_can_be_run(run, node):
    outcome = {"leaky": "failed", "gpu": "skipped"}
    (expected,) = [value for key, value in outcome.items() if key in node] or ["passed"]
    run(node).assert_outcomes(**{expected: 1})


@pytest.mark.parametrize("style", ["auto", "short", "line", "native", "no"])
def test_every_traceback_style_tells_the_failed_check(run, style):
    result = run(f"--tb={style}", "-rf", "--stackwise-model=models:leaky", "-k", "leaky and causality")
    result.assert_outcomes(failed=2, deselected=11)
    result.stdout.fnmatch_lines(["FAILED test_it.py::*CheckFailedError: leaky: causality failed*"])
    # pytest 8 shows the message of a failed Python test only.
    message = "leaky: causality failed" if pytest.version_tuple >= (9,) else ""
    result.stdout.fnmatch_lines([f"FAILED stackwise?models:leaky?::causality*{message}*"])


@pytest.mark.parametrize("arguments", [["-v"], ["-qq"], ["-rA"], ["--durations=3"], ["-x"], ["--setup-show"]])
def test_verbosity(run, arguments):
    result = run(*arguments, "--stackwise-model=models:leaky", "-k", "models or plain")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in result.stdout.str()
    result.stdout.fnmatch_lines(["verdict: FAIL *"])


def test_unittest_and_doctest_items_are_left_alone(pytester, run):
    pytester.makepyfile(
        test_other='''
        """
        >>> 1 + 1
        2
        """
        import unittest
        class TestIt(unittest.TestCase):
            def test_it(self): pass
        '''
    )
    run("--doctest-modules", "test_other.py").assert_outcomes(passed=2)


def test_marker_on_a_unittest_is_refused(pytester, run):
    pytester.makepyfile(
        test_other="""
        import pytest, unittest
        class TestIt(unittest.TestCase):
            @pytest.mark.nan_injection(step=1)
            def test_it(self): pass
        """
    )
    result = run("test_other.py")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*::test_it: *nan_injection does nothing here*"])


def test_hypothesis_test_may_use_the_fixtures(pytester, run, report):
    pytester.makepyfile(
        test_other="""
        import models
        from hypothesis import HealthCheck, given, settings, strategies as st
        @given(steps=st.integers(1, 2))
        @settings(max_examples=2, database=None, deadline=None,
                  suppress_health_check=[HealthCheck.function_scoped_fixture])
        def test_it(stability_run, steps): assert stability_run(models.plain, steps=steps).verdict == "stable"
        """
    )
    run("test_other.py", "--stackwise-report=out.json").assert_outcomes(passed=1)
    assert report()["stability"]
