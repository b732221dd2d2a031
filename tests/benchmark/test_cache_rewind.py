"""A cache that is put back, and what of a cache counts as changed."""

import itertools
import threading
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from stackwise.benchmark.cache_rewind import RewoundCache, is_changed_by


class Slotted:
    __slots__ = ("length",)


class Kept(Slotted):
    __slots__ = ("keys",)

    def __init__(self):
        self.length, self.keys = 0, torch.zeros(2, 3)


def test_a_cache_is_as_it_was_each_time():
    kept = RewoundCache(lambda: {"keys": torch.zeros(2), "length": 1}, "model")
    for _ in range(3):
        cache = kept.take()
        assert cache["length"] == 1
        assert cache["keys"].tolist() == [0.0, 0.0]
        cache["length"] += 1
        cache["keys"] += 1


def test_a_copy_is_made_ahead_of_its_use(monkeypatch):
    made = []
    monkeypatch.setattr("stackwise.benchmark.cache_rewind.copy.deepcopy", lambda cache: made.append(1) or {})
    kept = RewoundCache(dict, "model")
    kept.take()
    assert len(made) == 1
    kept.rewind()
    kept.take()
    assert len(made) == 2
    kept.take()
    assert len(made) == 3


def test_a_cache_alone():
    """Nothing is kept beside the one that is used; afterwards all goes on as before."""
    made = weakref.WeakSet()

    class Cache:
        def __init__(self):
            self.length = 4
            made.add(self)

        def __deepcopy__(self, memo):
            return Cache()

    kept = RewoundCache(Cache, "model")
    assert len(made) == 2
    for _ in range(2):
        kept.rewind_alone()
        assert len(made) == 1
        cache = kept.take()
        assert cache.length == 4
        cache.length += 1
        del cache
    for _ in range(2):
        kept.rewind()
        assert len(made) == 2
        assert kept.take().length == 4


def test_a_cache_that_cannot_be_copied():
    with pytest.raises(TypeError, match="decode: the cache of model, a dict, cannot be copied, so that no"):
        RewoundCache(lambda: {"lock": threading.Lock()}, "model")


def grow_tensor(cache):
    cache["layers"][0].keys = torch.cat((cache["layers"][0].keys,) * 2)


def write_to_tensor(cache):
    cache["layers"][0].keys[0] = 1.0


def count(cache):
    cache["length"] += 1


def append(cache):
    cache["layers"].append(None)


def replace_by_equal(cache):
    cache["layers"][0].keys = cache["layers"][0].keys.clone()


@pytest.mark.parametrize("step", [grow_tensor, write_to_tensor, count, append, replace_by_equal])
def test_changed(step):
    assert is_changed_by(step, {"layers": [SimpleNamespace(keys=torch.zeros(2, 3))], "length": 2})


@pytest.mark.parametrize(
    "step",
    [
        lambda cache: cache["layers"][0].keys.sum(),
        lambda cache: cache["layers"][0].keys.clone().add_(1),
        lambda cache: cache["length"] + 1,
    ],
    ids=["read", "copied", "counted elsewhere"],
)
def test_not_changed(step):
    assert not is_changed_by(step, {"layers": [SimpleNamespace(keys=torch.zeros(2, 3))], "length": 2})


def test_attributes_without_a_dict():
    assert is_changed_by(lambda cache: cache.keys.add_(1), Kept())
    assert is_changed_by(lambda cache: setattr(cache, "length", 1), Kept())
    assert not is_changed_by(lambda cache: cache.keys + 1, Kept())


def test_a_cache_that_holds_itself():
    cache = SimpleNamespace(keys=torch.zeros(2))
    cache.owner = cache
    assert not is_changed_by(lambda cache: None, cache)
    assert is_changed_by(lambda cache: cache.keys.add_(1), cache)


def test_a_position_and_nothing():
    assert not is_changed_by(lambda cache: cache + 1, 7)
    assert not is_changed_by(lambda cache: None, None)


RECORD = np.zeros(1, dtype=[("at", int)])[0]  # its field can be assigned


class Row(deque):
    """A queue, with an attribute beside it."""


@pytest.mark.parametrize("kind", [deque, Row])
def test_a_queue(kind):
    assert is_changed_by(lambda cache: cache.append(torch.zeros(2)), kind())
    assert is_changed_by(lambda cache: cache[0].add_(1), kind([torch.zeros(2)]))
    assert not is_changed_by(lambda cache: cache[0] + 1, kind([torch.zeros(2)]))


def test_what_cannot_be_looked_into_counts_as_changed():
    for closed in (np.zeros(2), itertools.count(), bytearray(2), {}.values(), BareBytes(2), RECORD):
        assert is_changed_by(lambda cache: None, [closed])


def test_what_nothing_can_change():
    cache = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"), kind=Kept, module=torch, n=max)
    assert not is_changed_by(lambda cache: None, cache)


class Bare:
    __slots__ = ()


class BareBytes(bytearray):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        np.int64(5),
        np.float32(1),
        np.bool_(True),
        np.dtype("int8"),
        slice(0, 3),
        ...,
        torch.strided,
        torch.contiguous_format,
        SDPBackend.MATH,
        object(),
        Bare(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_nothing_that_could_change(value):
    assert not is_changed_by(lambda cache: cache[0] + 1, (torch.zeros(2), value))
    assert is_changed_by(lambda cache: cache.update(at=type(value)), {"at": value})


def test_a_slice_of_what_changes():
    assert is_changed_by(lambda cache: cache.stop.add_(1), slice(None, torch.zeros((), dtype=torch.int64)))


def test_another_number_of_numpy():
    assert is_changed_by(lambda cache: cache.update(at=cache["at"] + 1), {"at": np.int64(5)})


def test_what_cannot_be_told_counts_as_changed():
    with torch.inference_mode():
        cache = [torch.zeros(2)]
    assert is_changed_by(lambda cache: None, cache)
