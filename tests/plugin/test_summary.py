"""Summary and report: what all tests found out, and a verdict that is never better than the run."""

import json

import pytest

MIXED = """
import models, pytest
from pytest_stackwise import parametrize_with_checks
@parametrize_with_checks([models.leaky], checks=["causality", "determinism"])
def test_model(spec, check): check(spec)
@pytest.mark.nan_injection(step=2)
def test_fault(stability_run): assert stability_run(models.plain, steps=4).verdict == "caught"
def test_speed(throughput): throughput(models.plain, seq_len=4, **models.QUICK)
def test_ordinary(): pass
"""
SOUND = "import models\ndef test_it(stability_run): assert stability_run(models.plain, steps=1)\n"


def test_no_records_no_section(pytester, run):
    pytester.makepyfile("def test_one(): pass\ndef test_two(): assert 0")
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    assert "stackwise =" not in result.stdout.str()
    assert "verdict" not in result.stdout.str()


def test_section_has_every_kind_of_record(pytester, run):
    pytester.makepyfile(MIXED)
    result = run("--benchmark-disable")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*= stackwise =*",
            "checks of leaky",
            "  FAIL  causality  measured *",
            "        where: row *, position *",
            "stability",
            "  caught *plain  T=16, 4 steps, nan_injection(step=2*",
            " *step 2: non-finite loss nan in *; update skipped",
            "throughput",
            "  *::test_speed  plain  forward 1 x 4 float32 on cpu *",
            "verdict: FAIL (checks: 1 failed, 1 passed; stability: 1 caught; *; 1 test failed)",
        ]
    )


def test_section_follows_the_table_of_pytest_benchmark(pytester, run):
    pytester.makepyfile(MIXED)
    lines = run().stdout.str().splitlines()
    [table] = [n for n, line in enumerate(lines) if "benchmark: 1 tests" in line]
    [verdict] = [n for n, line in enumerate(lines) if line.startswith("verdict: ")]
    assert table < verdict


def test_section_comes_once(pytester, run):
    pytester.makepyfile(SOUND)
    text = run().stdout.str()
    assert text.count("= stackwise =") == 1
    assert text.count("verdict: ") == 1


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("out.md", ["out.md"]),
        ("out.json", ["out.json"]),
        ("out.html", ["out.html"]),
        ("out", ["out.html", "out.json", "out.md"]),
        ("deep/er/out", ["deep/er/out.html", "deep/er/out.json", "deep/er/out.md"]),
    ],
)
def test_files(pytester, folder, run, given, written):
    pytester.makepyfile(SOUND)
    result = run(f"--stackwise-report={given}")
    result.assert_outcomes(passed=1)
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*out*") if p.is_file()) == written
    result.stdout.fnmatch_lines_random([f"report: {name}" for name in written])


def test_no_report_is_written_unasked(pytester, folder, run):
    pytester.makepyfile(SOUND)
    run().assert_outcomes(passed=1)
    assert not [*folder.glob("*.json"), *folder.glob("*.md")]


def test_json_report(pytester, folder, run, report):
    from stackwise import Report

    pytester.makepyfile(MIXED)
    run("--stackwise-report=out.json")
    found = report()
    assert {(record["check"], record["status"]) for record in found["checks"]} == {
        ("causality", "failed"),
        ("determinism", "passed"),
    }
    assert [record["verdict"] for record in found["stability"]] == ["caught"]
    assert [record["model"] for record in found["throughput"]] == ["plain"]
    assert found["failed_tests"] == ["test_json_report.py::test_model[leaky-causality]"]
    assert found["verdict"] == "FAIL"
    assert Report.from_json(folder / "out.json").verdict == "FAIL"


def test_markdown_report(pytester, folder, run):
    pytester.makepyfile(MIXED)
    run("--stackwise-report=out.md")
    lines = (folder / "out.md").read_text().splitlines()
    assert lines[0] == "# stackwise report"
    assert [line for line in lines if line.startswith("## ")] == [
        "## Checks of leaky",
        "## Stability",
        "## Throughput",
        "## Failed tests",
    ]
    assert any(line.startswith("| FAIL | causality |") for line in lines)
    assert "- `test_markdown_report.py::test_model[leaky-causality]`" in lines


