"""TrainingProgress as a reader of records."""

import io

from rich.console import Console

from stackwise.stability import StepRecord
from stackwise.training.progress import TrainingProgress


def lines(*writes, total=4):
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with TrainingProgress(total, console=console, quiet_seconds=0.0) as progress:
        for steps, figures in writes:
            progress.write([StepRecord(step, 1.5, 0.25, 1e-3, False) for step in steps], figures)
    return console.file.getvalue().splitlines()


def test_the_last_record_is_shown():
    [line] = lines(([0, 1], {"tokens_per_second": 1234.5, "mfu": 0.417, "data_wait_share": 0.02}))
    assert line == "training 2/4  loss 1.500  grad norm 0.25  1,234 tokens/s  MFU 42%  data wait 2%"


def test_figures_that_are_not_known():
    assert lines(([0], None), ([1], {"data_wait_share": 0.0})) == [
        "training 1/4  loss 1.500  grad norm 0.25",
        "training 2/4  loss 1.500  grad norm 0.25  data wait 0%",
    ]


def test_line_of_a_log_is_not_wrapped():
    console = Console(file=io.StringIO(), force_terminal=False, width=20)
    with TrainingProgress(4, console=console, quiet_seconds=0.0) as progress:
        progress.write([StepRecord(0, 1.5, 0.25, 1e-3, False)])
    assert console.file.getvalue() == "training 1/4  loss 1.500  grad norm 0.25\n"


def test_log_line_has_the_remaining_time(monkeypatch):
    """A resumed run begins at step 100; its speed is that of its own steps."""
    seconds = iter([0.0, 3.0, 5.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    first, second, third = lines(([100], None), ([110], None), ([149], None), total=150)
    assert first.endswith("grad norm 0.25")
    assert second.endswith("grad norm 0.25  about 8 s left")  # 39 steps at 5 per second
    assert third.endswith("grad norm 0.25")


def test_no_records():
    assert lines(([], {"tokens_per_second": 1.0})) == []
