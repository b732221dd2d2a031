"""Attention logits of any model: never below one that its attention computes, and growing as these do."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.prototype.observation import observe
from stackwise.stability.faults import LogitGrowth, broken
from stackwise.stability.guard import Guard, GuardPolicy
from stackwise.stability.telemetry import AttentionLogit
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


def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match="model: got 'OptimizedModule'; allowed: one that is not compiled"):
        AttentionLogit(torch.compile(subjects.tiny(), backend="eager"))


def test_a_softmax_of_something_else_is_none():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.gate = nn.Embedding(61, 8), nn.Linear(8, 4)

        def forward(self, ids):
            hidden = self.embedding(ids)
            return hidden * self.gate(hidden).softmax(-1).amax(-1, keepdim=True)

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
