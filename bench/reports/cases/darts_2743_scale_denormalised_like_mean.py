"""darts#2743 (unit8co/darts): reversible instance norm treats the scale of a forecast like its mean.

With a likelihood, the model predicts parameters of a distribution. The norm multiplies all of them by the
deviation of the series and adds its mean, the raw scale as well. A series far from zero gets a wrong scale.
The scale should be multiplied by the deviation only.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

TARGETS, OUTPUT_CHUNK, MAX_LENGTH = 2, 4, 64


class RINorm(nn.Module):
    """Reversible instance norm of (batch, time, targets)."""

    def __init__(self, input_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.affine_weight = nn.Parameter(torch.ones(input_dim))
        self.affine_bias = nn.Parameter(torch.zeros(input_dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalised series, its mean and its deviation."""
        mean = x.mean(dim=1, keepdim=True).detach()
        stdev = (x.var(dim=1, keepdim=True, unbiased=False) + self.eps).sqrt().detach()
        return (x - mean) / stdev * self.affine_weight + self.affine_bias, mean, stdev

    def inverse(self, x: Tensor, mean: Tensor, stdev: Tensor) -> Tensor:
        """Undo the norm of values."""
        return (x - self.affine_bias) / (self.affine_weight + self.eps**2) * stdev + mean

    def inverse_scale(self, x: Tensor, stdev: Tensor) -> Tensor:
        """Undo the norm of deviations."""
        return x / (self.affine_weight + self.eps**2).abs() * stdev


class TransformerModule(nn.Module):
    """Past of a series -> mean and scale of each future value."""

    def __init__(self, *, all_parameters: bool, d_model: int = 32, nhead: int = 4) -> None:
        super().__init__()
        self.all_parameters, self.rin = all_parameters, RINorm(TARGETS)
        self.encoder = nn.Linear(TARGETS, d_model)
        self.transformer = nn.Transformer(d_model, nhead, 2, 2, 2 * d_model, dropout=0.1, batch_first=True)
        self.decoder = nn.Linear(d_model, OUTPUT_CHUNK * TARGETS * 2)
        at = torch.arange(MAX_LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("pe", torch.stack([at.sin(), at.cos()], dim=-1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, TARGETS). Return (batch, OUTPUT_CHUNK, TARGETS, 2)."""
        x, mean, stdev = self.rin(x)
        src = self.encoder(x) * self.encoder.out_features**0.5 + self.pe[: x.shape[1]]
        out = self.decoder(self.transformer(src, src[:, -1:])[:, 0])
        out_mean, out_scale = out.unflatten(1, (OUTPUT_CHUNK, TARGETS, 2)).unbind(dim=-1)
        out_mean = self.rin.inverse(out_mean, mean, stdev)
        if self.all_parameters:
            sigma = F.softplus(self.rin.inverse(out_scale, mean, stdev))
        else:
            sigma = self.rin.inverse_scale(F.softplus(out_scale), stdev)
        return torch.stack([out_mean, sigma], dim=-1)

    def compute_loss(self, past_target: Tensor, future_target: Tensor) -> Tensor:
        """Return the negative log-likelihood of the future."""
        mu, sigma = self(past_target).unbind(dim=-1)
        return F.gaussian_nll_loss(mu, future_target, sigma.square(), eps=1e-6)


def buggy() -> nn.Module:
    """Undo the norm of all parameters as if they were values."""
    return TransformerModule(all_parameters=True)


def healthy() -> nn.Module:
    """Undo the norm of the mean and that of the scale."""
    return TransformerModule(all_parameters=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State series, one forecast for each, and the likelihood of their last values."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=TARGETS,
        per_position=False,
        max_length=MAX_LENGTH,
        loss=lambda model, x: model.compute_loss(x[:, :-OUTPUT_CHUNK], x[:, -OUTPUT_CHUNK:]),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the change of the scale of a forecast if the series moves by 5."""
    x = torch.randn(2, 12, TARGETS, generator=torch.Generator().manual_seed(1))
    return (model.eval()(x + 5) - model(x))[..., 1]
