"""A progress line: nothing for short commands, one line on a terminal, some lines in a log."""

import io
from contextlib import closing

import pytest

from stackwise.support.progress import ProgressLine, duration_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, *times, total=40, detail="part"):
    """Return the text of a command that finishes one part at each time, in seconds since its start."""
    clock = iter([100.0, *(100.0 + seconds for seconds in times)])
    with closing(ProgressLine("checking", stream=stream, clock=lambda: next(clock))) as line:
        for done in range(1, len(times) + 1):
            line.update(done, total, f"{detail} {done}")
    return stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_short_command_shows_nothing(stream):
    assert shown(stream, 1.0, 2.0, 4.9) == ""


@pytest.mark.parametrize(
    "times, total, lines",
    [
        (
            (6.0, 10.0, 15.0, 21.0),
            8,
            ["1 of 8, about 42 s left, part 1", "4 of 8, about 21 s left, part 4"],
        ),
        ((20.0,), 1, ["1 of 1, part 1"]),
    ],
    ids=["running", "finished"],
)
def test_log_has_a_line_every_ten_seconds(times, total, lines):
    assert shown(io.StringIO(), *times, total=total).splitlines() == [f"checking: {line}" for line in lines]


def test_terminal_has_one_line_that_is_deleted_at_the_end():
    text = shown(Terminal(), 6.0, 7.0, 7.1)
    assert "\n" not in text
    assert "checking: 1 of 40, about 4 min left, part 1" in text
    assert "checking: 2 of 40, about 2 min left, part 2" in text
    assert "part 3" not in text  # too soon after the last one
    assert text.endswith(f"\r{' ' * 79}\r")


def test_line_on_a_terminal_never_wraps():
    lines = shown(Terminal(), 6.0, detail="x" * 200).split("\r")
    assert [len(line) for line in lines if line] == [79, 79]


@pytest.mark.parametrize(
    "seconds, text", [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (3500, "58 min"), (7500, "2 h 5 min")]
)
def test_duration_has_a_rounded_text(seconds, text):
    assert duration_text(seconds) == text
