"""Interrupts: one that came upon a finalizer is raised afterwards; handlers of others stay."""

import os
import signal
import threading
import weakref

import pytest

from stackwise.prototype.search.interrupt import kept_interrupts


@pytest.fixture(autouse=True)
def usual_handler():
    # What is begun in the background of a shell takes no notice of Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Thing:
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_comes_upon_a_finalizer_is_not_lost():
    thing = Thing()
    weakref.finalize(thing, os.kill, os.getpid(), signal.SIGINT)
    with kept_interrupts() as raise_lost:
        raise_lost()
        del thing  # prints the KeyboardInterrupt, and goes on
        with pytest.raises(KeyboardInterrupt):
            raise_lost()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_is_raised_where_it_comes():
    with kept_interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_handler_of_the_caller_stays():
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    with kept_interrupts() as raise_lost:
        signal.raise_signal(signal.SIGINT)
        raise_lost()
    assert came == [signal.SIGINT]


def test_in_a_thread_there_is_nothing_to_keep():
    def run():
        with kept_interrupts() as raise_lost:
            raise_lost()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
