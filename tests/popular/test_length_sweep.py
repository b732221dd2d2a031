"""Popular models through `length_sweep`: stable at every length."""

import pytest

from stackwise.stability.lengths import first_unstable_length, length_sweep
from tests.popular import nanochat, nanogpt, vit


@pytest.mark.parametrize(
    ("model", "lengths"),
    [
        (nanogpt.tiny, (8, 16, 32)),
        pytest.param(nanogpt.manual, (8, 16, 32), marks=pytest.mark.slow),
        (nanochat.tiny, (8, 16, 32)),
        (vit.classifier, (4, 8, 16)),
        pytest.param(vit.convolutional_classifier, (4, 8, 16), marks=pytest.mark.slow),
    ],
    ids=["nanogpt", "nanogpt-manual", "nanochat", "vit", "vit-convolutional"],
)
def test_healthy_model_is_stable_at_every_length(model, lengths):
    sweep = length_sweep(model, lengths, tokens_per_step=64, seeds=2, steps=8, memory=False)

    assert sweep.problems == []
    assert [point.verdict for point in sweep.points] == ["stable"] * 3
    assert len({point.loss for point in sweep.points}) == 3


def test_search_finds_no_unstable_length():
    found = first_unstable_length(nanochat.tiny, 8, 24, step=8, tokens_per_step=64, steps=8, memory=False)

    assert found.verdict == "stable"


def test_length_beyond_the_positions_is_refused():
    with pytest.raises(ValueError, match="seq_len: got 64; tiny takes at most 32 positions"):
        length_sweep(nanogpt.tiny, (16, 64), steps=8)
