"""Random states as a value: of each generator, taken, put back, and left alone."""

import random

import numpy as np
import torch

from stackwise.random_states import random_states, random_states_kept, random_states_set, set_random_states
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
