"""The report: its verdict, its three forms, and the file that is whole or not there."""

import json
import math
import re
from datetime import datetime

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.benchmark import measure, model_workload
from stackwise.checks import CheckResult, check_model
from stackwise.report import Report, report_files
from stackwise.report.html import report_page
from stackwise.stability import GradientExplosion, stability_run
from stackwise.subject.spec import ModelSpec
from stackwise.support.device import fingerprint

TRAINING = {
    "parameters": 1234567,
    "num_batches": 40,
    "seconds": 12.4,
    "tokens_per_second": 54321.6,
    "first_loss": 5.5451,
    "final_loss": 3.2109,
    "validation_loss": 3.3334,
}
THROUGHPUT = {
    "model": "rack",
    "mode": "train",
    "batch_size": 4,
    "seq_len": 128,
    "device": "cpu",
    "workload": "rack train",
    "median_seconds": 0.0125,
    "min_seconds": 0.01,
    "max_seconds": 0.02,
    "calls": 80,
    "tokens_per_second": 40960.0,
    "peak_memory_bytes": 300 * 2**20,
    "warmup_calls": 6,
    "steady": True,
    "measured": True,
}
STABILITY = {
    "model": "rack",
    "seq_len": 16,
    "faults": ["gradient_explosion(step=8)"],
    "fired": [8],
    "verdict": "caught",
    "alarms": [{"text": "step 8: gradient spike 12.3 (limit 3); update skipped"}],
    "records": [{"step": step} for step in (*range(9), 8, 9, 10, 11)],
}
STATUSES = {
    "passed": "PASS",
    "failed": "FAIL",
    "warned": "WARN",
    "error": "ERROR",
    "not applicable": "n/a",
    "expected failure": "XFAIL",
    "accepted warning": "XWARN",
}


def check(status="passed", **changes):
    fields = {"check": "causality", "model": "rack", "status": status, "value": 0.0, "limit": 1e-5}
    return CheckResult(**fields | changes).to_dict()


def full_report():
    report = Report(training=TRAINING, environment={"cpu": "some|cpu", "cpu_count": 2}, failed_tests=["t::a"])
    report.add("checks", **check())
    report.add(
        "checks", **check("failed", value=0.118, where="position 5", meaning="It moved.", advice="Look.")
    )
    report.add("stability", **STABILITY)
    report.add("throughput", **THROUGHPUT)
    return report


@pytest.fixture(scope="module")
def real(subjects):
    """A report of what the library itself finds out, not of what a test thinks that it looks like."""
    report = Report(environment=fingerprint())
    spec = ModelSpec.of(subjects.gru)
    for result in check_model(spec):
        report.add("checks", **result.to_dict())
    report.add("stability", **stability_run(spec, steps=8, faults=[GradientExplosion(step=5)]).to_dict())
    shape = {"mode": "forward", "batch_size": 1, "seq_len": 4}
    measured = measure(model_workload(spec, **shape), min_calls=2, min_seconds=0.0, warmup_seconds=0.0)
    report.add("throughput", model="gru", device="cpu", **shape, **measured.to_dict(), measured=True)
    return report


