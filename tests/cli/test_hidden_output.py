"""Hidden output: nothing of a model or a library reaches the terminal, and nothing is lost."""

import os
import subprocess
import sys

import pytest

from stackwise.cli.hidden_output import hidden_output


def write_everywhere():
    print("printed")
    print("to standard error", file=sys.stderr)
    os.write(1, b"by a C++ library\n")
    os.write(2, b"by its errors\n")
    subprocess.run([sys.executable, "-c", "print('by a child')"], check=True)


def test_output_is_collected_and_not_shown(capfd):
    with hidden_output() as hidden:
        write_everywhere()
    assert capfd.readouterr() == ("", "")
    assert hidden.text.splitlines() == [
        "printed",
        "to standard error",
        "by a C++ library",
        "by its errors",
        "by a child",
    ]
    assert hidden.n_lines == 5


def test_streams_are_those_of_before_afterwards(capfd):
    with hidden_output():
        pass
    write_everywhere()
    out, err = capfd.readouterr()
    assert out.splitlines() == ["printed", "by a C++ library", "by a child"]
    assert err.splitlines() == ["to standard error", "by its errors"]


def test_log_handler_that_holds_the_stream_is_hidden(capfd):
    """A library that was imported before has a handler on the terminal."""
    code = (
        "import logging, sys\n"
        "from stackwise.cli.hidden_output import hidden_output\n"
        "logging.basicConfig(format='%(message)s')\n"
        "with hidden_output() as hidden:\n"
        "    logging.warning('of a library')\n"
        "print(hidden.text, end='')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("of a library\n", "")


def test_own_lines_reach_the_terminal(capfd):
    with hidden_output() as hidden:
        print("checking", file=hidden.terminal, flush=True)
    assert capfd.readouterr().err == "checking\n"


def test_output_before_an_error_is_shown(capfd):
    def fail():
        with hidden_output():
            print("the file has no weights")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert capfd.readouterr().err == "the file has no weights\n"


def test_error_of_the_user_hides_the_output(capfd):
    def fail():
        with hidden_output():
            print("loading a library")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert capfd.readouterr() == ("", "")


def test_undecodable_bytes_are_kept_readable():
    with hidden_output() as hidden:
        os.write(1, b"caf\xe9\n")
    assert hidden.text == "caf\ufffd\n"
