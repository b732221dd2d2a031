"""`stackwise replay`: the step that a guard has left out, computed again in another process's place."""

import textwrap

import pytest
import torch

from stackwise.cli import main
from stackwise.stability.guard import Guard
from stackwise.stability.guard.diagnosis import Bundle
from stackwise.stability.guard.replay_loader import DrawnBatch
from stackwise.support.random_state import random_states

RUN = """
import torch
from torch import nn
from stackwise.stability.guard.diagnosis import Bundle

class Run:
    def __init__(self, broken=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if broken:
            self.model[1].register_forward_hook(lambda m, a, out: out / (0 if self.bad(a) else 1))

    def bad(self, arguments):
        return bool((arguments[0].abs() > 100).any())

    def loss(self, batch):
        return self.model(batch["x"]).square().mean()

def run():
    return Run()

def mended():
    return Run(broken=False)

def nothing():
    return 3
"""


COUNTED = """
from pathlib import Path
from torch import nn

def made():
    with Path("made").open("a") as file:
        file.write("once ")
    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
"""


NARROW = """
import torch
from torch import nn

class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.half().float()

class Run:
    def __init__(self):
        self.model = nn.Linear(4, 1)

    def loss(self, batch):
        return Narrow.apply(self.model(batch).square().mean())
"""


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """Of the second step, which divides by zero in the activation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replayed.py").write_text(textwrap.dedent(RUN))
    space = {}
    exec(RUN, space)
    run = space["run"]()
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    guard = Guard(run.model, optimizer, loss_of=lambda _, batch: run.loss(batch), bundles=tmp_path / "guard")
    for batch in guard.batches([{"x": torch.ones(2, 4)}, {"x": torch.full((2, 4), 1e4)}]):
        loss = run.loss(batch)
        loss.backward()
        guard.step(loss)
    [alarm] = guard.alarms
    assert alarm.where == "1 (forward)"
    return alarm.bundle


def test_it_still_breaks_in_the_same_place(bundle, capsys):
    assert main(["replay", str(bundle), "replayed.py:run"]) == 1
    shown = capsys.readouterr().out
    assert "then: step 1, non-finite loss in 1 (forward)" in shown
    assert "breaks first: 1 (forward)" in shown


def test_it_is_mended(bundle, capsys):
    assert main(["replay", str(bundle), "replayed.py:mended"]) == 0
    assert "nothing breaks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "alarm, code, said",
    [
        ({"kind": "gradient spike", "value": 9.0, "limit": 1e-9}, 1, "; gradient spike again, above 1e-09\n"),
        ({"kind": "loss spike", "value": 9.0, "limit": 1e-9}, 1, "; loss spike again, above 1e-09\n"),
        ({"kind": "loss spike", "value": 9.0, "limit": 8.0}, 0, "; nothing breaks\n"),
        ({"kind": "loss spike"}, 0, "; nothing breaks, but loss spike is not looked at\n"),
        (
            {"kind": "logit growth", "value": 9.0, "limit": 8.0},
            0,
            "; nothing breaks, but logit growth is not looked at\n",
        ),
    ],
)
def test_a_spike_breaks_where_it_is_one_again(bundle, tmp_path, capsys, alarm, code, said):
    batch = DrawnBatch(0, 0, {"x": torch.ones(2, 4)}, random_states())
    folder = Bundle({"step": 0} | alarm, [batch], {}).write(tmp_path / "spike")
    assert main(["replay", str(folder), "replayed.py:mended"]) == code
    assert capsys.readouterr().out.endswith(said)


def test_a_model_is_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counted.py").write_text(textwrap.dedent(COUNTED))
    batch = DrawnBatch(0, 0, torch.randint(11, (2, 6)), random_states())
    alarm = {"step": 0, "kind": "gradient spike", "value": 99.0, "limit": 50.0}
    bundle = Bundle(alarm, [batch], {}).write(tmp_path / "bundle")
    assert main(["replay", str(bundle), "counted.py:made"]) == 0
    shown = capsys.readouterr().out
    assert "nothing breaks" in shown
    assert (tmp_path / "made").read_text() == "once "
    # Of random weights, where the bundle has none, the same each time.
    assert main(["replay", str(bundle), "counted.py:made"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("scale, code", [(2.0**16, 1), (2.0**15, 0), (None, 0)])
def test_the_loss_is_scaled_as_it_was(tmp_path, monkeypatch, capsys, scale, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "narrow.py").write_text(NARROW)
    batch = DrawnBatch(0, 0, torch.ones(2, 4), random_states())
    notes = {} if scale is None else {"loss_scale": scale}
    alarm = {"step": 0, "kind": "non-finite gradient"}
    folder = Bundle(alarm, [batch], {}, notes=notes).write(tmp_path / "bundle")
    assert main(["replay", str(folder), "narrow.py:Run"]) == code
    assert ("breaks first: the loss" if code else "nothing breaks") in capsys.readouterr().out


def test_what_is_no_training_is_refused(bundle, capsys):
    assert main(["replay", str(bundle), "replayed.py:nothing"]) == 2
    assert "got int; wanted an object with model and loss(batch)" in capsys.readouterr().err


def test_what_is_no_bundle_is_refused(tmp_path, bundle, capsys):
    assert main(["replay", str(tmp_path), "replayed.py:run"]) == 2
    assert "bundle.json: no bundle" in capsys.readouterr().err
