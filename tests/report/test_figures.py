"""Figures: what is marked in the plots of runs and latencies."""

import math

import pytest
from matplotlib.figure import Figure

from stackwise.report.figures import latency_plot, training_plot


def record(step, loss=2.0, skipped=False):
    return {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "skipped": skipped}


def drawn(plot):
    """The figure of a plot, and the labels in its legend."""
    figure = Figure(layout="constrained")
    plot.draw(figure)
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return figure, labels


def test_faults_alarms_skipped_updates_and_replays_are_marked():
    records = [record(0), record(1), record(2, 9.0, skipped=True), record(2), record(3)]
    run = {"records": records, "alarms": [{"step": 2}], "fired": [2], "recovery": {"twin": [2.0] * 4}}
    _, labels = drawn(training_plot("a", run))
    assert set(labels) == {
        "run",
        "fault",
        "alarm",
        "skipped",
        "replayed",
        "without fault",
    }


def test_run_without_events_has_only_the_line():
    _, labels = drawn(training_plot("a", {"records": [record(0), record(1)], "alarms": []}))
    assert labels == [], "the axes have their names"


def test_line_goes_through_the_last_attempt_of_a_step():
    records = [record(0, 1.0), record(1, 9.0, skipped=True), record(1, 2.0), record(2, 3.0)]
    figure, _ = drawn(training_plot("a", {"records": records, "alarms": []}))
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines["run"].get_ydata()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, "nan", "inf"])
def test_loss_that_is_not_finite_can_be_drawn(value):
    run = {"records": [record(0), record(1, value, skipped=True), record(2)], "alarms": [{"step": 1}]}
    assert training_plot("a", run).svg("p").startswith("<svg")


@pytest.mark.parametrize("records", [[], [record(0)], [{"step": 0}, {"step": 1}]])
def test_run_without_two_steps_has_no_plot(records):
    assert training_plot("a", {"records": records, "alarms": []}) is None


def test_long_run_is_thinned_and_says_so():
    records = [record(step) for step in range(5000)]
    plot = training_plot("a", {"records": records, "alarms": [{"step": 7}]})
    assert plot.caption == "1,001 of 5,000 steps are drawn."
    assert len(plot.svg("p")) < 200_000


def test_plot_of_a_run_with_many_events_is_small():
    records = [record(step, skipped=step % 2 == 0) for step in range(20_000)]
    run = {"records": records, "alarms": [{"step": step} for step in range(20_000)], "fired": range(20_000)}
    assert len(training_plot("a", run).svg("p")) < 200_000


def test_latency_has_its_percentiles():
    histogram = {"edges": [0.001, 0.002, 0.003], "counts": [5, 2], "above": 0}
    percentiles = {"p50": {"value": 0.0015}, "p95": {"value": 0.0028}, "p99": {"value": None}}
    figure, labels = drawn(latency_plot("a", histogram, percentiles))
    assert labels == ["p50 1.5 ms", "p95 2.8 ms"]
    assert figure.axes[0].get_xlabel() == "latency [ms]"