@pytest.mark.parametrize(
    "fields, verdict",
    [
        ({}, "EMPTY"),
        ({"environment": {"cpu": "x"}}, "EMPTY"),
        ({"checks": [check()]}, "PASS"),
        ({"checks": [check("warned")]}, "WARN"),
        ({"checks": [check("warned")], "failed_tests": ["t"]}, "FAIL"),
        ({"checks": [check("expected failure")]}, "PASS"),
        ({"checks": [check("accepted warning")]}, "PASS"),
        ({"checks": [check("not applicable")]}, "EMPTY"),
        ({"checks": [check("not applicable")], "stability": [STABILITY]}, "PASS"),
        ({"checks": [check("failed")]}, "WARN"),
        ({"checks": [check(), check("error")]}, "WARN"),
        ({"stability": [STABILITY]}, "PASS"),
        ({"stability": [STABILITY | {"verdict": "stable"}]}, "PASS"),
        *(
            ({"stability": [STABILITY | {"verdict": verdict}]}, "WARN")
            for verdict in ("unstable", "missed", "false alarm", "not recovered")
        ),
        ({"checks": [check()], "complete": False}, "INCOMPLETE"),
        ({"complete": False}, "INCOMPLETE"),
        ({"complete": False, "failed_tests": ["t"]}, "FAIL"),
        ({"checks": [check("failed")], "failed_tests": ["t"]}, "FAIL"),
        ({"throughput": [THROUGHPUT]}, "PASS"),
        ({"throughput": [THROUGHPUT | {"measured": False}]}, "EMPTY"),
        ({"training": TRAINING}, "PASS"),
        ({"training": TRAINING | {"final_loss": math.nan}}, "WARN"),
        ({"failed_tests": ["t"]}, "FAIL"),
        ({"checks": [check()], "failed_tests": ["t"]}, "FAIL"),
        ({"training": TRAINING, "stability": [STABILITY], "failed_tests": ["t"]}, "FAIL"),
    ],
)
def test_verdict(fields, verdict):
    report = Report(**fields)
    assert report.verdict == verdict
    assert report.to_dict()["verdict"] == verdict
    assert report.summary().startswith(f"verdict: {verdict} (")
    assert f"**verdict: {verdict} " in report.markdown()
    assert list(report.lines())[-1] == report.summary()


def test_summary():
    assert Report().summary() == "verdict: EMPTY (no results)"
    report = full_report()
    report.add("checks", **check())
    report.failed_tests.append("t::b")
    assert report.summary() == (
        "verdict: FAIL (training: 40 steps, loss 5.545 -> 3.211; checks: 1 failed, 2 passed; "
        "stability: 1 caught; throughput: 1 measured; "
        "2 tests failed)"
    )
    assert Report(failed_tests=["t"]).summary() == "verdict: FAIL (1 test failed)"


def test_what_failed_has_its_noun():
    report = Report(checks=[check("failed")], failed_tests=["rack::causality"], noun="check")
    assert report.summary() == "verdict: FAIL (checks: 1 failed)"
    assert "## Failed checks" in report.markdown()


@pytest.mark.parametrize(
    "text, told",
    [
        ('{"checks": 5}', "checks: got 5; Input should be a valid list"),
        ('{"failed_tests": [1]}', "failed_tests.0: got 1; Input should be a valid string"),
        ("[]", "got 'list'; allowed: a report, a JSON object"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text, told):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)) as raised:
        Report.from_json(path)
    assert str(raised.value).startswith(str(path))


def test_reports_that_do_not_say_the_noun_are_of_tests(tmp_path):
    path = tmp_path / "report.json"
    Report(failed_tests=["t"]).write(path)
    stored = json.loads(path.read_text())
    assert stored.pop("noun") == "test"
    path.write_text(json.dumps(stored))
    assert Report.from_json(path).noun == "test"


def test_sections():
    report = Report()
    with pytest.raises(
        ValueError, match="section: got 'speed'; allowed: checks, stability, throughput, memory"
    ):
        report.add("speed", value=1)
    with pytest.raises(ValueError, match="section: got 'training'"):
        report.add("training", value=1)
    assert report == Report(created=report.created)


def test_reports_share_nothing():
    one, two = Report(), Report()
    one.add("checks", **check())
    one.failed_tests.append("t")
    assert (two.checks, two.failed_tests) == ([], [])


def test_created_is_a_time_with_its_zone():
    created = datetime.fromisoformat(Report().created)
    assert created.utcoffset().total_seconds() == 0


@pytest.mark.parametrize("status", STATUSES)
def test_lines_of_checks(status):
    report = Report(
        checks=[check(status, value=0.25, limit=0.5, where="there", meaning="It is.", advice="Look.")]
    )
    header, *lines, _ = report.lines(1)
    assert header == "checks of rack"
    assert lines[0].split()[:2] == [STATUSES[status], "causality"]
    if status in ("failed", "warned", "error"):
        assert lines[0].endswith("causality  measured 0.25 (limit 0.5)")
        assert [line.strip() for line in lines[1:]] == ["It is.", "where: there.", "Look."]
    else:
        [line] = lines
        assert ("0.25 <= 0.5" in line) == (status == "passed")
        assert "It is [there]" in line
        assert ("Look" in line) == (status != "passed")


