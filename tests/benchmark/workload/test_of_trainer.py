"""A step of anybody's loop as a workload."""

import pytest
import torch

from stackwise.benchmark.workload import trainer_workload
from stackwise.trainer_spec import TrainerSpec


def test_a_training_step_of_anybodys_loop(subjects):
    steps = []

    def step(model, optimizer, batch):
        loss = model(batch["input_ids"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(tuple(batch["input_ids"].shape))
        return loss.detach()

    spec = TrainerSpec.from_function(step, subjects.gru, name="loop", seq_len=5)
    steps.clear()
    made = trainer_workload(spec, batch_size=3)
    before = [p.detach().clone() for p in made.model.parameters()]
    made.call()
    assert (made.name, made.tokens, made.mode, steps) == ("loop step", 15, "train", [(3, 5)])
    assert not all(map(torch.equal, before, made.model.parameters()))
    assert made.utilization(1.0) is None  # it may accumulate, freeze or cast, unknown to anybody
    with pytest.raises(ValueError, match="batch_size: got 0; allowed: an integer >= 1"):
        trainer_workload(spec, batch_size=0)
