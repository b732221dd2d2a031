"""Attention logits of any model: never below one that its attention computes, and growing as these do."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stackwise.prototype.observation import observe
from stackwise.stability.faults import LogitGrowth, broken
from stackwise.stability.guard import Guard, GuardPolicy
from stackwise.stability.recomputation import recomputation
from stackwise.stability.telemetry import AttentionLogit
from stackwise.support.logit_bound import LogitBound, note_logits, watching
from tests import subjects

IDS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))


def eager_llama():
    model = subjects.llama()
    model.set_attn_implementation("eager")
    return model


# Those that write their logits down have the largest itself, not a bound of it.
FUSED = {
    "llama": subjects.llama,
    "gpt2": subjects.gpt2,
    "bert": subjects.bert,
    "rack": subjects.rack,
    "window_rack": subjects.window_rack,
    "grouped_rack": subjects.grouped_rack,
}
WRITTEN = {"eager_llama": eager_llama, "x_decoder": subjects.x_decoder, "encoder": subjects.encoder}
MODELS = FUSED | WRITTEN


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def call(model):
    inputs = IDS
    if isinstance(model, nn.TransformerEncoder):
        inputs = torch.randn(12, 3, 16, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    output = model(inputs)
    return getattr(output, "logits", output)


def seen(model):
    watch = AttentionLogit(model)
    call(model)
    watch.remove()
    return watch.take().item()


@pytest.mark.parametrize("name", MODELS)
def test_no_logit_is_above_it(name):
    model = made(name).eval()
    largest = max(observe(model, lambda: call(model)).attention_logit_max.values())
    found = seen(model)
    assert found >= largest * (1 - 1e-5) > 0
    if name in ("eager_llama", "x_decoder"):
        assert found == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_it_grows_as_they_do(name):
    model = made(name)
    model.eval()
    before = seen(model)
    with broken(model, [LogitGrowth(step=0, factor=100.0)]):
        after = seen(model)
    # Of the first Block it is the factor; behind it all is otherwise.
    assert 30 < after / before < 300


def test_nothing_is_seen_without_gradients_or_calls():
    model = made("llama")
    watch = AttentionLogit(model)
    with torch.no_grad():
        call(model)
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q)
    assert math.isnan(watch.take())
    call(model)
    assert watch.take() > 0 and math.isnan(watch.take())
    watch.remove()
    call(model)
    assert math.isnan(watch.take())


def test_a_call_that_fails_is_over():
    model = made("llama")
    watch = AttentionLogit(model)
    with pytest.raises(IndexError):
        model(torch.full((1, 3), 10**6))
    watch.take()
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q)
    assert math.isnan(watch.take())


def test_outputs_are_the_same():
    model = made("llama")
    expected = call(model)
    watch = AttentionLogit(model)
    assert torch.equal(call(model), expected)
    watch.remove()


class Attends(nn.Module):
    """One attention over (..., T, 8), as `how` computes it from the module, queries and keys."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x):
        return self.how(self, self.q(x), self.k(x))


def fused(_, q, k):
    return F.scaled_dot_product_attention(q, k, k)


def written(_, q, k):
    return (q @ k.mT).softmax(-1) @ k


def logit_of(model, *inputs):
    watch = AttentionLogit(model)
    model(*inputs)
    watch.remove()
    return watch.take().item()


def bound_of(model, x):
    return (model.q(x).norm(dim=-1).amax(-1) * model.k(x).norm(dim=-1).amax(-1)).amax().item() * 8**-0.5


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def nothing_seen():
    return pytest.warns(UserWarning, match="AttentionLogit observed no attention with gradients")


def test_what_is_computed_again_is_not_seen():
    model = Attends(fused)
    watch = AttentionLogit(model)
    with recomputation():
        model(numbers(2, 5, 8))
    assert math.isnan(watch.take())


