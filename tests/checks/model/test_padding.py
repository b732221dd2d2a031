"""Padding: what is wrong beside it is caught and placed, sound models stay silent, the rest is said why."""

import numpy as np
import pytest
import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, Encoder, Placed, encoder, gpt, placed, spec_of

CHECKS = ["padding_content", "padding_amount", "padding_finite", "padding_empty_row", "padding_gradients"]


class Ignored(GPT):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, None, documents)


class IgnoredInTraining(GPT):
    def visible(self, T, past, keep, documents):
        return super().visible(T, past, None if self.training else keep, documents)


class Counted(Placed):
    def place(self, input_ids, past, keep, documents):
        return super().place(input_ids, past, None, documents)


class FromTheEnd(Placed):
    def place(self, input_ids, past, keep, documents):
        return torch.arange(input_ids.shape[1]).flip(0).expand(input_ids.shape)


class SeesNothing(GPT):
    """A padded query sees not even itself."""

    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, None, documents)
        return visible if keep is None else visible & keep.bool()[:, None, None]


class Half(GPT):
    """Two masks that are added: -4e4 each, which only float16 cannot hold twice."""

    def forward(self, input_ids, attention_mask=None, **rest):
        self.keep = attention_mask
        return super().forward(input_ids, attention_mask=attention_mask, **rest)

    def visible(self, T, past, keep, documents):
        return super().visible(T, past, None, documents)

    def softmax(self, scores):
        future = scores.isneginf()
        scores = scores.masked_fill(future, 0.0)
        scores = scores + torch.zeros_like(scores).masked_fill(future, -4e4)
        if self.keep is not None:
            hidden = ~self.keep.bool()[:, None]
            for plane in (hidden[:, :, None], hidden[..., None]):
                scores = scores + torch.zeros_like(scores).masked_fill(plane, -4e4)
        return scores.softmax(dim=-1)


@torch.no_grad()
def reference(spec, side, contents=(1, 1), alone=False):
    """The largest move of a real output over the spread, in float64 by NumPy."""
    model = spec.create().eval().double()
    inputs = spec.batch(3, 12)
    lengths, moves = (12, 8, 4), []
    outputs = []
    for content in contents:
        batch, keep = spec.batch(3, 12, seed=7919 * content), torch.zeros(3, 12, dtype=torch.bool)
        for row, n in enumerate(lengths):
            at = slice(0, n) if side == "right" else slice(12 - n, 12)
            batch[row, at], keep[row, at] = inputs[row, :n], True
        outputs.append(spec.masked(model, batch, keep).logits[keep].numpy())
    if alone:
        ones = [torch.ones(1, n, dtype=torch.bool) for n in lengths]
        rows = [spec.masked(model, inputs[i : i + 1, :n], ones[i]) for i, n in enumerate(lengths)]
        outputs[0] = np.concatenate([row.logits[0].numpy() for row in rows])
    moves = abs(outputs[0] - outputs[1]).max()
    return moves / abs(outputs[0] - outputs[0][0]).max()


