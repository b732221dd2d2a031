"""Random state: seeding for a block, lists of seeds, and saved states of all generators."""

import random

import numpy as np
import pytest
import torch

from stackwise.support.random_state import (
    choose_seeds,
    keep_random_states,
    random_states,
    random_states_equal,
    seeded,
    set_random_states,
    use_random_states,
)


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32 + 3, 2**63 - 1])
def test_seeded_is_a_function_of_the_seed(seed):
    draws = []
    for each in (seed, seed, seed ^ 1):
        draw()
        with seeded(each):
            draws.append(draw())
    assert draws[0] == draws[1]
    assert all(one != other for one, other in zip(draws[0], draws[2], strict=True))


def test_seeded_restores_the_states_after_an_exception():
    before = random_states()

    def fail():
        draw()
        raise KeyError

    with pytest.raises(KeyError), seeded(3):
        fail()
    assert random_states_equal(before, random_states())


def test_seeded_on_the_cpu_leaves_the_cuda_generators(monkeypatch):
    # torch.manual_seed seeds every GPU, and fork_rng([]) restores none of them.
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(0)
    assert seeds == [0]
    seeds.clear()
    with seeded(7, "cpu"):
        torch.rand(1)
    assert seeds == []


@pytest.mark.parametrize(
    ("arguments", "seeds"),
    [
        ({"seeds": 3}, (0, 1, 2)),
        ({"seeds": 3, "first": 5, "step": 10}, (5, 15, 25)),
        ({"seeds": [4, 2], "first": 5}, (4, 2)),
        ({"seeds": range(2, 5)}, (2, 3, 4)),
    ],
)
def test_seeds_are_counted_or_given(arguments, seeds):
    assert choose_seeds(**arguments) == seeds


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (0, "others: got 0; allowed: an integer >= 1"),
        (True, "others: got True"),
        (2.0, "others: got 2.0"),
        ((), r"others: got \(\); allowed: at least one"),
        ((1, 1), r"others: got \(1, 1\); allowed: distinct seeds"),
        ((0, -1), "others: got -1; allowed: an integer >= 0"),
        ("01", "others: got '0'"),
    ],
)
def test_other_seeds_are_refused(seeds, message):
    with pytest.raises(ValueError, match=message):
        choose_seeds(seeds, key="others")


def test_restored_states_draw_the_same_numbers():
    with seeded(0):
        states, first = random_states(), draw()
        assert draw() != first
        set_random_states(states)
        assert draw() == first


def test_blocks_restore_the_states_before_them():
    with seeded(0):
        states, first = random_states(), draw()
        set_random_states(states)
        with keep_random_states():
            assert draw() == first
        assert draw() == first
        second = draw()
        set_random_states(states)
        draw()
        with use_random_states(states):
            assert draw() == first
        assert draw() == second


@pytest.mark.parametrize(
    "draw_one",
    [lambda: torch.rand(1), random.random, lambda: np.random.rand()],  # noqa: NPY002
    ids=["torch", "python", "numpy"],
)
def test_states_are_equal_only_if_all_generators_are(draw_one):
    with seeded(0):
        states = random_states()
        assert random_states_equal(states, random_states())
        draw_one()
        assert not random_states_equal(states, random_states())


def test_states_are_equal_only_if_all_devices_are():
    states = random_states()
    device, other, second = ({**states, "cuda": {n: torch.tensor([x])}} for n, x in ((0, 1), (0, 2), (1, 1)))
    assert random_states_equal(device, device)
    for different in (other, second, states):
        assert not random_states_equal(device, different)


class FakeCuda:
    """CUDA devices of which number 1 is current and number 2 is initialised."""

    def __init__(self, monkeypatch, count=4):
        self.read, self.restored = [], {}
        for name, function in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: 1,
            "get_rng_state": lambda device: self.read.append(device) or torch.tensor([device]),
            "set_rng_state": lambda state, device: self.restored.update({device: state.item()}),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == 2, raising=False)


def test_unused_cuda_devices_are_left_alone(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    states = random_states()
    assert cuda.read == [1, 2] and states["cuda"].keys() == {1, 2}
    set_random_states(states)
    assert cuda.restored == {1: 1, 2: 2}


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ({}, {}),
        ({0: 7, 6: 8}, {0: 7}),  # device 6 does not exist here
        ({6: 8}, {1: 8}),  # the only device of the run: the current one replaces it
    ],
)
def test_states_of_missing_cuda_devices(monkeypatch, saved, restored):
    states = random_states()
    cuda = FakeCuda(monkeypatch, count=2)
    set_random_states(states | {"cuda": {device: torch.tensor([state]) for device, state in saved.items()}})
    assert cuda.restored == restored
