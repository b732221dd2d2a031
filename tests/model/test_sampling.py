"""Sampling: draws are distributed as they should be, and filters keep what the published ones keep."""

import dataclasses
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stackwise.model.sampling import GenerationOptions, Sampler

INF = float("inf")
N_DRAWS = 20_000
# The 99.99 % quantiles of chi-square, by degrees of freedom.
CHI_SQUARE = {3: 21.1, 4: 23.5, 5: 25.7, 10: 35.6}


def draw(logits_V, sampler, seed=0, n=N_DRAWS):
    generator = torch.Generator().manual_seed(seed)
    return sampler(logits_V.expand(n, -1), generator)


def chi_square(tokens_N, probability_V):
    """Pearson's statistic over the tokens of nonzero probability; the others must not occur."""
    counts_V = tokens_N.bincount(minlength=len(probability_V)).double()
    assert counts_V[probability_V == 0].sum() == 0
    possible = probability_V > 0
    expected = probability_V[possible].double() * len(tokens_N)
    return ((counts_V[possible] - expected) ** 2 / expected).sum().item()


def kept(sampler, logits_BV):
    return (sampler.filter(logits_BV) > -INF).tolist()


def published(logits_BV, temperature, top_k, top_p):
    for warper in (
        TemperatureLogitsWarper(temperature),
        *([TopKLogitsWarper(top_k)] if top_k is not None else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
    ):
        logits_BV = warper(None, logits_BV)
    return logits_BV


class TestDraws:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_follow_the_softmax(self, temperature):
        logits_V = torch.randn(11)
        probability_V = (logits_V.double() / temperature).softmax(-1)
        tokens = draw(logits_V, Sampler(temperature))
        assert tokens.shape == (N_DRAWS,) and tokens.dtype == torch.int64
        assert chi_square(tokens, probability_V) < CHI_SQUARE[10]
        # It would be noticed if they followed another temperature.
        assert chi_square(tokens, (logits_V.double() / temperature * 1.2).softmax(-1)) > 2 * CHI_SQUARE[10]

    def test_follow_the_softmax_of_what_top_k_leaves(self):
        logits_V = torch.randn(11)
        probability_V = logits_V.double().softmax(-1)
        probability_V[logits_V < logits_V.sort().values[-4]] = 0
        tokens = draw(logits_V, Sampler(1.0, top_k=4))
        assert chi_square(tokens, probability_V / probability_V.sum()) < CHI_SQUARE[3]

    def test_follow_the_softmax_of_what_top_p_leaves(self):
        probability_V = torch.tensor([0.05, 0.3, 0.02, 0.25, 0.03, 0.2, 0.15])
        tokens = draw(probability_V.log(), Sampler(1.0, top_p=0.85))
        left_V = torch.tensor([0.0, 0.3, 0.0, 0.25, 0.0, 0.2, 0.15], dtype=torch.float64)
        assert chi_square(tokens, left_V / left_V.sum()) < CHI_SQUARE[3]

    def test_rows_are_independent(self):
        tokens = draw(torch.zeros(2), Sampler(1.0)).view(-1, 2)
        pairs = tokens[:, 0] * 2 + tokens[:, 1]
        assert chi_square(pairs, torch.full((4,), 0.25)) < CHI_SQUARE[3]

    def test_each_row_follows_its_own_logits(self):
        logits_BV = torch.full((3, 5), -INF)
        logits_BV[0, 4] = logits_BV[1, 0] = logits_BV[2, 2] = 0.0
        assert Sampler(1.0)(logits_BV).tolist() == [4, 0, 2]

    def test_steps_differ(self):
        generator = torch.Generator().manual_seed(0)
        logits_BV = torch.zeros(4, 1000)
        assert not torch.equal(Sampler(1.0)(logits_BV, generator), Sampler(1.0)(logits_BV, generator))

    def test_banned_tokens_never_occur(self):
        logits_V = torch.randn(6).repeat(2)
        logits_V[:6] = -INF
        for sampler in (
            Sampler(1.0),
            Sampler(1.0, top_k=9),
            Sampler(1.0, top_p=0.999),
            Sampler(0.7, 9, 0.999),
        ):
            tokens = draw(logits_V, sampler)
            assert tokens.min() >= 6
        tokens = draw(logits_V, Sampler(1.0))
        probability_V = logits_V.double().softmax(-1)
        assert chi_square(tokens, probability_V) < CHI_SQUARE[5]

    def test_banned_tokens_do_not_occur_where_the_noise_is_zero(self, monkeypatch):
        # Some devices draw exponential numbers that are exactly 0, and argmax takes 0 / 0.
        monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_())
        assert Sampler(1.0)(torch.tensor([[-INF, 2.0, -INF, 1.0]])).tolist() == [1]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_dtypes(self, dtype):
        logits_V = torch.randn(11).to(dtype)
        tokens = draw(logits_V, Sampler(1.0, top_k=9, top_p=0.99), n=2000)
        filtered = Sampler(1.0, top_k=9, top_p=0.99).filter(logits_V[None])
        assert filtered.dtype == torch.float32
        assert filtered[0, tokens].isfinite().all() and len(tokens.unique()) > 4

    def test_bfloat16_logits_are_drawn_from_in_float32(self):
        # In bfloat16 the sum over 4096 equal probabilities stops growing, and a nucleus of 0.5 is off.
        assert sum(kept(Sampler(1.0, top_p=0.5), torch.zeros(1, 4096, dtype=torch.bfloat16))[0]) == 2048


