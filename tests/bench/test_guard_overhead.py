"""What the benchmark of the guard compares: one training with and without it, to the bit."""

import torch

from bench import claim as claim_module
from bench import guard_overhead
from bench.claim import Claim
from bench.guard_overhead import Guarded
from bench.peer_models import Shape

TINY = Shape(16, 2, 2, 1, 32, vocab_size=32, batch_size=2, seq_len=8)


def test_a_guarded_step_trains_alike():
    plain, guarded = (Guarded(TINY, compile=False) for _ in range(2))
    for _ in range(6):
        assert plain.plain().item() == guarded.guarded().item()
    pairs = zip(plain.rack.parameters(), guarded.rack.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
    assert guarded.guard.steps == 6
    assert guarded.guard.alarms == []


def test_the_bar_has_the_snapshot_in_it(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    monkeypatch.setattr(
        guard_overhead, "interleave", lambda calls, rounds: dict.fromkeys(calls, [0.01] * rounds)
    )
    monkeypatch.setattr(Guarded, "snapshot_seconds", lambda self: 0.045)
    claim = Claim("guard_overhead", quick=True)
    guard_overhead.measure(claim, TINY, rounds=3, compile=False)
    [bar] = claim.bars
    assert (bar.limit, bar.at_most) == (1.02, True)
    assert bar.value == 1.0 + 0.1
