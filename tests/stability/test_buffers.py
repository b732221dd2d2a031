"""What forward passes write is put back, and what they leave alone is not copied."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.stability.buffers import Buffers, elements


class Momentum(nn.Module):
    """Has a trained part, a running average of it, and a part that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.teacher.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return self.norm(self.student(self.frozen(x)) - self.teacher(x))


class Copies(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.copy_.default
        return function(*args, **(kwargs or {}))


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model, before):
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


TEACHER = {"teacher.weight", "teacher.bias"}
STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize("broken", [None, True, False])
def test_what_forward_passes_write_is_put_back(broken):
    model = Momentum()
    buffers = Buffers(model)
    buffers.keep()
    model(torch.randn(8, 4))
    buffers.note_written()
    before = state(model)
    with buffers.looking():
        model(torch.randn(8, 4))
        buffers.restore()  # as between passes over sound batches and those over the broken ones
        assert changed(model, before) == set()
        model(torch.randn(8, 4))
    assert changed(model, before) == set()
    buffers.keep()
    model(torch.randn(8, 4))
    buffers.note_written()
    assert changed(model, before) == TEACHER | STATISTICS
    buffers.restore(None if broken is None else torch.tensor(broken))
    assert changed(model, before) == (TEACHER | STATISTICS if broken is False else set())


def test_only_what_they_write_is_copied():
    model = Momentum()
    buffers = Buffers(model)
    counts = []
    for step in range(6):
        with Copies() as copies:
            buffers.keep()
        counts.append(copies.count)
        with torch.no_grad():  # of a loop, before the step is judged
            model.frozen.weight.mul_(0.5)
        model(torch.randn(8, 4))
        buffers.note_written()
        if step in (2, 4):
            with Copies() as copies, buffers.looking():
                pass
            counts.append(copies.count)  # there and back; of candidates there
            with buffers.looking():
                model(torch.randn(8, 4)) if step == 4 else None
            buffers.note_written()
    assert counts == [3, 3, 3, 3 + 3 + 3, 3, 3, 3 + 3 + 3, 3]


def test_what_a_loop_writes_stays():
    """Of weights without a gradient only those are put back that a look wrote; the rest is the loop's."""
    model = Momentum()
    buffers = Buffers(model)
    for _ in range(2):
        buffers.keep()
        before = state(model)
        with torch.no_grad():
            model.frozen.weight.mul_(0.5)
        model(torch.randn(8, 4))
        buffers.note_written()
        with buffers.looking():
            model(torch.randn(8, 4))
    buffers.restore()
    assert changed(model, before) == {"frozen.weight"} | TEACHER | STATISTICS
    buffers.keep()
    before = state(model)
    with torch.no_grad():
        model.frozen.weight.mul_(0.5)
    model(torch.randn(8, 4))
    buffers.restore()
    assert changed(model, before) == {"frozen.weight"}


def test_a_look_that_fails_puts_back_what_it_wrote():
    model = Momentum()
    buffers = Buffers(model)
    buffers.keep()
    model(torch.randn(8, 4))
    buffers.note_written()
    before = state(model)
    with pytest.raises(RuntimeError), buffers.looking():
        nn.Sequential(model, nn.Linear(5, 1))(torch.randn(8, 4))
    assert changed(model, before) == set()


def test_lazy_modules_are_passed_over():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.BatchNorm1d(4))
    buffers = Buffers(model)
    buffers.keep()
    model(torch.ones(8, 3))
    buffers.note_written()
    buffers.restore()
    assert torch.equal(model[2].running_var, torch.ones(4))


def test_expanded_buffers_are_put_back():
    model = nn.Module()
    model.register_buffer("scale", torch.ones(1, 3).expand(8, 3))
    buffers = Buffers(model)
    buffers.keep()
    model.scale[0].mul_(2)
    assert model.scale.sum() == 48
    for broken in (torch.tensor(True), None):
        buffers.restore(broken)
        assert torch.equal(model.scale, torch.ones(8, 3))


@pytest.mark.parametrize(
    "tensor, shape",
    [
        (torch.zeros(3, 4), (3, 4)),
        (torch.zeros(()), ()),
        (torch.zeros(()).expand(5), (1,)),
        (torch.zeros(3, 1).expand(3, 4), (3, 1)),
        (torch.zeros(0, 1).expand(0, 4), (0, 1)),
        (torch.zeros(4).to_sparse(), (4,)),
    ],
)
def test_each_element_in_memory_once(tensor, shape):
    assert tuple(elements(tensor).shape) == shape
