"""torch.compile: other gradients and cut graphs are found, what compiles soundly passes."""

import pytest
import torch

from stackwise.checks import check_model


def test_other_gradients_under_the_compiler(subjects):
    class Detached(subjects.TinyLM):
        def mix(self, x):
            return x + (x.detach() if torch.compiler.is_compiling() else x).sigmoid()

    model = Detached()
    model(torch.arange(4)[None]).square().mean().backward()
    eager = model.tokens.weight.grad.clone()
    model.zero_grad()
    torch.compile(model, backend="eager", dynamic=False)(torch.arange(4)[None]).square().mean().backward()
    assert not torch.allclose(eager, model.tokens.weight.grad, rtol=1e-2)
    result = subjects.ask(Detached, "compiled_gradients")
    assert result.status == "failed"
    assert result.value > result.limit == 1e-4
    assert "is_compiling" in result.advice


def test_sound(subjects):
    for result in check_model(subjects.tiny, checks=["compiled_gradients", "graph_breaks"]):
        assert result.status == "passed", result
        assert result.value <= result.limit


def test_a_cut_graph(subjects):
    class Reads(subjects.TinyLM):
        def mix(self, x):
            return x * 2 if x.sum().item() > 0 else x

    result = subjects.ask(Reads, "graph_breaks")
    assert result.status == "warned"
    assert result.value >= 1
    assert result.where


def test_nothing_compiled(subjects):
    class Disabled(subjects.TinyLM):
        @torch.compiler.disable
        def forward(self, ids):
            return super().forward(ids)

    assert subjects.ask(Disabled, "graph_breaks").status == "warned"
    assert subjects.ask(Disabled, "compiled_gradients").status == "not applicable"


@pytest.mark.parametrize("check", ["compiled_gradients", "graph_breaks"])
def test_random_state_is_left(subjects, check):
    state = torch.get_rng_state()
    subjects.ask(subjects.tiny, check)
    assert torch.equal(state, torch.get_rng_state())
