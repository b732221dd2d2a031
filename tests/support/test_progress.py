"""A progress line: nothing for short commands, one line on a terminal, some lines in a log."""

import io
from contextlib import closing

import pytest

from stackwise.support.progress import ProgressLine, duration_text


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, *times, total=40):
    """What a command writes that finishes one part at each of the times, in seconds since its start."""
    clock = Clock()
    with closing(ProgressLine("checking", stream=stream, clock=clock)) as line:
        for done, seconds in enumerate(times, start=1):
            clock.now = 100.0 + seconds
            line.update(done, total, f"part {done}")
    return stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_short_command_shows_nothing(stream):
    assert shown(stream, 1.0, 2.0, 4.9) == ""


def test_log_has_a_line_every_ten_seconds_with_the_remaining_time():
    lines = shown(io.StringIO(), 6.0, 10.0, 15.0, 21.0, total=8).splitlines()
    assert lines == [
        "checking: 1 of 8, about 42 s left, part 1",
        "checking: 4 of 8, about 21 s left, part 4",
    ]


def test_terminal_has_one_line_that_is_deleted_at_the_end():
    text = shown(Terminal(), 6.0, 7.0, 7.1)
    assert "\n" not in text
    assert "checking: 1 of 40, about 4 min left, part 1" in text
    assert "checking: 2 of 40, about 2 min left, part 2" in text
    assert "part 3" not in text  # too soon after the last one
    assert text.endswith(f"\r{' ' * 79}\r")


def test_line_on_a_terminal_never_wraps():
    clock, stream = Clock(), Terminal()
    line = ProgressLine("checking", stream=stream, clock=clock)
    clock.now += 6.0
    line.update(1, 2, "x" * 200)
    assert len(stream.getvalue().strip("\r")) == 79


def test_finished_work_has_no_remaining_time():
    assert shown(io.StringIO(), 20.0, total=1) == "checking: 1 of 1, part 1\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (3500, "58 min"), (7500, "2 h 5 min")],
)
def test_duration_text(seconds, text):
    assert duration_text(seconds) == text
