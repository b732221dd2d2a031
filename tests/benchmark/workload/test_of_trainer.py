"""A step of anybody's loop as a workload."""

from types import SimpleNamespace

import pytest
import torch

from stackwise.benchmark.workload import trainer_workload
from stackwise.subject.trainer_spec import TrainerSpec


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


@pytest.mark.parametrize(
    ("devices", "expected", "waited_for"),
    [
        (["cpu"], "cpu", []),
        ([], "cpu", []),
        (["cuda:0", "cuda:0"], "cuda:0", []),
        (["cuda:1", "cuda:0", "cuda:1", "cuda:2", "meta"], "cuda:1", ["cuda:0", "cuda:2"]),
    ],
)
def test_a_model_on_several_devices(monkeypatch, devices, expected, waited_for):
    """The step is over when all of them are idle; a clock waits for one."""
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(str(device)))
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    run = SimpleNamespace(
        model=SimpleNamespace(parameters=lambda: iter(parameters)), step=lambda batch: done.append("step")
    )
    spec = SimpleNamespace(
        name="split",
        batch_size=1,
        seq_len=1,
        create=lambda seed: run,
        batch=lambda *sizes, device, seed: done.append(f"batch on {device}"),
    )
    made = trainer_workload(spec)
    made.call()
    assert str(made.device) == expected
    assert done == [f"batch on {expected}", "step", *waited_for]