def test_html_report(pytester, folder, run):
    pytester.makepyfile(MIXED)
    run("--stackwise-report=out.html", "--stackwise-seed=3")
    html = (folder / "out.html").read_text()
    parts = [
        "FAIL",
        "causality",
        "position",
        "pytest &#39;test_html_report.py::test_model[leaky-causality]&#39;",
    ]
    assert [part for part in parts if part not in html] == []
    assert html.index("Failed checks") < html.index("Stability runs") < html.index("Throughput")


def test_report_has_the_error_and_the_command_of_a_failed_test(pytester, run, report):
    pytester.makepyfile(test_it="def test_one(): assert 1 == 2")
    run("--stackwise-report=out.json", "--stackwise-seed=3", "--stackwise-strict")
    error = {"where": "test_it.py:1", "message": "assert 1 == 2"}
    assert report()["errors"] == {"test_it.py::test_one": error}
    command = "pytest test_it.py::test_one --stackwise-seed=3 --stackwise-strict"
    assert report()["commands"] == {"test_it.py::test_one": command}


def test_report_repeats_a_check_without_code_by_the_command(pytester, run, report):
    run("--stackwise-model=models.py:leaky", "--stackwise-checks=causality", "--stackwise-report=out.json")
    [(test, command)] = report()["commands"].items()
    assert test == "stackwise[models.py:leaky]::causality"
    assert command == "stackwise check models.py:leaky --checks causality --seed 0 --device cpu"


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (SOUND, "PASS"),
        ("def test_it(): pass", "EMPTY"),
        ("def test_it(): assert 0", "FAIL"),
        (SOUND + "def test_other(): assert 0", "FAIL"),
        (SOUND + "def test_other(no_such_fixture): pass", "FAIL"),
        (
            SOUND
            + "import pytest\n@pytest.fixture\ndef bad():\n    yield\n    1 / 0\ndef test_other(bad): pass",
            "FAIL",
        ),
        (SOUND + "import pytest\n@pytest.mark.xfail\ndef test_other(): assert 0", "PASS"),
        (SOUND + "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_other(): pass", "FAIL"),
        (SOUND + "import pytest\ndef test_other(): pytest.skip('x')", "PASS"),
    ],
    ids=["sound", "empty", "failed", "other failed", "setup", "teardown", "xfail", "xpass", "skip"],
)
def test_verdict(pytester, run, report, source, verdict):
    pytester.makepyfile(source)
    run("--stackwise-report=out.json")
    assert report()["verdict"] == verdict


