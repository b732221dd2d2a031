"""What the benchmark of telemetry compares: steps that train alike, and a step that keeps all it says."""

import math

import pytest
import torch

from bench import claim as claim_module
from bench import overhead
from bench.claim import Claim
from bench.overhead import LOG_INTERVAL, Watched
from bench.peer_models import Shape
from stackwise.training.record_log import read_json_lines

TINY = Shape(16, 2, 2, 1, 32, vocab_size=32, batch_size=2, seq_len=8)


@pytest.fixture
def make(tmp_path):
    made = []

    def make():
        made.append(Watched(TINY, tmp_path / f"{len(made)}.jsonl", compile=False))
        return made[-1]

    yield make
    for watched in made:
        watched.close()


def weights(watched):
    states = (watched.optimizer.state[p]["master"] for p in watched.parameters)
    return torch.cat([state.flatten() for state in states])


def test_all_steps_train_alike(make):
    bare, naive, telemetry = (make() for _ in range(3))
    start = weights(bare)
    for _ in range(3):
        bare.bare()
        naive.naive()
        telemetry.telemetry()
    assert not torch.allclose(weights(bare), start, atol=1e-4)
    assert torch.equal(weights(bare), weights(naive))
    torch.testing.assert_close(weights(bare), weights(telemetry), rtol=1e-5, atol=1e-6)


def test_telemetry_keeps_what_it_says(make, tmp_path):
    naive, telemetry = make(), make()
    seen = [naive.naive() for _ in range(LOG_INTERVAL)]
    for _ in range(LOG_INTERVAL):
        telemetry.telemetry()
    lines, partial = read_json_lines(tmp_path / "1.jsonl")
    assert (len(lines), partial) == (LOG_INTERVAL, "")
    for line, (loss, norms) in zip(lines, seen, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-3)
        assert sorted(line["parameter_norms"].values()) == pytest.approx(sorted(norms), rel=2e-2)
        assert line["grad_norm"] == pytest.approx(math.hypot(*line["parameter_norms"].values()), rel=1e-5)
    assert lines[-1]["total_tokens"] == LOG_INTERVAL * TINY.batch_size * TINY.seq_len


def test_every_step_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    monkeypatch.setattr(overhead, "Watched", lambda shape, path: Watched(shape, path, compile=False))
    monkeypatch.setattr(overhead, "interleave", lambda calls, rounds: overhead_of(calls, rounds))
    claim = Claim("overhead", quick=True)
    overhead.measure(claim, TINY, rounds=3)
    [bar] = claim.bars
    assert (bar.name, bar.limit, bar.at_most) == ("telemetry d16 L2 2x8", 1.01, True)
    assert claim.figures[bar.name]["times_bare"].keys() == {"telemetry", "naive", "bare again"}


def overhead_of(calls, rounds):
    return claim_module.interleave(calls, rounds=rounds, seconds=0.0)
