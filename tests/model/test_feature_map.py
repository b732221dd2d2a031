"""FeatureMap: unbiased estimates of three kernels written out exactly, with an error that falls as 1/sqrt(M).

Shapes: B batch, K heads, each one draw, G query heads to a key head, T positions, D head size, M features,
F frequencies.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stackwise.model.feature_map import FeatureMap

RANDOM = ["favor", "gaussian", "laplacian"]
KINDS = [*RANDOM, "elu"]
HEAD_DIMS = [1, 4, 64, 256]


def exact_kernel(kind, q_D, k_D, bandwidth):
    """Of queries and keys as attention has them, not yet divided by D^(1/4)."""
    root = math.sqrt(len(q_D))
    match kind:
        case "favor":
            return np.exp(q_D @ k_D / root)
        case "gaussian":
            return np.exp(-((q_D - k_D) ** 2).sum() / (2 * bandwidth**2 * root))
        case "laplacian":
            return np.exp(-np.abs(q_D - k_D).sum() / (bandwidth * math.sqrt(root)))


def exact_kernels(kind, q_TD, k_TD, bandwidth):
    pairs = zip(q_TD.numpy(), k_TD.numpy(), strict=True)
    return torch.tensor([exact_kernel(kind, q, k, bandwidth) for q, k in pairs])


def full(features):
    """phi itself, where float64 can hold it."""
    return features.value_BKTM * features.log_scale_BKT[..., None].exp()


def estimates(feature_map, q_TD, k_TD):
    """(K, T): of each pair, one estimate a draw."""
    draws = len(feature_map.frequencies_KFD)
    phi_q, phi_k = (full(feature_map(x.expand(1, draws, *x.shape))) for x in (q_TD, k_TD))
    return (phi_q * phi_k).sum(-1)[0]


def pairs(head_dim, n_pairs=6, size=1.0):
    """Queries and keys so close to each other, and so small, that no kernel is near 0 or 1."""
    generator = torch.Generator().manual_seed(head_dim)
    q, k = (
        torch.randn(2, n_pairs, head_dim, dtype=torch.float64, generator=generator) * head_dim**-0.25 * size
    )
    return q, (k + 2 * q) / 3


def standard_errors(samples_KT, exact_T):
    """How far the mean over the draws is from where it should be."""
    error_T = samples_KT.std(0) / math.sqrt(len(samples_KT))
    return ((samples_KT.mean(0) - exact_T) / error_T).abs().max().item()


class TestEstimate:
    @pytest.mark.parametrize("bandwidth", [0.7, 1.0, 3.0])
    @pytest.mark.parametrize("head_dim, n_features", [(1, 4), (4, 2), (4, 10), (16, 8)])
    @pytest.mark.parametrize("kind", RANDOM)
    def test_is_unbiased(self, kind, head_dim, n_features, bandwidth):
        q, k = pairs(head_dim)
        exact = exact_kernels(kind, q, k, bandwidth)
        samples = estimates(FeatureMap(kind, 10_000, head_dim, n_features, bandwidth).double(), q, k)
        assert standard_errors(samples, exact) < 4.5
        # A mean so sharp that a forgotten factor would be seen.
        assert (samples.std(0) / math.sqrt(len(samples)) / exact).min() < 0.05

    @pytest.mark.parametrize("kind", RANDOM)
    def test_error_falls_as_the_root_of_the_features(self, kind):
        q, k = pairs(4, 12, size=0.5)
        exact = exact_kernels(kind, q, k, 1.0)
        sizes = [32, 128, 512, 2048]
        errors = [
            (estimates(FeatureMap(kind, 300, 4, size, 1.0).double(), q, k) - exact).square().mean().sqrt()
            for size in sizes
        ]
        slope, _ = np.polyfit(np.log(sizes), np.log(errors), 1)
        assert -0.6 < slope < -0.4

    def test_gaussian_frequencies_are_no_laplacian_kernel(self):
        q, k = pairs(4)
        exact = exact_kernels("laplacian", q, k, 1.0)
        laplacian = FeatureMap("laplacian", 8000, 4, 8, 1.0).double()
        assert standard_errors(estimates(laplacian, q, k), exact) < 4.5
        laplacian.frequencies_KFD.normal_()
        assert standard_errors(estimates(laplacian, q, k), exact) > 30

    @pytest.mark.parametrize("kind", ["gaussian", "laplacian"])
    def test_a_token_is_like_itself(self, kind):
        # cos^2 + sin^2, whatever was drawn.
        x = torch.randn(1, 3, 5, 8)
        value = FeatureMap(kind, 3, 8, 32, 0.5)(x).value_BKTM
        torch.testing.assert_close(value.square().sum(-1), torch.ones(1, 3, 5))

    def test_orthogonal_frequencies_err_less(self):
        # Why they are drawn so: Choromanski et al. 2021, theorem 2.
        q, k = pairs(16, size=0.5)
        exact = exact_kernels("favor", q, k, 1.0)
        feature_map = FeatureMap("favor", 4000, 16, 16, 1.0).double()
        orthogonal = (estimates(feature_map, q, k) - exact).square().mean()
        feature_map.frequencies_KFD.normal_()
        independent = (estimates(feature_map, q, k) - exact).square().mean()
        assert orthogonal < 0.9 * independent


def distance_from(samples, cumulative):
    """Kolmogorov and Smirnov's statistic, times the root of the sample size: above 1.95 in one of 1000."""
    ordered = samples.flatten().double().sort().values
    n = len(ordered)
    expected = cumulative(ordered)
    above = (torch.arange(1, n + 1) / n - expected).max()
    below = (expected - torch.arange(n) / n).max()
    return max(above, below).item() * math.sqrt(n)


