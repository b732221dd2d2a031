"""What the benchmark of asynchronous saves measures: whole checkpoints of one state, in two ways."""

import pytest

from bench import async_save
from bench import claim as claim_module
from bench.async_save import ASYNCHRONOUS, KINDS, SYNCHRONOUS, Training, measure
from bench.claim import Claim
from bench.peer_models import Shape
from stackwise.checkpoint import CheckpointManager

TINY = Shape(16, 2, 2, 1, 32, vocab_size=32, batch_size=2, seq_len=8)


@pytest.fixture
def claim(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    return Claim("async_save", quick=False)


def test_every_round_has_both(claim, tmp_path):
    measure(claim, TINY, 3, tmp_path)
    [held_up, size] = claim.bars
    assert (held_up.name, held_up.limit, held_up.at_most) == ("held up, d16 L2 2x8", 0.05, True)
    assert size.verdict == "SHORT"  # of a toy
    [figures] = claim.figures.values()
    taken = figures["seconds"]
    assert {kind: len(each) for kind, each in taken["saves"].items()} == dict.fromkeys(KINDS, 3)
    assert [len(taken[name]) for name in ("writing", "alone", "beside")] == [3, 3, 3]
    pairs = zip(taken["saves"][ASYNCHRONOUS], taken["saves"][SYNCHRONOUS], strict=True)
    assert held_up.value == pytest.approx(sorted(a / b for a, b in pairs)[1])
    assert taken["first"].keys() == set(KINDS)


def test_the_state_is_weights_and_both_moments():
    training = Training(TINY)
    parameters = sum(p.numel() for p in training.rack.parameters())
    assert training.state_bytes() == parameters * 4 * 3


def test_all_ways_save_the_same(tmp_path, monkeypatch):
    training = Training(TINY)
    monkeypatch.setattr(async_save, "_beside", lambda *_: None)
    monkeypatch.setattr(training, "step", lambda: None)
    async_save.seconds(training, tmp_path, 2)
    files = []
    for kind in KINDS:
        CheckpointManager(tmp_path / kind).verify(2)
        files.append((tmp_path / kind / "step-2/tensors/rank-00000.safetensors").read_bytes())
    assert files[0] == files[1]