def test_failures_are_before_warnings_and_warnings_before_the_rest():
    report = Report(checks=[check(status) for status in ("passed", "warned", "failed", "warned", "error")])
    marks = [line.split()[0] for line in report.lines(1) if "causality" in line]
    assert marks == ["FAIL", "ERROR", "WARN", "WARN", "PASS"]


def test_long_text_of_a_finding_is_wrapped():
    report = Report(checks=[check("failed", meaning="word " * 60, advice="")])
    lines = list(report.lines())[2:-1]
    assert len(lines) > 2 and max(map(len, lines)) <= 100
    assert all(line.startswith(" " * 8 + "word") for line in lines if "where" not in line)


def test_lines_of_checks_without_numbers():
    lines = list(Report(checks=[check("not applicable", value=None, limit=None, meaning="No.")]).lines(1))
    assert lines[1].split() == ["n/a", "causality", "No"]
    lines = list(Report(checks=[check("error", value=None, limit=None)]).lines())
    assert lines[1] == "  ERROR causality"


def test_checks_that_could_not_be_asked_stand_together():
    named = {"cache_limit": "needs decode", "horizon": "needs window=", "cache_decoding": "needs decode"}
    rows = [{**check("not applicable", meaning=text), "check": name} for name, text in named.items()]
    report = Report(checks=[rows[0], check("passed"), *rows[1:]])
    lines = [line.split(maxsplit=1) for line in report.lines(1)]
    assert [mark for mark, _ in lines] == ["checks", "PASS", "n/a", "n/a", "verdict:"]
    assert lines[2][1] == "cache_limit, cache_decoding  needs decode"
    assert lines[3][1] == "horizon  needs window="
    assert "| n/a | cache_limit, cache_decoding |  |  | needs decode |" in report.markdown()


@pytest.mark.parametrize(
    "verbosity, shown",
    [
        (-1, ["failed", "warned", "error"]),
        (0, ["failed", "warned", "error", "expected failure", "accepted warning"]),
        (1, list(STATUSES)),
    ],
)
def test_lines_by_verbosity(verbosity, shown):
    rows = [check(status, check=status.replace(" ", "_")) for status in STATUSES]
    *lines, last = Report(checks=rows).lines(verbosity)
    assert {line.split()[1] for line in lines[1:]} == {status.replace(" ", "_") for status in shown}
    assert last.startswith("verdict: WARN (checks: 1 failed, 1 error, 1 warned, 1 passed, 1 expected failure")


@pytest.mark.parametrize("verbosity", [-1, 0])
def test_lines_of_a_run_without_findings_are_the_verdict(verbosity):
    report = Report(checks=[check(), check("not applicable")])
    assert list(report.lines(verbosity)) == ["verdict: PASS (checks: 1 passed, 1 not applicable)"]


def test_lines_of_an_empty_run_say_why_nothing_applies():
    report = Report(checks=[check("not applicable", meaning="the model makes no claim")])
    assert "the model makes no claim" in "\n".join(report.lines())
    assert list(report.lines(-1)) == ["verdict: EMPTY (checks: 1 not applicable)"]


def test_quiet_lines_leave_out_measurements_without_findings():
    rows = {"stability": [STABILITY, STABILITY | {"verdict": "unstable"}], "throughput": [THROUGHPUT]}
    lines = list(Report(**rows).lines(-1))
    assert [line.split()[0] for line in lines] == ["stability", "unstable", "step", "verdict:"]


def test_names_of_any_length_stay_in_their_column():
    long = {**check("passed", value=0.0, limit=1.0), "check": "permutation_equivariance"}
    lines = list(Report(checks=[check("passed", value=0.0, limit=1.0), long]).lines(1))
    assert lines[1].index("0 <= 1") == lines[2].index("0 <= 1")


def test_what_is_said_stays_in_its_column():
    numbers = [(None, None), (0.0, None), (0.0, 1e-6), (1.25e3, 1.02e3)]
    rows = [
        check(status, value=value, limit=limit, meaning="Said.")
        for value, limit in numbers
        for status in ("passed", "expected failure", "accepted warning")
    ]
    lines = list(Report(checks=rows).lines(1))[1:-1]
    assert len({line.index("Said") for line in lines}) == 1
    bare = list(Report(checks=[check("passed", value=None, limit=None, meaning="Said.")]).lines(1))
    assert bare[1] == "  PASS  causality  Said"