def normal_cumulative(x):
    return (1 + torch.erf(x / math.sqrt(2))) / 2


class TestFrequencies:
    @pytest.mark.parametrize("bandwidth", [0.25, 1.0, 4.0])
    def test_laplacian_are_cauchy(self, bandwidth):
        frequencies = FeatureMap("laplacian", 100, 10, 100, bandwidth).frequencies_KFD
        assert frequencies.shape == (100, 50, 10)
        assert distance_from(frequencies, lambda x: 0.5 + torch.atan(x * bandwidth) / math.pi) < 1.95
        assert distance_from(frequencies, lambda x: normal_cumulative(x * bandwidth)) > 10

    @pytest.mark.parametrize("kind, bandwidth", [("favor", 5.0), ("gaussian", 0.5), ("gaussian", 2.0)])
    @pytest.mark.parametrize("head_dim", [1, 5])
    def test_others_are_normal(self, head_dim, kind, bandwidth):
        scale = bandwidth if kind == "gaussian" else 1.0
        frequencies = FeatureMap(kind, 1000, head_dim, 2 * head_dim, bandwidth).frequencies_KFD * scale
        # One number a group: those of a row are not independent of each other's lengths.
        for axis in range(head_dim):
            assert distance_from(frequencies[:, 0, axis], normal_cumulative) < 1.95

    @pytest.mark.parametrize("kind", ["favor", "gaussian"])
    @pytest.mark.parametrize("n_frequencies", [3, 6, 14])
    def test_are_orthogonal_within_groups_of_the_head_size(self, n_frequencies, kind):
        features = n_frequencies if kind == "favor" else 2 * n_frequencies
        frequencies = FeatureMap(kind, 40, 6, features, 1.0).double().frequencies_KFD
        assert frequencies.shape == (40, n_frequencies, 6)
        unit = frequencies / frequencies.norm(dim=-1, keepdim=True)
        cosines = (unit @ unit.transpose(-1, -2)).abs()
        group = torch.arange(n_frequencies) // 6
        same, self_ = group == group[:, None], torch.eye(n_frequencies, dtype=torch.bool)
        assert cosines[:, same & ~self_].max() < 1e-5
        if n_frequencies > 6:
            # A group that repeats another would be no further information.
            assert cosines[:, ~same].max() < 1 - 1e-4

    @pytest.mark.parametrize("head_dim", [2, 8])
    def test_lengths_are_chi_distributed(self, head_dim):
        frequencies = FeatureMap("favor", 500, head_dim, head_dim, 1.0).frequencies_KFD.double()
        squares = frequencies.square().sum(-1)
        half = torch.tensor(head_dim / 2, dtype=torch.float64)
        assert distance_from(squares, lambda x: torch.special.gammainc(half, x / 2)) < 1.95
        # Each row has its own.
        assert (squares[:, 0] - squares[:, 1]).abs().min() > 1e-6

    @pytest.mark.parametrize("kind", RANDOM)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_are_not_rounded_with_the_module(self, dtype, kind):
        feature_map = FeatureMap(kind, 20, 16, 256, 0.1)
        before = feature_map.frequencies_KFD.clone()
        assert kind != "laplacian" or before.abs().max() > torch.finfo(torch.float16).max
        module = torch.nn.ModuleList([feature_map]).to(dtype)
        assert feature_map.frequencies_KFD.dtype == torch.float32
        assert torch.equal(feature_map.frequencies_KFD, before)
        assert feature_map(torch.randn(1, 20, 3, 16).to(dtype)).value_BKTM.isfinite().all()
        assert module.double()[0].frequencies_KFD.dtype == torch.float64
        assert module.to(dtype)[0].frequencies_KFD.dtype == torch.float32
        assert module.to("meta", dtype)[0].frequencies_KFD.is_meta

    @pytest.mark.parametrize("kind", KINDS)
    def test_are_drawn_in_float32_where_the_default_is_narrower(self, kind):
        torch.manual_seed(0)
        expected = FeatureMap(kind, 2, 4, 8, 1.0).frequencies_KFD
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            torch.manual_seed(0)
            actual = FeatureMap(kind, 2, 4, 8, 1.0).frequencies_KFD
        finally:
            torch.set_default_dtype(default)
        assert actual.dtype == torch.float32 and torch.equal(actual, expected)

    @pytest.mark.parametrize("kind", RANDOM)
    def test_heads_have_draws_of_their_own_that_a_checkpoint_keeps(self, kind):
        feature_map, other = (FeatureMap(kind, 2, 4, 8, 1.0) for _ in range(2))
        first, second = feature_map.frequencies_KFD
        assert not torch.equal(first, second)
        assert not torch.equal(feature_map.frequencies_KFD, other.frequencies_KFD)
        other.load_state_dict(feature_map.state_dict())
        x = torch.randn(1, 2, 3, 4)
        assert torch.equal(feature_map(x).value_BKTM, other(x).value_BKTM)
        assert not list(feature_map.parameters())


