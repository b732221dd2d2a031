"""Backends: each computes the same, and which one ran is known."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stackwise.model import backend, create_simple_rack, sliced
from stackwise.model.backend import attend, tuning, using
from stackwise.model.layout import Layout
from stackwise.model.mask import AttentionMask, Keys
from stackwise.model.sliced import sliced_attention


@pytest.fixture(autouse=True)
def _untuned(monkeypatch):
    monkeypatch.setattr(backend, "_tuned", {})


def tensors(T=40, H=4, K=2, D=8, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)
        for heads in (H, K, K)
    ]


def mask_of(T, *, causal=True, window=None, keep=None):
    return Layout(torch.empty(2, T, 1), keep).mask(causal=causal, window=window)


def run(name, q, k, v, mask):
    with using(name):
        return attend(q, k, v, mask)


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 300),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 60),
    padded=st.booleans(),
    n_kv_heads=st.sampled_from([1, 2, 4]),
)
def test_all_backends_agree(T, causal, window, padded, n_kv_heads):
    q, k, v = tensors(T, K=n_kv_heads, dtype=torch.float64)
    keep = None
    if padded:
        keep = torch.ones(2, T, dtype=torch.bool)
        keep[0, : T // 2] = False
    mask = mask_of(T, causal=causal, window=window, keep=keep)
    results = {name: run(name, q, k, v, mask) for name in ("sdpa", "sliced", "math")}
    assert {name: ran for name, (_, ran) in results.items()} == {name: name for name in results}
    for y, _ in results.values():
        torch.testing.assert_close(y, results["sdpa"][0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n_queries", [1, 200])
def test_gradients_agree(n_queries):
    gradients = {}
    time_S = torch.arange(200)
    mask = AttentionMask(time_S[-n_queries:], Keys(time_S, True), window=70)
    for name in ("sdpa", "sliced"):
        q, k, v = tensors(200, dtype=torch.float64, grad=True)
        y, _ = run(name, q[:, :, -n_queries:], k, v, mask)
        gradients[name] = torch.autograd.grad(y.square().sum(), (q, k, v))
    for ours, theirs in zip(gradients["sliced"], gradients["sdpa"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


class TestASingleQuery:
    """Of T = 1, as each token decoded."""

    S = 70

    def mask(self, *, causal=True, window=None, padded=False, aligned=True):
        keep = None
        if padded:
            keep = torch.ones(2, self.S, dtype=torch.bool)
            keep[0, : self.S // 3] = False
        time_S = torch.arange(self.S)
        if not aligned:  # a ring of slots, and one that nothing is in yet
            time_S = time_S.roll(9)
            time_S[20] = -1
        return AttentionMask(
            torch.tensor([self.S - 1]), Keys(time_S, aligned), causal=causal, window=window, keep_BS=keep
        )

    @pytest.mark.parametrize("name", ["sdpa", "math", None])
    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("causal, window", [(True, None), (True, 11), (False, None), (False, 11)])
    @pytest.mark.parametrize("softcap", [None, 2.0])
    def test_heads_that_share_keys(self, name, aligned, padded, causal, window, softcap):
        """Against float64, each head with keys and values of its own."""
        mask = self.mask(causal=causal, window=window, padded=padded, aligned=aligned)
        visible = mask.dense()
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            q, k, v = tensors(self.S, H=6, K=2, dtype=dtype)
            q = q[:, :, -1:]
            wide = [each.double().repeat_interleave(6 // each.shape[1], dim=1) for each in (q, k, v)]
            logits = 0.3 * wide[0] @ wide[1].transpose(-1, -2)
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            if visible is not None:
                logits = logits.masked_fill(~visible, float("-inf"))
            with using(name) if name is not None else contextlib.nullcontext():
                y, ran = attend(q, k, v, mask, scale=0.3, softcap=softcap)
            assert ran == ("sliced" if softcap is not None else name or "sdpa") and y.dtype == dtype
            error = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(y.double(), logits.softmax(-1) @ wide[2], rtol=error, atol=error)

    @pytest.mark.parametrize("compiling", [False, True])
    @pytest.mark.parametrize("rules", [{}, {"window": 11}, {"padded": True}])
    def test_no_kernel_is_asked_for_grouped_heads(self, rules, compiling, monkeypatch):
        given = []
        real = torch.nn.functional.scaled_dot_product_attention

        def attention(q, k, v, **options):
            given.append((q.shape, k, v, options.get("enable_gqa", False)))
            return real(q, k, v, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        q, k, v = tensors(self.S, H=6, K=2)
        y, _ = run("sdpa", q[:, :, -1:], k, v, self.mask(**rules))
        ((shape, keys, values, grouped),) = given
        assert shape == (2, 2, 3, 8) and keys is k and values is v and not grouped
        assert y.shape == (2, 6, 1, 8)

    def test_dropout(self):
        """A share p of the weights of every head, each by itself."""
        S = 4000
        q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, S, 2)
        v = torch.eye(S).expand(1, 2, S, S)
        mask = AttentionMask(torch.tensor([S - 1]), Keys(torch.arange(S), True))
        kept = attend(q, k, v, mask, dropout=0.25)[0][0, :, 0] != 0
        error = 5 * (0.25 * 0.75 / S) ** 0.5
        assert ((1 - kept.double().mean(1) - 0.25).abs() < error).all()
        assert len({tuple(head.tolist()) for head in kept}) == 4


@pytest.mark.parametrize("compiling, n_parts", [(False, 32), (True, 16)])
def test_a_window_makes_no_more_parts_of_a_compiled_graph(compiling, n_parts, monkeypatch):
    parts = []
    real = sliced._mean
    monkeypatch.setattr(sliced, "_mean", lambda logits, *rest: parts.append(logits) or real(logits, *rest))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    q, k, v = tensors(2048, H=2, K=1, dtype=torch.float64)
    y, _ = run("sliced", q, k, v, mask_of(2048, window=40))
    assert len(parts) == n_parts
    assert sum(part.numel() for part in parts) < 0.1 * 2 * 2 * 2048**2
    torch.testing.assert_close(y, run("sdpa", q, k, v, mask_of(2048, window=40))[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_a_sum_over_many_keys_stays_within_float16(softcap):
    # 4096 values of 40 add up to more than it can hold; their mean is 40.
    q, k = torch.zeros(1, 4, 1, 8).half(), torch.randn(1, 2, 4096, 8).half()
    v = torch.full((1, 2, 4096, 8), 40.0).half().requires_grad_()
    keys = Keys(torch.arange(4096), True)
    mask = Layout(torch.empty(1, 1, 1), start=4095).mask(causal=True, window=None, keys=keys)
    y = sliced_attention(q, k, v, mask, softcap=softcap)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, torch.full_like(y, 40.0), rtol=2e-3, atol=0)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(v.grad, torch.full_like(v, 2 / 4096), rtol=2e-3, atol=0)


class TestRules:
    @pytest.mark.parametrize(
        "T, window, expected",
        [
            (1100, None, "sdpa"),
            (1100, 140, "sdpa"),
            (1100, 137, "sliced"),
            (1024, 1, "sliced"),
            (1023, 1, "sdpa"),
        ],
    )
    def test_windows_far_below_the_length_are_sliced(self, T, window, expected):
        assert attend(*tensors(T), mask_of(T, window=window))[1] == expected

    @pytest.mark.parametrize("T, window, expected", [(1100, 551, "sdpa"), (1100, 550, "sliced")])
    def test_compiled_slices_win_earlier(self, T, window, expected, monkeypatch):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert attend(*tensors(T), mask_of(T, window=window))[1] == expected

    @pytest.mark.parametrize(
        "dtype, T, expected",
        [(torch.bfloat16, 300, "sliced"), (torch.float32, 300, "sliced"), (torch.float32, 1100, "sdpa")],
    )
    def test_compiled_attention_is_sliced_where_that_wins(self, dtype, T, expected, monkeypatch):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert attend(*tensors(T, dtype=dtype), mask_of(T))[1] == expected

    def test_a_soft_cap_needs_slices(self):
        q, k, v = tensors()
        with using("sdpa"):
            y, name = attend(q, k, v, mask_of(40), softcap=1.0)
        assert name == "sliced" and not y.allclose(attend(q, k, v, mask_of(40))[0])

    def test_unknown_names_are_refused(self):
        with (
            pytest.raises(ValueError, match="backend: got 'flashy'; allowed: 'sdpa', 'sliced'"),
            using("flashy"),
        ):
            pass

    def test_using_ends(self):
        with pytest.raises(KeyError, match="stop"), using("math"):
            raise KeyError("stop")
        assert attend(*tensors(), mask_of(40))[1] == "sdpa"


class TestTuning:
    def fake(self, monkeypatch, seconds):
        """Each backend takes as long as it is said to."""
        clock = [0.0]
        real = backend._run

        def call(name, *arguments):
            clock[0] += seconds[name]
            return real(name, *arguments)

        monkeypatch.setattr(backend, "_run", call)
        monkeypatch.setattr(backend.time, "perf_counter", lambda: clock[0])

    @pytest.mark.parametrize("fastest", ["sdpa", "sliced"])
    @pytest.mark.parametrize("grad", [True, False])
    def test_the_fastest_is_taken_and_kept(self, monkeypatch, fastest, grad):
        self.fake(monkeypatch, {"sdpa": 2.0, "sliced": 2.0, fastest: 1.0})
        q, k, v = tensors(grad=grad)
        with tuning():
            assert attend(q, k, v, mask_of(40))[1] == fastest
        self.fake(monkeypatch, {"sdpa": 1.0, "sliced": 1.0})
        assert attend(q, k, v, mask_of(40))[1] == fastest
        assert attend(q[:, :, :30], k[:, :, :30], v[:, :, :30], mask_of(30))[1] == "sdpa"

    def test_other_rules_are_tuned_apart(self, monkeypatch):
        self.fake(monkeypatch, {"sdpa": 2.0, "sliced": 1.0})
        q, k, v = tensors()
        with tuning():
            attend(q, k, v, mask_of(40))
        assert attend(q, k, v, mask_of(40, causal=False))[1] == "sdpa"
        assert attend(q.double(), k.double(), v.double(), mask_of(40))[1] == "sdpa"

    def test_a_token_decoded_is_tuned_once_for_each_power_of_two_of_keys(self, monkeypatch):
        tried = []
        monkeypatch.setattr(
            backend, "_fastest", lambda call: tried.append((call[0].shape[2], call[1].shape[2])) or "math"
        )
        rack = create_simple_rack(1, 2, 16, 24, 2, 11)
        with tuning():
            rack.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=31)
        assert tried == [(3, 3), (1, 4), (1, 5), (1, 9), (1, 17), (1, 33)]
        assert rack.execution() == {"attention": "math"}

    @pytest.mark.parametrize("n_queries, expected", [(1, "sliced"), (2, "sdpa")])
    def test_only_a_single_query_has_what_another_length_was_tuned_for(
        self, monkeypatch, n_queries, expected
    ):
        def last(n_keys):
            q, k, v = tensors(n_keys)
            time_S = torch.arange(n_keys)
            return q[:, :, -n_queries:], k, v, AttentionMask(time_S[-n_queries:], Keys(time_S, True))

        self.fake(monkeypatch, {"sdpa": 2.0, "sliced": 1.0})
        with tuning():
            assert attend(*last(5))[1] == "sliced"
        assert {attend(*last(n_keys))[1] for n_keys in (6, 7, 8)} == {expected}
        assert {attend(*last(n_keys))[1] for n_keys in (3, 4, 9)} == {"sdpa"}

    def test_nothing_is_tried_without_being_asked(self, monkeypatch):
        self.fake(monkeypatch, {"sdpa": 2.0, "sliced": 1.0})
        assert attend(*tensors(), mask_of(40))[1] == "sdpa" and not backend._tuned

    def test_a_backend_that_cannot_is_left_out(self, monkeypatch):
        real = backend._run

        def call(name, *arguments):
            if name == "sdpa":
                raise RuntimeError("no such kernel")
            return real(name, *arguments)

        monkeypatch.setattr(backend, "_run", call)
        with tuning():
            assert attend(*tensors(), mask_of(40))[1] == "sliced"

    def test_gradients_of_the_caller_are_untouched(self):
        q, k, v = tensors(grad=True)
        with tuning():
            attend(q, k, v, mask_of(40))
        assert q.grad is None and k.grad is None and v.grad is None


def test_a_rack_tells_what_ran():
    rack = create_simple_rack(1, 2, 16, 24, 2, 11)
    assert rack.execution() == {"attention": "none yet"}
    with using("math"):
        rack(torch.zeros(1, 4, dtype=torch.int64))
    assert rack.execution() == {"attention": "math"}


@pytest.mark.parametrize("kind", ["favor", "gaussian", "laplacian", "elu"])
def test_kernel_attention_tells_its_features(kind):
    kernel = {"feature_map": kind}
    rack = create_simple_rack(1, 1, 16, 24, 2, 11, attention_type="kernel", kernel=kernel)
    rack(torch.zeros(1, 4, dtype=torch.int64))
    assert rack.execution() == {"attention": f"{kind} features"}
