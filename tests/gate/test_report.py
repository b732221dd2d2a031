import json
import math
import re
from dataclasses import replace

import pytest

from stackwise.gate.report import (
    code_quality,
    github_annotations,
    junit_properties,
    markdown,
    publish,
    short_text,
    terminal_lines,
    test_text,
    write_report,
)
from stackwise.gate.result import GateResult, TestResult, TrialResult
from stackwise.gate.verdict import Decision, Verdict


def trial(verdict, change, cost=1.2e-3, unit="s", confirmed=False, reason="because"):
    decision = Decision(verdict, change, change - 0.01, change + 0.01, 0.97, 8, confirmed, reason)
    head = cost * (1 + change)
    return TrialResult(decision, unit, 0.02, 0.01, (math.log1p(change),) * 8, (cost,) * 8, (head,) * 8)


SLOWER = TestResult(
    "bench/test_step.py::test_step[a|b]",
    trials={
        "memory": trial(Verdict.PASS, 0.0, 3 * 2.0**20, "B"),
        "time": trial(Verdict.REGRESSED, 0.05, confirmed=True, reason="higher cost"),
    },
    file="bench/test_step.py",
    line=12,
)
OPEN = TestResult("bench/test_open.py::test_open", trials={"time": trial(Verdict.INCONCLUSIVE, 0.01, 2e-6)})
FINE = TestResult("bench/test_fine.py::test_fine", trials={"time": trial(Verdict.PASS, 0.001, 3.0)})
CRASHED = TestResult("bench/test_crash.py::test_crash", "crashed on head", detail="Traceback\nboom: 100%, a")
NEW = TestResult("bench/test_new.py::test_new", "missing on base")


def gate(*tests, **options):
    given = {"rounds": 8, "seconds": 61.4, "seed": 3, "missing": "warn", **options}
    return GateResult("main", "feature", tests, **given)


RESULT = gate(SLOWER, OPEN, FINE, CRASHED, NEW, notes=("a is b on the head",), order_bias=0.012)


def test_the_worst_of_a_test_is_told_first():
    first, second = test_text(SLOWER).splitlines()
    assert first == (
        "time REGRESSED: 1.2 ms -> 1.26 ms, +5.00% [+4.00%, +6.00%] at 97.0%, tolerance 2%: higher cost"
    )
    assert second.startswith("memory PASS: 3 MiB -> 3 MiB, +0.00%")


def test_what_was_not_measured_is_told():
    assert test_text(CRASHED) == "crashed on head: Traceback\nboom: 100%, a"
    assert test_text(NEW) == "missing on base"


def test_what_no_time_was_left_for_is_open():
    left = TestResult(
        "bench/test_z.py::test_z", "not begun", detail="no time", file="bench/test_z.py", line=3
    )
    found = gate(FINE, left)
    assert not any(left.nodeid in line for line in terminal_lines(found)), "counted, not listed"
    assert terminal_lines(found)[-1].startswith("INCONCLUSIVE: feature against main: 1 PASS, 1 not begun; ")
    assert f"### Inconclusive\n\n- `{left.nodeid}`: not begun: no time" in markdown(found)
    [annotation] = github_annotations(found)
    assert annotation.startswith("::warning title=not begun%3A bench/test_z.py")
    [finding] = code_quality(found)
    assert finding["severity"] == "minor"


def test_what_is_not_known_is_no_number():
    decision = Decision(Verdict.INCONCLUSIVE, math.nan, -math.inf, math.inf, 0.0, 0, False, "stopped")
    found = TestResult("a", trials={"time": TrialResult(decision, "s", 0.02, 0.01, (), (), ())})
    assert test_text(found).startswith("time INCONCLUSIVE: not known -> not known, not known [not known]")
    assert "nan" not in "\n".join([*terminal_lines(gate(found), verbose=True), markdown(gate(found))])
    assert terminal_lines(gate(found))[0].split()[-1] == "stopped"


def test_a_line_for_each_metric():
    lines = terminal_lines(RESULT, verbose=True)
    assert re.fullmatch(
        r"REGRESSED +bench/test_step\.py::test_step\[a\|b\] +time +1\.2 ms -> 1\.26 ms +"
        r"\+5\.00% \[\+4\.00%, \+6\.00%\]  8 rounds, confirmed",
        lines[1],
    )
    assert re.fullmatch(r"INCONCLUSIVE +bench/test_open\.py::test_open +time +2 us -> 2\.02 us .*", lines[2])
    assert re.fullmatch(
        r"crashed on head +bench/test_crash\.py::test_crash +Traceback boom: 100%, a", lines[4]
    )
    assert lines[5].rstrip() == lines[5]
    counts = "1 INCONCLUSIVE, 1 PASS, 1 REGRESSED, 1 crashed on head, 1 missing on base"
    whole = f"REGRESSED: feature against main: {counts}; 8 rounds in 61 s"
    assert lines[-2:] == ["a is b on the head", whole]


