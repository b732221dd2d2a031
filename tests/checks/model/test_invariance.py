"""Rows of a batch: what makes them depend on each other is caught, what only looks like it is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.subject.spec import ModelSpec


@pytest.fixture(scope="module")
def models(subjects):
    class Sound(subjects.TinyLM):
        pass

    class SoftmaxOverRows(subjects.TinyLM):
        def weigh(self, scores):
            return scores.softmax(dim=-1) * scores.nan_to_num(neginf=0.0).softmax(dim=0)

    class MeanOverRows(subjects.TinyLM):
        def mix(self, x):
            return x - x.mean(dim=0, keepdim=True)

    class NormOverRows(subjects.TinyLM):
        def mix(self, x):
            return F.layer_norm(x.transpose(0, 2), x.shape[:1], eps=1.0).transpose(0, 2)

    class BatchStatistics(subjects.TinyLM):
        def __init__(self, running=False):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(16, track_running_stats=running)

        def mix(self, x):
            return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)

    class RunningStatistics(BatchStatistics):
        """The sound twin: in eval mode the statistics are fixed."""

        def __init__(self):
            super().__init__(running=True)

    class ReshapedRows(subjects.TinyLM):
        def mix(self, x):
            return x.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)

    class FirstRowOnly(subjects.TinyLM):
        def mix(self, x):
            return torch.cat([x[:1] + x[1:].sum(dim=0, keepdim=True), x[1:]])

    class InTraining(MeanOverRows):
        """Only where it is allowed: the question is about eval mode."""

        def mix(self, x):
            return super().mix(x) if self.training else x

    class SoundNorms(subjects.TinyLM):
        def mix(self, x):
            return F.group_norm(x.flatten(0, 1), 4).view_as(x)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


MUTANTS = [
    "SoftmaxOverRows",
    "MeanOverRows",
    "NormOverRows",
    "BatchStatistics",
    "ReshapedRows",
    "FirstRowOnly",
]
SOUND = ["Sound", "RunningStatistics", "InTraining", "SoundNorms"]


@torch.no_grad()
def gaps(factory):
    """Per row: how far it moves when it is alone, by NumPy."""
    spec = ModelSpec.of(factory)
    model, inputs = spec.create().eval().double(), spec.batch(3, spec.seq_len)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    together = spec.logits(model, inputs).numpy()
    alone = [spec.logits(model, row[None]).numpy()[0] for row in inputs]
    spread = abs(together - together[0, 0]).max()
    return [abs(a - b).max() / spread for a, b in zip(together, alone, strict=True)]


@pytest.mark.parametrize("name", MUTANTS)
def test_rows_that_see_each_other(subjects, models, name):
    moved = gaps(models[name])
    assert max(moved) > 1e-3
    result = subjects.ask(models[name], "batch_invariance")
    assert result.status == "failed"
    assert 0 < result.limit <= 1e-5
    assert result.value == pytest.approx(max(moved), rel=1e-3)
    assert result.where == f"row {moved.index(max(moved))} of 3"


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("seed", [0, 1])
def test_sound(subjects, models, name, seed):
    assert max(gaps(models[name])) < 1e-12
    result = subjects.ask(models[name], "batch_invariance", seed=seed)
    assert result.status == "passed"
    assert result.value <= result.limit


def test_outputs_that_are_infinite_at_some_positions_hide_nothing(subjects, models):
    class Forbidden(models["MeanOverRows"]):
        def forward(self, ids):
            output = super().forward(ids)
            output[:, 1::2, :3] = -torch.inf
            return output

    result = subjects.ask(Forbidden, "batch_invariance")
    assert result.status == "failed"
    assert 0 < result.value < 100


def test_row_that_turns_to_nan(subjects):
    class NanBesideOthers(subjects.TinyLM):
        def mix(self, x):
            return x / (x.shape[0] == 1)

    result = subjects.ask(NanBesideOthers, "batch_invariance")
    assert (result.status, result.value) == ("failed", float("inf"))


def test_vectors(subjects):
    assert subjects.ask(subjects.encoder, "batch_invariance").status == "passed"
    # Positions taken for rows: what forgetting batch_first=True does.
    swapped = ModelSpec.of(
        subjects.encoder, forward=lambda model, x: model(x.transpose(0, 1)).transpose(0, 1)
    )
    assert max(gaps(swapped)) > 1e-3
    assert subjects.ask(swapped, "batch_invariance").status == "failed"


class PositionsFirst(nn.Module):
    """Language model whose recurrent layer reads (T, B)."""

    def __init__(self, *, batch_first=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.recurrence = nn.GRU(16, 16, batch_first=batch_first)

    def forward(self, ids):
        return self.head(self.recurrence(self.embedding(ids))[0])


def test_advice_names_the_layer_that_takes_rows_for_positions(subjects):
    result = subjects.ask(PositionsFirst, "batch_invariance")
    assert result.status == "failed" and "recurrence has batch_first=False" in result.advice
    transposed = ModelSpec.of(PositionsFirst, forward=lambda m, x: m(x.transpose(0, 1)).transpose(0, 1))
    for model in (transposed, lambda: PositionsFirst(batch_first=True)):
        assert subjects.ask(model, "batch_invariance").status == "passed"


def test_rounding_is_no_dependence(subjects):
    class Rounding(subjects.TinyLM):
        def mix(self, x):
            noise = 1000.0 * x.sum(dim=0, keepdim=True).sin()
            return (x + noise) - noise

    assert 1e-16 < max(gaps(Rounding)) < 1e-9
    spec = ModelSpec.of(Rounding)
    with torch.no_grad():
        model, inputs = spec.create().eval(), spec.batch(3, 16)
        assert (model(inputs)[:1] - model(inputs[:1])).abs().max() > 1e-5
    assert subjects.ask(Rounding, "batch_invariance").status == "passed"


def test_rows_that_see_each_other_behind_a_head_that_starts_at_zero(subjects):
    class ZeroHead(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.head.weight)

    class Mixed(ZeroHead):
        def mix(self, x):
            return x + 0.3 * x.mean(dim=0, keepdim=True)

    assert subjects.ask(ZeroHead, "batch_invariance").status == "passed"
    result = subjects.ask(Mixed, "batch_invariance")
    assert result.status == "failed"
    assert "zero weights made random" in result.where


def test_complex_weights_stay_complex(subjects):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(29, 8)
            self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.head = nn.Linear(8, 29)

        def forward(self, ids):
            assert self.turn.imag.abs().max() > 0
            return self.head((self.tokens(ids) * self.turn).real)

    assert subjects.ask(Complex, "batch_invariance").status == "passed"


def positionless_encoder(change=None, **declared):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x):
            return self.inner(x if change is None else change(x))

    spec = {"inputs": "vectors", "width": 16, "causal": False, "positionless": True}
    return ModelSpec.of(Encoder, **spec | declared)


@torch.no_grad()
def disorder(spec):
    """How far the reversed output is from that of the reversed input, over the spread."""
    model, x = spec.create().eval().double(), spec.batch(2, spec.seq_len).double()
    output = spec.logits(model, x)
    gap = (output.flip(1) - spec.logits(model, x.flip(1))).abs().max()
    return (gap / (output - output[:1, :1]).abs().max()).item()


def test_order_that_does_not_matter(subjects):
    assert disorder(positionless_encoder()) < 1e-12
    result = subjects.ask(positionless_encoder(), "permutation_equivariance")
    assert (result.status, result.limit) == ("passed", 1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + torch.arange(x.shape[1]).to(x)[:, None] / 10,
        lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x: x.cumsum(dim=1),
    ],
)
def test_order_that_matters(subjects, change):
    assert disorder(positionless_encoder(change)) > 1e-3
    result = subjects.ask(positionless_encoder(change), "permutation_equivariance")
    assert result.status == "failed"
    assert result.where in ("positions reversed", "positions shuffled")


def test_order_that_only_a_shuffle_shows(subjects):
    """Neighbours on both sides are the same in a reversed row."""

    def change(x):
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1] + F.pad(x, (0, 0, 0, 1))[:, 1:]

    assert disorder(positionless_encoder(change)) < 1e-12
    result = subjects.ask(positionless_encoder(change), "permutation_equivariance")
    assert (result.status, result.where) == ("failed", "positions shuffled")


@pytest.mark.parametrize(
    "declared, reason",
    [
        ({"positionless": False}, "needs the claim"),
        ({"causal": True}, "itself an order"),
        ({"seq_len": 1}, "at least 2 positions"),
    ],
)
def test_order_that_cannot_be_asked_about(subjects, declared, reason):
    result = subjects.ask(positionless_encoder(**declared), "permutation_equivariance")
    assert result.status == "not applicable"
    assert reason in result.meaning


def test_what_is_random_is_left_to_determinism(subjects):
    class Dropping(subjects.TinyLM):
        def mix(self, x):
            return F.dropout(x, 0.1, training=True)

    class Noisy(subjects.TinyLM):
        def mix(self, x):
            return x + 0.1 * torch.randn(x.shape, dtype=x.dtype)

    for build in (Dropping, Noisy):
        assert subjects.ask(build, "determinism").status == "failed"
        for check in ("batch_invariance", "causality"):
            result = subjects.ask(build, check)
            assert result.status == "not applicable", result
            assert "see determinism" in result.meaning


def test_a_leak_shows_in_what_is_random_too(subjects):
    class Leaky(subjects.TinyLM):
        def mix(self, x):
            return F.dropout(x + x.mean(dim=1, keepdim=True), 0.1, training=True)

    assert subjects.ask(Leaky, "causality").status == "failed"
