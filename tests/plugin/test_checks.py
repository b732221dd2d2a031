"""Checks in two lines: ids, messages, expected failures and what the run's options say."""

from contextvars import Context
from xml.etree import ElementTree as ET

import pytest
import torch

CHECKS = ["determinism", "batch_invariance", "causality", "finite_gradients", "finite_logits", "initial_loss"]


def checked(pytester, arguments, body="check(spec)"):
    pytester.makepyfile(
        test_it=f"""
        import models, pathlib, pytest
        from stackwise import ModelSpec
        from pytest_stackwise import parametrize_with_checks
        @parametrize_with_checks({arguments})
        def test_model(spec, check): {body}
        """
    )


def test_every_spec_is_asked_every_check(pytester, run):
    checked(pytester, "[models.plain, ModelSpec.of(models.conv, name='shifted'), models.Plain()]")
    result = run("-v")
    result.assert_outcomes(passed=18)
    for name in ("plain", "shifted", "Plain"):
        result.stdout.fnmatch_lines([f"test_it.py::test_model[[]{name}-{check}] PASSED*" for check in CHECKS])


def test_other_parametrizations_stack(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        from stackwise import ModelSpec
        from pytest_stackwise import parametrize_with_checks
        @pytest.mark.parametrize("length", [4, 8])
        @parametrize_with_checks([models.plain], checks=["causality"])
        def test_model(spec, check, length): assert check(ModelSpec.of(spec, seq_len=length)).ok
        """
    )
    run().assert_outcomes(passed=2)


def test_failure_says_where_and_hides_the_library(pytester, run):
    checked(pytester, "[models.leaky]")
    result = run("-k", "causality")
    result.assert_outcomes(failed=1, deselected=5)
    result.stdout.re_match_lines(
        [
            r"> +def test_model\(spec, check\): check\(spec\)",
            r" +\^+",
            r"E +\S*CheckFailedError: leaky: causality failed: measured \d\.\d+, limit 1e-07",
            r"E +row \d+, position \d+, first difference: \w+",
            r"test_it\.py:\d+: CheckFailedError",
        ]
    )
    assert "pytest_stackwise/checks.py" not in result.stdout.str()
    assert "stackwise/checks/" not in result.stdout.str()


def test_failure_can_be_caught_with_its_result(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        from pytest_stackwise import parametrize_with_checks
        from pytest_stackwise.checks import CheckFailedError
        @parametrize_with_checks([models.leaky], checks=["causality"])
        def test_model(spec, check):
            with pytest.raises(CheckFailedError) as caught: check(spec)
            assert caught.value.result.status == "failed"
            assert caught.value.result.value > caught.value.result.limit
        """
    )
    run().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "expected",
    [
        "{'causality': 'it looks ahead'}",
        "lambda spec: {'causality': 'it looks ahead'} if 'l' in spec.name else {}",
    ],
    ids=["mapping", "function"],
)
def test_expected_failure_is_xfailed(pytester, run, report, expected):
    checked(pytester, f"[models.leaky], expected_failures={expected}")
    result = run("-rx", "--stackwise-report=out.json")
    result.assert_outcomes(passed=5, xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL test_it.py::test_model[[]leaky-causality] - it looks ahead"])
    statuses = {record["check"]: record["status"] for record in report()["checks"]}
    assert statuses["causality"] == "expected failure"
    assert report()["verdict"] == "PASS"


def test_expectations_of_a_function_differ_by_spec(pytester, run):
    checked(
        pytester,
        "[models.conv, models.leaky], "
        "expected_failures=lambda spec: {'causality': 'known'} if spec.name == 'leaky' else {}",
    )
    run().assert_outcomes(passed=11, xfailed=1)


def test_expected_failure_that_passes_fails(pytester, run):
    checked(pytester, "[models.conv], checks=['causality'], expected_failures={'causality': 'long mended'}")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*declared as an expected failure, but passed*", "E*long mended*"])


def test_expected_failure_that_does_not_apply_fails(pytester, run):
    checked(pytester, "[models.vectors], checks=['causality'], expected_failures={'causality': 'known'}")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*declared as an expected failure, but not applicable*"])


def test_expected_failure_fails_where_xfail_is_switched_off(pytester, run):
    checked(pytester, "[models.leaky], checks=['causality'], expected_failures={'causality': 'known'}")
    result = run("--runxfail")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*The output changes if*"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("[models.plain], expected_failures={'casuality': 'typo'}", "casuality"),
        ("[models.plain], checks=['determinism'], expected_failures={'causality': 'not asked'}", "causality"),
        ("[models.plain], checks=['casuality']", "casuality"),
        ("models.plain", "wanted a list"),
    ],
    ids=["mapping", "not asked", "check", "no list"],
)
def test_what_cannot_be_is_a_collection_error(pytester, run, arguments, text):
    checked(pytester, arguments)
    result = run()
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"E *{text}*"])


