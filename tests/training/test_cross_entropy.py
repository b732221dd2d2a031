"""Cross-entropy in chunks: the numbers of the plain one in float64, and never all logits at once."""

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stackwise.training.cross_entropy import chunked_cross_entropy, cross_entropy, plain_weight

WIDTH, VOCAB = 6, 23


def operands(n=11, dtype=torch.float64, seed=0, scale=1.0):
    """Hidden states, a head's weight, and labels of which every fourth is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (scale * torch.randn(rows, WIDTH, generator=generator) for rows in (n, VOCAB))
    labels = torch.randint(VOCAB, (n,), generator=generator)
    labels[::4] = -100
    factors = torch.rand(n, generator=generator) * 3
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, factors


def reference(hidden, weight, labels, factors=None, z_loss=0.0):
    """Position by position in float64: w (log Z - logit of the label + z (log Z)^2)."""
    total = 0.0
    logits = hidden.double() @ weight.double().T
    for n, label in enumerate(labels.tolist()):
        if label != -100:
            log_z = logits[n].exp().sum().log()
            factor = 1.0 if factors is None else factors[n].double()
            total = total + factor * (log_z - logits[n, label] + z_loss * log_z**2)
    return total if torch.is_tensor(total) else logits.sum() * 0.0


def with_gradients(function, hidden, weight, *rest):
    total = function(hidden, weight, *rest)
    return total.detach(), *torch.autograd.grad(total, (hidden, weight))


def plain(hidden, weight, *rest):
    return cross_entropy(F.linear(hidden, weight), *rest)


class LiveLogits(TorchDispatchMode):
    """How many rows of logits there are at one time, and the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.alive, self.most_rows, self.largest = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                # The transposed weight has the shape of logits too.
                if tensor.ndim == 2 and tensor.shape[1] == VOCAB and len(tensor) != WIDTH:
                    number = id(tensor)
                    self.alive[number] = (tensor.data_ptr(), len(tensor))
                    weakref.finalize(tensor, self.alive.pop, number, None)
        self.most_rows = max(self.most_rows, sum(dict(self.alive.values()).values()))
        return out


CASES = [
    pytest.param(weighted, z_loss, id=f"{'weights' if weighted else 'plain'}-z{z_loss}")
    for weighted, z_loss in itertools.product((False, True), (0.0, 0.3))
]


