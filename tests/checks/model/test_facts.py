"""Facts: constants that a model does not have are found, and unknown ones are not compared."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from stackwise.checks import check_model
from stackwise.checks.model.attention_facts import _bucket
from stackwise.subject.facts import Facts, alibi_slopes, facts_in
from stackwise.subject.spec import ModelSpec
from tests.zoo.declared_facts import SLOPES, STATED, Head, Routed, Stated
from tests.zoo.gpt import GPT, spec_of
from tests.zoo.inferred_facts import SIZES, factory, spec_with


def ask(spec, fact):
    [result] = check_model(spec, checks=[f"claimed_{fact}"])
    return result


@pytest.mark.parametrize(
    ("kind", "fact", "changed"),
    [  # correct models of these types fail other checks
        ("mpt", "alibi_slopes", {"attn_config": {"alibi_bias_max": 16}}),
        ("falcon", "alibi_slopes", {"alibi": True}),
        ("roberta", "position_offset", {"pad_token_id": 3}),
    ],
)
def test_configuration_that_the_model_ignores_fails(kind, fact, changed):
    spec = spec_with(factory(kind), factory(kind, **changed))

    assert ask(spec, fact).status == "failed"


LENGTHS = {"rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 8.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", **LENGTHS},
        {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0] * 4, **LENGTHS},
    ],
)
def test_attention_factor_of_a_configuration_is_part_of_the_scores(rope):
    build = factory("granite", rope_parameters=rope, max_position_embeddings=256)

    def without_factor():
        model = build()
        model.model.rotary_emb.attention_scaling = 1.0
        return model

    spec = ModelSpec.of(build)
    [frequencies] = check_model(spec, checks=["rotary_frequencies"])

    assert (frequencies.status, ask(spec, "attention_scale").status) == ("passed", "passed")
    assert ask(ModelSpec.of(without_factor), "attention_scale").status == "failed"


def test_notes_name_the_key_of_each_fact():
    spec = ModelSpec.of(factory("granite"))

    assert spec.facts.attention_scale == 0.25
    assert "attention_scale (config.attention_multiplier = 0.25)" in spec.notes


def test_declared_fact_keeps_the_others_of_the_configuration():
    spec = ModelSpec.of(factory("granite"), facts=Facts(logit_cap=30.0))
    again = ModelSpec.of(spec, facts=Facts(attention_scale=0.5))

    assert (spec.facts.logit_cap, spec.facts.attention_scale) == (30.0, 0.25)
    assert (again.facts.logit_cap, again.facts.attention_scale) == (30.0, 0.5)


@pytest.mark.parametrize("fact", STATED)
def test_model_without_a_claim_is_not_compared(fact):
    result = ask(spec_of(Stated, max_length=60), fact)

    assert result.meaning == f"needs {fact} in ModelSpec.facts, or a configuration with it"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"attention_scale": -1.0}, "attention_scale: got -1.0; allowed: finite numbers > 0"),
        ({"attention_dropout": 1.0}, "attention_dropout: got 1.0; allowed: a number >= 0 and < 1"),
        ({"alibi_slopes": 0.5}, "alibi_slopes: got 0.5; allowed: a tuple"),
        ({"initial_std": {"*": -0.1}}, "initial_std: got -0.1"),
        ({"key_heads": 0}, "key_heads: got 0; allowed: an integer >= 1"),
        ({"windows": (0, None)}, r"windows: got \(0, None\); allowed: a tuple of integers >= 1 or None"),
        ({"windows": (None, None, "4")}, "windows: got"),
        ({"logit_cap": (30.0,)}, "logit_cap: got"),
        ({"attention_scale": ()}, "attention_scale: got"),
        ({"relative_buckets": (8,)}, r"relative_buckets: got \(8,\); allowed: \(number >= 4, distance > "),
        ({"relative_buckets": (32, 8)}, r"relative_buckets: got \(32, 8\)"),
        ({"block_weights": 2}, "block_weights: got 2; allowed: a tuple of integers >= 0"),
    ],
)
def test_invalid_facts_are_refused(given, error):
    with pytest.raises(ValueError, match=error):
        Facts(**given)


def test_windows_may_be_none_in_each_layer():
    assert Facts(windows=(None, None)).windows == (None, None)


def test_initial_std_needs_new_weights_in_each_call():
    model = factory("granite")()
    spec = ModelSpec.of(model)

    result = ask(spec, "initial_std")

    assert "initial_std" in spec.notes
    assert result.meaning == "needs a function that builds a model with new weights in each call"


def test_constants_with_another_meaning_are_not_inferred():
    latent = SimpleNamespace(num_attention_heads=4, kv_lora_rank=8, num_key_value_heads=4)
    factor = SimpleNamespace(initializer_range=0.02, initializer_factor=1.0)
    for config in (latent, factor):
        config.model_type, config.get_text_config = "other", lambda config=config: config
        model = nn.ModuleDict({"layer": nn.ModuleDict({"q_proj": nn.Linear(2, 2)})})
        model.config = config

        assert facts_in(model) == (Facts(), {})


def test_value_that_differs_between_layers_is_not_inferred():
    transformers = pytest.importorskip("transformers")
    layers = {0: {"num_key_value_heads": 1}, 1: {"num_key_value_heads": 2}}
    config = transformers.LlamaConfig(**SIZES, per_layer_config=layers)

    assert "key_heads" not in facts_in(SimpleNamespace(config=config, named_parameters=list))[1]


def test_facts_of_another_type_are_refused():
    with pytest.raises(ValueError, match=r"facts: got \{\}"):
        ModelSpec.of(GPT, facts={})


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        (Facts(initial_std={"*.query": 0.1}), "initial_std: got '*.query'; allowed: a pattern of names"),
        (Facts(alibi_slopes=(0.5,)), "alibi_slopes: got (0.5,); allowed: a tuple of 4 numbers"),
        (Facts(key_heads=3), "key_heads: got 3; allowed: a divisor of the number of heads, 4"),
    ],
)
def test_facts_that_do_not_fit_the_model_are_errors(facts, error):
    [fact] = [name for name, value in vars(facts).items() if value is not None]
    result = ask(spec_of(Stated, max_length=60, facts=facts), fact)

    assert result.status == "error"
    assert error in result.meaning


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(61, 32), nn.GRU(32, 32, 2), nn.Linear(32, 61)

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids).mT.mT)[0])


@pytest.mark.parametrize("fact", sorted(STATED.keys() - {"initial_std", "logit_cap"}))
def test_model_without_such_a_part_is_not_compared(fact):
    facts = Facts(**{fact: STATED[fact][1]})
    result = ask(ModelSpec(Recurrent, "recurrent", "tokens", 61, facts=facts), fact)

    assert result.status == "not applicable", result


def test_layers_that_are_not_measured_are_counted():
    class Partly(Stated):
        def softmax(self, scores):
            return scores.softmax(dim=-1) if self.index else scores.exp() / scores.exp().sum(-1, keepdim=True)

    result = ask(spec_of(Partly, max_length=60, facts=Facts(attention_dropout=0.0)), "attention_dropout")

    assert result.status == "passed"
    assert result.meaning == "1 of 1 places were measured."


@pytest.mark.parametrize("n_heads", [2, 4, 8, 12])
def test_alibi_slopes_are_those_of_transformers(n_heads):
    modeling = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    bias = modeling.build_alibi_tensor(torch.ones(1, 3), n_heads, torch.float64)

    torch.testing.assert_close(torch.tensor(alibi_slopes(n_heads)), bias[:, 0, 1].float())


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("number", "farthest"), [(32, 128), (8, 20), (16, 100)])
def test_buckets_are_those_of_transformers(number, farthest, is_causal):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    steps = range(-200, 1 if is_causal else 201)
    function = modeling.T5Attention._relative_position_bucket
    expected = function(torch.tensor(steps), not is_causal, number, farthest).tolist()
    found = [_bucket(step, number, farthest, is_causal=is_causal) for step in steps]

    assert found.count(None) <= 8
    assert all(a in (None, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_buckets_of_a_configuration(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 24}
    model_class = {"decoder": "T5ForConditionalGeneration", "encoder": "T5EncoderModel"}[kind]

    def build(distance=24):
        config = transformers.T5Config(**sizes, decoder_start_token_id=0)
        model = getattr(transformers, model_class)(config)
        for module in model.modules():
            if hasattr(module, "relative_attention_max_distance"):
                module.relative_attention_max_distance = distance
        return model

    spec = ModelSpec.of(build)

    assert spec.facts.relative_buckets == (8, 24)
    assert ask(spec, "relative_buckets").status == "passed"
    assert ask(ModelSpec.of(lambda: build(12)), "relative_buckets").status == "failed"


def test_buckets_without_ranges_are_not_inferred():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 61}
    config = transformers.T5Config(**sizes, relative_attention_max_distance=16)

    assert ModelSpec.of(lambda: transformers.T5EncoderModel(config)).facts.relative_buckets is None


def norm_of(function):
    class SomeNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x):
            return function(x) * self.weight

    return SomeNorm()


def normed(function, *, all_norms=True):
    class Model(Stated):
        def __init__(self):
            super().__init__()
            self.norm = norm_of(function)
            for layer in self.layers if all_norms else ():
                layer["attention_norm"], layer["mlp_norm"] = norm_of(function), norm_of(function)

    return Model


def rms(x):
    return x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5),
        lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-5).rsqrt(),
        lambda x: x / (rms(x) + 1e-5),
        lambda x: x / (rms(x) + 1e-8),
        lambda x: x / rms(x).clamp(min=1e-5),
    ],
)
@pytest.mark.parametrize("claim", [1e-5, 1e-8])
def test_eps_of_another_form_of_norm_is_not_compared(function, claim):
    result = ask(spec_of(normed(function), max_length=60, facts=Facts(norm_eps=claim)), "norm_eps")

    assert result.status == "not applicable"
    assert result.meaning.startswith("needs a norm over the residual stream that divides by the root")


def test_norm_of_another_form_is_counted():
    model = normed(lambda x: x / (rms(x) + 1e-5), all_norms=False)
    result = ask(spec_of(model, max_length=60, facts=Facts(norm_eps=1e-5)), "norm_eps")

    assert (result.status, result.meaning) == ("passed", "4 of 5 places were measured.")


def test_norm_without_eps_fails():
    model = normed(lambda x: x / rms(x), all_norms=False)
    result = ask(spec_of(model, max_length=60, facts=Facts(norm_eps=1e-5)), "norm_eps")

    assert result.status == "failed"
    assert "The eps is 0, but 1e-05 is claimed" in result.meaning


class Buffered(Routed):
    """Passes each expert a buffer with rows of zeros after its tokens."""

    def branch(self, layer, x):
        shape, x = x.shape, x.flatten(0, 1)
        weights, chosen = layer["router"](x).softmax(dim=-1).topk(self.n_chosen)
        y = torch.zeros_like(x)
        for number in range(self.n_experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            rows = nn.functional.pad(x[tokens], (0, 0, 0, len(x) + 13 - len(tokens)))
            outputs = layer["down"][number](layer["up"][number](rows).relu())[: len(tokens)]
            y = y.index_add(0, tokens, outputs * weights[tokens, place, None])
        return y.view(shape)


class Mul(nn.Module):
    def forward(self, x):
        return x * 0.25


class Multiplied(Stated):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(Mul(), self.head)


class Unnormed(Stated):
    def __init__(self):
        super().__init__()
        self.norm = Mul()


class Computed(Stated):
    layer_order = (0, 0)

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "out", "gate", "up", "down"):
            weight_norm(self.layers[0][name])


class Copied(Stated):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList((self.layers[0], copy.deepcopy(self.layers[0])))


class SharedAttention(Stated):
    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "out"):
            self.layers[1][name] = self.layers[0][name]


class Relative(GPT):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(129, self.n_heads)

    def attend(self, layer, x, positions, visible, cache):
        q, k, v = (self.split(layer[name](x)) for name in ("q", "k", "v"))
        place = torch.arange(x.shape[1])
        bias = self.table(place - place[:, None] + 64).permute(2, 0, 1)
        scores = (q @ self.repeat(k).mT + bias).masked_fill(~visible, -torch.inf)
        return layer["out"](self.merge(scores.softmax(dim=-1) @ self.repeat(v))), (k, v)


class Deep(Stated):
    attention_rate = mlp_rate = 0.5

    def dropped(self, x, rate):
        keep = torch.rand(len(x), 1, 1) < 1 - rate
        return x * keep / (1 - rate) if self.training and rate else x


class OneWideHead(Stated):
    def attend(self, layer, x, positions, visible, cache):
        place = torch.arange(x.shape[1])
        near = (place[:, None] - place < 5).expand(self.n_heads, -1, -1).clone()
        near[-1] = True
        return super().attend(layer, x, positions, visible & near, cache)


class WideAtStart(Stated):
    def attend(self, layer, x, positions, visible, cache):
        place = torch.arange(x.shape[1])
        near = (place[:, None] - place < 5) | (place[:, None] == 7)
        return super().attend(layer, x, positions, visible & near, cache)


class Steep(Stated):
    """Has other slopes for all queries but the last one."""

    def softmax(self, scores):
        place = torch.arange(scores.shape[-1])
        slopes = torch.tensor(SLOPES)[:, None, None] * (1 + (place[:, None] < place[-1]))
        return super().softmax(scores - slopes * (place[:, None] - place))


class Grouped(Stated):
    """Multiplies each key head by its query heads at once. Rows of weights are positions and heads."""

    is_tiled = is_split = False

    def attend(self, layer, x, positions, visible, cache):
        self.index += 1
        q, k, v = (layer[name](x).unflatten(-1, (-1, self.head_dim)) for name in ("q", "k", "v"))
        n = self.n_heads // self.n_kv_heads
        q = q.unflatten(2, (n, -1)).transpose(2, 3) if self.is_tiled else q.unflatten(2, (-1, n))
        if self.is_split:
            q = q * torch.randn(self.n_kv_heads, n, self.head_dim)
        scores = torch.einsum("btkgd,bskd->bkgts", q, k) * self.score_scale
        weights = scores.masked_fill(~visible[:, :, None], -torch.inf).softmax(dim=-1)
        weights = self.dropped(weights, self.weight_rate)
        y = torch.einsum("bkgts,bskd->btkgd", weights, v)
        y = y.transpose(2, 3) if self.is_tiled else y
        return layer["out"](y.flatten(2)), (k, v)


class Tiled(Grouped):
    is_tiled = True


class Split(Tiled):
    is_split = True


class Dropping(Grouped):
    weight_rate = 0.2


class Image(nn.Module):
    """Classifies images by a class token."""

    divisor = 8.0

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(1, 1, 32))
        parts = ("q", "k", "v", "out")
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32)} | {name: nn.Linear(32, 32) for name in parts})
            for _ in range(2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1)
        for layer in self.layers:
            y = layer["norm"](x)
            q, k, v = (layer[name](y).unflatten(-1, (4, -1)).transpose(1, 2) for name in ("q", "k", "v"))
            weights = (q @ k.mT / self.divisor**0.5).softmax(dim=-1)
            weights = nn.functional.dropout(weights, 0.2, self.training)
            x = x + 0.5 * layer["out"]((weights @ v).transpose(1, 2).flatten(2))
        return self.head(x[:, 0])


class ScaledByWidth(Image):
    divisor = 32.0


class ClampedScores(Stated):
    def softmax(self, scores):
        return super().softmax(scores.clamp(-5, 5).masked_fill(scores.isinf(), -torch.inf))


class ClampedHead(Head):
    cap = staticmethod(lambda x: x.clamp(-3, 3))

    def forward(self, x):
        return self.cap(super().forward(x))


class ClampedLogits(Stated):
    def __init__(self):
        super().__init__()
        self.head = ClampedHead(self)


class InnerFactor(ClampedLogits):
    def __init__(self):
        super().__init__()
        self.head.cap = lambda x: 3 * (x / 6).tanh()


@pytest.mark.parametrize(
    ("model", "fact", "value", "status"),
    [
        (Buffered, "experts_per_token", 2, "passed"),
        (Buffered, "experts_per_token", 3, "failed"),
        (Multiplied, "logit_scale", 0.25, "passed"),
        (Multiplied, "logit_scale", 1.0, "failed"),
        (Unnormed, "logit_scale", 0.25, "not applicable"),
        (Computed, "block_weights", (0, 0), "passed"),
        (Computed, "block_weights", (0, 1), "failed"),
        (Copied, "block_weights", (0, 0), "failed"),
        (Copied, "block_weights", (0, 1), "passed"),
        (SharedAttention, "block_weights", (0, 0), "failed"),
        (Relative, "position_offset", 0, "not applicable"),
        (Deep, "residual_dropout", 0.1, "not applicable"),
        (OneWideHead, "windows", (5, 5), "failed"),
        (WideAtStart, "windows", (5, 5), "failed"),
        (Steep, "alibi_slopes", SLOPES, "failed"),
        (Grouped, "key_heads", 2, "passed"),
        (Tiled, "key_heads", 2, "failed"),
        (Split, "key_heads", 2, "not applicable"),
        (Grouped, "attention_scale", 8**-0.5, "passed"),
        (Grouped, "attention_scale", 32**-0.5, "failed"),
        (Dropping, "attention_dropout", 0.2, "passed"),
        (Dropping, "attention_dropout", 0.1, "failed"),
        (ClampedScores, "attention_cap", 5.0, "failed"),
        (ClampedLogits, "logit_cap", 3.0, "failed"),
        (InnerFactor, "logit_scale", 1.0, "failed"),
    ],
)
def test_other_forms_pass_or_fail_only_if_measured(model, fact, value, status):
    result = ask(spec_of(model, max_length=60, facts=Facts(**{fact: value})), fact)

    assert result.status == status, result


class Biased(nn.Module):
    """Bidirectional attention with a bias for each distance."""

    def __init__(self, bias_of):
        super().__init__()
        self.bias_of, self.embedding, self.head = bias_of, nn.Embedding(61, 32), nn.Linear(32, 61)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32)})
            for _ in range(2)
        )

    def forward(self, ids):
        x, positions = self.embedding(ids), torch.arange(ids.shape[1])
        bias = self.bias_of((positions[:, None] - positions).to(x.dtype))
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT * 8**-0.5 + torch.tensor(SLOPES).to(x)[:, None, None] * bias
            x = x + layer["out"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x)


@pytest.mark.parametrize(
    ("bias_of", "status"),
    [
        (lambda distance: -distance.abs(), "passed"),
        (lambda distance: -distance, "failed"),
        (lambda distance: torch.where(distance < 0, 2 * distance, -distance), "failed"),
    ],
    ids=["both directions", "signed", "twice ahead"],
)
def test_slopes_of_later_keys_are_measured(bias_of, status):
    spec = ModelSpec.of(lambda: Biased(bias_of), causal=False, facts=Facts(alibi_slopes=SLOPES))
    assert ask(spec, "alibi_slopes").status == status


@pytest.mark.parametrize(
    ("model", "fact", "value", "status"),
    [
        (Image, "attention_scale", 8**-0.5, "passed"),
        (ScaledByWidth, "attention_scale", 8**-0.5, "failed"),
        (Image, "key_heads", 4, "passed"),
        (Image, "attention_dropout", 0.2, "passed"),
        (Image, "residual_scale", 0.5, "passed"),
        (Image, "residual_scale", 1.0, "failed"),
        (Image, "experts_per_token", 1, "not applicable"),
    ],
)
@pytest.mark.parametrize("size", [(3, 12, 16), (3, 16, 16)])
def test_constants_of_images_are_measured(model, fact, value, status, size):
    def make_batch(batch_size, _, generator):
        return torch.randn(batch_size, *size, generator=generator)

    spec = ModelSpec.of(model, make_batch=make_batch, facts=Facts(**{fact: value}))

    assert not spec.per_position
    assert ask(spec, fact).status == status


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"causal": None}, "needs a causal model"),
        ({"max_length": 7}, "needs a sequence of 13 positions, and at most 7 are measured"),
    ],
)
def test_windows_that_are_not_measured_have_a_reason(declared, reason):
    declared = {"max_length": 60, "facts": Facts(windows=(5, None)), **declared}
    result = ask(spec_of(Stated, **declared), "windows")

    assert (result.status, result.meaning) == ("not applicable", reason)


class DoubledNorm(nn.RMSNorm):
    """Returns vectors of RMS 2, as new norms with a factor 1 + weight do if the weight is 1."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(("scale", "status"), [(0.25, "passed"), (8**-0.5, "failed")])
def test_queries_of_norms_with_another_size_have_the_claimed_scale(scale, status):
    class Model(Stated):
        q_eps = k_eps = 1e-6
        score_scale = 0.25

        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer["q_norm"], layer["k_norm"] = DoubledNorm(8, eps=1e-6), DoubledNorm(8, eps=1e-6)

    result = ask(ModelSpec.of(Model, facts=Facts(attention_scale=scale)), "attention_scale")

    assert result.status == status