@pytest.mark.parametrize("lag", [0, 3])
def test_a_batch_behind_a_broken_one_is_sound(lag):
    model = Attends(lambda m, q, k: F.scaled_dot_product_attention(q, k, k / (1 + k.norm())))
    batches = list(numbers(16, 2, 6, 8))
    batches[10] *= 30

    def loss_of(model, batch):
        return (model(batch) - 1).square().mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    guard, watch = Guard(model, optimizer, loss_of=loss_of, lag=lag), AttentionLogit(model)
    for batch in guard.batches(batches):
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss, logit=watch.take())
    assert guard.quarantined == [(0, 10)]
    assert [(alarm.step, alarm.kind) for alarm in guard.alarms] == [(10, "logit growth")]


def test_a_step_has_the_largest_of_its_batches():
    model, x = Attends(fused), numbers(2, 5, 8)
    watch = AttentionLogit(model)
    for factor in (1, 3, 2):
        model(factor * x).sum().backward()
    assert watch.take().item() == pytest.approx(bound_of(model, 3 * x))


@pytest.mark.parametrize("ends", ["call", "take", "remove"])
def test_a_call_that_is_interrupted_is_over(ends):
    def how(model, q, k):
        if model.interrupted:
            raise KeyboardInterrupt
        return fused(model, q, k)

    model, x = Attends(how), numbers(2, 5, 8)
    watch, model.interrupted = AttentionLogit(model), True
    outside = LogitBound(torch.device("cpu"))
    with watching(outside):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model(x)
        with Passing() as above:
            model.interrupted = False
            if ends == "call":
                with torch.no_grad():
                    model(x)
            elif ends == "take":
                watch.take()
            else:
                watch.remove()
            assert torch.overrides._get_current_function_mode_stack() == [above]
        note_logits(x.requires_grad_(), x, None)
        assert outside.seen
    fused(None, x, x)
    assert math.isnan(watch.take())


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_model_may_call_itself():
    def how(model, q, k):
        if model.training:
            with torch.no_grad():
                model.eval()(100 * numbers(2, 5, 8))
            model.train()
        return fused(model, q, k)

    model, x = Attends(how), numbers(2, 5, 8)
    assert logit_of(model, x) == pytest.approx(bound_of(model, x))
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_shape_and_dtype_is_seen(shape, dtype):
    model, x = Attends(fused).to(dtype), numbers(*shape).to(dtype)
    assert logit_of(model, x) == pytest.approx(
        bound_of(model, x), rel=0.02 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.parametrize("shape", [(2, 3, 0, 8), (0, 3, 5, 8)])
def test_what_has_no_numbers_is_passed_over(shape):
    with nothing_seen():
        assert math.isnan(logit_of(Attends(fused), torch.zeros(shape)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_passed_over():
    def how(_, q, k):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k)

    rows = [numbers(3, 2, 8), numbers(5, 2, 8)]
    with nothing_seen():
        assert math.isnan(logit_of(Attends(how), torch.nested.nested_tensor(rows, layout=torch.jagged)))


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_over_other_positions_is_seen_in_torchs_own(need_weights):
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    watch = AttentionLogit(attention)
    attention(numbers(2, 5, 8), numbers(2, 9, 8), numbers(2, 9, 8), need_weights=need_weights)
    assert watch.take() > 0


MIXED = torch.tensor([[1.0, 0.3], [-0.5, 1.5], [2.0, -1.0]], requires_grad=True)  # three heads of two
WRITTEN_OUT = {
    "cross": lambda m, q, k: (q @ k[:, :3].mT).softmax(-1),
    "four dimensions": lambda m, q, k: (q[:, None] @ k[:, None, :3].mT * 0.5).softmax(-1),
    "heads behind queries": lambda m, q, k: torch.einsum("btd,bsd->bts", q, k)[:, :, None].softmax(-1),
    "keys before queries": lambda m, q, k: (k @ q.mT).softmax(-2),
    "local": lambda m, q, k: (q @ torch.cat([k.roll(1, 1), k, k], 1).mT).softmax(-1),
    "masked in place": lambda m, q, k: hide_first(q @ k[:, :3].mT).softmax(-1),
    "less the largest": lambda m, q, k: less(q @ k[:, :3].mT, lambda x: x.amax(-1, keepdim=True)),
    "less the largest, with a sink": lambda m, q, k: less(
        torch.cat([q[:, None] @ k[:, None].mT, q[:, None, :, :1]], -1),
        lambda x: x.max(-1, keepdim=True).values,
    ),
    "less the largest of all, in place": lambda m, q, k: (q @ k.mT).sub_((q @ k.mT).max()).softmax(-1),
    "talking heads": lambda m, q, k: (
        F.linear((heads(q) @ heads(k).mT).movedim(1, -1), MIXED).movedim(-1, 1).softmax(-1)
    ),
    "talking heads, with a bias": lambda m, q, k: (
        F.linear((heads(q) @ heads(k)[:, :, :3].mT).movedim(1, -1), MIXED, torch.zeros(3, requires_grad=True))
        .movedim(-1, 1)
        .softmax(-1)
    ),
    "talking heads by einsum": lambda m, q, k: torch.einsum(
        "bhts,gh->bgts", heads(q) @ heads(k).mT, MIXED
    ).softmax(-1),
    "half": lambda m, q, k: torch.baddbmm(q.new_zeros(()), q, k[:, :3].mT).bfloat16().float().softmax(-1),
}


def heads(x):
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def less(scores, largest):
    return (scores - largest(scores)).softmax(-1)


def hide_first(scores):
    scores[..., 0] = -math.inf
    return scores


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_attention_that_is_written_out_is_seen_in_any_shape(name):
    model, x = Attends(WRITTEN_OUT[name]), numbers(2, 5, 8)
    before = logit_of(model, x)
    with torch.no_grad():
        model.q.weight.mul_(100)
        model.q.bias.mul_(100)
    assert logit_of(model, x) == pytest.approx(100 * before, rel=0.02)


ROUTERS = {
    "experts": lambda m, attended: m.q(attended),
    "one head": lambda m, attended: m.q(attended)[:, None],
    "one position": lambda m, attended: m.q(attended)[:, :, None],
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_behind_attention_is_none(name):
    """Also with as many experts as positions and as features."""

    def attended(m, q, k):
        return m.k(fused(m, q, k)) + 100 * written(m, q, k)

    routed = lambda m, q, k: ROUTERS[name](m, attended(m, q, k)).softmax(-1)  # noqa: E731
    x = numbers(2, 8, 8)
    assert logit_of(Attends(routed), x) == logit_of(Attends(attended), x)


def test_distances_grow_as_products_do():
    model = Attends(lambda m, q, k: (-((q @ k.mT) ** 2) - 1).softmax(-1))
    before = logit_of(model, numbers(2, 5, 8))
    assert before > 1
    assert logit_of(model, 4 * numbers(2, 5, 8)) > 4 * before


NO_ATTENTION = {
    "router": lambda m, q, k: q.softmax(-1),
    "router of a product": lambda m, q, k: torch.einsum("btc,ec->bte", numbers(2, 8, 8), m.q.weight).softmax(
        -1
    ),
    "router of groups": lambda m, q, k: m.q(numbers(2, 3, 8, 8)).softmax(-1).sum((1, 2)),
    "less the largest": lambda m, q, k: q - q.amax(-1, keepdim=True),
    "one less": lambda m, q, k: torch.sub(1.0, q),
    "frozen": lambda m, q, k: q + torch.no_grad()(fused)(m, 100 * k, k),
    "frozen, written out": lambda m, q, k: q + torch.no_grad()(written)(m, 100 * k, k),
    "constant": lambda m, q, k: q + fused(m, numbers(2, 8, 8), numbers(2, 8, 8)),
    "weights": lambda m, q, k: q + m.k.weight[None, None].softmax(-1).sum(),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_what_is_no_attention_or_not_trained_is_not_seen(name):
    model, x = Attends(NO_ATTENTION[name]), numbers(2, 8, 8)  # as many positions as features
    if name != "weights":
        with nothing_seen():
            assert math.isnan(logit_of(model, x))
    both = Attends(lambda m, q, k: NO_ATTENTION[name](m, q, k).sum() + fused(m, q, k))
    assert logit_of(both, x) == pytest.approx(bound_of(both, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_behind_a_checkpoint_is_trained(reentrant):
    model = Attends(lambda m, q, k: checkpoint(fused, m, q, k, use_reentrant=reentrant))
    assert logit_of(model, numbers(2, 5, 8)) == pytest.approx(bound_of(model, numbers(2, 5, 8)))


def test_it_warns_once_that_nothing_was_seen():
    model = nn.Linear(8, 8)
    watch = AttentionLogit(model)
    assert math.isnan(watch.take())  # nobody called
    model(numbers(2, 8))
    with nothing_seen():
        watch.take()
    model(numbers(2, 8))
    assert math.isnan(watch.take())


def test_logits_of_zero_are_seen_and_no_signal():
    model = Attends(fused)
    nn.init.zeros_(model.q.weight)
    nn.init.zeros_(model.q.bias)
    assert math.isnan(logit_of(model, numbers(2, 5, 8)))


def test_model_built_on_meta_device_is_watched_once_materialized():
    with torch.device("meta"):
        model = Attends(fused)
    watch = AttentionLogit(model)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p)
    model(numbers(2, 5, 8))
    assert watch.take().item() == pytest.approx(bound_of(model, numbers(2, 5, 8)))


@pytest.mark.parametrize("how", ["around", "inside", "in place"])
@pytest.mark.parametrize("attention", [fused, written])
def test_a_compiled_model_is_watched(attention, how):
    model, x = Attends(attention), numbers(2, 3, 5, 8)
    expected = [logit_of(model, factor * x) for factor in (1, 2)]
    torch._dynamo.reset()
    called = watched = torch.compile(model, backend="eager", fullgraph=True)
    if how == "inside":
        watched = model
    elif how == "in place":
        model.compile(backend="eager", fullgraph=True)
        called = watched = model
    watch = AttentionLogit(watched)
    for factor, logit in zip((1, 2), expected, strict=True):
        called(factor * x).sum().backward()
        assert watch.take().item() == pytest.approx(logit)
    with recomputation():
        called(x)
    assert math.isnan(watch.take())


def test_the_host_waits_for_nothing():
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in function.name()
            return function(*args, **(kwargs or {}))

    model = Attends(lambda m, q, k: fused(m, q, k) + written(m, q, k) + m.torchs_own(q, k, k)[0])
    model.torchs_own = nn.MultiheadAttention(8, 2, batch_first=True)
    watch = AttentionLogit(model)
    with Refusing():
        model(numbers(2, 5, 8))
        logit = watch.take()
    assert logit > 0


def test_a_copy_of_a_watched_model_is_none_of_its_calls():
    model = Attends(fused)
    watch = AttentionLogit(model)
    copy.deepcopy(model)(numbers(2, 5, 8))
    assert math.isnan(watch.take())


def test_a_softmax_of_something_else_is_none():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.gate = nn.Embedding(61, 8), nn.Linear(8, 4)

        def forward(self, ids):
            hidden = self.embedding(ids)
            return hidden * self.gate(hidden).softmax(-1).amax(-1, keepdim=True)

    with nothing_seen():
        assert math.isnan(seen(Router()))


@pytest.mark.parametrize("name", ["llama", "gpt2", "rack", "x_decoder"])
def test_the_guard_sees_queries_that_grow(name):
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    quiet = {"loss_factor": None, "suspect_factor": None, "factor": 1e9, "proven_factor": 1e9}
    guard = Guard(model, optimizer, policy=GuardPolicy(**quiet))
    logit = AttentionLogit(model)
    with broken((model, optimizer), [LogitGrowth(step=12, factor=100.0)]):
        for _ in range(16):
            logits = call(model)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
            loss.backward()
            guard.step(loss, logit=logit.take())
    assert [(alarm.step, alarm.kind) for alarm in guard.alarms] == [(12, "logit growth")]
