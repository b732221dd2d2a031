"""HTML of a report: its sections, their order, and what each record looks like."""

import re

import pytest

from stackwise.checks import CheckResult
from stackwise.report import Report
from stackwise.report.html import report_page

STABILITY = {
    "test": "t.py::run",
    "model": "gpt",
    "seq_len": 8,
    "faults": ["gradient_explosion(step=3)"],
    "fired": [3],
    "verdict": "caught",
    "stopped": "",
    "alarms": [{"step": 3, "text": "step 3: gradient spike"}],
    "records": [
        {"step": step, "loss": 3.0, "grad_norm": 1.0, "lr": 0.1, "skipped": False} for step in range(6)
    ],
}
THROUGHPUT = {
    "test": "t.py::speed",
    "model": "gpt",
    "mode": "train",
    "batch_size": 4,
    "seq_len": 8,
    "device": "cpu",
    "median_seconds": 0.0125,
    "calls": 80,
    "tokens_per_second": 40960.0,
    "peak_memory_bytes": 2**20,
    "steady": True,
    "measured": True,
    "percentiles": {"p50": {"value": 0.0125}, "p95": {"value": None}},
    "histograms": {"call": {"edges": [0.01, 0.02, 0.03], "counts": [60, 19], "above": 1}},
}


def check(status, name="causality", **changes):
    fields = {"check": name, "model": "gpt", "status": status, "value": 0.118, "limit": 1e-5}
    return CheckResult(**fields | changes).to_dict()


def sections(report):
    return {section.title: section for section in report_page(report).sections}


def full():
    report = Report(
        failed_tests=["t.py::a", "t.py::b"],
        errors={"t.py::b": {"where": "t.py:3", "message": "AssertionError"}},
    )
    report.commands = {"t.py::a": "pytest t.py::a", "t.py::b": "pytest t.py::b"}
    report.add(
        "checks", test="t.py::a", **check("failed", where="position 5", meaning="It moved.", advice="Look.")
    )
    report.add("checks", test="t.py::w", **check("warned", "padding", meaning="It may be wrong."))
    report.add("checks", test="t.py::p", **check("passed", "dropout"))
    report.add("checks", test="t.py::n", **check("not applicable", "tying", meaning="Nothing is tied."))
    report.add("checks", test="t.py::x", **check("expected failure", "cache", meaning="Known."))
    report.add("stability", **STABILITY)
    report.add("throughput", **THROUGHPUT)
    return report


def test_sections_are_in_the_order_of_their_weight():
    assert list(sections(full())) == [
        "Failed checks",
        "Failed tests",
        "Warnings",
        "Stability runs",
        "Throughput",
        "Passed checks",
        "Expected failures and accepted warnings",
        "Checks that do not apply",
    ]


@pytest.mark.parametrize(
    "title, folded, count",
    [
        ("Failed checks", False, 1),
        ("Warnings", False, 1),
        ("Passed checks", True, 1),
        ("Checks that do not apply", True, 1),
    ],
)
def test_only_findings_and_measurements_are_expanded(title, folded, count):
    section = sections(full())[title]
    assert (section.folded, section.count) == (folded, count)


def test_failed_check_shows_place_evidence_advice_and_command():
    [finding] = sections(full())["Failed checks"].findings
    assert (finding.where, finding.advice) == ("position 5", "Look.")
    assert finding.evidence == "measured 0.118, limit 1e-05"
    assert finding.command == "pytest t.py::a"


def test_failed_test_without_a_record_shows_its_error():
    [finding] = sections(full())["Failed tests"].findings
    assert (finding.title, finding.where, finding.message) == ("t.py::b", "t.py:3", "AssertionError")
    assert finding.command == "pytest t.py::b"


