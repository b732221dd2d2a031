"""PyPOTS#453 (WenjieDu/PyPOTS): with missing data, RevIN does not divide by the standard deviation.

The branch with a missing mask only subtracts the mean. The inverse multiplies by the standard deviation in
any case, so that it does not restore the data. https://github.com/WenjieDu/PyPOTS/issues/453
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec


class RevIN(nn.Module):
    """Normalisation of each series over its observed values, and its inverse."""

    def __init__(self, n_features: int, *, divide: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.divide, self.eps = divide, eps
        self.affine_weight = nn.Parameter(torch.ones(n_features))
        self.affine_bias = nn.Parameter(torch.zeros(n_features))

    def forward(self, x: Tensor, missing_mask: Tensor | None = None, mode: str = "norm") -> Tensor:
        return self._normalize(x, missing_mask) if mode == "norm" else self._denormalize(x)

    def _normalize(self, x: Tensor, missing_mask: Tensor | None) -> Tensor:
        if missing_mask is None:
            self.mean = x.mean(dim=1, keepdim=True).detach()
            self.stdev = (x.var(dim=1, keepdim=True, unbiased=False) + self.eps).sqrt().detach()
            x = (x - self.mean) / self.stdev
        else:
            missing_sum = missing_mask.sum(dim=1, keepdim=True) + 1e-9
            self.mean = ((x * missing_mask).sum(dim=1, keepdim=True) / missing_sum).detach()
            x = (x - self.mean).masked_fill(missing_mask == 0, 0)
            self.stdev = ((x * x).sum(dim=1, keepdim=True) / missing_sum + self.eps).sqrt().detach()
            if self.divide:
                x = x / self.stdev
        return x * self.affine_weight + self.affine_bias

    def _denormalize(self, x: Tensor) -> Tensor:
        x = (x - self.affine_bias) / (self.affine_weight + self.eps * self.eps)
        return x * self.stdev + self.mean


class RevINTransformer(nn.Module):
    """Imputation: embedding of values and mask, encoder, and reconstruction of all values."""

    def __init__(self, *, divide: bool, n_steps: int = 32, n_features: int = 5, d_hidden: int = 32) -> None:
        super().__init__()
        self.revin = RevIN(n_features, divide=divide)
        self.saits_embedding = nn.Linear(2 * n_features, d_hidden)
        self.position_embedding = nn.Parameter(0.1 * torch.randn(n_steps, d_hidden))
        layers = (
            nn.TransformerEncoderLayer(d_hidden, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.backbone = nn.Sequential(*layers, nn.LayerNorm(d_hidden))
        self.output_projection = nn.Linear(d_hidden, n_features)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mask is 1 at observed values."""
        X, missing_mask = inputs["X"], inputs["missing_mask"]
        normed = self.revin(X, missing_mask, mode="norm")
        enc_out = self.saits_embedding(torch.cat([normed, missing_mask.to(X.dtype)], dim=-1))
        enc_out = self.backbone(enc_out + self.position_embedding[: X.shape[1]])
        reconstruction = self.revin(self.output_projection(enc_out), mode="denorm")
        imputation = torch.where(missing_mask == 1, X, reconstruction)
        return {"imputation": imputation, "reconstruction": reconstruction}


def buggy() -> nn.Module:
    """Only the mean is subtracted."""
    return RevINTransformer(divide=False)


def healthy() -> nn.Module:
    """Divided by the standard deviation."""
    return RevINTransformer(divide=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Series of which one value in four is missing."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        steps, features = torch.arange(x.shape[1])[:, None], torch.arange(5)
        mask = ((steps + features) % 4 > 0).to(x).expand_as(x)
        return model({"X": x * mask, "missing_mask": mask})["reconstruction"]

    return ModelSpec.of(make, inputs="vectors", width=5, max_length=32, forward=forward)


def observe(model: nn.Module) -> float:
    """Largest error at observed values after the normalisation and its inverse."""
    generator = torch.Generator().manual_seed(1)
    x = 7 * torch.randn(2, 20, 5, generator=generator) + 3
    mask = (torch.rand(2, 20, 5, generator=generator) > 0.3).float()
    restored = model.revin(model.revin(x * mask, mask, mode="norm"), mode="denorm")
    return ((restored - x) * mask).abs().max().item()
