"""Packing: documents that see each other or misplace themselves are caught, sound models stay silent."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, Encoder, Placed, encoder, gpt, placed, spec_of

CHECKS = ["packing_isolation", "packing_alone"]


class Open(GPT):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, keep, None)


class OpenEncoder(Encoder):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, keep, None)


class GoesOn(Placed):
    def place(self, input_ids, past, keep, documents):
        return super().place(input_ids, past, keep, None)


class Shifted(GPT):
    """Each token reads the one before, across the border of documents too."""

    def embed(self, input_ids):
        x = super().embed(input_ids)
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


@torch.no_grad()
def moves(spec):
    """(isolation, alone): in float64, of the last document of a row of three."""
    model = spec.create().eval().double()
    ids, other = spec.batch(1, 12), spec.batch(1, 12, seed=7919)
    documents = torch.tensor([[0] * 4 + [1] * 2 + [2] * 6])
    changed = torch.where(documents < 2, other, ids)
    one, two = (spec.packed(model, x, documents).logits[:, 6:] for x in (ids, changed))
    alone = spec.logits(model, ids[:, 6:])
    spread = (one - one[:, :1]).abs().max()
    return ((one - two).abs().max() / spread).item(), ((one - alone).abs().max() / spread).item()


@pytest.mark.parametrize("make", [gpt, placed, encoder])
@pytest.mark.parametrize("check", CHECKS)
def test_sound(subjects, make, check):
    assert max(moves(make())) < 1e-12
    result = subjects.ask(make(), check)
    assert result.status == "passed"
    assert result.value <= result.limit


@pytest.mark.parametrize("name", ["rack", "window_rack", "bidirectional_rack", "dropout_rack"])
@pytest.mark.parametrize("check", CHECKS)
def test_our_own(subjects, name, check):
    assert subjects.ask(getattr(subjects, name), check).status == "passed"


@pytest.mark.parametrize("build", [Open, OpenEncoder, Shifted])
def test_documents_that_read_each_other(subjects, build):
    spec = spec_of(build, causal=not issubclass(build, Encoder))
    assert min(moves(spec)) > 1e-3
    result = subjects.ask(spec, "packing_isolation")
    assert (result.status, result.limit) == ("failed", 1e-8)
    assert result.value > 1e-3
    reader, source = int(result.where.split()[1]), int(result.where.split()[-1])
    assert reader != source
    assert subjects.ask(spec, "packing_alone").status == "failed"


def test_the_first_document_reads_nothing(subjects):
    result = subjects.ask(spec_of(Open), "packing_isolation")
    assert not result.where.startswith("document 0")


def test_positions_that_go_on(subjects):
    spec = spec_of(GoesOn)
    isolation, alone = moves(spec)
    assert isolation < 1e-12 < 1e-3 < alone
    assert subjects.ask(spec, "packing_isolation").status == "passed"
    result = subjects.ask(spec, "packing_alone")
    assert (result.status, result.limit) == ("failed", 1e-6)
    assert "in document 0" not in result.where
    assert "start again" in result.advice


@pytest.mark.parametrize("check", CHECKS)
def test_what_cannot_be_asked(subjects, check):
    for declared, reason in (({"packed": None}, "needs packed"), ({"seq_len": 3}, "at least 4 positions")):
        result = subjects.ask(spec_of(**declared), check)
        assert result.status == "not applicable"
        assert reason in result.meaning


def test_vectors(subjects):
    class Sums(nn.Module):
        """Running sums of each document."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x, documents=None):
            if documents is None:
                return self.inner(x.cumsum(dim=1))
            same = (documents[:, :, None] == documents[:, None]).tril().to(x)
            return self.inner(same @ x)

    class OpenSums(Sums):
        def forward(self, x, documents=None):
            return super().forward(x)

    for build, status in ((Sums, "passed"), (OpenSums, "failed")):
        spec = ModelSpec.of(
            build, inputs="vectors", width=8, packed=lambda model, x, d: model(x, documents=d)
        )
        for check in CHECKS:
            assert subjects.ask(spec, check).status == status
