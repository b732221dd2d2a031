"""Invariance: rows that depend on each other fail, and so does an order of positions that must not matter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec
from tests import subjects
from tests.subjects import TinyLM


def mixing(mix):
    """Return a model of one layer that ends with `mix(x, training)`, x (B, T, C)."""

    class Mixing(TinyLM):
        def __init__(self):
            super().__init__(n_layers=1)

        def mix(self, x):
            return mix(x, self.training)

    return Mixing


MeanOverRows = mixing(lambda x, _: x - x.mean(dim=0, keepdim=True))


class SoftmaxOverRows(TinyLM):
    def weigh(self, scores):
        return scores.softmax(dim=-1) * scores.nan_to_num(neginf=0.0).softmax(dim=0)


class BatchStatistics(TinyLM):
    """Statistics of the batch in eval mode, too."""

    running = False

    def __init__(self):
        super().__init__(n_layers=1)
        self.batch_norm = nn.BatchNorm1d(16, track_running_stats=self.running)

    def mix(self, x):
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class RunningStatistics(BatchStatistics):
    running = True


class InfiniteOutputs(MeanOverRows):
    """Some outputs are -inf, and the others differ."""

    def forward(self, ids):
        output = super().forward(ids)
        output[:, 1::2, :3] = -torch.inf
        return output


class ZeroHead:
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)


class ZeroHeadMixedRows(ZeroHead, MeanOverRows):
    pass


class ZeroHeadSeparateRows(ZeroHead, TinyLM):
    pass


class ComplexWeights(nn.Module):
    """Its complex weights must stay complex."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 8), nn.Linear(8, 29)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, ids):
        assert self.turn.imag.abs().max() > 0
        return self.head((self.tokens(ids) * self.turn).real)


class Recurrent(nn.Module):
    """Language model whose recurrent layer reads (T, B) unless `batch_first`."""

    def __init__(self, *, batch_first=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.recurrence = nn.GRU(16, 16, batch_first=batch_first)

    def forward(self, ids):
        return self.head(self.recurrence(self.embedding(ids))[0])


def transposed(model, x):
    return model(x.transpose(0, 1)).transpose(0, 1)


MIXED_ROWS = {
    "softmax": SoftmaxOverRows,
    "mean": MeanOverRows,
    "norm": mixing(
        lambda x, _: F.layer_norm(x.transpose(0, 2), x.shape[:1], eps=1.0).transpose(0, 2),
    ),
    "batch statistics": BatchStatistics,
    "reshape": mixing(lambda x, _: x.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)),
    "first row only": mixing(lambda x, _: torch.cat([x[:1] + x[1:].sum(dim=0, keepdim=True), x[1:]])),
    "infinite outputs": InfiniteOutputs,
    "zero head": ZeroHeadMixedRows,
    "vectors, positions first": ModelSpec.of(subjects.encoder, forward=transposed),
}


@pytest.mark.parametrize("name", MIXED_ROWS)
def test_rows_that_depend_on_each_other_fail(name):
    result = subjects.ask(MIXED_ROWS[name], "batch_invariance")
    assert result.status == "failed", str(result)
    assert 0 < result.limit < result.value < 100
    assert result.where.startswith("row ")
    assert "the batch has" in result.meaning


def test_row_that_becomes_nan_in_a_batch_fails():
    result = subjects.ask(mixing(lambda x, _: x / (x.shape[0] == 1)), "batch_invariance")
    assert (result.status, result.value) == ("failed", float("inf"))


def test_advice_names_the_layer_that_reads_positions_first():
    result = subjects.ask(Recurrent, "batch_invariance")
    assert result.status == "failed"
    assert "recurrence has batch_first=False" in result.advice


def with_rounding(x, _):
    noise = 1000.0 * x.sum(dim=0, keepdim=True).sin()
    return (x + noise) - noise


SEPARATE_ROWS = {
    "running statistics": RunningStatistics,
    "mixed in train mode only": mixing(
        lambda x, training: x - x.mean(dim=0, keepdim=True) if training else x
    ),
    "group norm": mixing(lambda x, _: F.group_norm(x.flatten(0, 1), 4).view_as(x)),
    "rounding": mixing(with_rounding),
    "zero head": ZeroHeadSeparateRows,
    "complex weights": ComplexWeights,
    "positions first, transposed": ModelSpec.of(Recurrent, forward=transposed),
    "rows first": lambda: Recurrent(batch_first=True),
}


@pytest.mark.parametrize("name", SEPARATE_ROWS)
def test_rows_that_are_separate_pass(name):
    result = subjects.ask(SEPARATE_ROWS[name], "batch_invariance", seed=1)
    assert result.status == "passed", str(result)
    assert result.value <= result.limit


@pytest.mark.parametrize(
    "mix",
    [lambda x, _: F.dropout(x, 0.1, training=True), lambda x, _: x + torch.randn(x.shape, dtype=x.dtype)],
    ids=["dropout", "noise"],
)
def test_random_model_is_reported_by_determinism(mix):
    results = check_model(mixing(mix), checks=["determinism", "batch_invariance", "causality"])
    by_name = {result.check: result for result in results}
    assert by_name["determinism"].status == "failed"
    for name in ("batch_invariance", "causality"):
        assert by_name[name].status == "not applicable"
        assert "see determinism" in by_name[name].meaning


def encoder(change=lambda x: x, **declared):
    class Encoder(nn.Module):
        """Encoder without positions, of vectors that `change` changes."""

        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x):
            return self.inner(change(x))

    spec = {"inputs": "vectors", "width": 16, "causal": False, "positionless": True}
    return ModelSpec.of(Encoder, **spec | declared)


def previous(x):
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def test_order_of_positions_that_does_not_matter_passes():
    result = subjects.ask(encoder(), "permutation_equivariance")
    assert result.status == "passed"
    assert result.value <= result.limit


@pytest.mark.parametrize(
    "change, where",
    [
        (lambda x: x + torch.arange(x.shape[1]).to(x)[:, None] / 10, "positions "),
        (lambda x: x + previous(x), "positions "),
        (lambda x: x.cumsum(dim=1), "positions "),
        # In the reversed order, each position has the same neighbours.
        (lambda x: x + previous(x) + previous(x.flip(1)).flip(1), "positions shuffled"),
    ],
    ids=["positions", "previous", "sums", "neighbours"],
)
def test_order_of_positions_that_matters_fails(change, where):
    result = subjects.ask(encoder(change), "permutation_equivariance")
    assert result.status == "failed"
    assert result.where.startswith(where)


@pytest.mark.parametrize(
    "declared, reason",
    [
        ({"positionless": False}, "needs the claim"),
        ({"causal": True}, "which is an order"),
        ({"seq_len": 1}, "at least 2 positions"),
    ],
    ids=["no claim", "causal", "one position"],
)
def test_order_of_positions_is_not_asked(declared, reason):
    result = subjects.ask(encoder(**declared), "permutation_equivariance")
    assert result.status == "not applicable"
    assert reason in result.meaning


def test_wrong_gradient_of_the_batch_norm_of_torch_is_no_finding(subjects):
    """On the CPU, torch 2.13 computes it for one row whose gradient has the strides of channels_last."""

    class Hybrid(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.BatchNorm2d(16))
            self.head = nn.Linear(16, 4)

        def forward(self, images):
            return self.head(self.stem(images).flatten(2).mT.tanh()).mean(1)

    assert subjects.ask(ModelSpec.of(Hybrid), "batch_invariance").status == "passed"
