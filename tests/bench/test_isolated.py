"""Functions in processes of their own: bounded where the system says what they hold already."""

import pytest

from bench import isolated as isolated_module
from bench.isolated import isolated

# Of Python 3.12, at a fork.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def greedy():
    yield len(bytearray(2**29))


def test_a_process_that_grows_too_far_is_told():
    ended = isolated(greedy, gigabytes=0.1)
    assert ended.values == []
    assert ended.error.startswith("MemoryError")


def test_without_a_word_on_what_is_held_nothing_is_bounded(monkeypatch):
    monkeypatch.setattr(isolated_module, "process_status", lambda key: None)
    ended = isolated(greedy, gigabytes=0.1)
    assert (ended.values, ended.error) == ([2**29], None)