class TestFeatures:
    def test_elu_is_exact(self):
        # elu(x) + 1 in float32 is 0 below -17, where exp(x) is not.
        x = torch.linspace(-80, 80, 321)
        actual = full(FeatureMap("elu", 1, 1, 256, 1.0)(x[None, None, :, None]))[0, 0, :, 0]
        exact = np.where(x > 0, x.double() + 1, x.double().exp())
        torch.testing.assert_close(actual.double(), torch.from_numpy(exact), rtol=1e-5, atol=0)

    def test_elu_has_as_many_features_as_the_head_and_divides_it(self):
        feature_map = FeatureMap("elu", 2, 16, 256, 1.0).double()
        assert feature_map.n_features == 16 and not feature_map.frequencies_KFD.numel()
        x = torch.randn(1, 2, 3, 16, dtype=torch.float64)
        expected = torch.where(x > 0, x / 2 + 1, (x / 2).exp())
        torch.testing.assert_close(full(feature_map(x)), expected, rtol=1e-12, atol=0)

    def test_gradient_of_elu_at_zero_is_one(self):
        x = torch.zeros(1, 1, 1, 1, requires_grad=True)
        FeatureMap("elu", 1, 1, 256, 1.0)(x).value_BKTM.sum().backward()
        assert x.grad is not None and x.grad.item() == 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_overflows(self, kind, head_dim, dtype):
        feature_map = FeatureMap(kind, 2, head_dim, 32, 0.1)
        x = torch.linspace(-100, 100, 9)[:, None] * torch.randn(2, 1, head_dim).clamp(-1, 1)
        x = x.to(dtype).requires_grad_()
        value, log_scale = feature_map(x[None])
        value.square().sum().backward()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert value.dtype == wide and value.isfinite().all() and x.grad.isfinite().all()
        assert value.shape == (1, 2, 9, feature_map.n_features)
        assert log_scale.dtype == wide and log_scale.isfinite().all() and log_scale.shape == (1, 2, 9)
        if feature_map.is_positive:
            # Each token has a largest one, and of no two is the product 0, nor its inverse infinite.
            assert (value.amax(-1) == 1).all()
            assert value.min() > (1e-120 if dtype == torch.float64 else 1e-15)
        else:
            assert value.abs().max() <= 1 and not log_scale.any()

    def test_log_scale_is_what_the_values_were_divided_by(self):
        feature_map = FeatureMap("favor", 2, 4, 32, 1.0).double()
        for size in (0.1, 1.0, 30.0):
            x = torch.randn(1, 2, 5, 4, dtype=torch.float64) * size
            value, log_scale = feature_map(x)
            small = x / 4**0.25
            logarithm = torch.einsum("bktd,kfd->bktf", small, feature_map.frequencies_KFD)
            logarithm = logarithm - small.square().sum(-1, keepdim=True) / 2 - math.log(32) / 2
            seen = value > 1e-110
            assert seen.any(-1).all()
            actual = value.log() + log_scale[..., None]
            torch.testing.assert_close(actual[seen], logarithm[seen], rtol=1e-10, atol=1e-10)

    def test_gradient_takes_the_scale_for_a_constant(self):
        feature_map = FeatureMap("favor", 2, 4, 8, 1.0).double()
        x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
        features = feature_map(x)
        assert not features.log_scale_BKT.requires_grad
        weights = torch.randn(8, dtype=torch.float64)
        (actual,) = torch.autograd.grad((full(features) * weights).sum(), x)
        small = x / 4**0.25
        phase = torch.einsum("bktd,kfd->bktf", small, feature_map.frequencies_KFD)
        phi = (phase - small.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(8)
        (expected,) = torch.autograd.grad((phi * weights).sum(), x)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    def test_query_heads_of_a_group_share_the_draw(self, kind):
        feature_map = FeatureMap(kind, 2, 4, 8, 1.0).double()
        x_BKGTD = torch.randn(3, 2, 5, 6, 4, dtype=torch.float64)
        together = full(feature_map(x_BKGTD))
        for g in range(5):
            torch.testing.assert_close(together[:, :, g], full(feature_map(x_BKGTD[:, :, g])))

    @pytest.mark.parametrize("kind", KINDS)
    def test_only_some_are_positive(self, kind):
        feature_map = FeatureMap(kind, 2, 4, 32, 1.0)
        value = feature_map(torch.randn(1, 2, 50, 4) * 3).value_BKTM
        assert feature_map.is_positive == bool((value > 0).all()) == (kind in ("favor", "elu"))
