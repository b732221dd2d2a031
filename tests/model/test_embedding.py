"""BoundedEmbedding: rows within the bound as they are, longer ones at the bound, and true gradients."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stackwise.model import create_simple_rack
from stackwise.model.embedding import BoundedEmbedding, TokenEmbedding
from stackwise.training.optimizer import parameter_groups

EPS = torch.finfo(torch.float32).eps


def embedding_of(rows, bound, dtype=torch.float32):
    rows = torch.as_tensor(rows, dtype=dtype)
    embedding = BoundedEmbedding(*rows.shape, bound)
    embedding.weight.data = rows.clone()
    return embedding


def rows_of_length(lengths, width, seed=0):
    rows = torch.randn(
        len(lengths), width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return rows / rows.norm(dim=1, keepdim=True) * torch.tensor(lengths, dtype=torch.float64)[:, None]


class TestBound:
    @settings(deadline=None, max_examples=50, derandomize=True)
    @given(
        bound=st.floats(1e-3, 1e3),
        relative=st.lists(st.floats(0.0, 1e4), min_size=1, max_size=6),
        width=st.integers(1, 40),
        seed=st.integers(0, 99),
    )
    def test_of_any_row(self, bound, relative, width, seed):
        rows = rows_of_length([bound * r for r in relative], width, seed).float()
        out = embedding_of(rows, bound)(torch.arange(len(rows))[None])[0]
        length = rows.double().norm(dim=1)
        for row, x, norm in zip(rows, out, length, strict=True):
            if norm < bound * (1 - 8 * EPS):
                assert torch.equal(row, x)
            if norm > bound * (1 + 8 * EPS):
                assert abs(x.double().norm().item() / bound - 1) < 8 * EPS
            # min(1, bound / |x|) * x, whatever the side: the direction never changes.
            expected = row.double() * min(1.0, bound / norm.item()) if norm > 0 else row.double()
            torch.testing.assert_close(x.double(), expected, rtol=8 * EPS, atol=0.0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_within_it_every_bit_stays(self, dtype):
        rows = torch.cat(
            [
                rows_of_length([1e-30, 1e-3, 0.5, 0.99], 48),
                torch.tensor([[0.0] * 48, [-0.0] * 48, [1.0] + [0.0] * 47, [-0.0, -1.0] + [0.0] * 46]),
            ]
        ).to(dtype)
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        out = embedding_of(rows, 1.0, dtype)(torch.arange(8)[None])
        assert out.dtype == dtype
        assert torch.equal(out[0].view(bits), rows.view(bits))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("bound", [1e-3, 1.0, 1e20])
    def test_of_rows_whose_squares_overflow(self, bound, dtype):
        rows = torch.full((5, 64), 1.0)
        rows[:, ::2] *= -1
        rows[:4] *= torch.tensor([[3e18], [1e19], [1e30], [3e38]])
        rows[4, 7] = 3e38
        rows = rows.to(dtype)
        embedding = embedding_of(rows, bound, dtype)
        out = embedding(torch.arange(5)[None])[0]
        length = rows.double().norm(dim=1, keepdim=True)
        expected = rows.double() * (bound / length).clamp(max=1.0)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), expected, rtol=8 * eps, atol=bound * 1e-30)
        out.sum().backward()
        assert embedding.weight.grad.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_lengths_of_half_precision_rows_are_those_of_float32(self, dtype):
        rows = rows_of_length([1.2, 3.3, 17.0, 900.0], 256).to(dtype)
        out = embedding_of(rows, 1.0, dtype)(torch.arange(4)[None])[0]
        expected = rows.double() / rows.double().norm(dim=1, keepdim=True)
        # Rounded once: the nearest number of that dtype, but for ties that float32 sees differently.
        assert (out == expected.to(dtype)).double().mean() > 0.99

    def test_under_autocast(self):
        rows = rows_of_length([0.9, 3.0], 16).float()
        with torch.autocast("cpu", torch.bfloat16):
            out = embedding_of(rows, 1.0)(torch.arange(2)[None])
        assert out.dtype == torch.float32
        assert torch.equal(out[0, 0], rows[0])
        assert out[0, 1].norm().item() == pytest.approx(1.0, rel=8 * EPS)

    def test_holds_for_rare_tokens_whatever_training_does(self):
        torch.manual_seed(0)
        embedding = embedding_of(rows_of_length([0.5] * 8, 16).float(), 2.0)
        optimizer = torch.optim.SGD(embedding.parameters(), 0.3)
        direction = torch.randn(16)
        for step in range(100):
            ids = torch.tensor([[0, 1, 2, 7 if step % 50 == 0 else 3]])
            optimizer.zero_grad()
            (-1e3 * (embedding(ids) @ direction).sum()).backward()
            optimizer.step()
        assert embedding.weight[[0, 7]].norm(dim=1).min() > 100
        out = embedding(torch.arange(8)[None])[0]
        assert out.norm(dim=1).max() <= 2.0 * (1 + 8 * EPS)
        assert torch.equal(out[4:7], embedding.weight[4:7])

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3), (5,), ()])
    def test_shapes(self, shape):
        ids = torch.zeros(shape, dtype=torch.int64)
        assert embedding_of(rows_of_length([3.0], 4), 1.0)(ids).shape == (*shape, 4)


class TestGradient:
    def test_is_the_derivative(self):
        rows = rows_of_length([0.2, 0.999, 1.001, 5.0], 6)
        embedding = embedding_of(rows, 1.0, torch.float64)
        ids = torch.tensor([[0, 1, 2], [3, 3, 0]])

        def bounded(weight):
            return torch.func.functional_call(embedding, {"weight": weight}, (ids,))

        assert torch.autograd.gradcheck(bounded, rows.clone().requires_grad_(), eps=1e-7)
        assert torch.autograd.gradgradcheck(bounded, rows.clone().requires_grad_(), eps=1e-7)

    def test_passes_whole_within_and_turns_beyond(self):
        rows = rows_of_length([0.5, 3.0], 8)
        embedding = embedding_of(rows, 1.5, torch.float64)
        upstream = torch.randn(1, 2, 8, dtype=torch.float64)
        embedding(torch.tensor([[0, 1]])).backward(upstream)
        within, beyond = embedding.weight.grad
        assert torch.equal(within, upstream[0, 0])
        unit = rows[1] / 3.0
        tangential = upstream[0, 1] - (upstream[0, 1] @ unit) * unit
        torch.testing.assert_close(beyond, 1.5 / 3.0 * tangential)
        assert abs(beyond @ unit) < 1e-12 < beyond.norm()

    @pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 1e-45])
    def test_is_whole_where_the_norm_is_zero(self, value):
        embedding = embedding_of([[value] * 4, [1.0] * 4], 1.0)
        out = embedding(torch.tensor([[0, 0]]))
        out.backward(torch.full((1, 2, 4), 3.0))
        assert embedding.weight.grad.tolist() == [[6.0] * 4, [0.0] * 4]

    def test_leaves_the_weight_alone(self):
        embedding = embedding_of(rows_of_length([0.1, 50.0], 4), 1.0)
        before, version = embedding.weight.clone(), embedding.weight._version
        for _ in range(2):
            embedding(torch.tensor([[0, 1]])).sum().backward()
        with torch.no_grad():
            embedding(torch.tensor([[1, 1]]))
        assert torch.equal(embedding.weight, before)
        assert embedding.weight._version == version


class TestAsTheEmbeddingOfARack:
    def rack(self, bound, tied=True, scale=1.0):
        torch.manual_seed(0)
        rack = create_simple_rack(1, 2, 16, 32, 2, 11, tie_embeddings=tied)
        with torch.no_grad():
            for parameter in rack.parameters():
                parameter.mul_(4.0)
            rack.embedding.weight[3] *= scale
        bounded = BoundedEmbedding(11, 16, bound)
        bounded.weight = rack.embedding.weight
        twin = copy.copy(rack)
        twin._modules = {**rack._modules, "embedding": bounded}
        return rack, twin

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_bound_that_nothing_reaches_changes_nothing(self, tied):
        rack, bounded = self.rack(1e3, tied)
        ids = torch.randint(11, (2, 7))
        assert torch.equal(rack(ids), bounded(ids))

    def test_a_row_that_explodes_enters_at_the_bound(self):
        rack, bounded = self.rack(0.5, tied=False, scale=1e6)
        assert rack.embed(torch.tensor([[3]])).norm() > 1e4
        assert bounded.embed(torch.tensor([[3]])).norm().item() == pytest.approx(0.5, rel=8 * EPS)
        assert torch.equal(bounded.embed(torch.tensor([[4]])), rack.embed(torch.tensor([[4]])))

    def test_a_tied_head_reads_and_trains_the_same_weight(self):
        _, rack = self.rack(0.2)
        assert rack.lm_head.weight is rack.embedding.weight
        assert rack.get_parameter_count() == sum(p.numel() for p in set(rack.parameters()))
        x = torch.randn(1, 2, 16)
        torch.testing.assert_close(rack.head(x), rack.final_norm(x) @ rack.embedding.weight.T)
        unseen_by_the_input = 9
        rack(torch.tensor([[1, 2, 3]])).logsumexp(-1).sum().backward()
        assert rack.embedding.weight.grad[unseen_by_the_input].abs().max() > 0

    def test_generation_caches_as_ever(self):
        _, rack = self.rack(0.2)
        ids = torch.randint(11, (2, 6))
        cache = rack.new_cache(2, 6)
        steps = torch.cat([rack(ids[:, i : i + 1], cache=cache) for i in range(6)], dim=1)
        torch.testing.assert_close(steps, rack(ids), rtol=1e-5, atol=1e-5)


class TestAsAnEmbedding:
    def test_same_seed_same_weights_same_names(self):
        torch.manual_seed(3)
        plain = nn.Embedding(7, 5)
        torch.manual_seed(3)
        bounded = BoundedEmbedding(7, 5, 2.0)
        assert torch.equal(plain.weight, bounded.weight)
        assert list(bounded.state_dict()) == ["weight"]
        bounded.load_state_dict(plain.state_dict())
        assert isinstance(bounded, nn.Embedding)
        assert (bounded.num_embeddings, bounded.embedding_dim) == (7, 5)

    def test_does_not_decay(self):
        decayed, kept, *_ = parameter_groups(BoundedEmbedding(7, 5, 2.0), 0.1)
        assert not decayed["params"]
        assert len(kept["params"]) == 1

    def test_says_its_bound(self):
        # nn.Embedding, and what reads its max_norm, would write to the weight.
        assert BoundedEmbedding(7, 5, 2).max_norm is None
        assert repr(BoundedEmbedding(7, 5, 2)) == "BoundedEmbedding(7, 5, bound=2.0)"

    def test_copies_keep_it(self):
        embedding = embedding_of(rows_of_length([9.0], 4), 1.0)
        assert copy.deepcopy(embedding)(torch.tensor([[0]])).norm().item() == pytest.approx(1.0)

    @pytest.mark.parametrize("max_norm", [0, -1.0, math.inf, math.nan, None, "1", True])
    def test_refuses_a_bound_that_is_none(self, max_norm):
        with pytest.raises(ValueError, match=r"max_norm: got .*; allowed: a finite number > 0"):
            BoundedEmbedding(7, 5, max_norm)

    @pytest.mark.parametrize("sizes, key", [((0, 5), "vocab_size"), ((7, 1.5), "d_model")])
    def test_refuses_sizes(self, sizes, key):
        with pytest.raises(ValueError, match=rf"{key}: got .*; allowed: an integer >= 1"):
            BoundedEmbedding(*sizes, 1.0)


class TestCompiledGradient:
    """Of a table in one pass, beside a sum over tokens in float64."""

    @pytest.fixture(autouse=True)
    def forget_other_graphs(self):
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow), torch.bfloat16]
    )
    @pytest.mark.parametrize(
        "shape", [(3, 7), *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(1, 1), (40,)])]
    )
    def test_is_the_sum_over_the_occurrences_of_a_token(self, dtype, shape):
        torch.manual_seed(0)
        embedding = TokenEmbedding(11, 6).to(dtype)
        input_ids = torch.randint(9, shape)  # tokens 9 and 10 do not occur
        gradient = torch.randn(*shape, 6).to(dtype)
        torch.compile(embedding, fullgraph=True)(input_ids).backward(gradient)
        expected = torch.zeros(11, 6, dtype=torch.float64)
        for token, row in zip(input_ids.flatten(), gradient.flatten(0, -2), strict=True):
            expected[token] += row.double()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(embedding.weight.grad.double(), expected, rtol=eps, atol=8 * EPS)
        assert embedding.weight.grad.dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_of_ids_of_either_width(self, dtype):
        weight = torch.randn(5, 3, requires_grad=True)
        ids = torch.tensor([[1, 2, 2]], dtype=dtype)
        torch.ops.stackwise.embedding_rows(weight, ids).sum().backward()
        assert torch.equal(weight.grad, torch.tensor([0.0, 1, 2, 0, 0])[:, None].expand(5, 3))

    def test_of_a_frequent_token_is_summed_in_float32(self):
        # In bfloat16 a sum of ones stops at 256.
        embedding = TokenEmbedding(4, 2).bfloat16()
        out = torch.compile(embedding, fullgraph=True)(torch.ones(1, 1000, dtype=torch.long))
        out.backward(torch.ones_like(out))
        torch.testing.assert_close(embedding.weight.grad[1].float(), torch.full((2,), 1000.0))

    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_of_a_tied_head_and_a_bound_is_that_of_the_eager_rack(self, backend):
        torch.manual_seed(0)
        rack = create_simple_rack(
            1, 1, d_model=16, d_ff=24, n_heads=2, vocab_size=13, embedding_max_norm=0.05
        )
        twin = copy.deepcopy(rack)
        input_ids = torch.randint(13, (2, 9))
        rack(input_ids).square().sum().backward()
        torch.compile(twin, dynamic=False, backend=backend)(input_ids).square().sum().backward()
        torch.testing.assert_close(twin.embedding.weight.grad, rack.embedding.weight.grad)

    def test_of_what_is_frozen_is_none(self):
        embedding = TokenEmbedding(5, 2).requires_grad_(False)
        assert not torch.compile(embedding, fullgraph=True)(torch.arange(3)).requires_grad