SOUND = {
    "gpt": gpt,
    "placed": placed,
    "encoder": encoder,
    "rack": lambda: "rack",
    "bidirectional_rack": lambda: "bidirectional_rack",
    "llama": lambda: "llama",
    "gpt2": lambda: "gpt2",
    "bert": lambda: "bert",
    "x_decoder": lambda: "x_decoder",
    "x_encoder": lambda: "x_encoder",
    "torch_encoder": lambda: "encoder",
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("check", CHECKS)
def test_sound(subjects, name, check):
    model = SOUND[name]()
    result = subjects.ask(getattr(subjects, model) if isinstance(model, str) else model, check)
    assert result.status == "passed", result
    assert result.value <= result.limit


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("build", [GPT, Encoder])
def test_the_reference_finds_nothing_in_sound_models(side, build):
    spec = spec_of(build, causal=build is GPT)
    assert reference(spec, side, (1, 2)) < 1e-12
    assert reference(spec, side, alone=True) < 1e-12


def test_mask_that_is_ignored(subjects):
    spec = spec_of(Ignored)
    moved = reference(spec, "left", (1, 2))
    assert moved > 1e-2
    result = subjects.ask(spec, "padding_content")
    assert (result.status, result.limit) == ("failed", 1e-8)
    assert result.value > 1e-2
    assert "left padding" in result.where
    assert "eval mode" in result.where
    assert int(result.where.split()[1].strip(",")) in (1, 2)  # row 0 is not padded


def test_mask_that_is_ignored_on_the_right_harms_a_causal_model_not(subjects):
    assert reference(spec_of(Ignored), "right", (1, 2)) < 1e-12
    assert subjects.ask(spec_of(Ignored, padding_sides=("right",)), "padding_content").status == "passed"


def test_mask_that_one_mode_ignores(subjects):
    assert reference(spec_of(IgnoredInTraining), "left", (1, 2)) < 1e-12
    result = subjects.ask(spec_of(IgnoredInTraining), "padding_content")
    assert result.status == "failed"
    assert "train mode" in result.where


def test_batch_statistics_take_in_padding(subjects):
    class Normed(GPT):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(self.width)

        def embed(self, input_ids):
            return self.batch_norm(super().embed(input_ids).transpose(1, 2)).transpose(1, 2)

    assert subjects.ask(spec_of(Normed), "padding_content").status == "passed"


@pytest.mark.parametrize(
    "build, side, cause",
    [(Counted, "left", "first real token"), (FromTheEnd, "right", "counted from the end")],
)
def test_positions_that_count_padding(subjects, build, side, cause):
    moved = reference(spec_of(build), side, alone=True)
    assert moved > 1e-2
    assert reference(spec_of(build), side, (1, 2)) < 1e-12
    assert subjects.ask(spec_of(build), "padding_content").status == "passed"
    result = subjects.ask(spec_of(build, padding_sides=(side,)), "padding_amount")
    assert (result.status, result.limit) == ("failed", 1e-6)
    assert result.value == pytest.approx(moved, rel=1e-6)
    assert f"{side} padding" in result.where
    assert cause in result.advice


def test_ragged_batch_that_is_not_finite(subjects):
    result = subjects.ask(spec_of(SeesNothing), "padding_finite")
    assert (result.status, result.limit) == ("failed", 0.0)
    assert 0 < result.value <= 1
    assert "left padding" in result.where
    assert "float32" in result.where
    # On the right nothing that is real sees a query without sight.
    assert subjects.ask(spec_of(SeesNothing, padding_sides=("right",)), "padding_finite").status == "passed"


def test_ragged_batch_that_float16_cannot_hold(subjects):
    spec = spec_of(Half)
    inputs, keep = spec.batch(1, 12), torch.arange(12)[None] >= 4
    with torch.no_grad():
        for dtype, finite in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
            output = spec.masked(spec.create().eval().to(dtype), inputs, keep).logits[keep]
            assert output.isfinite().all() == finite
    result = subjects.ask(spec, "padding_finite")
    assert result.status == "failed"
    assert "float16" in result.where


def test_what_overflows_without_padding_is_left_to_others(subjects):
    class Overflows(GPT):
        def embed(self, input_ids):
            x = super().embed(input_ids)
            return x * 1e10 if x.dtype == torch.float16 else x

    result = subjects.ask(spec_of(Overflows), "padding_finite")
    assert (result.status, result.where) == ("passed", "float32, bfloat16")


def test_model_that_is_never_finite(subjects):
    class Never(GPT):
        def embed(self, input_ids):
            return super().embed(input_ids) * torch.inf

    for check in ("padding_finite", "padding_gradients"):
        result = subjects.ask(spec_of(Never), check)
        assert result.status == "not applicable"
        assert "finite without padding" in result.meaning


def test_empty_row_that_changes_others(subjects):
    class Mixed(Encoder):
        """The scale of attention is that of the emptiest row."""

        def visible(self, T, past, keep, documents):
            self.least = 1.0 if keep is None else 1.0 + keep.sum(dim=1).min().item()
            return super().visible(T, past, keep, documents)

        def scale(self):
            return super().scale() * self.least

    assert subjects.ask(encoder(), "padding_empty_row").status == "passed"
    result = subjects.ask(encoder(Mixed), "padding_empty_row")
    assert result.status == "failed"
    assert result.where == "row 1 of 3 is empty"


def test_empty_row_that_is_refused(subjects):
    class Refuses(GPT):
        def forward(self, input_ids, attention_mask=None, **rest):
            if attention_mask is not None and not attention_mask.any(dim=1).all():
                raise ValueError("a row is empty")
            return super().forward(input_ids, attention_mask=attention_mask, **rest)

    result = subjects.ask(spec_of(Refuses), "padding_empty_row")
    assert result.status == "not applicable"
    assert "ValueError: a row is empty" in result.meaning
    result = subjects.ask(spec_of(Refuses), "padding_gradients")
    assert (result.status, result.where) == ("passed", "right padding, left padding")


def test_gradients_that_an_empty_row_poisons(subjects):
    spec = spec_of(SeesNothing, padding_sides=("right",))
    model = spec.create().train()
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[1] = False
    spec.masked(model, spec.batch(2, 8), keep).logits[0].sum().backward()
    bad = {name for name, p in model.named_parameters() if not p.grad.isfinite().all()}
    assert bad
    result = subjects.ask(spec, "padding_gradients")
    assert (result.status, result.value) == ("failed", len(bad))
    assert set(result.where.split(" and ")[0].split(", ")) <= bad
    assert "a row of nothing but padding" in result.meaning


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "declared, reason",
    [
        ({"masked": None}, "needs masked"),
        ({"padding_sides": ()}, "needs padding_sides"),
        ({"seq_len": 2}, "at least 3 positions"),
    ],
)
def test_what_cannot_be_asked(subjects, check, declared, reason):
    result = subjects.ask(spec_of(**declared), check)
    assert result.status == "not applicable"
    assert reason in result.meaning