class TestValue:
    @given(
        st.integers(0, 9), st.integers(1, 12), st.booleans(), st.sampled_from([0.0, 0.1]), st.integers(0, 99)
    )
    def test_float64(self, n, chunk, weighted, z_loss, seed):
        hidden, weight, labels, factors = operands(n, seed=seed)
        factors = factors if weighted else None
        got = with_gradients(chunked_cross_entropy, hidden, weight, labels, factors, z_loss, chunk)
        wanted = with_gradients(reference, hidden, weight, labels, factors, z_loss)
        assert got[0].dtype == torch.float64 and got[0].shape == ()
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("weighted, z_loss", CASES)
    def test_gradcheck(self, weighted, z_loss):
        hidden, weight, labels, factors = operands(7)
        factors = factors if weighted else None
        assert torch.autograd.gradcheck(
            lambda h, w: chunked_cross_entropy(h, w, labels, factors, z_loss, 3), (hidden, weight)
        )

    @given(st.integers(1, 40), st.integers(1, 40))
    def test_chunk_makes_no_difference(self, one, other):
        hidden, weight, labels, factors = operands(33, torch.float32)
        results = [
            with_gradients(chunked_cross_entropy, hidden, weight, labels, factors, 0.1, chunk)
            for chunk in (one, other)
        ]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("function", [plain, chunked_cross_entropy])
    @pytest.mark.parametrize("weighted, z_loss", CASES)
    def test_float32(self, function, weighted, z_loss):
        hidden, weight, labels, factors = operands(50, torch.float32)
        arguments = (labels, factors if weighted else None, z_loss)
        got = with_gradients(function, hidden, weight, *arguments)
        wanted = with_gradients(reference, hidden, weight, *arguments)
        assert [x.dtype for x in got] == [torch.float32] * 3
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16 weights"])
    @pytest.mark.parametrize("weighted, z_loss", CASES)
    def test_bfloat16(self, autocast, weighted, z_loss):
        """Every entry within four roundings of the largest one; dtypes as those of the operands."""
        dtype = torch.float32 if autocast else torch.bfloat16
        hidden, weight, labels, factors = operands(64, dtype)
        arguments = (labels, factors if weighted else None, z_loss)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = with_gradients(chunked_cross_entropy, hidden, weight, *arguments, 9)
        wanted = with_gradients(reference, hidden, weight, *arguments)
        assert [x.dtype for x in got] == [torch.float32, dtype, dtype]
        for one, other in zip(got, wanted, strict=True):
            assert (one - other).abs().max() <= 4 * 2**-8 * other.abs().max()

    def test_many_chunks_do_not_wear_a_bfloat16_gradient(self):
        """The sum over 512 chunks is as close as that of one: it is taken in float32."""
        hidden, weight, labels, _ = operands(512, torch.bfloat16)
        _, _, wanted = with_gradients(reference, hidden, weight, labels)
        one, many = (
            with_gradients(chunked_cross_entropy, hidden, weight, labels, None, 0.0, chunk)[2] - wanted
            for chunk in (512, 1)
        )
        assert many.norm() <= 1.5 * one.norm()

    def test_large_logits(self):
        hidden, weight, labels, _ = operands(20, torch.float32, scale=40.0)
        got = with_gradients(chunked_cross_entropy, hidden, weight, labels, None, 0.0, 6)
        wanted = with_gradients(plain, hidden, weight, labels)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-3)

    def test_scaled_by_what_comes_from_above(self):
        hidden, weight, labels, _ = operands()
        total = chunked_cross_entropy(hidden, weight, labels, chunk=4)
        once = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
        (total / 7).backward()
        for leaf, gradient in zip((hidden, weight), once, strict=True):
            torch.testing.assert_close(leaf.grad, gradient / 7)

    def test_differentiable_once(self):
        hidden, weight, labels, _ = operands()
        total = chunked_cross_entropy(hidden, weight, labels, chunk=4)
        (gradient,) = torch.autograd.grad(total.square(), hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    def test_nothing_to_predict(self):
        hidden, weight, labels, _ = operands()
        got = with_gradients(
            chunked_cross_entropy, hidden, weight, torch.full_like(labels, -100), None, 0.1, 4
        )
        assert all(x.count_nonzero() == 0 for x in got)

    def test_tied_weight(self):
        """Gradients of the head add to those of the embedding."""
        _, weight, labels, _ = operands()
        ids = labels.clamp(min=0)
        total = chunked_cross_entropy(weight[ids], weight[:VOCAB], labels, chunk=4)
        wanted = torch.autograd.grad(reference(weight[ids], weight, labels), weight)
        torch.testing.assert_close(torch.autograd.grad(total, weight), wanted)


class TestPlain:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_one_operation_of_torch(self, dtype):
        """Bit for bit and operation for operation."""
        logits, labels = torch.randn(9, VOCAB).to(dtype).requires_grad_(), operands(9)[2]
        seen = []
        for function in (
            lambda: cross_entropy(logits, labels),
            lambda: F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum"),
        ):
            with Operations() as operations:
                total = function()
                (gradient,) = torch.autograd.grad(total, logits)
            seen.append((operations.names, total, gradient))
        assert seen[0][0] == seen[1][0]
        assert seen[0][1].equal(seen[1][1]) and seen[0][2].equal(seen[1][2])


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class TestMemory:
    N, CHUNK = 96, 8

    def measured(self, function, dtype, **options):
        hidden, weight, labels, _ = operands(self.N, dtype)
        with LiveLogits() as live:
            total = function(hidden, weight, labels, **options)
            del options
            torch.autograd.grad(total, (hidden, weight))
        return live

    @pytest.mark.parametrize("dtype, buffers", [(torch.float32, 1), (torch.bfloat16, 2)])
    def test_rows_of_logits(self, dtype, buffers):
        """In bfloat16 those of a chunk are there twice while they are widened or narrowed."""
        live = self.measured(chunked_cross_entropy, dtype, chunk=self.CHUNK)
        assert live.most_rows == buffers * self.CHUNK
        assert live.largest == max(self.N * WIDTH, VOCAB * WIDTH, self.CHUNK * VOCAB)

    def test_plain_has_them_all(self):
        live = self.measured(plain, torch.float32)
        assert live.most_rows >= self.N
        assert live.largest == self.N * VOCAB

    @pytest.mark.parametrize("hidden_needs, weight_needs", list(itertools.product((False, True), repeat=2)))
    @pytest.mark.parametrize("enabled", [True, False], ids=["", "no_grad"])
    def test_only_the_products_that_are_asked_for(self, hidden_needs, weight_needs, enabled):
        hidden, weight, labels, _ = operands(self.N)
        hidden.requires_grad_(hidden_needs)
        weight.requires_grad_(weight_needs)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(enabled):
            total = chunked_cross_entropy(hidden, weight, labels, chunk=self.CHUNK)
        assert total.requires_grad == (enabled and (hidden_needs or weight_needs))
        products = 1 + enabled * (hidden_needs + weight_needs)
        assert counter.get_total_flops() == products * 2 * self.N * VOCAB * WIDTH


class TestCompiled:
    @pytest.mark.parametrize("autocast", [True, False], ids=["autocast", ""])
    def test_one_graph(self, autocast):
        hidden, weight, labels, factors = operands(20, torch.float32)
        arguments = (hidden, weight, labels, factors, 0.1, 8)
        compiled = torch.compile(chunked_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = with_gradients(compiled, *arguments)
        wanted = with_gradients(reference, *arguments[:-1])
        for one, other in zip(got, wanted, strict=True):
            assert (one - other).abs().max() <= (4 * 2**-8 if autocast else 1e-5) * other.abs().max()

    @pytest.mark.parametrize("of_hidden, of_weight", [(True, True), (True, False), (False, True)])
    def test_operator_is_what_it_says(self, of_hidden, of_weight):
        hidden, weight, labels, factors = operands(9, torch.float32)
        arguments = (hidden.requires_grad_(of_hidden), weight.requires_grad_(of_weight))
        arguments += (labels.clamp(min=0), factors, 0.1, 4, torch.float32, of_hidden, of_weight)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.stackwise.chunked_cross_entropy.default, arguments, test_utils=checks)


class Sharded(torch.Tensor):
    """Stands for a tensor class with arithmetic of its own."""


class TestRefused:
    @staticmethod
    def of_a_class():
        head = nn.Linear(WIDTH, VOCAB, bias=False)
        head.weight = nn.Parameter(torch.Tensor._make_subclass(Sharded, head.weight.data))
        return head

    @staticmethod
    def parametrised():
        return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, VOCAB, bias=False))

    @pytest.mark.parametrize(
        "make, reason",
        [
            (lambda: nn.Linear(WIDTH, VOCAB), "with a bias"),
            (lambda: nn.Sequential(nn.Linear(WIDTH, VOCAB, bias=False)), "of class Sequential"),
            (nn.Identity, "of class Identity"),
            (parametrised, "of class ParametrizedLinear"),
            (of_a_class, "with a weight of class Sharded"),
        ],
        ids=["bias", "sequential", "identity", "parametrised", "tensor class"],
    )
    def test_head(self, make, reason):
        with pytest.raises(ValueError, match=f"logits_chunk: got a head {reason}; allowed: "):
            plain_weight(make())

    def test_quantised_head(self):
        torchao = pytest.importorskip("torchao.quantization")
        head = nn.Linear(32, 64, bias=False)
        torchao.quantize_(head, torchao.Int8WeightOnlyConfig())
        with pytest.raises(ValueError, match="logits_chunk: got a head with a weight of class"):
            plain_weight(head)

    def test_plain_head(self):
        head = nn.Linear(WIDTH, VOCAB, bias=False)
        assert plain_weight(head) is head.weight

    @pytest.mark.parametrize("chunk", [0, -1, True, 2.0])
    def test_chunk(self, chunk):
        with pytest.raises(ValueError, match="chunk: got"):
            chunked_cross_entropy(*operands()[:3], chunk=chunk)

    def test_float16(self):
        hidden, weight, labels, _ = operands(dtype=torch.float16)
        with pytest.raises(ValueError, match="logits_chunk: got float16"):
            chunked_cross_entropy(hidden, weight, labels)
        with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="got float16"):
            chunked_cross_entropy(hidden.float(), weight.float(), labels)

    def test_a_label_beyond_the_vocabulary(self):
        hidden, weight, labels, _ = operands()
        labels[3] = VOCAB
        with pytest.raises(RuntimeError, match="out of bounds"):
            chunked_cross_entropy(hidden, weight, labels)


def test_a_label_that_is_no_token_is_refused_as_by_the_plain_one():
    hidden_NC, weight_VC = torch.randn(4, 3), torch.randn(5, 3)
    for label in (-1, 5):
        labels_N = torch.tensor([0, label, -100, 2])
        with pytest.raises((IndexError, RuntimeError)):
            cross_entropy(hidden_NC @ weight_VC.T, labels_N)
        with pytest.raises((IndexError, RuntimeError)):
            chunked_cross_entropy(hidden_NC, weight_VC, labels_N, chunk=2)