def test_a_page_tells_first_what_is_wrong():
    page = markdown(RESULT)
    assert page.startswith("## Performance of feature against main: REGRESSED\n\nREGRESSED: feature")
    failed, inconclusive, warnings = (
        page.index(f"### {title}\n") for title in ("Failed", "Inconclusive", "Warnings")
    )
    assert failed < page.index("- `bench/test_crash.py::test_crash`: crashed on head") < inconclusive
    assert inconclusive < page.index("- `bench/test_open.py::test_open`: time INCONCLUSIVE") < warnings
    assert "memory PASS" not in page  # it is right, and in the table
    assert "\n- a is b on the head\n" in page
    assert "8 rounds in 61 s, seed 3. The first side of a pair differs by +1.20%" in page


def test_every_row_of_the_table_has_all_cells():
    table = [line for line in markdown(RESULT).splitlines() if line.startswith("|")]
    # Split where GitHub does: at bars that are not escaped, also within code.
    assert {len(re.split(r"(?<!\\)\|", line)) for line in table} == {11}
    assert len(table) == 2 + 6
    assert (
        "| REGRESSED | `bench/test_step.py::test_step[a\\|b]` | time | 1.2 ms | 1.26 ms | +5.00% |"
        in table[3]
    )


def test_a_page_of_what_is_fine_has_no_findings():
    page = markdown(gate(FINE))
    assert "###" not in page and "PASS" in page


def test_annotations_are_at_the_test_and_escaped():
    slower, crashed, undecided, new = github_annotations(RESULT)
    assert slower.startswith(
        "::error title=REGRESSED%3A bench/test_step.py%3A%3Atest_step[a|b],file=bench/test_step.py,line=12::"
        "time REGRESSED: 1.2 ms -> 1.26 ms, +5.00%25 [+4.00%25"
    )
    assert "%0Amemory PASS" in slower
    assert crashed.endswith("::crashed on head: Traceback%0Aboom: 100%25, a")
    assert undecided.startswith("::warning title=INCONCLUSIVE%3A")
    assert new == "::warning title=missing on base%3A bench/test_new.py%3A%3Atest_new::missing on base"
    assert not any("\n" in line for line in (slower, crashed, undecided, new))


def test_github_shows_ten_annotations_of_a_level():
    tests = [TestResult(f"t.py::t{n}", "crashed on head") for n in range(13)]
    lines = github_annotations(gate(*tests, OPEN))
    assert len(lines) == 11 and lines[9] == "::error title=gate::4 tests more, see the summary"
    assert len(github_annotations(gate(*tests[:10]))) == 10


def test_code_quality_has_what_gitlab_requires():
    found = code_quality(RESULT)
    assert [each["severity"] for each in found] == ["major", "minor", "major", "info"]
    assert len({each["fingerprint"] for each in found}) == 4
    assert found[0]["location"] == {"path": "bench/test_step.py", "lines": {"begin": 12}}
    assert found[1]["location"] == {"path": "bench/test_open.py", "lines": {"begin": 1}}
    # The same finding in another run, with other numbers.
    again = TestResult(
        SLOWER.nodeid, trials={"time": trial(Verdict.REGRESSED, 0.07)}, file=SLOWER.file, line=9
    )
    assert code_quality(gate(again))[0]["fingerprint"] == found[0]["fingerprint"]


