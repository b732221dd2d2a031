"""A host that waits: each way to read a value is counted at its line, sound models never do."""

import pytest
import torch

WAYS = {
    "item": lambda x: x * x.abs().max().item(),
    "int": lambda x: x * int(x.detach().max() * 0 + 1),
    "condition": lambda x: x * 2 if x.sum() > 0 else x,
    "all": lambda x: x if torch.isfinite(x).all() else x * 0,
    "tolist": lambda x: x * x.flatten()[:1].detach().tolist()[0],
    "cpu": lambda x: x + x.detach().cpu(),
    "to cpu": lambda x: x + x.detach().to("cpu"),
    "numpy": lambda x: x * float(x.detach().numpy()[0, 0, 0]),
    "nonzero": lambda x: x + 0 * torch.nonzero(x).sum(),
    "masked_select": lambda x: x + 0 * x.masked_select(x > 0).sum(),
    "unique": lambda x: x + 0 * torch.unique(x.detach()).sum(),
    "boolean index": lambda x: x + 0 * x[x > 0].sum(),
    "equal": lambda x: x * 2 if torch.equal(x, x + 1) else x,
}


def mixing(subjects, way):
    class Model(subjects.TinyLM):
        def mix(self, x):
            return way(x)

    return Model


@pytest.mark.parametrize("name", WAYS)
def test_each_way(subjects, name):
    result = subjects.ask(mixing(subjects, WAYS[name]), "host_waits")
    assert result.status == "warned"
    assert result.value >= 2, "once in each of two layers"
    assert "test_synchronization.py" in result.where


@pytest.mark.parametrize(
    "name", ["tiny", "rack", "llama", "gpt2", "bert", "x_decoder", "gru", "conv", "encoder"]
)
def test_sound(subjects, name):
    result = subjects.ask(getattr(subjects, name), "host_waits")
    assert (result.status, result.value) == ("passed", 0.0), result


@pytest.mark.parametrize("lines, status", [(1, "passed"), (3, "passed"), (4, "warned")])
def test_a_few_waits_per_call_cost_little(subjects, lines, status):
    class Reads(subjects.TinyLM):
        def forward(self, ids):
            ids = ids if (ids >= 0).all() else -ids
            ids = ids if lines < 2 or (ids >= 0).all() else -ids
            ids = ids if lines < 3 or (ids >= 0).all() else -ids
            ids = ids if lines < 4 or (ids >= 0).all() else -ids
            return super().forward(ids)

    result = subjects.ask(Reads, "host_waits")
    assert (result.status, result.value) == (status, float(lines))


def test_tensors_that_were_created_on_the_host(subjects):
    """Such as the random number that decides if layerdrop skips a layer."""

    def layerdrop(x):
        return x * 0.5 if torch.rand([]) < 0.1 else x

    result = subjects.ask(mixing(subjects, layerdrop), "host_waits")
    assert (result.status, result.value) == ("passed", 0.0)


def test_tensors_that_were_created_on_the_device(subjects):
    def layerdrop(x):
        return x * 0.5 if torch.rand([], device=x.device) < 0.1 else x

    assert subjects.ask(mixing(subjects, layerdrop), "host_waits").status == "warned"


def test_what_only_the_first_call_does(subjects):
    class Caches(subjects.TinyLM):
        scale = None

        def mix(self, x):
            if self.scale is None:
                self.scale = x.detach().abs().max().item()
            return x / self.scale

    assert subjects.ask(Caches, "host_waits").status == "passed"


def test_in_the_backward_pass(subjects):
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * min(1.0, gradient.norm().item())

    result = subjects.ask(mixing(subjects, Reads.apply), "host_waits")
    assert (result.status, result.value) == ("warned", 2.0)
