"""Generation: engines of three kinds pass, and requests that an engine lacks are not applicable."""

import pytest
import torch
import transformers

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
    found = statuses(spec)
    for name in ("generation_beams", "generation_inputs"):
        assert found.pop(name) == ("passed" if model is llama else "not applicable")
    assert set(found.values()) == {"passed"}


@pytest.mark.parametrize("model", [llama, rack])
def test_inferred_generate_is_noted(model):
    assert "generate" in ModelSpec.of(model).notes


class PositionsFromZero(transformers.LlamaForCausalLM):
    """Several tokens after a cache get the positions 0, 1, 2, ..."""

    def forward(self, input_ids=None, position_ids=None, **options):
        if input_ids is not None and input_ids.shape[1] > 1:
            position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=position_ids, **options)


class ScaledEmbeddings(transformers.LlamaForCausalLM):
    """Embeddings that are passed are doubled."""

    def forward(self, input_ids=None, inputs_embeds=None, **options):
        inputs_embeds = None if inputs_embeds is None else 2 * inputs_embeds
        return super().forward(input_ids, inputs_embeds=inputs_embeds, **options)


@pytest.mark.parametrize(
    ("kind", "way"), [(PositionsFromZero, "past_key_values"), (ScaledEmbeddings, "inputs_embeds")]
)
def test_generation_inputs_names_the_argument(kind, way):
    [result] = check_model(lambda: kind(llama()), checks=["generation_inputs"])
    assert (result.status, result.where.endswith(way)) == ("failed", True)