def test_checks_are_grouped_by_model():
    rows = [check(model=m, check=c) for m, c in [("a", "one"), ("b", "one"), ("a", "two")]]
    lines = list(Report(checks=rows).lines(1))[:-1]
    assert [line.split()[-1] if "of" in line else line.split()[1] for line in lines] == [
        "a",
        "one",
        "two",
        "b",
        "one",
    ]


def test_lines_of_stability():
    alarms = [{"text": f"step {i}: loss"} for i in range(5)]
    lines = list(Report(stability=[STABILITY, STABILITY | {"faults": [], "alarms": alarms}]).lines())
    assert lines[0] == "stability"
    assert lines[1].split(None, 1) == ["caught", "rack  T=16, 12 steps, gradient_explosion(step=8)"]
    assert lines[2].strip() == STABILITY["alarms"][0]["text"]
    assert lines[3].endswith("no fault")
    assert [line.strip() for line in lines[4:-1]] == ["step 0: loss", "step 1: loss", "step 2: loss"]


def test_lines_of_throughput():
    rows = [
        THROUGHPUT,
        THROUGHPUT | {"steady": False, "peak_memory_bytes": None},
        THROUGHPUT | {"measured": False},
    ]
    header, measured, unsteady, called, _ = Report(throughput=rows).lines()
    assert header == "throughput"
    assert "rack  train 4 x 128 on cpu  40,960 tokens/s, median 12.5 ms of 80 calls" in measured
    assert "process 300 MiB" in measured and "peak memory" not in measured
    assert "not steady" not in measured
    assert "not steady" in unsteady
    assert "peak memory not available" in unsteady
    assert "not measured" in called
    assert "tokens/s" not in called
    report = Report(throughput=rows)
    assert "throughput: 2 measured, 1 not measured" in report.summary()
    [table] = tables(report.markdown())
    assert [cells(row)[-1] for row in table[2:]] == ["yes", "no", "not measured"]


def test_lines_of_training():
    [line, _] = Report(training=TRAINING).lines()
    for text in ("1,234,567 parameters", "40 steps", "54,322 tokens/s", "5.545 -> 3.211", "3.333 nats"):
        assert text in line