def test_expectation_that_shows_only_when_a_model_is_built_fails_its_tests(pytester, run):
    checked(pytester, "[models.plain], expected_failures=lambda spec: {'casuality': 'typo'}")
    result = run()
    result.assert_outcomes(failed=6)
    result.stdout.fnmatch_lines(["E *casuality*"])


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("number", "got int"),
        ("broken", "the weights are gone"),
        ("needy", "width"),
        ("offline", "Connection refused"),
    ],
)
def test_model_that_cannot_be_built_fails_once_and_is_skipped_then(pytester, run, factory, text):
    pytester.makepyfile(test_other="def test_other(): pass")
    checked(pytester, f"[models.{factory}, models.plain]")
    result = run("-rs")
    result.assert_outcomes(failed=1, skipped=5, passed=7)
    result.stdout.fnmatch_lines([f"E *{text}*", "SKIPPED*cannot be driven*see *determinism*"])
    # Whichever is asked alone says so itself.
    run("-k", f"{factory} and causality").assert_outcomes(failed=1, deselected=12)


def test_check_that_is_never_called_fails_its_test(pytester, run):
    pytester.makepyfile(
        """
        import models
        from pytest_stackwise import parametrize_with_checks
        @parametrize_with_checks([models.leaky])
        def test_model(spec, check): pass
        """
    )
    result = run()
    result.assert_outcomes(failed=6)
    result.stdout.fnmatch_lines(["*the test never called its check*"])


def test_models_are_not_built_at_collection(pytester, run):
    checked(pytester, "[models.broken]")
    assert run("--collect-only").ret == 0


def test_check_that_does_not_apply_is_skipped_with_the_reason(pytester, run):
    checked(pytester, "[models.vectors]")
    result = run("-rs")
    result.assert_outcomes(passed=4, skipped=2)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED*causality does not apply: needs the claim: causal=True",
            "SKIPPED*initial_loss does not apply: needs token ids*",
        ]
    )


@pytest.mark.parametrize(
    ("checks", "names"),
    [
        (["causality"], ["causality"]),
        (["finiteness", "causality"], ["causality", "finite_gradients", "finite_logits"]),
    ],
    ids=["check", "family"],
)
def test_selection(pytester, run, checks, names):
    checked(pytester, f"[models.plain], checks={checks}")
    result = run("-v")
    result.assert_outcomes(passed=len(names))
    result.stdout.fnmatch_lines([f"*[[]plain-{name}] PASSED*" for name in names])


def test_selection_by_keyword(pytester, run):
    checked(pytester, "[models.plain, models.conv]")
    run("-k", "causality").assert_outcomes(passed=2, deselected=10)
    run("-k", "conv and not finite").assert_outcomes(passed=4, deselected=8)


def test_device_and_seed_of_the_run_reach_the_check(pytester, run, driven):
    checked(pytester, "[models.plain]")
    run("--stackwise-seed=9", "--stackwise-device=cpu", "-k", "determinism").assert_outcomes(
        passed=1, deselected=5
    )
    assert set(driven) == {("cpu", 9)}


def test_junit_has_the_measured_value_and_counts_failures(pytester, folder, run):
    checked(pytester, "[models.leaky, models.vectors]")
    result = run("--junitxml=out.xml", "-k", "causality or determinism")
    result.assert_outcomes(passed=2, failed=1, skipped=1, deselected=8)
    (suite,) = ET.parse(folder / "out.xml").getroot().iter("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped"), suite.get("errors")) == (
        "4",
        "1",
        "1",
        "0",
    )
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    leak = cases["test_model[leaky-causality]"]
    assert "position" in leak.find("failure").text
    values = {p.get("name"): float(p.get("value")) for p in leak.iter("property")}
    assert values.keys() == {"stackwise.causality", "stackwise.causality.limit"}
    assert values["stackwise.causality"] > 1e-5 > values["stackwise.causality.limit"]
    assert not list(cases["test_model[vectors-causality]"].iter("property"))


def test_exception_in_a_model_is_the_failure_of_its_test(pytester, run):
    checked(pytester, "[models.eval_only]")
    result = run("-rf")
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(["FAILED *finite_gradients] - KeyError: 'only in eval mode'"])


@pytest.mark.usefixtures("_warm")
def test_check_outside_of_a_test_is_refused():
    from pytest_stackwise.checks import BoundCheck
    from stackwise.checks import known_checks

    check = BoundCheck(known_checks()["causality"])
    with pytest.raises(RuntimeError, match="outside of a test"):
        Context().run(check, torch.nn.Linear(2, 2))


def test_no_models_is_no_pass(pytester, run):
    checked(pytester, "[]")
    assert "passed" not in run().parseoutcomes()


def test_expected_failure_of_a_function_must_be_asked(pytester, run):
    checked(
        pytester,
        "[models.plain], checks=['determinism'], expected_failures=lambda spec: {'causality': 'why'}",
    )
    run().assert_outcomes(failed=1)


@pytest.mark.parametrize(
    "models", ["models.Plain()", "torch.nn.Sequential(models.Plain())", "'models:plain'"]
)
def test_one_model_is_no_list(pytester, run, models):
    pytester.makepyfile(
        f"""
        import models, torch
        from pytest_stackwise import parametrize_with_checks
        @parametrize_with_checks({models})
        def test_model(spec, check): check(spec)
        """
    )
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E *wanted a list of models*"])


