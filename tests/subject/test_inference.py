"""Inference: a mask that a model cannot do without, and what is told where no call was found."""

import types

import pytest
import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.inference import InferenceError
from stackwise.subject.spec import ModelSpec

V = 31


class Core(nn.Module):
    """Ids to logits, each by itself."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(16, 8)
        self.embedding = nn.Embedding(V, 8)
        self.head = nn.Linear(8, V)

    def logits(self, ids):
        return self.head(self.embedding(ids))


class Masked(Core):
    def forward(self, input_ids, attention_mask):
        return self.logits(input_ids * attention_mask)


class MaskedByName(Core):
    def forward(self, *, input_ids, attention_mask):
        return self.logits(input_ids * attention_mask)


@pytest.mark.parametrize("model", [Masked, MaskedByName])
def test_a_mask_that_is_required_is_one_of_ones(model):
    spec = ModelSpec.of(model)
    assert (spec.inputs, spec.width) == ("tokens", V)
    assert "attention_mask= of ones" in spec.notes
    built, ids = spec.create().eval(), spec.batch(2, 9)
    assert torch.equal(spec.logits(built, ids), built.logits(ids))
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    assert torch.equal(spec.masked(built, ids, keep), built.logits(ids * keep))
    results = check_model(spec, checks=["determinism", "batch_invariance", "finite_gradients"])
    assert {result.status for result in results} == {"passed"}


class ScoresOfDict(Core):
    def forward(self, batch):
        ids = batch["input_ids"]
        return {"hidden": self.embedding(ids), "scores": self.logits(ids)}


class ScoresOfObject(Core):
    def forward(self, ids):
        return types.SimpleNamespace(scores=self.logits(ids))


class OtherKey(Core):
    def forward(self, batch):
        return self.logits(batch["text"])


class MoreKeys(Core):
    def forward(self, batch):
        return self.logits(batch["input_ids"]) * batch["speaker"]


class OtherName(Core):
    def forward(self, *, text):
        return self.logits(text)


class MoreNames(Core):
    def forward(self, ids, *, scale):
        return self.logits(ids) * scale


class OtherMask(Core):
    def forward(self, input_ids, attention_mask):
        assert attention_mask.ndim == 4
        return self.logits(input_ids)


class NamedVectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, *, features):
        return self.mix(features)


CALLS = {
    ScoresOfDict: 'm({"input_ids": x})["scores"]',
    ScoresOfObject: "m(x).scores",
    OtherKey: 'm({"text": x})',
    MoreKeys: 'm({"input_ids": x, "speaker": ...})',
    OtherName: "m(text=x)",
    MoreNames: "m(x, scale=...)",
    OtherMask: "m(x, attention_mask=...)",
}


def example_of(model, **declared):
    with pytest.raises(InferenceError) as raised:
        ModelSpec.of(model, **declared)
    last = str(raised.value).splitlines()[-1]
    return last.removeprefix("For example: ") if last.startswith("For example: ") else None


@pytest.mark.parametrize("model", CALLS, ids=lambda model: model.__name__)
def test_an_example_is_filled_in(model):
    text = example_of(model)
    wanted = (
        f'ModelSpec.of({model.__name__}, inputs="tokens", width={V}, forward=lambda m, x: {CALLS[model]})'
    )
    assert text == wanted
    if "..." not in text:  # nothing is left to be said
        spec = eval(text, {"ModelSpec": ModelSpec, model.__name__: model})
        built, ids = spec.create().eval(), spec.batch(2, 9)
        assert torch.equal(spec.logits(built, ids), built.logits(ids))


def test_an_example_of_vectors():
    wanted = 'ModelSpec.of(NamedVectors, inputs="vectors", width=6, forward=lambda m, x: m(features=x))'
    assert example_of(NamedVectors) == wanted


def test_what_is_declared_is_in_the_example():
    assert 'inputs="tokens", width=20, ' in example_of(OtherKey, inputs="tokens", width=20)
    assert "ModelSpec.of(mine, " in example_of(OtherKey, name="mine")


class Flat(Core):
    def forward(self, ids):
        return self.logits(ids)[:, -1]


def test_no_example_where_nothing_points_to_one():
    assert example_of(Flat) is None
    assert example_of(lambda: nn.Conv1d(3, 3, 1)) is None
    assert example_of(OtherKey, forward=lambda model, inputs: model(inputs)) is None


class Full(Core):
    """Has memory for eight positions."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, ids):
        if ids.shape[1] > 8:
            raise self.error
        return self.logits(ids)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["cuda", "cpu"],
)
def test_memory_that_is_too_small_says_nothing_of_how_a_model_is_called(error):
    with pytest.raises(type(error)) as raised:
        ModelSpec.of(lambda: Full(error))
    assert str(raised.value) == str(error)
    assert ModelSpec.of(lambda: Full(ValueError("eight at most"))).seq_len == 8


class Classifier(nn.Module):
    """Images (B, 3, 8, 8) to classes (B, 5)."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 4, 4), nn.Linear(4, 5)

    def forward(self, images):
        return self.head(self.convolution(images).mean(dim=(2, 3)))


def make_images(batch_size, seq_len, generator):
    return torch.randn(batch_size, 3, 8, seq_len, generator=generator)


def test_images_are_taken_from_the_declared_batches():
    spec = ModelSpec.of(Classifier, make_batch=make_images)

    assert (spec.inputs, spec.seq_len, spec.causal) == ("vectors", 16, None)
    assert spec.notes.startswith("takes inputs (B, 3, 8, 16)")
    [result] = check_model(spec, checks=["batch_invariance"])
    assert result.status == "passed"


def test_error_of_an_image_model_shows_how_to_declare_images():
    with pytest.raises(
        InferenceError, match=r"make_batch=lambda .*torch.randn\(batch_size, 3, HEIGHT, WIDTH"
    ):
        ModelSpec.of(Classifier)


def test_declared_batches_that_the_model_refuses_are_named():
    def make_batch(batch_size, seq_len, generator):
        return torch.randn(batch_size, 1, 8, 8, generator=generator)

    with pytest.raises(InferenceError, match=r"inputs \(2, 1, 8, 8\): RuntimeError"):
        ModelSpec.of(Classifier, make_batch=make_batch)
