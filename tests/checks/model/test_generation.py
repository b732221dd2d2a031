"""Generation: engines of three kinds pass, and requests that an engine lacks are not applicable."""

import pytest
import torch

from stackwise.checks import check_model
from stackwise.checks.model.generation import _chi_square, _reference
from stackwise.model import create_rack_from_config
from stackwise.subject.spec import ModelSpec
from tests.conftest import SMALL
from tests.zoo.generation import Engine, Samples, engine
from tests.zoo.gpt import GPT, encoder, spec_of


def statuses(model):
    return {result.check: result.status for result in check_model(model, checks=["generation"])}


def llama():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=64, **sizes)


def rack():
    return create_rack_from_config({"model": SMALL["model"]})


@pytest.mark.parametrize("model", [llama, rack, engine])
def test_generate_of_each_kind_passes(model):
    spec = ModelSpec.of(model)
    assert spec.generate is not None
    assert set(statuses(spec).values()) == {"passed"}


@pytest.mark.parametrize("model", [llama, rack])
def test_inferred_generate_is_noted(model):
    assert "generate" in ModelSpec.of(model).notes


def test_engine_of_one_prompt_is_not_asked_for_stop_tokens():
    found = statuses(spec_of(GPT, generate=Samples()))
    assert found.pop("generation_stop") == "not applicable"
    assert set(found.values()) == {"passed"}


def test_end_token_of_the_engine_is_the_default_of_stop():
    def generate(model, prompts, *, max_new_tokens, temperature=0.0, seed=0, stop=tuple(range(0, 61, 4))):
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        return Engine()(model, prompts, **options, stop=stop)

    spec = spec_of(GPT, generate=generate)
    assert spec.generate.end_tokens == tuple(range(0, 61, 4))
    assert set(statuses(spec).values()) == {"passed"}


def test_list_may_omit_the_stop_token():
    def generate(model, prompts, *, max_new_tokens, stop=()):
        rows = Engine()(model, prompts, max_new_tokens=max_new_tokens, stop=stop).tolist()
        ends = [next((i for i, token in enumerate(row) if token in stop), len(row)) for row in rows]
        return [row[:end] for row, end in zip(rows, ends, strict=True)]

    assert statuses(spec_of(GPT, generate=generate))["generation_stop"] == "passed"


def test_new_tokens_with_the_prompt_fail():
    def generate(model, prompts, *, max_new_tokens):
        return torch.cat(
            (torch.stack(prompts), Engine()(model, prompts, max_new_tokens=max_new_tokens)), dim=1
        )

    assert statuses(spec_of(GPT, generate=generate))["generation_greedy"] == "failed"


def test_engine_with_a_fixed_seed_warns():
    def generate(model, prompts, *, max_new_tokens, temperature=0.0):
        return Engine()(model, prompts, max_new_tokens=max_new_tokens, temperature=temperature)

    assert statuses(spec_of(GPT, generate=generate))["sampling_independence"] == "warned"


@pytest.mark.parametrize(
    "generate", [lambda model, prompts, max_tokens: None, lambda model, prompts, temperature: None]
)
def test_unknown_or_missing_parameter_is_an_error(generate):
    with pytest.raises(ValueError, match=r"generate: got .*; allowed: .*max_new_tokens"):
        spec_of(GPT, generate=generate)


def test_wrong_number_of_rows_is_an_error():
    spec = spec_of(GPT, generate=lambda model, prompts, max_new_tokens: [[1] * max_new_tokens])
    with pytest.raises(ValueError, match="generate: got 1; allowed: new tokens of 2 rows"):
        spec.generate(None, [torch.ones(3, dtype=torch.long)] * 2, max_new_tokens=1)


@pytest.mark.parametrize("model", ["encoder", "t5"])
def test_model_without_generation_is_not_applicable(model):
    from transformers import T5Config

    t5 = T5Config(vocab_size=61, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16)
    [result, *_] = check_model(encoder() if model == "encoder" else t5, checks=["generation_greedy"])
    assert result.status == "not applicable"
    assert ("encoder-decoder" in result.meaning) == (model == "t5")


def test_prompts_of_one_length_if_padding_on_the_left_is_not_known():
    spec = ModelSpec.of(llama)
    calls = []

    def recorded(model, prompts, *, max_new_tokens):
        calls.append({len(prompt) for prompt in prompts})
        return spec.generate.function(model, prompts, max_new_tokens=max_new_tokens, temperature=0.0)

    call = type(spec.generate)(recorded, one_length=True)
    check_model(ModelSpec.of(spec, generate=call), checks=["generation_rows"])
    assert calls == [{5}]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1.0, "top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1.0, "top_p": 0.39}, [0, 1, 0, 0]),
    ],
)
def test_reference_probabilities(options, expected):
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.double).log()
    p, is_allowed = _reference(logits, 1e-6, **options)
    assert p[0].tolist() == pytest.approx(expected)
    assert is_allowed[0].tolist() == [each > 0 for each in expected]


def test_chi_square_is_that_of_scipy_and_rarely_large():
    stats = pytest.importorskip("scipy.stats")
    expected = torch.tensor([200.0, 120.0, 100.0, 92.0], dtype=torch.double)
    observed = torch.tensor([230, 100, 90, 92])
    p = stats.chisquare(observed.numpy(), expected.numpy()).pvalue
    assert 10 ** -_chi_square(expected, observed) == pytest.approx(p)
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(61, generator=generator, dtype=torch.double).softmax(0)
    draws = torch.multinomial(probabilities, 512 * 4000, replacement=True, generator=generator).view(4000, -1)
    counts = [_chi_square(512 * probabilities, torch.bincount(row, minlength=61)) for row in draws]
    assert sum(each > 2 for each in counts) / 4000 == pytest.approx(0.01, abs=0.006)
    assert max(counts) < 5
