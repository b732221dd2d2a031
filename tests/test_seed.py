"""Random choices that start from a seed and leave the caller's state alone."""

import random

import numpy as np
import pytest
import torch

from stackwise.seed import seeded


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
