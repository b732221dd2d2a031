"""State of a run, and its next batches."""

import torch

from stackwise.checks.probe.run_state import different, next_batches, state_of
from tests.zoo.loop import Loop, loop


def test_state_of_two_runs():
    one, two = loop().create(), loop().create()
    assert different(state_of(one), state_of(two)) == []
    with torch.no_grad():
        one.model.norm.weight[3] = torch.nan
        two.model.norm.weight[3] = torch.nan
    assert different(state_of(one), state_of(two)) == []
    two.model.norm.weight.requires_grad_(False)
    assert different(state_of(one), state_of(two)) == ["model.norm.weight takes gradients"]


def test_next_batches_go_on_over_epochs():
    run = Loop()
    wanted = [batch["input_ids"] for number in (0, 1) for batch in run.epoch(number)]
    run.batch_number = 2
    own = next_batches(run)
    for index in range(2, 9):
        assert torch.equal(next(own)["input_ids"], wanted[index])
        run.advance()