def test_an_argument_that_changes_nothing(subjects):
    class Dummy(subjects.TinyLM):
        def forward(self, ids, attention_mask=None):
            return super().forward(ids)

    spec = ModelSpec.of(Dummy)
    assert spec.masked is not None
    result = subjects.ask(spec, "padding_content")
    assert result.status == "warned"
    assert "ignores it" in result.meaning
    # One that sees what follows reads padding.
    encoder = ModelSpec.of(Dummy, causal=False)
    assert subjects.ask(encoder, "padding_content").status == "warned", "no output reads what follows"

    class Both(Dummy):
        def weigh(self, scores):
            return scores.nan_to_num(neginf=0.0).softmax(dim=-1)

    result = subjects.ask(ModelSpec.of(Both, causal=False), "padding_content")
    assert result.status == "failed"
    assert "ignores its mask" in result.meaning
    # Who says that the mask counts is taken at their word.
    both_sides = ModelSpec.of(Dummy, padding_sides=("right", "left"))
    assert subjects.ask(both_sides, "padding_content").status == "failed"


def test_vectors(subjects):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x, padding_mask=None):
            return self.inner(x) + x.mean(dim=1, keepdim=True)

    class MeanOfReal(Mean):
        def forward(self, x, padding_mask=None):
            keep = torch.ones_like(x[..., :1]) if padding_mask is None else (~padding_mask)[..., None].to(x)
            return self.inner(x) + (x * keep).sum(dim=1, keepdim=True) / keep.sum(dim=1, keepdim=True).clamp(
                min=1
            )

    def spec(build):
        return ModelSpec.of(
            build,
            inputs="vectors",
            width=8,
            causal=False,
            masked=lambda model, x, keep: model(x, padding_mask=~keep),
            padding_sides=("right", "left"),
        )

    for check in CHECKS:
        assert subjects.ask(spec(MeanOfReal), check).status == "passed"
    assert subjects.ask(spec(Mean), "padding_content").status == "failed"
    assert subjects.ask(spec(Mean), "padding_amount").status == "failed"


def test_padding_ids_are_no_real_tokens(subjects):
    """A model that finds padding by its id has no such id among its real tokens."""

    class ById(Placed):
        def __init__(self):
            super().__init__()
            self.embedding.padding_idx = 7

        def place(self, input_ids, past, keep, documents):
            return super().place(input_ids, past, (input_ids != 7) if keep is None else keep, documents)

    spec = spec_of(ById, decode=None, packed=None)
    for seed in range(6):
        assert subjects.ask(spec, "padding_amount", seed=seed).status == "passed"


def test_nothing_to_train(subjects):
    class Frozen(GPT):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)

    for check in ("padding_gradients", "recompute_gradients", "backend_gradients"):
        result = subjects.ask(spec_of(Frozen), check)
        assert (result.status, result.meaning) == ("not applicable", "no parameter is trainable")


def test_a_padded_row_that_is_random_is_left_to_determinism(subjects):
    class Dropping(GPT):
        def softmax(self, scores):
            return nn.functional.dropout(super().softmax(scores), 0.1, training=True)

    for check in ("padding_amount", "packing_alone", "cache_decoding", "cache_padding"):
        result = subjects.ask(spec_of(Dropping), check)
        assert result.status == "not applicable", result
        assert "see determinism" in result.meaning


class TextClassifier(nn.Module):
    """Ids and a mask to classes, by the mean over real positions."""

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


class InvertedMask(TextClassifier):
    def hidden(self, keep):
        return (keep == 1) & (keep.min(dim=1, keepdim=True).values == 0)


class MeanOverPadding(TextClassifier):
    def pooled(self, x, keep):
        return x.mean(1)


class IgnoredMask(TextClassifier):
    def forward(self, ids, attention_mask=None):
        return super().forward(ids)


def test_padding_of_an_output_per_row(subjects):
    results = check_model(ModelSpec.of(TextClassifier), checks=["padding"])
    assert {result.status for result in results} == {"passed"}
    assert len(results) == 5


@pytest.mark.parametrize("model", [InvertedMask, MeanOverPadding, IgnoredMask])
def test_wrong_masks_of_an_output_per_row(model):
    results = check_model(ModelSpec.of(model), checks=["padding"])
    assert "failed" in {result.status for result in results}
    assert "error" not in {result.status for result in results}
