"""What the benchmark of peers compares: calls that do the same, and the best of the others."""

import pytest
import torch

from bench import claim as claim_module
from bench import peers
from bench.claim import Claim
from bench.peer_models import Shape, rack

TINY = Shape(16, 2, 2, 1, 32, vocab_size=32, batch_size=2, seq_len=8)


@pytest.fixture
def claim(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    return Claim("peers", quick=True)


@pytest.fixture
def ids():
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))


def built():
    torch.manual_seed(0)
    return rack(TINY)


def test_threads_that_sleep_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["peers"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with pytest.raises(SystemExit):
        peers.main()
    assert "OMP_WAIT_POLICY: got PASSIVE; allowed: ACTIVE" in capsys.readouterr().err


def test_our_step_trains_as_that_of_a_peer(ids):
    theirs = peers.train_call(built(), ids, torch.float32, compiled=False)
    ours = peers.our_train_call(built(), ids, torch.bfloat16, compiled=False)
    losses = [(float(theirs()), float(ours())) for _ in range(3)]
    assert losses[0][0] > losses[-1][0]
    for one, two in losses:
        assert two == pytest.approx(one, rel=0.02)


def test_a_forward_pass_leaves_the_last_target_out(ids):
    model, logits = built()
    expected = logits(model, ids[:, :-1])
    torch.testing.assert_close(peers.forward_call((model, logits), ids, torch.float32, False)(), expected)


def test_the_fastest_peer_is_the_one_to_beat(claim, monkeypatch, capsys):
    def seconds(label):
        name, _, kind = label.split()
        return {"slow": 3.0, "fast": 2.0, "stackwise": 1.0}[name] * (1.5 if kind == "eager" else 1.0)

    def interleave(calls, *, rounds):
        return {label: [seconds(label)] * rounds for label in calls}

    monkeypatch.setattr(peers, "PEERS", {"slow": rack, "fast": rack})
    monkeypatch.setattr(peers, "train_call", lambda *_: lambda: None)
    monkeypatch.setattr(peers, "our_train_call", lambda *_: lambda: None)
    monkeypatch.setattr(peers, "interleave", interleave)
    peers.compare(claim, "train", TINY, 2.5, rounds=3)
    [bar] = claim.bars
    assert (bar.name, bar.value, bar.limit, bar.verdict) == ("train d16 L2 2x8", 2.0, 2.5, "SHORT")
    figures = claim.figures[bar.name]
    assert figures["best_peer"] in ("fast fp32 compiled", "fast bf16 compiled")
    # All are looked at, and the fastest are measured to the end.
    assert len(figures["screening_seconds"]) == 9
    assert set(figures["seconds"]) == {
        peers.OURS,
        "fast fp32 compiled",
        "fast bf16 compiled",
        *[label for label in figures["seconds"] if seconds(label) == 3.0],
    }
    assert len(figures["seconds"]) == 1 + peers.KEPT
    assert "2.00 times fast" in capsys.readouterr().out