class TestSeeds:
    LOGITS = torch.linspace(-1, 1, 50).expand(64, -1)

    def test_of_a_generator(self):
        state = torch.get_rng_state()
        first, same, other = (
            Sampler(1.0)(self.LOGITS, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
        )
        assert torch.equal(first, same) and not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), state)

    def test_of_the_global_generator(self):
        torch.manual_seed(5)
        first = Sampler(1.0)(self.LOGITS)
        assert not torch.equal(Sampler(1.0)(self.LOGITS), first)
        torch.manual_seed(5)
        assert torch.equal(Sampler(1.0)(self.LOGITS), first)

    def test_greedy_draws_nothing(self):
        state = torch.get_rng_state()
        assert Sampler()(self.LOGITS).tolist() == [49] * 64
        assert torch.equal(torch.get_rng_state(), state)


class TestFilter:
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
    @pytest.mark.parametrize("top_k", [None, 1, 2, 7, 39, 40, 41])
    @pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999, 1.0])
    def test_is_the_published_one(self, temperature, top_k, top_p):
        logits_BV = 3 * torch.randn(32, 40)
        torch.testing.assert_close(
            Sampler(temperature, top_k, top_p).filter(logits_BV),
            published(logits_BV, temperature, top_k, top_p),
            rtol=1e-6,
            atol=0,
        )

    @settings(derandomize=True, max_examples=60)
    @given(
        st.lists(st.integers(-4, 4), min_size=1, max_size=9),
        st.floats(0.05, 1.0),
        st.none() | st.integers(1, 10),
        st.floats(0.1, 3),
    )
    def test_keeps_the_fewest_that_suffice(self, logits, top_p, top_k, temperature):
        """Written out in float64: the kept are the most likely, just enough, and never none."""
        sampler = Sampler(temperature, top_k, top_p)
        [keeps] = kept(sampler, torch.tensor([logits], dtype=torch.float32))
        weights = [math.exp(each / temperature) for each in logits]
        if top_k is not None:
            least = sorted(weights, reverse=True)[:top_k][-1]
            weights = [weight if weight >= least else 0.0 for weight in weights]
        total = sum(weights)
        probabilities = [weight / total for weight in weights]
        inside = sorted((p for p, keep in zip(probabilities, keeps, strict=True) if keep), reverse=True)
        outside = [p for p, keep in zip(probabilities, keeps, strict=True) if not keep]
        assert inside and min(inside) >= max(outside, default=0) - 1e-6
        assert sum(inside) >= top_p - 1e-6
        assert sum(inside[:-1]) <= top_p + 1e-6 or top_p == 1

    def test_top_k_keeps_ties_with_the_last(self):
        logits = torch.tensor([[3.0, 2.0, 1.0, 2.0, 0.0]])
        assert kept(Sampler(1.0, top_k=1), logits) == [[True, False, False, False, False]]
        for k in (2, 3):
            assert kept(Sampler(1.0, top_k=k), logits) == [[True, True, False, True, False]]
        assert kept(Sampler(1.0, top_k=4), logits) == [[True, True, True, True, False]]

    def test_top_k_of_the_vocabulary_and_more_is_no_filter(self):
        logits = torch.randn(2, 5)
        for k in (5, 6, 10**9):
            torch.testing.assert_close(Sampler(1.0, top_k=k).filter(logits), logits, rtol=0, atol=0)

    @pytest.mark.parametrize(
        "top_p, n", [(1e-9, 1), (0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)]
    )
    def test_top_p_includes_the_token_that_crosses(self, top_p, n):
        # Four equal logits have probabilities, and sums of them, without rounding.
        assert sum(kept(Sampler(1.0, top_p=top_p), torch.zeros(1, 4))[0]) == n

    def test_tiny_top_p_keeps_the_most_likely_only(self):
        logits = torch.randn(16, 300)
        tokens = Sampler(1.0, top_p=1e-12)(logits)
        assert torch.equal(tokens, logits.argmax(-1))

    def test_top_p_looks_at_what_temperature_and_top_k_left(self):
        probabilities = torch.tensor([[0.5, 0.2, 0.15, 0.15]])
        assert sum(kept(Sampler(1.0, top_p=0.6), probabilities.log())[0]) == 2
        assert sum(kept(Sampler(0.25, top_p=0.6), probabilities.log())[0]) == 1
        # Of two that are left the first has 5 / 7.
        assert sum(kept(Sampler(1.0, top_k=2, top_p=0.7), probabilities.log())[0]) == 1

    def test_nothing_is_not_a_number(self):
        logits = torch.full((2, 6), -INF)
        logits[0, 3], logits[1, 1:3] = 1e4, torch.tensor([-1e4, -1e4])
        for sampler in (Sampler(1e-6), Sampler(1.0, 4, 0.5), Sampler(1e6, 1), Sampler(1.0, top_p=0.9)):
            assert not sampler.filter(logits).isnan().any()
            assert sampler(logits)[0] == 3 and sampler(logits)[1] in (1, 2)

    def test_its_input_is_left_alone(self):
        logits = torch.randn(3, 9)
        before = logits.clone()
        Sampler(0.5, 3, 0.5)(logits)
        assert torch.equal(logits, before)


