"""Prefetched: the same batches, the state of what was handed out, and no thread left behind."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from stackwise.data import TokenWindows, prefetch
from stackwise.data.prefetch import Prefetched
from tests.forked import HANG_SECONDS


def windows(n_tokens=201, **settings):
    return TokenWindows(torch.arange(n_tokens), 2, 4, seed=1, **settings)


def ids(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert threads() == []


class Failing:
    """Batches 0, 1, 2, then an error."""

    def __len__(self):
        return 5

    def __iter__(self):
        for i in range(3):
            yield {"input_ids": torch.tensor([[i]])}
        raise OSError("the disk is gone")

    def state_dict(self):
        return {}


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_same_batches(depth):
    ahead, plain = Prefetched(windows(), depth), windows()
    assert len(ahead) == len(plain)
    for _ in range(3):
        assert ids(ahead) == ids(plain)
        assert ahead.state_dict() == plain.state_dict()


@pytest.mark.parametrize("taken", [0, 1, 7, 24])
def test_state_is_of_what_was_handed_out(taken):
    plain = ids(windows(n_tokens=204))
    assert len(plain) == 25
    ahead = Prefetched(windows(n_tokens=204), depth=5)
    pass_ = iter(ahead)
    for _ in range(taken):
        next(pass_)
    _wait_until_full(ahead)
    state = ahead.state_dict()
    assert (state["epoch"], state["batch"]) == (0, taken)
    resumed = Prefetched(windows(n_tokens=204))
    resumed.load_state_dict(state)
    assert ids(resumed) == plain[taken:]
    assert ids(pass_) == plain[taken:]  # and the one that was saved goes on


def test_a_consumer_that_stops_ends_the_thread():
    ahead, plain = Prefetched(windows()), windows()
    for _ in ahead:
        break
    assert threads() == []
    next(iter(plain))
    assert ahead.state_dict()["batch"] == 1
    assert ids(ahead) == ids(plain)  # the next epoch, as without


def test_a_consumer_that_fails_ends_the_thread():
    def consume():
        for _ in Prefetched(windows()):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        consume()


@pytest.mark.parametrize("end", ["close", "set_epoch", "load_state_dict", "again"])
def test_what_ends_a_pass(end):
    ahead = Prefetched(windows())
    state, pass_ = ahead.state_dict(), iter(ahead)
    next(pass_)
    assert len(threads()) == 1
    if end == "again":
        ahead.set_epoch(0)
        other = iter(ahead)
        next(other)
        assert len(threads()) == 1
        other.close()
    else:
        {"close": ahead.close, "set_epoch": lambda: ahead.set_epoch(3)}.get(
            end, lambda: ahead.load_state_dict(state)
        )()
    assert threads() == []
    assert list(pass_) == []


def test_set_epoch():
    ahead, plain = Prefetched(windows()), windows()
    for epoch in (4, 4, 1):
        ahead.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert ahead.state_dict() == plain.state_dict()
        assert ids(ahead) == ids(plain)


def test_an_error_comes_where_its_batch_would_have():
    pass_ = iter(Prefetched(Failing(), depth=9))
    assert [next(pass_)["input_ids"].item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(pass_)


def test_waited_seconds_are_those_of_the_consumer(monkeypatch):
    """A wait takes one second, and the work on a batch takes a hundred. The end is waited for as well."""
    seconds = [0]

    def perf_counter():
        seconds[0] += 1
        return seconds[0]

    monkeypatch.setattr(prefetch, "time", SimpleNamespace(perf_counter=perf_counter))
    ahead = Prefetched(windows(), depth=9)
    assert ahead.waited_seconds == 0
    for _ in ahead:
        seconds[0] += 100
    assert ahead.waited_seconds == len(ahead) + 1


def test_no_more_is_read_ahead_than_asked():
    ahead = Prefetched(windows(), depth=3)
    pass_ = iter(ahead)
    next(pass_)
    _wait_until_full(ahead)
    assert ahead.loader.state_dict()["batch"] <= 1 + 3 + 1
    pass_.close()


def test_depth():
    with pytest.raises(ValueError, match="depth: got 0"):
        Prefetched(windows(), 0)


def _wait_until_full(ahead):
    deadline = time.monotonic() + HANG_SECONDS
    while ahead._pass and not ahead._pass.items.full() and ahead._pass.thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)
