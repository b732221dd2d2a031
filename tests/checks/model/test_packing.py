"""Packing: documents of a row that depend on each other fail, and correct models pass."""

import pytest
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, Encoder, Placed, encoder, placed, spec_of

# Without them, fewer variations are asked.
ONLY_PACKED = {"masked": None, "padding_sides": (), "decode": None, "labelled_loss": None}


class DocumentsIgnored(GPT):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, keep, None)


class DocumentsIgnoredInEncoder(Encoder):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, keep, None)


class PositionsGoOn(Placed):
    """Learned positions are counted from the start of the row."""

    def place(self, input_ids, past, keep, documents):
        return super().place(input_ids, past, keep, None)


class ReadsPreviousToken(GPT):
    """Each token reads the previous one, also in the previous document."""

    def embed(self, input_ids):
        x = super().embed(input_ids)
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class Sums(nn.Module):
    """Running sums of vectors, in each document."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, documents=None):
        if documents is None:
            return self.inner(x.cumsum(dim=1))
        same = (documents[:, :, None] == documents[:, None]).tril().to(x)
        return self.inner(same @ x)


class SumsOfTheRow(Sums):
    def forward(self, x, documents=None):
        return super().forward(x)


def vectors(build):
    return ModelSpec.of(
        build, inputs="vectors", width=8, packed=lambda model, x, documents: model(x, documents=documents)
    )


MODELS = {
    "documents ignored": (lambda: spec_of(DocumentsIgnored, **ONLY_PACKED), "failed"),
    "documents ignored in an encoder": (lambda: encoder(DocumentsIgnoredInEncoder), "failed"),
    "positions go on": (lambda: spec_of(PositionsGoOn, **ONLY_PACKED), "failed"),
    "previous token": (lambda: spec_of(ReadsPreviousToken, **ONLY_PACKED), "failed"),
    "sums of the row": (lambda: vectors(SumsOfTheRow), "failed"),
    "sums": (lambda: vectors(Sums), "passed"),
    "GPT": (spec_of, "passed"),
    "learned positions": (placed, "passed"),
    "encoder": (encoder, "passed"),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents(subjects, name):
    model, status = MODELS[name]
    result = subjects.ask(model(), "packing_alone")
    assert result.status == status, str(result)
    assert (result.value > result.limit) == (status == "failed")
    assert ("packed documents" in result.meaning) == (status == "failed")


@pytest.mark.parametrize("name", ["window_rack", "bidirectional_rack", "dropout_rack"])
def test_rack_passes(subjects, name):
    assert subjects.ask(getattr(subjects, name), "packing_alone").status == "passed"


def test_packing_isolation_is_another_name():
    [result] = check_model(vectors(SumsOfTheRow), checks=["packing_isolation"])
    assert (result.check, result.status) == ("packing_alone", "failed")


@pytest.mark.parametrize(
    "declared, reason",
    [({"packed": None}, "needs packed"), ({"max_length": 3}, "at least 4 positions")],
    ids=["no packed", "3 positions"],
)
def test_other_model_is_not_asked(subjects, declared, reason):
    result = subjects.ask(spec_of(**ONLY_PACKED | declared), "packing_alone")
    assert result.status == "not applicable"
    assert reason in result.meaning
