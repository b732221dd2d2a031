"""Random states as a value: of each generator, taken, put back, and left alone."""

import random

import numpy as np
import torch

from stackwise.random_states import (
    random_states,
    random_states_equal,
    random_states_kept,
    random_states_set,
    set_random_states,
)
from stackwise.seed import seeded


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()  # noqa: NPY002


def test_what_is_put_back_draws_the_same():
    with seeded(0):
        states, first = random_states(), draw()
        assert draw() != first
        set_random_states(states)
        assert draw() == first


def test_kept():
    with seeded(0):
        with random_states_kept():
            first = draw()
        assert draw() == first


def test_set_for_a_while():
    with seeded(0):
        states, first, second = random_states(), draw(), draw()
        set_random_states(states)
        assert draw() == first
        with random_states_set(states):
            assert draw() == first
        assert draw() == second


def test_equal():
    draws = (lambda: torch.rand(1), random.random, lambda: np.random.rand())  # noqa: NPY002
    with seeded(0):
        states = random_states()
        for draw_one in draws:
            assert random_states_equal(states, random_states())
            draw_one()
            assert not random_states_equal(states, random_states())
            set_random_states(states)
    device, other = ({**states, "cuda": {0: torch.tensor([number])}} for number in (1, 2))
    assert random_states_equal(device, device)
    assert not random_states_equal(device, other)
    assert not random_states_equal(device, states)


class Cuda:
    """Four devices: the second is the current one, the third in use too."""

    def __init__(self, monkeypatch, count=4):
        self.asked, self.given = [], {}
        for name, answer in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: 1,
            "get_rng_state": lambda device: self.asked.append(device) or torch.tensor([device]),
            "set_rng_state": lambda state, device: self.given.update({device: state.item()}),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        begun = lambda device: device == 2  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", begun, raising=False)


def test_devices_that_are_not_used_are_left_alone(monkeypatch):
    cuda = Cuda(monkeypatch)
    states = random_states()
    assert cuda.asked == [1, 2] and states["cuda"].keys() == {1, 2}
    set_random_states(states)
    assert cuda.given == {1: 1, 2: 2}


def test_devices_that_this_machine_does_not_have(monkeypatch):
    states = random_states()
    cuda = Cuda(monkeypatch, count=2)
    set_random_states(states)
    assert cuda.given == {}  # nothing was saved of any
    set_random_states(states | {"cuda": {0: torch.tensor([7]), 6: torch.tensor([8])}})
    assert cuda.given == {0: 7}
    cuda.given.clear()
    set_random_states(states | {"cuda": {6: torch.tensor([8])}})
    assert cuda.given == {1: 8}  # another device of the same run
