"""Findings of tests that pass: warnings of pytest, the verdict WARN, and failures if that is strict."""

import pytest

pytestmark = pytest.mark.usefixtures("every_check")

WARNS = """
import models, pytest
from pytest_stackwise import parametrize_with_checks
@parametrize_with_checks([models.plain], checks=["token_effect", "determinism"]{arguments})
def test_model(spec, check): check(spec)
"""
UNSTABLE = """
import models
def test_run(stability_run):
    from stackwise.stability import NanInjection
    stability_run(models.loop_spec(), steps=4, faults=[NanInjection(step=1, target="weight")])
"""
CAUGHT = """
import models, pytest
from pytest_stackwise import parametrize_with_checks
from pytest_stackwise.checks import CheckFailedError
@parametrize_with_checks([models.leaky], checks=["causality"])
def test_model(spec, check):
    with pytest.raises(CheckFailedError): check(spec)
"""


@pytest.fixture
def write(pytester):
    """Write a test file: write(source, arguments of parametrize_with_checks)."""

    def write(source, arguments=""):
        pytester.makepyfile(test_it=source.replace("{arguments}", arguments))

    return write


@pytest.mark.parametrize(
    "source, passed", [(WARNS, 2), (UNSTABLE, 1), (CAUGHT, 1)], ids=["check", "run", "caught"]
)
def test_finding_of_a_test_that_passes_is_one_warning(write, run, report, source, passed):
    write(source)
    result = run("--stackwise-report=out.json")
    result.assert_outcomes(passed=passed, warnings=1)
    assert result.ret == pytest.ExitCode.OK
    assert report()["verdict"] == "WARN"
    result.stdout.fnmatch_lines(
        ["*= warnings summary =*", "*test_it.py::test_*", "*StackwiseWarning: *", "verdict: WARN (*"]
    )


def test_warning_says_first_what_is_wrong_then_when_it_is_correct(write, run):
    write(WARNS)
    run().stdout.fnmatch_lines(
        ["*StackwiseWarning: plain: token_effect warned; *have no effect*This is correct if*"]
    )


@pytest.mark.parametrize("ending", ["model:plain", "trainer:slow_start"], ids=["model", "trainer"])
def test_zero_code_check_that_warns(pytester, run, ending):
    pytester.makepyfile(
        more="""
        import torch
        from models import Loop, plain
        def slow_start():
            loop = Loop()
            loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda n: min(n / 10, 1.0))
            step = loop.step
            loop.step = lambda batch: (step(batch), loop.scheduler.step())[0]
            return loop
        """
    )
    kind, factory = ending.split(":")
    asked = (f"--stackwise-{kind}=more:{factory}", "--stackwise-checks=token_effect,scheduler_order")
    result = run(*asked)
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(
        ["stackwise[[]more:*::*", "*StackwiseWarning: *warned*", "verdict: WARN (*1 warned*"]
    )
    run(*asked, "--stackwise-strict").assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize("source", [WARNS, UNSTABLE], ids=["check", "run"])
@pytest.mark.parametrize("way", ["option", "ini"])
def test_strict_fails_a_test_for_each_finding(pytester, write, run, report, source, way):
    write(source)
    if way == "ini":
        pytester.makeini("[pytest]\nstackwise_strict = true")
    result = run("--stackwise-report=out.json", *(["--stackwise-strict"] if way == "option" else []))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["failed"] == 1 and "warnings" not in result.parseoutcomes()
    assert report()["verdict"] == "FAIL"


def test_strict_of_one_test(write, run):
    write(WARNS, ", strict=True")
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["E *CheckFailedError: plain: token_effect failed*", "E *Strict: a warning fails*"]
    )


