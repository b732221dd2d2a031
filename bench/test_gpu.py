"""How much of a GPU training and decoding use; `pytest bench --gpu`."""

import pytest
import torch

from bench.claim import Claim
from bench.gpu import DECODING, TRAINING, decoding_bar, overhead_bars, training_bar

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def claim():
    claim = Claim("gpu", quick=False)
    yield claim
    claim.conclude()


@pytest.mark.parametrize("size", TRAINING, ids=lambda size: size.name)
def test_training(claim, size):
    bar = training_bar(claim, torch.device("cuda"), size)
    assert bar.verdict == "PASS", bar


@pytest.mark.parametrize("size", DECODING, ids=lambda size: size.name)
def test_decoding(claim, size):
    bar = decoding_bar(claim, torch.device("cuda"), size)
    assert bar.verdict == "PASS", bar


def test_overhead(claim):
    for bar in overhead_bars(claim, torch.device("cuda")):
        assert bar.verdict == "PASS", bar