def test_failed_run_is_a_failed_test():
    row = STABILITY | {"verdict": "not recovered", "recovery": {"problems": ["step 5: 0.3 nats apart"]}}
    error = {"where": "t.py:3", "message": "RecoveryFailedError: not recovered"}
    report = Report(failed_tests=["t.py::run"], errors={"t.py::run": error}, stability=[row])
    [finding] = sections(report)["Failed tests"].findings
    assert (finding.where, finding.message) == ("t.py:3", "RecoveryFailedError: not recovered")
    assert finding.details == ("step 5: 0.3 nats apart", "step 3: gradient spike")
    assert "Warnings" not in sections(report)


def test_finding_of_a_test_that_passed_is_a_warning():
    [finding] = sections(Report(stability=[STABILITY | {"verdict": "missed"}]))["Warnings"].findings
    assert finding.status == "warning"


def test_run_has_a_plot_of_its_steps():
    [plot] = sections(full())["Stability runs"].plots
    assert plot.title == "caught: t.py::run"
    assert "gradient_explosion(step=3)" in plot.caption


def test_latency_has_a_histogram():
    [plot] = sections(full())["Throughput"].plots
    assert plot.title == "Latency of a call: gpt, train"
    assert "1 slower sample is not drawn" in plot.caption


def test_call_that_was_not_measured_has_no_histogram():
    report = Report(throughput=[THROUGHPUT | {"measured": False}])
    assert not sections(report)["Throughput"].plots


def test_training_has_a_plot_if_its_steps_are_known():
    training = {
        "parameters": 10,
        "num_batches": 6,
        "seconds": 1.0,
        "tokens_per_second": 9.0,
        "first_loss": 3.0,
        "final_loss": 2.0,
    }
    assert not sections(Report(training=training))["Training"].plots
    [plot] = sections(Report(training=training | {"records": STABILITY["records"]}))["Training"].plots
    assert plot.title == "Loss and gradient norm"


def test_many_runs_have_at_most_twelve_plots():
    section = sections(Report(stability=[STABILITY] * 20))["Stability runs"]
    assert len(section.plots) == 12
    assert section.notes == ["The first 12 of 20 plots are shown."]


def test_report_of_500_checks_is_smaller_than_3_megabytes():
    report = full()
    for number in range(500):
        test = f"tests/test_models.py::test_model[{'long_name_' * 9}{number}]"
        report.add(
            "checks",
            test=test,
            **check(("passed", "failed", "not applicable")[number % 3], meaning="m" * 200),
        )
    html = report_page(report).html()
    assert len(html.encode()) < 3_000_000
    assert len(re.findall("long_name_0|long_name_\\d+", html)) >= 300


def test_node_id_with_markup_is_shown_as_text():
    report = Report(failed_tests=["t.py::a[<script>x</script>]"])
    html = report_page(report).html()
    assert "<script>x" not in html
    assert "t.py::a[&lt;script&gt;x&lt;/script&gt;]" in html


@pytest.mark.parametrize(
    ("count", "message"), [(1, "z" * 5_000_000), (6_000, "m" * 1_000)], ids=["long message", "many failures"]
)
def test_page_stays_below_three_megabytes(count, message):
    names = [f"t.py::test_{number}" for number in range(count)]
    report = Report(
        failed_tests=names, errors={name: {"where": "t.py:1", "message": message} for name in names}
    )
    html = report_page(report).html()
    assert len(html.encode()) < 3e6
    assert all(f"test_{number}<" in html for number in (0, count - 1))


def test_page_has_no_control_characters():
    report = Report(failed_tests=["t"], errors={"t": {"where": "", "message": "\x1b[31mred\x07"}})
    assert "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}" in report_page(report).html()


def test_page_of_a_training_run_is_named_after_it():
    training = {"parameters": 9, "num_batches": 3, "seconds": 1.0, "tokens_per_second": 5.0}
    report = Report(training=training | {"first_loss": 2.0, "final_loss": 1.0})
    page = report_page(report)
    assert (page.title, page.summary) == ("Training run", "training: 3 steps, loss 2.000 -> 1.000")
