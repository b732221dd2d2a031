"""Padding: wrong handling of padded rows fails, correct models pass, and other models are not asked."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.checks.engine.exploration import Explorer
from stackwise.checks.subject import Subject
from stackwise.subject.spec import ModelSpec
from tests.zoo.forward import (
    empty_row_poisons_gradients,
    padded_query_sees_nothing,
    padding_is_counted,
    padding_mask_ignored,
)
from tests.zoo.gpt import GPT, Encoder, Placed, encoder, spec_of

CHECKS = ("padding_amount", "padding_empty_row", "half_precision")


@pytest.fixture(autouse=True)
def _few_variations(only_variations):
    """Explore the variations that matter here: less than a second."""
    only_variations({"padded_rows", "empty_row", "half_precision", "batch", "later_tokens", "train_mode"})


def answers(model, *checks):
    return {result.check: result for result in check_model(model, checks=checks or CHECKS)}


def failed(results):
    return {check for check, result in results.items() if result.status == "failed"}


class Subsampled(nn.Module):
    """Mean of frames of three positions, each two positions after the one before."""

    def __init__(self, from_lengths):
        super().__init__()
        self.from_lengths, self.head = from_lengths, nn.Linear(8, 5)
        self.conv = nn.Conv1d(12, 8, 3, 2)

    def forward(self, speech, speech_lengths):
        frames = self.conv(speech.transpose(1, 2)).transpose(1, 2)
        last = (speech_lengths - 3) // 2 if self.from_lengths else (speech_lengths - 1) // 2
        used = (torch.arange(frames.shape[1]) <= last[:, None])[..., None]
        return self.head((frames * used).sum(1) / used.sum(1))


@pytest.mark.parametrize("from_lengths, status", [(True, "passed"), (False, "failed")])
def test_lengths_of_a_model_that_needs_several_positions(from_lengths, status):
    results = answers(
        ModelSpec.of(
            lambda: Subsampled(from_lengths),
            inputs="vectors",
            width=12,
            seq_len=40,
            per_position=False,
            forward=lambda model, x: model(x, torch.full((len(x),), x.shape[1])),
            masked=lambda model, x, keep: model(x, keep.sum(1)),
        ),
        "padding_amount",
        "mask_effect",
    )
    assert results["padding_amount"].status == status
    assert results["mask_effect"].status == "passed"


class MaskIgnoredInTraining(GPT):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, None if self.training else keep, documents)


class CountedFromTheEnd(Placed):
    def place(self, input_ids, past, keep, documents):
        return torch.arange(input_ids.shape[1]).flip(0).expand(input_ids.shape)


class ScaledByTheEmptiestRow(Encoder):
    def visible(self, T, past, keep, documents):
        self.is_empty = keep is not None and not keep.any(dim=1).all()
        return super().visible(T, past, keep, documents)

    def scale(self):
        return super().scale() * (2 if self.is_empty else 1)


class LowestNumber(GPT):
    """Hidden scores get the lowest float32, which is -inf in half precision. Padded queries see nothing."""

    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, None, documents)
        return visible if keep is None else visible & (keep[:, None, None] & keep[:, None, -T:, None])

    def softmax(self, scores):
        lowest = torch.tensor(torch.finfo(torch.float32).min).to(scores)
        return super().softmax(torch.where(scores.isneginf(), lowest, scores))


class OverflowsInFloat16(GPT):
    """Overflows without padding, too."""

    def embed(self, input_ids):
        x = super().embed(input_ids)
        return x * 1e10 if x.dtype == torch.float16 else x


class BatchNormed(GPT):
    """Batch statistics of train mode include the padding, as they do in every model."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(self.width)

    def embed(self, input_ids):
        return self.batch_norm(super().embed(input_ids).transpose(1, 2)).transpose(1, 2)


class Frozen(GPT):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class MeanOfReal(nn.Module):
    """Vectors in, vectors out."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, padding_mask=None):
        keep = torch.ones_like(x[..., :1]) if padding_mask is None else (~padding_mask)[..., None].to(x)
        return self.inner(x) + (x * keep).sum(dim=1, keepdim=True) / keep.sum(dim=1, keepdim=True).clamp(1)


class MeanOfAll(MeanOfReal):
    def forward(self, x, padding_mask=None):
        return super().forward(x)


def vectors(build):
    return ModelSpec.of(
        build,
        inputs="vectors",
        width=8,
        causal=False,
        masked=lambda model, x, keep: model(x, padding_mask=~keep),
        padding_sides=("right", "left"),
    )


class TextClassifier(nn.Module):
    """Ids and a mask in, classes out, from the mean over real positions."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids, attention_mask=None):
        keep = torch.ones_like(ids) if attention_mask is None else attention_mask
        x = self.layer(self.embedding(ids), src_key_padding_mask=self.hidden(keep))
        return self.head(self.pooled(x, keep[..., None]))

    def hidden(self, keep):
        return keep == 0

    def pooled(self, x, keep):
        return (x * keep).sum(1) / keep.sum(1).clamp(min=1)


class MaskInverted(TextClassifier):
    def hidden(self, keep):
        return (keep == 1) & (keep.min(dim=1, keepdim=True).values == 0)


class MeanOverPadding(TextClassifier):
    def pooled(self, x, keep):
        return x.mean(1)


class ClassifierIgnoresMask(TextClassifier):
    def forward(self, ids, attention_mask=None):
        return super().forward(ids)