def test_file_that_cannot_be_collected_is_no_pass(pytester, run, report):
    pytester.makepyfile(test_sound=SOUND, test_torn="def test_(:")
    result = run("--stackwise-report=out.json", "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, errors=1)
    assert report()["verdict"] == "FAIL"


@pytest.mark.slow
def test_run_that_ended_early_is_no_pass(pytester, run_apart, report):
    pytester.makepyfile(SOUND + "def test_last(): raise KeyboardInterrupt\ndef test_never(): pass")
    result = run_apart("--stackwise-report=out.json")
    assert result.ret != pytest.ExitCode.OK
    assert report()["verdict"] == "INCOMPLETE"


def test_old_report_is_replaced(pytester, folder, run, report):
    (folder / "out.json").write_text("old")
    pytester.makepyfile(SOUND)
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    assert report()["verdict"] == "PASS"
    assert not list(folder.glob(".out.json*"))


def test_records_are_plain_json(pytester, folder, run):
    pytester.makepyfile(SOUND)
    run("--stackwise-report=out.json").assert_outcomes(passed=1)

    def refuse(constant):
        raise ValueError(constant)

    assert json.loads((folder / "out.json").read_text(), parse_constant=refuse)["stability"]


def test_finding_that_no_test_minds_is_no_plain_pass(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.gradient_explosion(step=8, factor=1.01)
        def test_it(stability_run): stability_run(models.plain)
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    assert report()["stability"][0]["verdict"] == "missed"
    assert report()["verdict"] == "WARN"


def test_collecting_alone_writes_nothing(pytester, folder, run):
    pytester.makepyfile(SOUND)
    run("--stackwise-report=out.json", "--collect-only")
    assert not (folder / "out.json").exists()


def test_report_says_where_it_was_measured(pytester, run, report):
    pytester.makepyfile(SOUND)
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    assert {"cpu", "torch", "python", "gpu"} <= report()["environment"].keys()


def test_repeated_command_works_from_a_subfolder(pytester, run, report):
    pytester.mkdir("sub")
    (pytester.path / "sub" / "test_in.py").write_text("def test_it(): assert 0\n")
    (pytester.path / "pytest.ini").write_text("[pytest]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(pytester.path / "sub")
        run("--stackwise-report=out.json")
    stored = json.loads((pytester.path / "sub" / "out.json").read_text())
    assert stored["commands"] == {"sub/test_in.py::test_it": "pytest test_in.py::test_it"}


def test_zero_code_command_has_the_options_of_the_run(pytester, run):
    target = "models.py:leaky"
    run(
        f"--stackwise-model={target}",
        "--stackwise-checks=causality",
        "--stackwise-strict",
        "--stackwise-suite=full",
        "--stackwise-report=out.json",
    )
    commands = json.loads((pytester.path / "out.json").read_text())["commands"]
    assert commands[f"stackwise[{target}]::causality"] == (
        f"stackwise check {target} --checks causality --seed 0 --device cpu --suite full --strict"
    )


def test_report_that_fails_keeps_the_summary(pytester, run, monkeypatch):
    pytester.makepyfile(SOUND)
    monkeypatch.setattr("stackwise.report.Report.write", lambda *_: 1 / 0)
    result = run("--stackwise-report=out.html")
    result.stdout.fnmatch_lines(["verdict: *", "report not written: *out.html: ZeroDivisionError: *"])
    assert result.ret == 1


def test_models_of_one_name_in_one_list_get_numbers(pytester, run):
    pytester.makepyfile("""
import models
from pytest_stackwise import parametrize_with_checks
def variant(make):
    def build(): return make()
    return build
@parametrize_with_checks([variant(models.plain), variant(models.leaky)], checks=["causality"])
def test_model(spec, check): check(spec)
""")

    result = run("-v")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_model[[]build-causality] PASSED*"])
    result.stdout.fnmatch_lines(["*test_model[[]build_2-causality] FAILED*", "checks of build_2"])


def test_models_of_one_name_are_told_apart(pytester, run):
    test = """
import models
from pytest_stackwise import parametrize_with_checks
def build(): return models.{name}()
@parametrize_with_checks([build], checks=["causality"])
def test_model(spec, check): check(spec)
"""
    pytester.makepyfile(test_one=test.format(name="leaky"), test_two=test.format(name="plain"))
    result = run("--stackwise-report=report.md")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["checks of build in test_one.py::test_model"])
    report = (pytester.path / "report.md").read_text()
    assert "## Checks of build in test_one.py::test_model" in report
    assert "## Checks of build in test_two.py::test_model" in report


def test_model_of_two_tests_with_different_checks_has_one_section(pytester, run):
    pytester.makepyfile(
        """
import models
from pytest_stackwise import parametrize_with_checks
@parametrize_with_checks([models.plain], checks=["causality"])
def test_one(spec, check): check(spec)
@parametrize_with_checks([models.plain], checks=["determinism"])
def test_two(spec, check): check(spec)
"""
    )
    run("--stackwise-report=report.md").assert_outcomes(passed=2)
    assert (pytester.path / "report.md").read_text().count("## Checks of ") == 1
