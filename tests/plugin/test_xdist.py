"""xdist: workers find out what a serial run finds out, and the controller writes it down once."""

from collections import Counter
from xml.etree import ElementTree as ET

import pytest

EVERYTHING = """
import models, pytest
from pytest_stackwise import parametrize_with_checks
@parametrize_with_checks([models.leaky], expected_failures=lambda spec: (
    {"causality": "known"} if spec.name == "leaky" else {}
))
def test_model(spec, check): check(spec)
@parametrize_with_checks([models.leaky], checks=["causality"])
def test_leak(spec, check): check(spec)
@pytest.mark.nan_injection(step=2)
@pytest.mark.seq_lengths(4, 8)
def test_fault(stability_run): assert stability_run(models.plain, steps=4).verdict == "caught"
@pytest.mark.gradient_explosion(step=5)
def test_explosion(stability_run): assert stability_run(models.plain, steps=8).alarm_steps == [5]
@pytest.mark.throughput(seq_len=4)
def test_speed(throughput): throughput(models.plain, **models.QUICK)
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.nan_injection(step=2)
def test_no_run(stability_run): pass
def test_ordinary(): assert 0
"""
CROSSES = """
import marshal, pytest
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    hook, report = item.config.hook, (yield)
    sent = hook.pytest_report_to_serializable(config=item.config, report=report)
    return hook.pytest_report_from_serializable(config=item.config, data=marshal.loads(marshal.dumps(sent)))
"""
WATCH = """
import os
from stackwise.report import Report
write = Report.write
def watched(self, path):
    with open("writers", "a") as file:
        file.write(os.environ.get("PYTEST_XDIST_WORKER", "controller") + "\\n")
    write(self, path)
Report.write = watched
"""
OPTIONS = ("--stackwise-model=models:conv", "--stackwise-model=models:needy", "--stackwise-seed=2")


def outcomes(path):
    (suite,) = ET.parse(path).getroot().iter("testsuite")
    return Counter(
        (case.get("classname"), case.get("name"), *(child.tag for child in case if child.tag != "properties"))
        for case in suite.iter("testcase")
    )


def comparable(report):
    """The report without what a clock or the order of the workers decides."""
    checks = sorted((r["model"], r["check"], r["status"]) for r in report["checks"])
    runs = sorted(
        (r["test"], r["verdict"], [round(s["loss"], 3) for s in r["records"] if not s["skipped"]])
        for r in report["stability"]
    )
    speeds = [(r["test"], r["model"], r["mode"], r["batch_size"], r["seq_len"]) for r in report["throughput"]]
    return checks, runs, speeds, sorted(report["failed_tests"]), report["verdict"]


def test_what_crosses_processes_is_all_there_is(pytester, folder, run, report, monkeypatch):
    """Each report of a test becomes plain values and a report again, as from a worker to the controller."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "--stackwise-checks=causality --benchmark-disable")
    pytester.makepyfile(test_it=EVERYTHING)
    here = run(*OPTIONS, "--stackwise-report=here.json", "--junitxml=here.xml")
    pytester.makeconftest(CROSSES)
    across = run(*OPTIONS, "--stackwise-report=across.json", "--junitxml=across.xml")
    assert across.parseoutcomes() == here.parseoutcomes()
    assert outcomes(folder / "across.xml") == outcomes(folder / "here.xml")
    assert comparable(report("across.json")) == comparable(report("here.json"))
    assert report("across.json")["stability"]


@pytest.mark.slow
def test_two_workers_agree_with_a_serial_run(pytester, folder, run, run_apart, report, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--stackwise-checks=causality,determinism")
    pytester.makepyfile(test_it=EVERYTHING)
    serial = run(*OPTIONS, "--stackwise-report=serial", "--junitxml=serial.xml")
    counts = {"passed": 8, "failed": 4, "skipped": 3, "xfailed": 1}
    serial.assert_outcomes(**counts)
    pytester.makeconftest(WATCH)
    spread = run_apart(*OPTIONS, "-n", "2", "--stackwise-report=spread", "--junitxml=spread.xml")
    spread.assert_outcomes(**counts)

    assert outcomes(folder / "spread.xml") == outcomes(folder / "serial.xml")
    assert comparable(report("spread.json")) == comparable(report("serial.json"))
    assert (folder / "writers").read_text().split() == ["controller", "controller"]
    assert spread.stdout.str().count("= stackwise =") == 1
    assert spread.stdout.str().count("report: spread.md") == 1
    assert (folder / "spread.md").read_text().count("## Stability") == 1
    # pytest-benchmark is off under xdist: nothing may look like a measurement.
    assert [record["measured"] for record in report("spread.json")["throughput"]] == [False]
    spread.stdout.fnmatch_lines(["*plain  forward 1 x 4 float32 on cpu  called once, not measured*"])


def test_model_that_is_not_there_is_named(pytester, run_apart):
    pytester.makepyfile("def test_it(): pass")
    result = run_apart("--stackwise-model=nothing:tiny", "-n", "1")
    assert result.ret not in (pytest.ExitCode.OK, pytest.ExitCode.INTERNAL_ERROR)
    assert "nothing:tiny" in result.stdout.str() + result.stderr.str()


@pytest.mark.slow
def test_crash_of_a_worker_is_no_pass(pytester, run_apart, report):
    pytester.makepyfile(
        """
        import models, os
        def test_sound(stability_run): assert stability_run(models.plain, steps=1)
        def test_crash(): os._exit(1)
        """
    )
    result = run_apart("-n", "1", "--stackwise-report=out.json")
    result.assert_outcomes(passed=1, failed=1)
    assert report()["verdict"] == "FAIL"
    assert len(report()["stability"]) == 1


@pytest.mark.slow
def test_choice_of_checks_reaches_the_workers(pytester, folder, run_apart, report):
    pytester.makepyfile(
        """
        import models
        from pytest_stackwise import parametrize_with_checks
        @parametrize_with_checks([models.conv, models.loop_spec()])
        def test_it(spec, check): check(spec)
        """
    )
    result = run_apart(
        "--stackwise-model=models:leaky",
        "--stackwise-trainer=models:piling",
        "--stackwise-checks=causality,fresh_gradients",
        "-n",
        "2",
        "--stackwise-report=out.json",
        "--junitxml=out.xml",
    )
    result.assert_outcomes(passed=4, failed=2)
    assert {(r["model"], r["check"], r["status"]) for r in report()["checks"]} == {
        ("conv", "causality", "passed"),
        ("loop", "fresh_gradients", "passed"),
        ("leaky", "causality", "failed"),
        ("piling", "fresh_gradients", "failed"),
    }
    names = {p.get("name") for p in ET.parse(folder / "out.xml").getroot().iter("property")}
    assert {"stackwise.causality", "stackwise.causality.limit"} <= names


@pytest.mark.slow
def test_unknown_check_is_named(pytester, run_apart):
    pytester.makepyfile("def test_it(): pass")
    result = run_apart("--stackwise-checks=cazuality", "-n", "1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "cazuality" in result.stderr.str()
