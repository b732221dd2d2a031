"""What the benchmark of telemetry compares: steps that train alike, and steps that keep all they say."""

import math
from contextlib import suppress

import pytest
import torch

from bench import claim as claim_module
from bench import overhead
from bench.claim import Claim
from bench.overhead import Bare, Loop, Measured, Rounds, build, trainer_config
from bench.peer_models import Shape
from stackwise import ArchitectureTrainer
from stackwise.training.record_log import read_json_lines

TINY = Shape(16, 2, 2, 1, 32, vocab_size=32, batch_size=2, seq_len=8)
STEPS = 3


@pytest.fixture
def ids():
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))


def flat(tensors):
    return torch.cat([t.detach().float().flatten() for t in tensors])


def test_the_trainer_and_the_bare_step_train_alike(ids, tmp_path):
    bare = Bare(TINY, ids, compile=False)
    before = flat(bare.rack.parameters())
    losses = [bare.step().item() for _ in range(STEPS)]
    torch.manual_seed(0)
    rack = build(TINY)
    config = trainer_config(TINY, tmp_path / "run.jsonl", compile=False)
    config.training.max_steps = STEPS
    result = ArchitectureTrainer(config, progress=False).train_architecture(rack, [ids])
    assert [record.loss for record in result["records"]] == pytest.approx(losses, rel=1e-3)
    masters = flat(bare.optimizer.state[p]["master"] for p in bare.rack.parameters())
    assert not torch.allclose(masters, before, atol=1e-3)
    torch.testing.assert_close(masters, flat(rack.parameters()), rtol=1e-5, atol=1e-6)
    lines, partial = read_json_lines(tmp_path / "run.jsonl")
    assert (len(lines), partial) == (STEPS, "")
    assert all(len(line["parameter_norms"]) == len(list(rack.parameters())) for line in lines)


def test_a_loop_trains_alike_whatever_is_kept_of_it(ids):
    plain, monitored, items = (Loop(TINY, ids, compile=False) for _ in range(3))
    for _ in range(STEPS):
        plain.plain()
        [loss], [gradient] = monitored.monitored()
        each_loss, norms = items.items()
        assert loss.loss == each_loss
        assert list(gradient.parameter_norms.values()) == pytest.approx(norms, rel=1e-4)
        assert gradient.total_norm == pytest.approx(math.hypot(*norms), rel=1e-5)
    assert torch.equal(flat(plain.rack.parameters()), flat(items.rack.parameters()))
    # Norms are summed in another order, and AdamW divides small gradients by their own size.
    torch.testing.assert_close(
        flat(plain.rack.parameters()), flat(monitored.rack.parameters()), rtol=1e-5, atol=2e-5
    )


def test_each_round_has_a_time_of_everything(ids):
    made = []
    rounds = Rounds(ids, {"a": lambda: made.append("a"), "b": lambda: made.append("b")}, rounds=4)
    rounds.steps = lambda took: 2
    batches = iter(rounds)
    with suppress(Measured):
        while True:
            next(batches)
            made.append("trainer")
    assert {name: len(seconds) for name, seconds in rounds.seconds.items()} == {"a": 4, "b": 4, "trainer": 4}
    assert all(made.count(name) == 2 + 4 * 2 for name in ("a", "b", "trainer"))


def test_the_bars_are_of_the_trainer_and_of_the_monitor(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    monkeypatch.setattr(Rounds, "steps", lambda self, took: 1)
    claim = Claim("overhead", quick=True)
    overhead.measure(claim, TINY, rounds=3, compile=False)
    assert [(bar.name, bar.limit, bar.at_most) for bar in claim.bars] == [
        ("trainer d16 L2 2x8", 1.01, True),
        ("monitored d16 L2 2x8", 1.01, True),
    ]
    assert {bar.judge(quick=True) for bar in claim.bars} == {"not judged"}
    [figures, _] = claim.figures.values()
    assert figures["times_plain"].keys() == {"trainer", "bare again", "monitored", "items"}