def test_rerun_of_a_test_starts_anew(pytester, run, report):
    pytester.makeconftest(
        """
        from _pytest.runner import runtestprotocol
        def pytest_runtest_protocol(item, nextitem):
            for report in runtestprotocol(item, nextitem=nextitem, log=False):
                report.outcome = "rerun"
                item.ihook.pytest_runtest_logreport(report=report)
            for report in runtestprotocol(item, nextitem=nextitem, log=False):
                item.ihook.pytest_runtest_logreport(report=report)
            return True
        """
    )
    pytester.makepyfile(
        """
        import models
        from pytest_stackwise import parametrize_with_checks
        @parametrize_with_checks([models.plain], checks=["determinism"])
        def test_model(spec, check, throughput):
            check(spec)
            throughput(spec, **models.QUICK)
        """
    )
    run("--stackwise-report=out.json", "-p", "no:benchmark").assert_outcomes(passed=1)
    assert (len(report()["checks"]), len(report()["throughput"])) == (1, 1)


def test_suite_of_the_call_and_of_the_run(pytester, run, every_check):
    from stackwise.checks.check import select_checks

    fast = {c.name for c in select_checks()}
    full = {c.name for c in select_checks(suite="full")}
    assert fast < full

    def asked(arguments, *options):
        checked(pytester, arguments)
        found = run("--collect-only", "-q", *options)
        assert found.ret == 0
        return {line.partition("[plain-")[2].rstrip("]") for line in found.outlines if "[plain-" in line}

    assert asked("[models.plain]") == fast
    assert asked("[models.plain]", "--stackwise-suite=full") == full
    assert asked("[models.plain], suite='full'") == full
    assert asked("[models.plain], suite='fast'", "--stackwise-suite=full") == fast


@pytest.mark.parametrize(
    ("arguments", "option", "names"),
    [
        ("[models.plain]", "causality", ["causality"]),
        ("[models.plain]", "determinism,initial_loss", ["determinism", "initial_loss"]),
        ("[models.plain], checks=['finiteness', 'causality']", "finite_logits", ["finite_logits"]),
        ("[models.plain], checks=['finite_logits', 'causality']", "finiteness", ["finite_logits"]),
    ],
    ids=["one", "two", "narrowed by name", "narrowed by family"],
)
def test_option_narrows_what_is_asked(pytester, run, arguments, option, names):
    checked(pytester, arguments)
    result = run("-v", f"--stackwise-checks={option}")
    result.assert_outcomes(passed=len(names))
    result.stdout.fnmatch_lines([f"*[[]plain-{name}] PASSED*" for name in names])


def test_option_that_leaves_nothing_is_no_pass(pytester, run):
    checked(pytester, "[models.plain], checks=['determinism']")
    run("--stackwise-checks=causality").assert_outcomes(skipped=1)


def test_expected_failure_of_a_check_that_the_run_leaves_out(pytester, run):
    checked(pytester, "[models.leaky], expected_failures={'causality': 'it looks ahead'}")
    run("--stackwise-checks=determinism").assert_outcomes(passed=1)


def test_training_steps_are_asked_what_is_asked_of_these(pytester, run, every_check):
    checked(pytester, "[models.loop_spec(), models.plain], checks=['fresh_gradients', 'determinism']")
    result = run("-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*[[]loop-fresh_gradients] PASSED*", "*[[]plain-determinism] PASSED*"])


def test_training_step_that_is_wrong_fails(pytester, run, every_check, report):
    checked(
        pytester,
        "[ModelSpec and __import__('stackwise').TrainerSpec.of(models.piling)], checks=['fresh_gradients']",
    )
    result = run("--stackwise-report=out.json")
    result.assert_outcomes(failed=1)
    assert [(r["check"], r["status"]) for r in report()["checks"]] == [("fresh_gradients", "failed")]


def test_check_of_training_steps_is_unknown_to_models(pytester, run):
    checked(pytester, "[models.plain], checks=['fresh_gradients']")
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E *unknown fresh_gradients*"])


def test_exception_inside_a_check_is_its_error_in_the_report(pytester, run, report):
    checked(pytester, "[models.eval_only]")
    run("--stackwise-report=out.json").assert_outcomes(passed=4, failed=2)
    broken = {r["check"]: r["meaning"] for r in report()["checks"] if r["status"] == "error"}
    assert broken.keys() == {"finite_gradients", "finite_logits"}
    assert "KeyError" in broken["finite_logits"]


def test_warning_is_shown_and_fails_nothing(pytester, run, every_check):
    checked(pytester, "[models.plain], checks=['token_effect']")
    result = run()
    result.assert_outcomes(passed=1)
    # It reads no other position, which may be meant.
    result.stdout.fnmatch_lines(
        [
            "  WARN  token_effect  measured *",
            "*have no effect on the last output*",
            "verdict: WARN (checks: 1 warned)",
        ]
    )