class Nano(GPT):
    """Model with a method `generate` in the style of nanoGPT."""

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits = self(idx[:, -24:]).logits[:, -1] / temperature
            if top_k is not None:
                logits[logits < logits.topk(top_k).values[:, [-1]]] = -torch.inf
            idx = torch.cat((idx, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return idx


class Shifted(Nano):
    """Generation forgets the last token of the prompt."""

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        found = super().generate(idx[:, :-1], max_new_tokens, temperature, top_k)
        return torch.cat((idx, found[:, idx.shape[1] - 1 :]), dim=1)


@pytest.mark.parametrize(("model", "status"), [(Nano, "passed"), (Shifted, "failed")])
def test_method_in_the_style_of_nanogpt_is_inferred(model, status):
    spec = ModelSpec.of(model, causal=True)
    assert {*spec.generate.options} == {"max_new_tokens", "temperature", "top_k"}
    assert spec.cache_problem == ""
    assert statuses(spec)["generation_greedy"] == status


class ZeroForOthers(Nano):
    """Tokens outside the top k get the logit 0, so that they are drawn too."""

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits = self(idx[:, -24:]).logits[:, -1] / temperature
            if top_k is not None:
                logits[logits < logits.topk(top_k).values[:, [-1]]] = 0.0
            idx = torch.cat((idx, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return idx


def test_bug_in_top_k_does_not_hide_the_method():
    found = statuses(ModelSpec.of(ZeroForOthers, causal=True))
    assert {found["generation_greedy"], found["sampling_distribution"]} == {"failed"}


def drawn(logits, temperature, top_k):
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1)


def uniform_among_k(logits, temperature, top_k):
    return drawn(logits.where(logits.isinf(), 0.0) if top_k else logits, temperature, top_k)


def no_temperature_with_k(logits, temperature, top_k):
    return drawn(logits, 1.0 if top_k and temperature else temperature, top_k)


@pytest.mark.parametrize(
    ("draw", "status"), [(drawn, "passed"), (uniform_among_k, "failed"), (no_temperature_with_k, "failed")]
)
def test_probabilities_among_the_top_k(draw, status):
    def generate(model, prompts, *, max_new_tokens, temperature=0.0, top_k=None):
        ids = torch.stack(prompts)
        for _ in range(max_new_tokens):
            logits = model(ids).logits[:, -1]
            if top_k is not None:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
            ids = torch.cat((ids, draw(logits, temperature, top_k)), dim=1)
        return ids[:, len(prompts[0]) :]

    [result] = check_model(spec_of(GPT, generate=generate), checks=["sampling_distribution"])
    assert result.status == status, result


def drawing(model, idx, max_new_tokens):
    return torch.cat((idx, torch.randint(61, (len(idx), max_new_tokens))), dim=1)


def penalised(model, idx, max_new_tokens, repetition_penalty=1.2):
    return torch.cat((idx, idx[:, :1].expand(-1, max_new_tokens)), dim=1)


def without_prompt(model, idx, max_new_tokens):
    return idx[:, :1].expand(-1, max_new_tokens)


def of_nothing(model):
    return torch.zeros(1, 8, dtype=torch.long)


def greedy(model, idx, max_new_tokens):
    for _ in range(max_new_tokens):
        idx = torch.cat((idx, model(idx).logits[:, -1:].argmax(-1)), dim=1)
    return idx


def wide(model, idx, max_new_tokens, beam_size=4):
    return greedy(model, idx, max_new_tokens)


def filtered(model, idx, max_new_tokens, temperature=1.0, top_k=None, min_p=0.1):
    return Nano.generate(model, idx, max_new_tokens, temperature, top_k)


def confident(model, idx, max_new_tokens):
    for _ in range(max_new_tokens):
        p = (100 * model(idx).logits[:, -1]).softmax(-1)
        idx = torch.cat((idx, torch.multinomial(p, 1)), dim=1)
    return idx


def with_seed(model, idx, max_new_tokens, seed=0):
    new = torch.randint(61, (1, max_new_tokens), generator=torch.Generator().manual_seed(seed))
    return torch.cat((idx, new.expand(len(idx), -1)), dim=1)


OTHERS = [drawing, penalised, without_prompt, of_nothing, wide, filtered, confident, with_seed]


def test_method_of_an_unknown_form_is_named():
    [result, *_] = check_model(of_method(drawing), checks=["generation_greedy"])
    assert result.meaning.endswith("The model has a method generate of an unknown form.")


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_are_not_inferred(method):
    assert ModelSpec.of(of_method(method), causal=True).generate is None


def of_method(method):
    return type("Model", (GPT,), {"generate": method, "__module__": __name__})


def with_default_top_k(model, idx, max_new_tokens, temperature=0.8, top_k=50):
    return Nano.generate(model, idx, max_new_tokens, temperature, top_k if top_k > 0 else None)


def with_default_beams(model, idx, max_new_tokens, num_beams=4):
    found = greedy(model, idx, max_new_tokens)
    return found if num_beams == 1 else found.flip(1)


@pytest.mark.parametrize("method", [with_default_top_k, with_default_beams])
def test_method_is_called_without_effects_of_its_defaults(method):
    found = statuses(ModelSpec.of(of_method(method), causal=True))
    assert {found["generation_greedy"], found["generation_rows"]} == {"passed"}
    assert "error" not in found.values()


class Ending(GPT):
    """After the end token, a row is filled with zeros."""

    eos_id = 0

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        has_ended = torch.zeros(len(idx), 1, dtype=torch.bool)
        for _ in range(max_new_tokens):
            token = self(idx).logits[:, -1:].argmax(-1).masked_fill(has_ended, 0)
            idx, has_ended = torch.cat((idx, token), dim=1), has_ended | (token == self.eos_id)
        return idx


@pytest.mark.parametrize("eos_id", [44, 56])
def test_method_may_have_an_end_token(eos_id):
    spec = ModelSpec.of(type("Model", (Ending,), {"eos_id": eos_id}), causal=True)
    assert "failed" not in statuses(spec).values()


class WithoutTokenizer(Nano):
    @property
    def eos_token_id(self):
        raise RuntimeError("no tokenizer")


def test_end_token_may_be_a_property_that_raises():
    assert ModelSpec.of(WithoutTokenizer, causal=True).generate.may_end == ()


class Excluding(GPT):
    """The end token is never generated."""

    eos_id = 0

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits = self(idx).logits[:, -1].index_fill(1, torch.tensor([self.eos_id]), -torch.inf)
            if top_k is not None:
                logits[logits < logits.topk(top_k).values[:, [-1]]] = -torch.inf
            idx = torch.cat((idx, torch.multinomial((logits / temperature).softmax(-1), 1)), dim=1)
        return idx


@pytest.mark.parametrize("eos_id", [15, 55])
def test_method_may_exclude_the_end_token(eos_id):
    spec = ModelSpec.of(type("Model", (Excluding,), {"eos_id": eos_id}), causal=True)
    assert "failed" not in statuses(spec).values()


class PaddedVocabulary(Nano):
    """Generation excludes the last ids, which pad the embedding to a multiple of 8."""

    def __init__(self):
        super().__init__()
        self.vocab_size = 56

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            idx = torch.cat((idx, self(idx).logits[:, -1:, : self.vocab_size].argmax(-1)), dim=1)
        return idx


def test_padded_vocabulary_is_not_compared():
    found = statuses(ModelSpec.of(PaddedVocabulary, causal=True))
    assert set(found.values()) == {"not applicable"}


class Cached(Nano):
    """Generation changes the outputs of later calls."""

    offset = 0

    def embed(self, input_ids):
        return super().embed((input_ids + self.offset) % 61)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        self.offset = 0
        found = super().generate(idx, max_new_tokens, temperature, top_k)
        self.offset = 1
        return found


def test_plain_call_after_generation_is_compared():
    found = statuses(ModelSpec.of(Cached, causal=True))
    assert (found["generation_greedy"], found["generation_state"]) == ("passed", "failed")


def restoring(model, idx, max_new_tokens):
    was_training = model.training
    model.eval()
    found = greedy(model, idx, max_new_tokens)
    model.train(was_training)
    return found


def always_train(model, idx, max_new_tokens):
    found = greedy(model.eval(), idx, max_new_tokens)
    model.train()
    return found


def always_eval(model, idx, max_new_tokens):
    return greedy(model.eval(), idx, max_new_tokens)


MODES = [(restoring, "warned"), (always_train, "warned"), (always_eval, "failed")]


@pytest.mark.parametrize(("method", "status"), MODES)
def test_mode_after_generation(method, status):
    assert statuses(ModelSpec.of(of_method(method), causal=True))["generation_state"] == status


def of_first_row(model, idx, max_new_tokens):
    return greedy(model, idx[:1].expand_as(idx), max_new_tokens)


def test_rows_with_the_prompt_of_another_row_fail():
    found = statuses(ModelSpec.of(of_method(of_first_row), causal=True))
    assert (found["generation_greedy"], found["generation_rows"]) == ("passed", "failed")


def test_method_without_a_temperature_is_not_sampled():
    found = statuses(ModelSpec.of(of_method(greedy), causal=True))
    assert found["sampling_distribution"] == "not applicable"


def test_beam_search_of_transformers_passes():
    assert check_model(llama(), checks=["generation_beams"])[0].status == "passed"


def test_engine_of_one_prompt_is_not_asked_for_stop_tokens():
    found = statuses(spec_of(GPT, generate=Samples()))
    names = ("generation_stop", "generation_beams", "generation_inputs")
    assert [found.pop(name) for name in names] == ["not applicable"] * 3
    assert set(found.values()) == {"passed"}


def test_end_token_of_the_engine_is_the_default_of_stop():
    def generate(model, prompts, *, max_new_tokens, temperature=0.0, seed=0, stop=tuple(range(0, 61, 4))):
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        return Engine()(model, prompts, **options, stop=stop)

    spec = spec_of(GPT, generate=generate)
    assert spec.generate.end_tokens == tuple(range(0, 61, 4))
    assert set(statuses(spec).values()) == {"passed", "not applicable"}


@pytest.mark.parametrize("first", range(4))
def test_end_token_may_be_one_of_top_k_and_top_p(first):
    class Ends(Engine):
        def __call__(
            self,
            model,
            prompts,
            *,
            max_new_tokens,
            temperature=0.0,
            top_k=None,
            top_p=1.0,
            seed=0,
            stop=tuple(range(first, 61, 4)),
        ):
            options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "stop": stop}
            return super().__call__(model, prompts, max_new_tokens=max_new_tokens, **options)

    [result] = check_model(spec_of(GPT, generate=Ends()), checks=["sampling_distribution"])
    assert result.status in ("passed", "not applicable")


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
        # Of the three most likely tokens, two have a share of 7/9. Of all tokens, they have 0.7.
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.75, "of_all": True}, [0, 4 / 9, 2 / 9, 3 / 9]),
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