def test_greedy_takes_the_most_likely():
    logits = torch.randn(50, 30)
    assert torch.equal(Sampler()(logits), logits.argmax(-1))
    assert torch.equal(Sampler(temperature=0)(logits.bfloat16()), logits.bfloat16().argmax(-1))


def test_cold_draws_are_the_most_likely():
    logits = torch.randn(200, 30)
    assert torch.equal(Sampler(1e-6)(logits), logits.argmax(-1))


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0), Sampler(0.7, 3), Sampler(0.7, 3, 0.9)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_score_tells_whether_there_was_anything_to_take(sampler, dtype):
    nan = float("nan")
    rows = [[1, nan, 2, 3], [nan] * 4, [1, 2, INF, 3], [-INF] * 4, [1, -INF, 2, 3], [-INF, -INF, 0, -INF]]
    score, token = sampler.draw(torch.tensor(rows, dtype=dtype))
    assert score.isfinite().tolist() == [False, False, False, False, True, True]
    assert token[4] in (0, 2, 3) and token[5] == 2


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, 3, 0.9)])
def test_no_value_is_read(sampler):
    # A tensor without data has none to wait for.
    assert sampler(torch.empty(2, 7, device="meta")).shape == (2,)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": -1.0}, "temperature: got -1.0; allowed: 0, or a finite number >= 1e-06"),
        ({"temperature": INF}, "temperature: got inf"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": 1e-30}, "temperature: got 1e-30"),
        ({"temperature": "hot"}, "temperature: got 'hot'"),
        ({"temperature": True}, "temperature: got True"),
        ({"temperature": None}, "temperature: got None"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: got 0; allowed: an integer >= 1, or None for all"),
        ({"temperature": 1.0, "top_k": -1}, "top_k: got -1"),
        ({"temperature": 1.0, "top_k": 2.0}, "top_k: got 2.0"),
        ({"temperature": 1.0, "top_k": True}, "top_k: got True"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: got 0.0; allowed: 0 < top_p <= 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p: got 1.1"),
        ({"temperature": 1.0, "top_p": None}, "top_p: got None"),
        ({"top_k": 5}, "top_k: got 5; allowed: None at temperature=0"),
        ({"temperature": 0.0, "top_p": 0.9}, "top_p: got 0.9; allowed: 1 at temperature=0"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Sampler(**arguments)


def test_whole_numbers_are_numbers():
    assert Sampler(1, 2, 1).filter(torch.tensor([[3, 1, 2]])).tolist() == [[3.0, -INF, 2.0]]


@pytest.mark.parametrize("option", dataclasses.fields(GenerationOptions), ids=lambda option: option.name)
def test_generation_options_are_documented(option):
    classes = (GenerationOptions.__doc__, Sampler.__doc__)
    assert any(re.search(rf"^ +{option.name}: ", text, re.M) for text in classes)


def test_integers_may_be_of_any_kind():
    plain = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 2, "seed": 2**64 - 1, "prefill_chunk": 4}
    given = {"max_new_tokens": np.int64(3), "top_k": np.uint8(2), "seed": np.uint64(2**64 - 1)}
    options = GenerationOptions(**{**plain, **given, "prefill_chunk": torch.tensor(4)})
    assert options == GenerationOptions(**plain) and type(options.max_new_tokens) is int
    for wrong in (True, np.float64(3), torch.tensor(3.0), torch.tensor([3, 3]), np.int64(0)):
        with pytest.raises(ValueError, match="max_new_tokens: got "):
            GenerationOptions(max_new_tokens=wrong)


def test_numbers_may_be_of_any_kind():
    for number in (np.float32(0.5), np.float16(0.5), np.float64(0.5), Fraction(1, 2)):
        options = GenerationOptions(max_new_tokens=3, temperature=number, top_p=number)
        assert options == GenerationOptions(max_new_tokens=3, temperature=0.5, top_p=0.5)
        assert type(options.temperature) is type(options.top_p) is float
    for wrong in (True, np.float32("nan"), np.float32(-1), np.complex64(1), torch.tensor(1.0), "1"):
        with pytest.raises(ValueError, match="temperature: got "):
            GenerationOptions(max_new_tokens=3, temperature=wrong)


def test_options_do_not_change():
    options = GenerationOptions(max_new_tokens=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 3
