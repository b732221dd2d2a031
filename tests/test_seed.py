"""Random choices that start from a seed and leave the caller's state alone, and several seeds."""

import random

import numpy as np
import pytest
import torch

from stackwise.seed import chosen_seeds, seeded


def test_seeded_puts_the_state_back_after_an_exception():
    before = torch.get_rng_state()

    def fail():
        torch.rand(5)
        raise KeyError

    with pytest.raises(KeyError), seeded(3):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_is_a_function_of_the_seed():
    draws = []
    for seed in (1, 1, 2):
        torch.rand(7)
        with seeded(seed):
            draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_seeded_covers_python_and_numpy():
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    draws = []
    for seed in (1, 1, 2):
        with seeded(seed):
            draws.append((random.random(), float(np.random.rand())))  # noqa: NPY002
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[2][0]
    assert draws[0][1] != draws[2][1]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32 + 3, 2**63 - 1])
def test_large_seeds(seed):
    with seeded(seed):
        torch.rand(1)


def test_seeding_the_cpu_leaves_the_cuda_generators(monkeypatch):
    # torch.manual_seed reseeds every GPU, and fork_rng([]) puts none of them back.
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(0)
    assert seeds == [0]
    seeds.clear()
    with seeded(7, "cpu"):
        torch.rand(1)
    assert seeds == []


def test_a_number_of_seeds_and_which_ones():
    assert chosen_seeds(3) == (0, 1, 2)
    assert chosen_seeds(3, 5, apart=10) == (5, 15, 25)
    assert chosen_seeds([4, 2], 5) == (4, 2)
    assert chosen_seeds(range(2, 5)) == (2, 3, 4)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (0, "others: got 0; allowed: an integer >= 1"),
        (True, "others: got True"),
        (2.0, "others: got 2.0"),
        ((), r"others: got \(\); allowed: at least one"),
        ((1, 1), r"others: got \(1, 1\); allowed: each once"),
        ((0, -1), "others: got -1; allowed: an integer >= 0"),
        ("01", "others: got '0'"),
    ],
)
def test_what_is_no_seeds_is_refused(seeds, message):
    with pytest.raises(ValueError, match=message):
        chosen_seeds(seeds, key="others")
