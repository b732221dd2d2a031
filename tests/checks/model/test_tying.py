"""Tying: what the head reads, against where its weight is stored."""

import copy

import pytest
import torch
from torch import nn

from stackwise.subject.spec import ModelSpec


class Tied(nn.Module):
    tied = True

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(29, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 29, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.1)
        self.tie()

    def tie(self):
        if self.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.layer(self.tokens(ids)).tanh())


class Untied(Tied):
    tied = False


class ByCopy(Tied):
    def tie(self):
        self.head.weight.data.copy_(self.tokens.weight.data)


class Functional(Untied):
    """No second parameter: the head is a product with the table."""

    def forward(self, ids):
        return self.layer(self.tokens(ids)).tanh() @ self.tokens.weight.t()


class Saved(Untied):
    """The head keeps the tensor itself, outside of parameters and buffers."""

    def __init__(self):
        super().__init__()
        table = self.tokens.weight
        self.project = lambda x: x @ table.t()

    def forward(self, ids):
        return self.project(self.layer(self.tokens(ids)).tanh())


class OnCast(Tied):
    """A cast gives the head a weight of its own."""

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        return self


class OnLoad(Tied):
    def __init__(self):
        super().__init__()
        self.register_load_state_dict_post_hook(lambda model, keys: model.split())

    def split(self):
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


def shares(model):
    return model.head.weight.data_ptr() == model.tokens.weight.data_ptr()


@pytest.mark.parametrize(
    "build, stored, claim, status",
    [
        (Tied, True, True, "passed"),
        (Tied, True, None, "passed"),
        (Tied, True, False, "failed"),
        (Untied, False, False, "passed"),
        (Untied, False, None, "passed"),
        (Untied, False, True, "failed"),
        (ByCopy, False, True, "failed"),
        (ByCopy, False, None, "warned"),
        (ByCopy, False, False, "passed"),
    ],
)
def test_claims(subjects, build, stored, claim, status):
    assert shares(build()) is stored
    result = subjects.ask(ModelSpec.of(build, tied=claim), "tying")
    if (build, claim) == (ByCopy, False):
        status = "warned"  # it may be meant to start there; it is said all the same
    assert result.status == status
    assert result.value == float(stored)
    if status == "warned":
        assert result.where == "head.weight"


class EncoderReadsTheHead(nn.Module):
    """An untied head, whose weight the embedding of the source has by mistake (transformers#48154)."""

    def __init__(self, tied):
        super().__init__()
        self.source, self.tokens = nn.Embedding(29, 16), nn.Embedding(29, 16)
        self.head = nn.Linear(16, 29, bias=False)
        if tied:
            self.source.weight = self.head.weight

    def forward(self, ids):
        context = self.source(torch.tensor([3, 5], device=ids.device)).mean(dim=0)
        return self.head((self.tokens(ids) + context).tanh())


@pytest.mark.parametrize(("tied", "status"), [(True, "failed"), (False, "passed")])
def test_another_embedding_that_an_untied_head_shares(subjects, tied, status):
    result = subjects.ask(ModelSpec.of(lambda: EncoderReadsTheHead(tied), tied=False), "tying")
    assert (result.status, result.where) == (status, "source.weight" if tied else "")


def test_second_name_of_a_table_that_the_head_does_not_read(subjects):
    def build():
        model = Untied()
        model.vocabulary = nn.Linear(16, 29, bias=False)
        model.vocabulary.weight = model.tokens.weight
        return model

    assert subjects.ask(ModelSpec.of(build, tied=False), "tying").status == "passed"


def test_a_head_without_a_weight_of_its_own(subjects):
    assert subjects.ask(ModelSpec.of(Functional, tied=True), "tying").status == "passed"


@pytest.mark.parametrize(
    "build, lost",
    [
        (Saved, lambda model: copy.deepcopy(model)),
        (OnCast, lambda model: model.double()),
        (OnLoad, lambda model: model.load_state_dict(model.state_dict()) and model),
    ],
)
def test_ties_that_do_not_last(subjects, build, lost):
    def moves(model):
        ids = torch.zeros(1, 2, dtype=torch.long)
        before = model(ids)
        with torch.no_grad():
            model.tokens.weight[9] += 1
        return not torch.equal(model(ids)[..., 9], before[..., 9])

    assert moves(build())
    assert not moves(lost(build()))
    result = subjects.ask(ModelSpec.of(build, tied=True), "tying")
    assert result.status == "failed"
    # A cast is part of moving a model to its device: there the tie is lost from the start.
    assert result.where == {Saved: "deepcopy()", OnCast: "", OnLoad: "load_state_dict()"}[build]


def test_where_there_is_nothing_to_ask(subjects):
    assert "token ids" in subjects.ask(subjects.encoder, "tying").meaning

    class OneHot(Untied):
        def forward(self, ids):
            return self.head(nn.functional.one_hot(ids, 29).to(self.head.weight) @ self.tokens.weight)

    result = subjects.ask(ModelSpec.of(OneHot, tied=True), "tying")
    assert result.status == "not applicable"
    assert "an embedding" in result.meaning


@pytest.mark.parametrize(
    "name, claim", [("rack", True), ("layernorm_rack", False), ("gpt2", True), ("llama", False)]
)
def test_models_of_others(subjects, name, claim):
    result = subjects.ask(ModelSpec.of(getattr(subjects, name), tied=claim), "tying")
    assert (result.status, result.value) == ("passed", float(claim))
