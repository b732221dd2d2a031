"""What the benchmark of recomputation counts."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench import recompute
from bench.recompute import KINDS, Shape, bytes_held, bytes_saved

TINY = Shape(16, 32, 2, 4, batch_size=1, seq_len=16, rounds=1, gigabytes=1.0)


def test_held_is_what_outlives_the_call():
    x, weight = torch.randn(5, 4), torch.randn(4, 4, requires_grad=True)
    # Of three results one is saved for the backward pass, one is returned, and one is neither.
    assert bytes_held(lambda: (x @ weight).tanh() + 1.0) == 2 * 5 * 4 * 4
    with torch.no_grad():
        assert bytes_held(lambda: (x @ weight).tanh() + 1.0) == 5 * 4 * 4
    assert bytes_held(lambda: checkpoint(lambda: (x @ weight).tanh() + 1.0, use_reentrant=False)) == 80


def test_a_view_is_no_memory():
    x = torch.randn(6, 4)
    assert bytes_held(lambda: x.view(3, 8).t()[:2]) == 0
    assert bytes_held(lambda: (x * 2).view(3, 8).t()[:2]) == 6 * 4 * 4


def test_saved_leaves_weights_out():
    model, x = nn.Linear(4, 4, bias=False), torch.randn(5, 4, requires_grad=True)
    assert bytes_saved(lambda: model(x).tanh(), model) == 2 * 5 * 4 * 4


def test_a_pass_of_each_kind_is_measured(monkeypatch):
    monkeypatch.setattr(recompute, "QUICK", TINY)
    monkeypatch.setattr(recompute, "_peak", lambda call: call() and None)
    found = {name: next(recompute.one_pass(TINY, "full", "fp32", options)) for name, options in KINDS.items()}
    assert len({each["gradients"] for each in found.values()}) == 1
    held = {name: each["held_bytes"] for name, each in found.items()}
    assert held["full"] < held["every_nth 2"] < held["none"]
    # Two Blocks of four; the four also leave tables behind in the Layout that they share.
    assert abs((held["none"] - held["every_nth 2"]) / (held["none"] - held["full"]) - 0.5) < 0.01
