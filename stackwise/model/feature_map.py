"""Feature maps phi. The inner product phi(q) . phi(k) is a kernel, or an estimate of one.

Shapes: B batch, K heads, T positions, D head size, M features, F frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.config import FeatureMapKind

__all__ = ["FeatureMap", "Features"]


class Features(NamedTuple):
    """phi(x) as `value * exp(log_scale)`, so that no exponential overflows or underflows float32.

    Attributes:
        value_BKTM: float32, or float64; absolute values of at most 1.
        log_scale_BKT: same dtype, without gradient.
    """

    value_BKTM: Tensor
    log_scale_BKT: Tensor


class FeatureMap(nn.Module):
    """phi of one kernel, with independent random draws for each key/value head.

    Heads of size D are first divided by D^(1/4), as softmax(q.k / sqrt(D)) divides their product. For x and y
    divided in this way, the kernels are

    - `favor`: exp(x.y), by positive orthogonal random features (Choromanski et al. 2021, arXiv:2009.14794,
      lemma 1): exp(w.x - |x|^2 / 2), w ~ N(0, I).
    - `gaussian`: exp(-|x - y|^2 / (2 b^2)), by random Fourier features (Rahimi & Recht 2007): cosine and
      sine of w.x, w ~ N(0, I / b^2), drawn orthogonally (Yu et al. 2016, arXiv:1610.09072).
    - `laplacian`: exp(-|x - y|_1 / b) by random Fourier features; the frequencies are independent Cauchy
      numbers of scale 1 / b, the Fourier transform of the kernel.
    - `elu`: (elu(x) + 1) . (elu(y) + 1) (Katharopoulos et al. 2020, arXiv:2006.16236), without random draws.

    The estimates are unbiased, and their error decreases as 1 / sqrt(M). Frequencies stay float32, or
    float64, if the module is cast: some Cauchy numbers exceed the range of float16.

    Args:
        kind: `favor`, `gaussian`, `laplacian` or `elu`, as above.
        n_heads: K.
        head_dim: D.
        n_features: M; for `elu` it is D.
        bandwidth: b.
    """

    def __init__(
        self, kind: FeatureMapKind, n_heads: int, head_dim: int, n_features: int, bandwidth: float
    ) -> None:
        super().__init__()
        self.kind, self.head_dim = kind, head_dim
        self.n_features = head_dim if kind == "elu" else n_features
        match kind:
            case "favor":
                frequencies = _orthogonal_normal(n_heads, n_features, head_dim)
            case "gaussian":
                frequencies = _orthogonal_normal(n_heads, n_features // 2, head_dim) / bandwidth
            case "laplacian":
                frequencies = torch.empty(n_heads, n_features // 2, head_dim, dtype=_dtype()).cauchy_()
                frequencies = frequencies / bandwidth
            case "elu":
                frequencies = torch.empty(n_heads, 0, head_dim, dtype=_dtype())
        self.frequencies_KFD: Tensor
        self.register_buffer("frequencies_KFD", frequencies)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.frequencies_KFD
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.frequencies_KFD
        wide = torch.promote_types(after.dtype, torch.float32)
        if after.dtype != wide:
            self.frequencies_KFD = before.to(after.device, wide)
        return self

    @property
    def is_positive(self) -> bool:
        """True if every feature is above zero, so that no estimate of the kernel is negative."""
        return self.kind in ("favor", "elu")

    def forward(self, x_BKTD: Tensor) -> Features:
        """Features of queries or keys (B, K, T, D), or (B, K, G, T, D) with G query heads per key head."""
        x = x_BKTD.to(torch.promote_types(x_BKTD.dtype, torch.float32)) * self.head_dim**-0.25
        if self.kind == "elu":
            exponent = F.relu(x).log1p() + x.clamp(max=0)  # elu(x) + 1 would be rounded to 0 below -17
        else:
            frequencies_KDF = self.frequencies_KFD.to(x.dtype).transpose(-1, -2)
            phase = x @ (frequencies_KDF if x.ndim == 4 else frequencies_KDF[:, None])
            if self.kind != "favor":
                value = torch.cat((phase.cos(), phase.sin()), dim=-1) / math.sqrt(self.n_features / 2)
                return Features(value, value.new_zeros(value.shape[:-1]))
            exponent = phase - x.square().sum(-1, keepdim=True) / 2 - math.log(self.n_features) / 2
        highest = exponent.detach().amax(-1, keepdim=True)
        # The product of two features stays above zero: a query with zero weight for all keys would be 0 / 0.
        least = 0.375 * math.log(torch.finfo(x.dtype).tiny)
        return Features((exponent - highest).clamp(min=least).exp(), highest.squeeze(-1))

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.kind}, n_features={self.n_features}"


def _orthogonal_normal(n_heads: int, n_frequencies: int, head_dim: int) -> Tensor:
    """Return rows that are each N(0, I), and orthogonal within each group of D rows."""
    groups = math.ceil(n_frequencies / head_dim)
    gaussian = torch.randn(n_heads, groups, head_dim, head_dim, dtype=_dtype())
    q, r = torch.linalg.qr(gaussian)
    # The signs make Q uniform (Mezzadri 2007, arXiv:math-ph/0609050); lengths are drawn separately.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    lengths = torch.randn(n_heads, groups, head_dim, head_dim, dtype=_dtype()).norm(dim=-1, keepdim=True)
    rows: Tensor = (q * lengths).flatten(1, 2)[:, :n_frequencies]
    return rows


def _dtype() -> torch.dtype:
    """Return the dtype of random draws: torch's default, at least float32."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)
