"""How much of a GPU training and decoding use; `pytest bench --gpu`."""

import pytest
import torch

from bench.claim import Claim
from bench.gpu import DECODING, TRAINING, decoding_bar, training_bar

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def claim():
    claim = Claim("gpu", quick=False)
    yield claim
    claim.conclude()


@pytest.mark.parametrize("size", TRAINING, ids=lambda size: size.name)
def test_training(claim, size):
    claim.bars.append(training_bar(claim, size, torch.device("cuda")))
    assert claim.bars[-1].verdict == "PASS", claim.bars[-1]


@pytest.mark.parametrize("size", DECODING, ids=lambda size: size.name)
def test_decoding(claim, size):
    claim.bars.append(decoding_bar(claim, size, torch.device("cuda")))
    assert claim.bars[-1].verdict == "PASS", claim.bars[-1]
