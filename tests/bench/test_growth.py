"""bench.growth: what its loops keep, which bar a verdict falls under, and which models are asked."""

import pytest
from torch import nn

from bench import growth


def model():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


@pytest.mark.parametrize("leak", growth.LEAKS)
def test_each_leak_keeps_something_of_every_step(leak):
    loop = growth.Loop(lambda: model, leak)
    held = []
    for _ in range(3):
        loop()
        held.append(len(loop.kept) + nodes(loop.total.grad_fn))
    assert 0 < held[0] < held[1] < held[2]


def nodes(grad_fn):
    seen, waiting = set(), [grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return len(seen)


def test_a_sound_loop_keeps_nothing():
    loop = growth.Loop(lambda: model, growth.SOUND)
    before = loop.model[1].weight.detach().clone()
    loop()
    assert not loop.kept
    assert loop.total.grad_fn is None
    assert not loop.model[1].weight.equal(before)


def test_bars():
    runs = {
        "a; sound": {"verdict": "flat", "types": [], "error": None},
        "b; sound": {"verdict": "grows", "types": [], "error": None},
        "c; sound": {"error": "cannot be built"},
        "a; a hook accumulates": {"verdict": "grows", "types": ["torch.Tensor"], "error": None},
        "a; loss += keeps the graph": {"verdict": "grows", "types": ["torch.Tensor"], "error": None},
        "a; an optimizer for each step": {"verdict": "flat", "types": [], "error": None},
    }
    values = {bar.name: bar.value for bar in growth.bars(runs)}
    assert values == {
        "sound loops": 2.0,
        "alarms at sound loops": 1.0,
        "leaks caught": pytest.approx(2 / 3),
        "leaks named": pytest.approx(1 / 3),
    }


def test_every_model_of_others_is_asked_and_some_are_broken():
    jobs = growth.jobs_of(quick=False)
    sound = [name for name in jobs if name.endswith(growth.SOUND)]
    assert len(sound) > 20
    assert len(jobs) - len(sound) == growth.LEAKY * len(growth.LEAKS)
