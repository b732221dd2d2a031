"""Parts of a loss that scale with the number of rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class Autoencoder(nn.Module):
    """Variational autoencoder of vectors (B, T, 6)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mean + (log_var / 2).exp() * torch.randn_like(mean))

    def divergence(self, x):
        """Return (B, T)."""
        mean, log_var = self.encoder(x).chunk(2, dim=-1)
        return -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(dim=-1)


def mean_of_all(model, x):
    return F.mse_loss(model(x), x) + 0.1 * model.divergence(x).mean()


def sum_of_all(model, x):
    return F.mse_loss(model(x), x, reduction="sum") + model.divergence(x).sum()


def sum_of_divergence(model, x):
    return F.mse_loss(model(x), x) + 0.1 * model.divergence(x).sum()


def sum_with_penalty_of_weights(model, x):
    return sum_of_all(model, x) + 10 * model.encoder.weight.square().sum()


def contrastive(model, x):
    vectors = F.normalize(model.encoder(x).mean(1), dim=-1)
    return F.cross_entropy(5 * vectors @ vectors.T, torch.arange(len(x)))


def pairwise(model, x):
    """The sigmoid loss of all pairs, over the number of rows."""
    vectors = F.normalize(model.encoder(x).mean(1), dim=-1)
    signs = 2 * torch.eye(len(x), dtype=x.dtype) - 1
    return -F.logsigmoid(signs * (vectors @ vectors.T)).sum() / len(x)


def zero(model, x):
    return 0 * mean_of_all(model, x)


def not_finite(model, x):
    return mean_of_all(model, x) / 0


@pytest.mark.parametrize(
    ("loss", "status", "part"),
    [
        (mean_of_all, "passed", "mean over the rows"),
        (sum_of_all, "passed", "sum over the rows"),
        (sum_with_penalty_of_weights, "passed", "sum over the rows"),
        (zero, "not applicable", "finite and not 0"),
        (not_finite, "not applicable", "finite and not 0"),
        (contrastive, "not applicable", "a mean or a sum over rows"),
        (pairwise, "not applicable", "compares no rows"),
        (sum_of_divergence, "failed", "grows with their number"),
    ],
)
def test_loss_of_copies_of_a_row(subjects, loss, status, part):
    result = subjects.ask(ModelSpec.of(Autoencoder, inputs="vectors", width=6, loss=loss), "loss_rows")
    assert result.status == status, result
    assert part in result.meaning


def test_own_loss_of_a_language_model(subjects):
    def labelled(model, ids, labels):
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    assert subjects.ask(ModelSpec.of(subjects.tiny, labelled_loss=labelled), "loss_rows").status == "passed"


def test_a_model_without_a_loss(subjects):
    spec = ModelSpec.of(Autoencoder, inputs="vectors", width=6)
    assert subjects.ask(spec, "loss_rows").status == "not applicable"