def test_lines_of_what_the_library_finds(real):
    text = "\n".join(real.lines(1))
    for part in ("checks of gru", "PASS", "stability", "caught", "throughput", "gru  forward 1 x 4 on cpu"):
        assert part in text
    told = r"verdict: PASS \(checks: \d+ passed, \d+ not applicable; stability: 1 caught; throughput: 1 "
    told += r"measured\)"
    assert re.fullmatch(told, real.summary())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def cells(row):
    """The cells of a table's row, as a Markdown reader splits it: an escaped pipe is no border."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def tables(page):
    return [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]


def test_markdown():
    page = full_report().markdown()
    assert page.startswith("# stackwise report\n\n**verdict: FAIL")
    assert page.endswith("\n")
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Training",
        "## Checks of rack",
        "## Stability",
        "## Throughput",
        "## Failed tests",
    ]
    assert "- `t::a`" in page
    checks, stability, throughput = tables(page)
    assert cells(checks[0]) == ["", "check", "measured", "limit", "details"]
    assert cells(checks[3]) == ["FAIL", "causality", "0.118", "1e-05", "It moved [position 5]. Look"]
    assert cells(stability[2]) == [
        "caught",
        "rack",
        "T=16, 12 steps, gradient_explosion(step=8)",
        STABILITY["alarms"][0]["text"],
    ]
    assert cells(throughput[2]) == [
        "rack",
        "train 4 x 128 on cpu",
        "12.5 ms",
        "40,960",
        "process 300 MiB",
        "80",
        "host, warm",
        "yes",
    ]


def test_markdown_of_an_empty_report():
    page = Report().markdown()
    assert "no results" in page
    assert "## " not in page


def test_pipes_are_escaped():
    report = Report(checks=[check("failed", where="a|b", meaning="|c|", advice="d")])
    [table] = tables(report.markdown())
    assert cells(table[2])[4] == r"\|c\| [a\|b]. d"
    assert {len(cells(row)) for row in table} == {5}


@given(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\\"), max_size=20
    )
)
def test_tables_stay_tables(text):
    report = Report(checks=[check("failed", where=text, meaning=text)])
    report.add("stability", **STABILITY | {"faults": [text]})
    for table in tables(report.markdown()):
        assert len({len(cells(row)) for row in table}) == 1


def test_a_message_of_several_lines_is_one_row(subjects):
    class Broken(subjects.GRULM):
        def forward(self, ids):
            raise RuntimeError("first line\nsecond | line\n\nlast line")

    spec = ModelSpec(Broken, "broken", "tokens", 50)
    report = Report(checks=[r.to_dict() for r in check_model(spec, checks=["determinism"])])
    [table] = tables(report.markdown())
    assert len(table) == 3
    assert {len(cells(row)) for row in table} == {5}
    assert "first line" in table[2]
    assert "last line" in table[2]
    assert "first line second | line last line" in " ".join(" ".join(report.lines()).split())


def test_round_trip(tmp_path, real):
    for number, report in enumerate((full_report(), real, Report())):
        path = tmp_path / f"{number}.json"
        report.write(path)
        again = Report.from_json(path)
        assert again == report
        assert again.markdown() == report.markdown()
        assert list(again.lines()) == list(report.lines())


def test_numbers_that_are_not_finite(tmp_path):
    report = Report(checks=[check("failed", value=math.inf), check("failed", value=math.nan)])
    report.write(tmp_path / "r.json")
    again = Report.from_json(tmp_path / "r.json")
    # JSON has no such numbers, and readers in other languages refuse them.
    json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert [float(row["value"]) for row in again.checks] == pytest.approx([math.inf, math.nan], nan_ok=True)
    measured = [line.split()[3] for line in report.lines() if "FAIL  causality" in line]
    assert measured == ["inf", "nan"]
    assert list(again.lines()) == list(report.lines())
    assert again.markdown() == report.markdown()


def test_json_is_for_programs(tmp_path):
    full_report().write(tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    stored = json.loads(text)
    assert text.endswith("}\n")
    assert set(stored) == {
        "stackwise",
        "created",
        "verdict",
        "environment",
        "training",
        "checks",
        "stability",
        "throughput",
        "memory",
        "quality",
        "failed_tests",
        "errors",
        "commands",
        "subjects",
        "noun",
        "complete",
    }


def test_write_of_markdown(tmp_path):
    report = Report(failed_tests=["ä"])
    report.write(str(tmp_path / "a" / "b" / "r.md"))
    assert (tmp_path / "a" / "b" / "r.md").read_text(encoding="utf-8") == report.markdown()
    assert names_in(tmp_path / "a" / "b") == ["r.md"]


@pytest.mark.parametrize("name", ["r.txt", "r", "r.htm", "r.JSON", ".md"])
def test_other_endings(tmp_path, name):
    with pytest.raises(ValueError, match=f"report: got '{name}'; allowed endings: .md, .json, .html"):
        Report().write(tmp_path / "new" / name)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "name, files",
    [
        ("r.md", ["r.md"]),
        ("r.json", ["r.json"]),
        ("r.html", ["r.html"]),
        ("r", ["r.md", "r.json", "r.html"]),
    ],
)
def test_files_that_a_name_asks_for(tmp_path, name, files):
    found = report_files(tmp_path / "new" / name)
    assert found == [tmp_path / "new" / file for file in files]
    # The folder is there before the run, so that a long one does not end without its report.
    assert names_in(tmp_path) == ["new"]
    assert names_in(tmp_path / "new") == []


@pytest.mark.parametrize("name", ["r.txt", "r.htm", "r.tar.md.gz"])
def test_files_of_another_kind(tmp_path, name):
    allowed = r"a name ending in \.md, \.json, \.html, or without an ending"
    with pytest.raises(ValueError, match=f"report: got .*; allowed: {allowed}"):
        report_files(tmp_path / "new" / name)
    assert names_in(tmp_path) == []


def test_write_of_html(tmp_path):
    full_report().write(tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert html.index("FAIL") < html.index("It moved.") < html.rindex("Passed checks")


def test_write_replaces(tmp_path):
    path = tmp_path / "r.json"
    Report(failed_tests=["old"] * 100).write(path)
    Report(failed_tests=["new"]).write(path)
    assert Report.from_json(path).failed_tests == ["new"]
    assert names_in(tmp_path) == ["r.json"]


def test_what_cannot_be_written_leaves_the_old_report(tmp_path):
    path = tmp_path / "r.json"
    Report(failed_tests=["old"]).write(path)
    with pytest.raises(TypeError):
        Report(environment={"device": torch.device("cpu")}).write(path)
    assert Report.from_json(path).failed_tests == ["old"]
    assert names_in(tmp_path) == ["r.json"]


def percentiles(**values):
    return {name: {"q": 50, "value": value, "low": None, "high": None} for name, value in values.items()}


MORE = {
    "percentiles": percentiles(p50=0.0125, p95=0.0131, p99=None),
    "mfu": 0.41234,
    "mbu": None,
    "clock": "device",
    "cache": "cold",
    "dtype": "bfloat16",
    "compile": True,
}
GENERATION = THROUGHPUT | {
    "mode": "generate",
    "new_tokens": 16,
    "percentiles": percentiles(p50=0.0125),
    "latencies": {"ttft": percentiles(p50=0.003), "itl": percentiles(p50=0.0006), "tpot": {}},
    "mbu": 0.5,
}


def test_lines_of_throughput_say_what_is_known():
    _, line, generation, call, _ = Report(
        throughput=[
            THROUGHPUT | MORE,
            GENERATION,
            THROUGHPUT | {"mode": "call", "batch_size": None, "seq_len": None, "tokens_per_second": None},
        ]
    ).lines()
    assert "train 4 x 128 bfloat16 compiled on cpu" in line
    assert "p95 13.1 ms" in line
    assert "p99" not in line, "it is withheld"
    assert "MFU 41.2%" in line
    assert "MBU" not in line
    assert line.endswith("cold cache, device clock")
    assert "generate 4 x 128 + 16 on cpu" in generation
    assert "MBU 50.0%, TTFT 3 ms, ITL 600 us" in generation
    assert "TPOT" not in generation
    assert "call on cpu  median 12.5 ms of 80 calls" in call
    assert "tokens/s" not in call


def test_table_of_throughput_has_the_columns_that_say_something():
    [table] = tables(Report(throughput=[THROUGHPUT | MORE, GENERATION]).markdown())
    assert cells(table[0]) == [
        "model",
        "workload",
        "median",
        "p95",
        "tokens/s",
        "peak memory",
        "MFU",
        "MBU",
        "TTFT p50",
        "ITL p50",
        "calls",
        "clock, cache",
        "steady",
    ]
    assert cells(table[2])[3:8] == ["13.1 ms", "40,960", "process 300 MiB", "41.2%", ""]
    assert cells(table[3])[8:12] == ["3 ms", "600 us", "80", "host, warm"]


NOTED = GENERATION | {
    "throttled": True,
    "gpu": {"readings": 9, "throttled": {"power cap": 3, "hardware thermal slowdown": 1}},
    "notes": ["the call waits for the device", "threads spin"],
    "latencies": {
        "ttft": percentiles(p50=0.003),
        "itl": percentiles(p50=0.0006, p95=0.0009, p99=0.0021),
        "tpot": {},
    },
}
FLOOR = THROUGHPUT | {"mode": "decode", "floor_seconds": 0.00123, "bound": "memory", "mbu": 0.5, "hfu": 0.02}
RECOMPUTED = THROUGHPUT | {"mfu": 0.3, "hfu": 0.4}


def test_lines_have_what_a_reader_must_know():
    lines = list(Report(throughput=[NOTED, FLOOR, RECOMPUTED, RECOMPUTED | {"hfu": 0.3}]).lines())
    noted, first, second, floor, recomputed, plain = lines[1:7]
    assert "throttled (power cap in 3 of 9, hardware thermal slowdown in 1 of 9)" in noted
    assert "ITL 600 us, ITL p95 900 us, ITL p99 2.1 ms" in noted
    assert (first, second) == ("    note: the call waits for the device", "    note: threads spin")
    assert "no faster than 1.23 ms, memory-bound" in floor
    assert "MFU 30.0%, HFU 40.0%" in recomputed
    assert "HFU" not in plain, "nothing is recomputed: it is MFU"


def test_table_has_them_too():
    [table] = tables(Report(throughput=[NOTED, FLOOR, RECOMPUTED]).markdown())
    header = cells(table[0])
    rows = [dict(zip(header, cells(line), strict=True)) for line in table[2:]]
    assert [(row["ITL p95"], row["ITL p99"]) for row in rows] == [("900 us", "2.1 ms"), ("", ""), ("", "")]
    reasons = "power cap in 3 of 9, hardware thermal slowdown in 1 of 9"
    assert [row["throttled"] for row in rows] == [reasons, "", ""]
    assert [row["notes"] for row in rows] == ["the call waits for the device; threads spin", "", ""]
    assert [(row["floor"], row["bound"]) for row in rows] == [("", ""), ("1.23 ms", "memory"), ("", "")]
    assert [(row["MFU"], row["HFU"]) for row in rows] == [("", ""), ("", "2.0%"), ("30.0%", "40.0%")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.217e-6, "3.22 us"),
        (0.00099949, "999 us"),
        (0.0125, "12.5 ms"),
        (0.99961, "1 s"),
    ],
)
def test_times_have_three_digits_and_their_unit(seconds, text):
    row = THROUGHPUT | {"median_seconds": seconds, "percentiles": percentiles(p95=seconds)}
    _, line, _ = Report(throughput=[row]).lines()
    assert f"median {text} of 80 calls, p95 {text}, " in line
    [table] = tables(Report(throughput=[row]).markdown())
    assert cells(table[2])[2:4] == [text, text]


def test_a_measurement_is_read_back_to_its_test():
    rows = [{"test": "t.py::test_speed[T8]", **THROUGHPUT}, THROUGHPUT]
    _, named, bare, _ = Report(throughput=rows).lines()
    assert named.startswith("  t.py::test_speed[T8]  rack  train 4 x 128 on cpu  ")
    assert bare.startswith("  rack  train 4 x 128 on cpu  ")
    [table] = tables(Report(throughput=rows).markdown())
    assert [cells(line)[:2] for line in table] == [
        ["test", "model"],
        ["---", "---"],
        ["t.py::test_speed[T8]", "rack"],
        ["", "rack"],
    ]


def test_why_it_was_not_steady_is_told():
    reason = "two windows differed by 3.1% after 40 calls"
    row = THROUGHPUT | {"steady": False, "warmup": {"steady": False, "reason": reason}}
    _, line, _ = Report(throughput=[row]).lines()
    assert f", not steady ({reason}), " in line
    [table] = tables(Report(throughput=[row]).markdown())
    assert cells(table[2])[-1] == f"no ({reason})"


@pytest.mark.parametrize(
    ("mode", "execution", "told"),
    [
        ("forward", {"attention": "sdpa", "compile": "1 graph"}, ""),
        ("forward", {"attention": "eager"}, "attention: eager"),
        ("decode", {"decode": "with a cache"}, ""),
        (
            "decode",
            {"attention": "sdpa", "decode": "all tokens again: the model keeps no cache"},
            "all tokens again: the model keeps no cache",
        ),
        ("forward", {"compile": "3 graphs"}, "compile: 3 graphs"),
        ("prefill", {"prefill": "into an empty cache"}, ""),
        ("generate", {"generate": "greedy, with the cache of the model"}, ""),
    ],
)
def test_execution_is_told_where_it_says_more_than_the_usual(mode, execution, told):
    row = THROUGHPUT | {"mode": mode, "execution": execution}
    _, line, _ = Report(throughput=[row]).lines()
    assert (f", {told}, process" in line) if told else "calls, process" in line
    header, _, cell = tables(Report(throughput=[row]).markdown())[0]
    assert dict(zip(cells(header), cells(cell), strict=True)).get("execution", "") == told


@pytest.mark.parametrize(
    ("size", "told"), [(0, "0 B"), (64 * 2**10, "64 KiB"), (300 * 2**20, "300 MiB"), (80 * 2**30, "80 GiB")]
)
def test_memory_is_told_in_its_unit(size, told):
    peak = PEAK | {"limit": size, "peaks": {"by tensors on cuda": size}}
    row = THROUGHPUT | {"device": "cuda:0", "peak_memory_bytes": size}
    _, line, _, held, _ = Report(throughput=[row], memory=[peak]).lines()
    assert f"peak memory {told}, " in f"{line}, "
    assert held.endswith(f"  {told} by tensors on cuda, at most {told}")


def test_memory_of_tensors_and_of_the_process_are_told_apart():
    rows = [THROUGHPUT | {"device": "cuda:0"}, THROUGHPUT, THROUGHPUT | {"peak_memory_bytes": None}]
    _, gpu, cpu, untold, _ = Report(throughput=rows).lines()
    assert "peak memory 300 MiB" in gpu and "process" not in gpu
    assert "process 300 MiB" in cpu and "peak memory" not in cpu
    assert "peak memory not available" in untold
    [table] = tables(Report(throughput=rows).markdown())
    place = cells(table[0]).index("peak memory")
    assert [cells(line)[place] for line in table[2:]] == ["300 MiB", "process 300 MiB", "not available"]


PEAK = {
    "test": "t::a",
    "kind": "peak",
    "verdict": "within",
    "limit": 2**30,
    "peaks": {"by tensors on cuda": 300 * 2**20, "more in the memory of the host": 20 * 2**20},
}
GROWTH = {
    "test": "t::b",
    "kind": "growth",
    "verdict": "grows",
    "bytes_per_step": 4100.4,
    "steps": 40,
    "reasons": ["1 tensors more a step are alive"],
    "types": [{"name": "torch.Tensor", "count_per_step": 1.0, "bytes_per_step": 4000.0}],
}


@pytest.mark.parametrize(
    ("rows", "verdict", "told"),
    [
        ([PEAK], "PASS", "memory: 1 within"),
        ([PEAK, PEAK | {"verdict": "read", "limit": None}], "PASS", "memory: 1 within, 1 read"),
        ([PEAK | {"verdict": "not told", "peaks": {}}], "EMPTY", "memory: 1 not told"),
        ([PEAK | {"verdict": "beyond"}], "WARN", "memory: 1 beyond"),
        ([GROWTH | {"verdict": "flat", "reasons": []}], "PASS", "memory: 1 flat"),
        ([GROWTH], "WARN", "memory: 1 grows"),
        ([GROWTH | {"verdict": "fragments"}], "WARN", "memory: 1 fragments"),
    ],
    ids=["within", "read", "not told", "beyond", "flat", "grows", "fragments"],
)
def test_verdict_of_memory(rows, verdict, told):
    assert Report(memory=rows).summary() == f"verdict: {verdict} ({told})"


def test_memory_in_all_forms(tmp_path):
    report = Report(memory=[PEAK, GROWTH, PEAK | {"verdict": "not told", "peaks": {}}])
    header, peak, growth, reason, kind, untold, _ = report.lines()
    assert header == "memory"
    told = "300 MiB by tensors on cuda, 20 MiB more in the memory of the host, at most 1 GiB"
    assert peak == f"  within       t::a  {told}"
    assert growth == "  grows        t::b  +4,100 bytes a step over 40 steps"
    assert (reason.strip(), kind.strip()) == ("1 tensors more a step are alive", "torch.Tensor: +1 a step")
    assert untold == "  not told     t::a  not told by this system"
    [table] = tables(report.markdown())
    assert cells(table[0]) == ["verdict", "test", "memory", "details"]
    assert cells(table[3])[3] == "1 tensors more a step are alive; torch.Tensor: +1 a step"
    report.write(tmp_path / "r.json")
    assert Report.from_json(tmp_path / "r.json").memory == report.memory


def test_write_escapes_text_that_utf_8_cannot_encode(tmp_path):
    Report(failed_tests=["t"], errors={"t": {"where": "", "message": "\udc80"}}).write(tmp_path / "r.html")
    assert "\\udc80" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_notes_on_a_model_are_in_every_format():
    report = Report()
    row = {"check": "tying", "model": "gpt", "status": "passed", "value": None, "limit": None}
    report.add("checks", subject_notes="assumed causal", **CheckResult(**row).to_dict())
    assert report.subjects == {"gpt": "assumed causal"}
    assert "assumed causal" in report.markdown()
    assert "  assumed causal" in report.lines(verbosity=1)
    assert "assumed causal" in report_page(report).html()
    assert "subject_notes" not in report.checks[0]