@pytest.mark.parametrize("name", ["gate.md", "deep/er/gate.json", "gl.codequality.json"])
def test_a_report_is_written_by_its_ending(tmp_path, name):
    write_report(RESULT, tmp_path / name)
    text = (tmp_path / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        assert text == markdown(RESULT)
    elif "codequality" in name:
        assert json.loads(text) == code_quality(RESULT)
    else:
        assert GateResult.from_dict(json.loads(text)) == RESULT
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [(tmp_path / name).name]


def test_another_ending_is_refused(tmp_path):
    allowed = r"\.md, \.json, \.html, \.codequality\.json"
    with pytest.raises(ValueError, match=f"report: got 'gate.txt'; allowed: {allowed}"):
        write_report(RESULT, tmp_path / "gate.txt")


def test_page_is_written_as_html(tmp_path):
    write_report(RESULT, tmp_path / "gate.html")
    html = (tmp_path / "gate.html").read_text()
    assert html.index("REGRESSED") < html.index("bench/test_crash.py::test_crash")
    assert "bench/test_step.py::test_step[a|b]" in html


def test_nothing_is_published_that_nobody_asked_for(monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert publish(RESULT) == []


def test_a_job_of_github_gets_a_summary_and_annotations(monkeypatch, tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("# Before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    lines = publish(RESULT, [tmp_path / "gate.json"])
    assert summary.read_text() == "# Before\n" + markdown(RESULT)
    assert lines == [f"gate: wrote {tmp_path / 'gate.json'}", *github_annotations(RESULT)]


def test_properties_for_junit_are_numbers():
    assert junit_properties(CRASHED) == [("gate", "crashed on head")]
    found = dict(junit_properties(SLOWER))
    assert found["gate"] == "REGRESSED" and found["gate_memory_verdict"] == "PASS"
    given = {name: found[f"gate_time_{name}"] for name in ("change", "low", "high", "rounds", "base", "head")}
    assert given == {
        "change": "0.05",
        "low": "0.04",
        "high": "0.06",
        "rounds": "8",
        "base": "0.0012",
        "head": "0.00126",
    }


def test_a_tolerance_that_a_floor_has_raised_stays_legible():
    small = replace(SLOWER.trials["memory"], tolerance=1024.0, base=(64.0,), head=(128.0,))
    assert "tolerance 64 KiB:" in test_text(TestResult("a", trials={"memory": small}))
    unknown = replace(small, base=(), head=())
    assert "tolerance 102,400%:" in test_text(TestResult("a", trials={"memory": unknown}))


def test_remedy_of_a_set_up_error_is_never_shortened():
    detail = f"it imported {'x' * 500}: pip install -e ."
    row, *_ = terminal_lines(gate(TestResult("a", "set-up error", {}, detail)))
    assert row.endswith(detail)


def test_a_long_reason_is_shortened_in_the_terminal_line():
    crashed = TestResult(
        "bench/test_a.py::test_b", "crashed on head", {}, f"it ended with code 1; {'x' * 3000}"
    )
    short, *_ = terminal_lines(gate(crashed), width=100)
    assert len(short) <= 350 and short.startswith("crashed on head") and "ended with code 1" in short
    long, *_ = terminal_lines(gate(crashed), verbose=True)
    assert "x" * 3000 in long


def test_tokens_per_second_stand_beside_the_time():
    found = replace(SLOWER, tokens=(60, 60))
    time_line, memory_line = test_text(found).splitlines()
    assert time_line.startswith("time REGRESSED: 1.2 ms -> 1.26 ms (50,000 -> 47,619 tokens/s), +5.00%")
    assert "tokens" not in memory_line
    memory_row, time_row, *_ = terminal_lines(gate(found), verbose=True)
    assert time_row.endswith("8 rounds, confirmed  50,000 -> 47,619 tokens/s")
    assert "tokens" not in memory_row
    assert "| 1.2 ms (50,000 tokens/s) | 1.26 ms (47,619 tokens/s) |" in markdown(gate(found))
    properties = dict(junit_properties(found))
    assert properties["gate_tokens_per_second_base"] == "50000"
    assert properties["gate_tokens_per_second_head"] == "47619"
    slow = replace(OPEN, trials={"time": trial(Verdict.PASS, 0.0, 8.0)}, tokens=(1, 1))
    assert " (0.125 -> 0.125 tokens/s), " in test_text(slow)


def test_that_nothing_was_compared_is_told():
    skipped = gate(TestResult("a", "skipped", detail="no GPU"))
    assert terminal_lines(skipped)[-1].startswith(
        "INCONCLUSIVE: feature against main: nothing was compared: 1 skipped; "
    )
    assert "nothing was compared" in markdown(skipped)
    assert "nothing was compared" not in markdown(RESULT)


def test_line_of_a_test_has_test_change_and_limit_in_80_columns():
    names = ["bench/test_a.py::test_it", f"bench/{'very_' * 20}long.py::test_it[{'x' * 30}]"]
    lines = terminal_lines(gate(*(replace(SLOWER, nodeid=name) for name in names)))[:2]
    assert lines[0].split() == ["REGRESSED", names[0], "time", "+5.00%", ">", "2%"]
    assert re.fullmatch(r"REGRESSED  \.\.\.\S*long.py::test_it\[x{30}\]  time \+5.00% > 2%", lines[1])
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("test", "text"),
    [
        (SLOWER, "time +5.00% > 2%"),
        (TestResult("a", trials={"time": SLOWER.trials["memory"]}), "time +0.00%, limit 2%"),
        (TestResult("a", "set-up error", detail="no\nfile"), "set-up error: no file"),
    ],
    ids=["worse", "pass", "error"],
)
def test_short_text_is_change_and_limit_or_the_reason(test, text):
    assert short_text(test) == text


def test_suite_that_is_slower_is_shown_like_a_failed_test():
    decision = Decision(Verdict.REGRESSED, 0.05, 0.04, 0.06, 0.998, 5, True, "the mean cost is higher")
    trial = TrialResult(decision, "s", 0.02, 0.01, (math.log(1.05),) * 5, (), ())
    found = replace(gate(FINE), suite=TestResult("(all tests together)", trials={"time": trial}))
    row, last = terminal_lines(found)[-2:]
    assert row.split() == ["REGRESSED", "(all", "tests", "together)", "time", "+5.00%", ">", "2%"]
    assert last.startswith("REGRESSED: feature against main: 1 PASS, all tests together REGRESSED; ")
    text = "time REGRESSED: +5.00% [+4.00%, +6.00%] at 99.8%, tolerance 2%: the mean cost is higher"
    assert f"### Failed\n\n- `(all tests together)`: {text}" in markdown(found)
    assert github_annotations(found) == [
        f"::error title=REGRESSED%3A (all tests together)::{text.replace('%', '%25')}"
    ]
    [finding] = code_quality(found)
    assert (finding["description"], finding["severity"]) == (f"(all tests together): {text}", "major")
