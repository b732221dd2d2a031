"""GradientController: counts within its window, warns once in it, and clips as torch does."""

import json
import math
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.stability import GradientMonitor
from stackwise.stability.gradient_controller import GradientController, GradientWarning
from stackwise.stability.guard import Guard, GuardPolicy

Record = namedtuple("Record", "step total_norm parameter_norms")


class Source:
    def __init__(self, norms):
        self.norms, self.read = list(enumerate(norms)), 0

    def records(self):
        new, self.read = self.norms[self.read :], len(self.norms)
        return [Record(step, norm, {"a.weight": norm / 2, "b.weight": norm}) for step, norm in new]


def warnings_of(norms, **arguments):
    return GradientController(Source(norms), **arguments).read()


@given(st.lists(st.booleans(), max_size=80), st.integers(2, 12), st.data())
def test_clips_are_those_of_the_window(clipped, window, data):
    allowed = data.draw(st.integers(0, window - 1))
    controller = GradientController(
        Source([2.0 if c else 0.5 for c in clipped]), window=window, allowed=allowed
    )
    found = controller.read()
    assert controller.clips_in_window == sum(clipped[-window:])
    assert controller.clips == sum(clipped)
    expected, last = [], -window
    for step in range(len(clipped)):
        count = sum(clipped[max(0, step + 1 - window) : step + 1])
        if count > allowed and step - last >= window:
            expected.append((step, count))
            last = step
    assert [(w.step, w.value) for w in found] == expected
    assert all(w.kind == "frequent clipping" and w.limit == allowed for w in found)


def test_old_clips_do_not_count():
    # Ten in three hundred steps are not many in any hundred.
    norms = [2.0 if step % 30 == 0 else 0.5 for step in range(300)]
    assert warnings_of(norms) == []


def test_a_limit_is_not_above_itself():
    assert warnings_of([1.0] * 50, allowed=0) == []


def test_explosions_and_what_is_not_finite():
    found = warnings_of([1.0, 101.0, 100.0, math.nan, math.inf])
    assert [(w.step, w.kind, w.where) for w in found] == [
        (1, "explosion", "b.weight"),
        (3, "non-finite", "a.weight"),
        (4, "non-finite", "a.weight"),
    ]
    assert str(found[0]) == "step 1: explosion, gradient norm 101 (limit 100), b.weight"
    json.dumps(found[0].to_dict())
    assert str(GradientWarning(9, "frequent clipping", 11.0, 10.0)) == (
        "step 9: 11 clipped steps (more than 10) in the window"
    )


def test_records_are_read_once():
    controller = GradientController(Source([5.0]), allowed=0)
    assert len(controller.read()) == 1
    assert controller.read() == []


def test_clipping_is_that_of_torch_and_the_norm_is_of_one_vector():
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    controller = GradientController(GradientMonitor(model), max_norm=0.5, explosion=3.0)
    x = torch.randn(6, 4)
    for m in (model, twin):
        (m(x) * 5).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    norm = controller.clip(model, step=7)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    [warning] = controller.read()
    assert (warning.step, warning.kind) == (7, "explosion")
    assert warning.value == pytest.approx(expected.item(), rel=1e-6)


def test_a_view_of_a_guard():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.0), policy=GuardPolicy(clip=1e-3))
    controller = GradientController(guard, max_norm=1e-3, window=10, allowed=4)
    for _ in range(12):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        guard.step(loss)
    found = controller.read()
    assert [w.step for w in found] == [4]
    assert controller.clips == 12
    with pytest.raises(ValueError, match="source: got 'Guard'; allowed: a GradientMonitor, to clip with"):
        controller.clip(model)


@pytest.mark.parametrize(
    "arguments, key",
    [
        ({"max_norm": 0.0}, "max_norm"),
        ({"window": 0}, "window"),
        ({"allowed": 100}, "allowed"),
        ({"explosion": math.inf}, "explosion"),
    ],
)
def test_what_is_refused(arguments, key):
    with pytest.raises(ValueError, match=f"^{key}: got"):
        GradientController(Source([]), **arguments)