@pytest.mark.parametrize("source", [WARNS, UNSTABLE], ids=["check", "run"])
@pytest.mark.parametrize("by", ["command line", "ini"])
def test_filter_that_makes_warnings_errors_fails_the_test(pytester, write, run, source, by):
    write(source)
    if by == "ini":
        pytester.makeini("[pytest]\nfilterwarnings =\n    error")
    result = run(*(["-W", "error::pytest_stackwise.StackwiseWarning"] if by == "command line" else []))
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["This warning is an error because of a warning filter."])
    assert "plugin.py" not in result.stdout.str() and "Traceback" not in result.stdout.str()


def test_filter_that_ignores_warnings_leaves_the_verdict(write, run):
    write(WARNS)
    result = run("-W", "ignore::pytest_stackwise.StackwiseWarning")
    result.assert_outcomes(passed=2, warnings=0)
    result.stdout.fnmatch_lines(["verdict: WARN (*"])


@pytest.mark.parametrize("form", ["{reasons}", "lambda spec: {reasons}"], ids=["mapping", "function"])
def test_accepted_warning_passes_and_is_shown_with_its_reason(write, run, report, form):
    reasons = "{'token_effect': 'no memory by design'}"
    write(WARNS, f", accepted_warnings={form.format(reasons=reasons)}")
    result = run("--stackwise-strict", "--stackwise-report=out.json")
    result.assert_outcomes(passed=2, warnings=0)
    result.stdout.fnmatch_lines(
        ["  XWARN token_effect*declared: no memory by design", "verdict: PASS (*1 accepted warning*"]
    )
    assert report()["verdict"] == "PASS"


def test_accepted_warning_that_does_not_occur_fails(write, run):
    write(WARNS.replace("models.plain", "models.rack"), ", accepted_warnings={'token_effect': 'long ago'}")
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*declared as an accepted warning, but passed*", "E*long ago*"])


def test_accepted_warning_of_an_unknown_check_is_a_collection_error(write, run):
    write(WARNS, ", accepted_warnings={'casuality': 'typo'}")
    result = run()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["E *accepted_warnings: got casuality*allowed: determinism, token_effect*"])


@pytest.mark.parametrize(
    "options, passes, warns, accepted",
    [((), False, True, True), (("-q",), False, True, False), (("-v",), True, True, True)],
)
def test_section_by_verbosity(pytester, run, options, passes, warns, accepted):
    pytester.makepyfile(
        """
        import models
        from pytest_stackwise import parametrize_with_checks
        @parametrize_with_checks([models.plain], checks=["token_effect", "determinism"])
        def test_model(spec, check): check(spec)
        accepted = {"token_effect": "ok"}
        @parametrize_with_checks([models.Plain], checks=["token_effect"], accepted_warnings=accepted)
        def test_other(spec, check): check(spec)
        """
    )
    text = run(*options).stdout.str()
    found = [mark in text for mark in ("  PASS  determinism", "  WARN  token_effect", "  XWARN token_effect")]
    assert found == [passes, warns, accepted]
    assert "verdict: WARN (checks: 1 warned, 1 passed, 1 accepted warning)" in text


def test_run_in_which_nothing_applies_is_empty(write, run, report):
    source = WARNS.replace("models.plain", "models.vectors")
    write(source.replace("token_effect", "causality").replace("determinism", "initial_loss"))
    run("--stackwise-report=out.json").assert_outcomes(skipped=2)
    assert report()["verdict"] == "EMPTY"


@pytest.mark.slow
def test_warnings_come_through_workers(write, run_apart):
    pytest.importorskip("xdist")
    write(WARNS)
    result = run_apart("-n", "2")
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(["*StackwiseWarning: plain: token_effect warned*", "verdict: WARN (*"])


def test_wrong_value_of_the_strict_setting_is_a_usage_error(pytester, run):
    pytester.makeini("[pytest]\nstackwise_strict = maybe\n")
    pytester.makepyfile("def test_it(): pass")
    pytester.makeconftest(
        "from pytest_stackwise import options\ndef pytest_collection_finish(session):\n"
        "    options.strict(session.config)\n"
    )
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*stackwise_strict: got 'maybe'; allowed: true, false"])