HEALTHY = {
    "mask ignored, right padding": lambda: replace(padding_mask_ignored(), padding_sides=("right",)),
    "overflow without padding": lambda: spec_of(OverflowsInFloat16),
    "batch norm": lambda: spec_of(BatchNormed),
    "frozen": lambda: spec_of(Frozen),
    "vectors": lambda: vectors(MeanOfReal),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_model_passes(name):
    results = answers(HEALTHY[name]())
    assert {result.status for result in results.values()} == {"passed"}
    assert results["padding_amount"].value <= results["padding_amount"].limit


@pytest.mark.parametrize("name", ["bert", "x_encoder", "encoder", "bidirectional_rack"])
def test_published_model_passes(subjects, name):
    assert {result.status for result in answers(getattr(subjects, name)).values()} == {"passed"}


# Name -> model, the check that fails, and a part of the condition.
BUGS = {
    "mask ignored": (padding_mask_ignored, "padding_amount", "left"),
    "padding counted": (padding_is_counted, "padding_amount", "left"),
    "counted from the end": (
        lambda: spec_of(CountedFromTheEnd, causal=None, decode=None, padding_sides=("right",)),
        "padding_amount",
        "right",
    ),
    "NaN": (padded_query_sees_nothing, "padding_amount", "left"),
    "NaN gradient": (empty_row_poisons_gradients, "padding_empty_row", "gradient"),
    "lowest number overflows": (lambda: spec_of(LowestNumber), "half_precision", "16"),
    "scale of the emptiest row": (
        lambda: encoder(ScaledByTheEmptiestRow),
        "padding_empty_row",
        "only padding",
    ),
    "mean of all vectors": (lambda: vectors(MeanOfAll), "padding_amount", "padding"),
}


@pytest.mark.parametrize("name", BUGS)
def test_wrong_padding_fails(name):
    make, check, part = BUGS[name]
    result = answers(make(), check)[check]
    assert result.status == "failed"
    assert part in result.meaning


def test_mask_that_train_mode_ignores_fails():
    subject = Subject(spec_of(MaskIgnoredInTraining), torch.device("cpu"))
    # Half of the draws have padding on the right, which a causal model does not read.
    found = Explorer(subject, ("padded_rows", "train_mode"), count=40).explore().findings
    assert {each.variation for each in found} <= {"padded_rows", "train_mode"} and found


@pytest.mark.parametrize(
    "build, is_healthy",
    [(TextClassifier, True), (MaskInverted, False), (MeanOverPadding, False), (ClassifierIgnoresMask, False)],
)
def test_padding_of_an_output_per_row(build, is_healthy):
    results = answers(ModelSpec.of(build), "padding", "half_precision")
    assert bool(failed(results)) != is_healthy
    assert "error" not in {result.status for result in results.values()}


@pytest.mark.parametrize(
    "declared, status",
    [({}, "passed"), ({"causal": False}, "failed"), ({"padding_sides": ("right", "left")}, "failed")],
)
def test_mask_that_changes_nothing(subjects, declared, status):
    """It is harmless only if no real position reads padding: on the right of a causal model."""

    class Unused(subjects.TinyLM):
        def forward(self, ids, attention_mask=None):
            return super().forward(ids)

        def visible(self, seq_len):
            return super().visible(seq_len) | (declared.get("causal") is False)

    results = answers(ModelSpec.of(Unused, **declared), "padding_amount", "mask_effect")
    assert (results["padding_amount"].status, results["mask_effect"].status) == (status, "warned")


def test_padding_id_is_no_real_token():
    """A model may find padding by its id."""

    class ById(Placed):
        def __init__(self):
            super().__init__()
            self.embedding.padding_idx = 7

        def place(self, input_ids, past, keep, documents):
            return super().place(input_ids, past, (input_ids != 7) if keep is None else keep, documents)

    for seed in range(6):
        subject = Subject(spec_of(ById), torch.device("cpu"), seed)
        exploration = Explorer(subject, ["padded_rows"], count=0).explore()
        assert not exploration.findings


class RefusesEmptyRow(GPT):
    def forward(self, input_ids, attention_mask=None, **rest):
        if attention_mask is not None and not attention_mask.any(dim=1).all():
            raise ValueError("a row is empty")
        return super().forward(input_ids, attention_mask=attention_mask, **rest)


class NeverFinite(GPT):
    def embed(self, input_ids):
        return super().embed(input_ids) * torch.inf


class Random(GPT):
    def softmax(self, scores):
        return nn.functional.dropout(super().softmax(scores), 0.1, training=True)


@pytest.mark.parametrize(
    "spec, checks, reason",
    [
        (spec_of(masked=None), CHECKS[:2], "needs masked"),
        (spec_of(padding_sides=()), CHECKS[:2], "needs padding_sides"),
        (spec_of(RefusesEmptyRow), ["padding_empty_row"], "ValueError: a row is empty"),
        (spec_of(NeverFinite), CHECKS, "finite"),
        (spec_of(Random), CHECKS, "see determinism"),
    ],
    ids=["no mask", "no side", "refused", "never finite", "random"],
)
def test_check_of_padding_does_not_apply(spec, checks, reason):
    for result in answers(spec, *checks).values():
        assert result.status == "not applicable"
        assert reason in result.meaning


@pytest.mark.parametrize("generates, status", [(False, "warned"), (True, "failed")])
def test_mask_that_generation_needs_has_an_effect(subjects, generates, status):
    """`generate` pads rows on the left."""

    class Unused(subjects.TinyLM):
        def forward(self, ids, attention_mask=None):
            return super().forward(ids)

        def can_generate(self):
            return generates

    assert answers(ModelSpec.of(Unused), "mask_effect")["mask_effect"].status == status
