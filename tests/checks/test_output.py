"""Output of the model under test is shown once, however often the model is built and called."""

import logging
import sys
import warnings
from contextlib import contextmanager, suppress

import pytest
from torch import nn

from stackwise.checks import check_model
from stackwise.checks.output import shown_once


def lines_of(captured):
    return [line for line in captured.splitlines() if line]


def print_line(text):
    print(text)


def log_line(text):
    logging.getLogger("a.model").warning(text)


def warn_line(text):
    """Print a warning as the interpreter does; pytest would record it."""
    print(warnings.formatwarning(text, UserWarning, "model.py", 3), file=sys.stderr)


@contextmanager
def stderr_handler():
    """A log handler that holds standard error, as those of libraries do."""
    logger, handler = logging.getLogger("a.model"), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


@pytest.mark.parametrize("say", [print_line, log_line, warn_line])
def test_line_is_shown_once_and_repeats_are_counted(capsys, say):
    with stderr_handler(), shown_once():
        for _ in range(20):
            say("three million parameters")
    out, err = capsys.readouterr()
    assert (out + err).count("three million parameters\n") == 1
    assert "repeated lines are not shown" in lines_of(err)[-1]


def test_without_repeats_nothing_is_added(capsys):
    with shown_once():
        print("one", file=sys.stderr)
        print("two")
    assert capsys.readouterr() == ("two\n", "one\n")


def test_table_of_numbers_is_shown_once_as_a_whole(capsys):
    with shown_once() as shown:
        for number in range(3):
            for layer in range(4):
                print(f"layer {layer}: {layer + number} parameters")
            shown.next_round()
    assert lines_of(capsys.readouterr().out) == [f"layer {layer}: {layer} parameters" for layer in range(4)]


def test_progress_bar_is_one_line(capsys):
    with shown_once():
        for percent in range(0, 101, 5):
            bar = "█" * (percent // 10)
            print(f"\rloading: {percent}%|{bar:10}| {percent}/100", end="", file=sys.stderr)
    err = capsys.readouterr().err
    assert 1 <= err.count("loading") <= 2  # the last update has no end, so it is shown when all is over


def test_streams_and_handlers_are_restored():
    before = (sys.stdout, sys.stderr)
    with stderr_handler() as handler:
        with suppress(KeyError), shown_once():
            assert handler.stream is sys.stderr
            assert sys.stderr is not before[1]
            raise KeyError
        assert (sys.stdout, sys.stderr) == before
        assert handler.stream is sys.stderr


def test_line_without_an_end_is_shown(capsys):
    with shown_once():
        print("loading ...", end="")
    assert capsys.readouterr().out == "loading ...\n"


def test_checks_show_the_output_of_many_builds_once(capsys):
    def build():
        print("number of parameters: 0.03M")
        return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    check_model(build, checks=["determinism", "causality", "initialized"])
    out, err = capsys.readouterr()
    assert lines_of(out) == ["number of parameters: 0.03M"]
    assert "repeated lines are not shown" in err


def test_output_of_a_factory_that_raises_later_is_shown(capsys):
    builds = []

    def build():
        builds.append(1)
        print("reading the vocabulary")
        if len(builds) > 3:
            print("vocab.json is empty")
            raise RuntimeError("no vocabulary")
        return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    [result] = check_model(build, checks=["initialized"])
    assert result.status == "error" and "no vocabulary" in result.meaning
    assert lines_of(capsys.readouterr().out) == ["reading the vocabulary", "vocab.json is empty"]
