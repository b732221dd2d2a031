"""State: a call must not leave changes in buffers, arguments, modes and settings, nor memory."""

from collections import deque

import pytest
import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec


class Counting(nn.Module):
    """Counts the tokens of each id in a buffer."""

    persistent = True

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.register_buffer("seen", torch.zeros(31), persistent=self.persistent)

    def forward(self, ids):
        self.count(ids)
        return self.embedding(ids)

    def count(self, ids):
        self.seen += torch.bincount(ids.flatten(), minlength=31)


class NotSaved(Counting):
    persistent = False


class InTraining(Counting):
    def count(self, ids):
        if self.training:
            super().count(ids)


class Cached(Counting):
    """The buffer contains the last inputs, as a cache of keys and values does."""

    def count(self, ids):
        self.seen[: ids.shape[1]] = ids[0]


@pytest.mark.parametrize(
    "build, status",
    [(Counting, "failed"), (NotSaved, "failed"), (InTraining, "passed"), (Cached, "passed")],
)
def test_buffers_stay_the_same_in_eval_mode(subjects, build, status):
    assert subjects.ask(build, "eval_buffers").status == status


@pytest.mark.parametrize("name", ["rack", "llama", "gru"])
def test_healthy_model_passes(subjects, name):
    assert subjects.ask(getattr(subjects, name), "eval_buffers").status == "passed"


def test_buffers_of_any_dtype_are_compared(subjects):
    class Narrow(Counting):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(float("nan")).to(torch.float8_e4m3fn))
            self.register_buffer("empty", torch.zeros(0))

        def count(self, ids):
            pass

    assert subjects.ask(Narrow, "eval_buffers").status == "passed"


class Plain(nn.Module):
    """Embedding and head, with an action in each call."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.ring, self.log = deque(maxlen=40), []

    def forward(self, ids, state=None):
        x = self.embedding(ids)
        self.act(ids, x)
        return self.head(x)

    def act(self, ids, x):
        pass


def acting(act):
    return type("Acting", (Plain,), {"act": act})


@pytest.mark.usefixtures("few_compositions")
@pytest.mark.parametrize(
    "act, status",
    [
        (lambda self, ids, x: torch.rand(3), "passed"),
        (lambda self, ids, x: ids.clamp_(max=40), "passed"),
        (lambda self, ids, x: ids.data[:, 0].fill_(1), "failed"),
        (lambda self, ids, x: self.head.requires_grad_(False), "warned"),
        (lambda self, ids, x: torch.use_deterministic_algorithms(True), "failed"),
    ],
)
def test_side_effects_of_a_call(subjects, act, status):
    before = torch.are_deterministic_algorithms_enabled()
    assert subjects.ask(acting(act), "side_effects").status == status
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.usefixtures("few_compositions")
def test_state_written_in_place_is_no_finding():
    def decode(model, ids, state):
        state = torch.zeros(len(ids), 1) if state is None else state
        return model(ids, state), state

    class Stateful(Plain):
        def forward(self, ids, state=None):
            if state is not None:
                state.add_(ids.shape[1])
            return super().forward(ids)

    spec = ModelSpec(build=Stateful, name="stateful", width=31, inputs="tokens", decode=decode, causal=True)
    [result] = check_model(spec, checks=["side_effects"])
    assert result.status == "passed", result


@pytest.mark.parametrize(
    "act, status",
    [
        (lambda self, ids, x: self.ring.append(x.detach()), "passed"),
        (lambda self, ids, x: self.log.append(x.detach().mean()), "warned"),
        (lambda self, ids, x: self.log.append(x.detach().repeat(9, 9, 1)), "failed"),
    ],
)
def test_memory_that_calls_leave(subjects, act, status):
    state = torch.get_rng_state()
    assert subjects.ask(acting(act), "memory_growth").status == status
    assert torch.equal(state, torch.get_rng_state())


def test_replaced_module_is_no_side_effect(subjects):
    class Cached(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.kept = nn.Identity()

        def forward(self, *args, **kwargs):
            self.kept = nn.Identity()  # in train mode, as each new module
            return super().forward(*args, **kwargs)

    assert subjects.ask(Cached, "side_effects").status == "passed"
