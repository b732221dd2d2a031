"""Facts that models of litgpt and x-transformers state: inferred, noted with their source, and measured."""

import warnings
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.facts import Facts, alibi_slopes, facts_in
from stackwise.subject.rotary import RotaryClaim, rotary_by_layer, rotary_in
from stackwise.subject.spec import ModelSpec
from tests.zoo.declared_facts import Stated
from tests.zoo.facts import Rotating


@dataclass
class Config:
    """Has the keys of litgpt.Config that state facts, and sizes of `GPT` of the zoo."""

    n_layer: int = 2
    n_embd: int = 32
    n_head: int = 4
    head_size: int = 8
    n_query_groups: int = 2
    norm_eps: float = 1e-5
    norm_qk: bool = False
    attention_scores_scalar: int | None = None
    attention_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_size: int | None = None
    sliding_window_indices: list[int] | None = None
    scale_embeddings: bool = False
    n_expert_per_token: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    latent_attention: dict | None = None
    rope_base: int = 10000
    rotary_percentage: float = 1.0
    rope_condense_ratio: int = 1
    rope_adjustments: dict | None = None
    rope_local_base_freq: float | None = None
    rope_indices: list[int] | None = None


def built(used, stated=None):
    """Return a function that builds a model of one configuration, with a reference to another one."""
    sizes, chosen = {0: None, 1: used.sliding_window_size}, used.sliding_window_indices or [0, 0]

    class Model(Stated):
        n_kv_heads = used.n_query_groups
        score_scale = (used.attention_scores_scalar or used.head_size) ** -0.5
        score_cap, score_caps = used.attention_logit_softcapping, used.attention_logit_softcapping is not None
        logit_cap, logit_caps = used.final_logit_softcapping, used.final_logit_softcapping is not None
        windows = tuple(sizes[index] for index in chosen[: used.n_layer])
        embedding_scale = used.n_embd**0.5 if used.scale_embeddings else 1.0
        eps = last_eps = used.norm_eps
        q_eps = k_eps = used.norm_eps if used.norm_qk else 0.0

        def __init__(self):
            super().__init__()
            self.config = stated or used

    return Model


def ask(spec, name):
    [result] = check_model(spec, checks=[name])
    return result


GEMMA = Config(
    norm_eps=1e-6,
    attention_scores_scalar=16,
    attention_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    sliding_window_size=5,
    sliding_window_indices=[1, 0, 1],
    scale_embeddings=True,
)
QWEN = Config(norm_qk=True, norm_eps=1e-6)
CHANGED = [  # (configuration, fact, keys that differ in the model, noted source)
    (GEMMA, "attention_scale", {"attention_scores_scalar": 32}, "attention_scores_scalar = 16"),
    (Config(), "attention_scale", {"attention_scores_scalar": 16}, "head_size = 8"),
    (GEMMA, "attention_cap", {"attention_logit_softcapping": 20.0}, "attention_logit_softcapping = 50.0"),
    (GEMMA, "key_heads", {"n_query_groups": 4}, "n_query_groups = 2"),
    (GEMMA, "embedding_scale", {"scale_embeddings": False}, "scale_embeddings = True"),
    (Config(), "embedding_scale", {"scale_embeddings": True}, "scale_embeddings = False"),
    (GEMMA, "logit_cap", {"final_logit_softcapping": None}, "final_logit_softcapping = 30.0"),
    (GEMMA, "windows", {"sliding_window_size": 6}, "sliding_window_size = 5"),
    (GEMMA, "windows", {"sliding_window_indices": [0, 1]}, "sliding_window_size = 5"),
    (GEMMA, "norm_eps", {"norm_eps": 1e-5}, "norm_eps = 1e-06"),
    (QWEN, "qk_norm_eps", {"norm_eps": 1e-5}, "norm_eps = 1e-06"),
]


@pytest.mark.parametrize(("config", "fact", "changed", "source"), CHANGED)
def test_configuration_of_litgpt_states_facts(config, fact, changed, source):
    sound = ModelSpec.of(built(config))
    broken = ModelSpec.of(built(replace(config, **changed), config))

    assert f"{fact} (config.{source})" in sound.notes
    assert ask(sound, f"claimed_{fact}").status == "passed"
    assert ask(broken, f"claimed_{fact}").status == "failed"


def test_experts_of_a_configuration_of_litgpt():
    model = built(Config(n_expert_per_token=2, norm_topk_prob=True, routed_scaling_factor=2.5))()

    assert (facts_in(model)[0].experts_per_token, facts_in(model)[0].routing_sum) == (2, 2.5)


def test_windows_need_the_key_of_the_layers():
    config = replace(GEMMA)
    del config.sliding_window_indices  # the default stays

    assert facts_in(built(GEMMA, config)())[0].windows is None


@pytest.mark.parametrize(
    "changed", [{"rope_adjustments": {"mscale_all_dim": 1.0}}, {"latent_attention": {"kv_lora_rank": 8}}]
)
def test_scores_with_further_factors_have_no_claim(changed):
    assert facts_in(built(Config(**changed))())[0].attention_scale is None


def test_latent_attention_of_litgpt_has_no_key_heads():
    assert facts_in(built(Config(latent_attention={}))())[0].key_heads is None


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 64}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 256}
ROTARY = [  # (keys, claim of each layer)
    ({"rope_base": 500000}, RotaryClaim(5e5, 8)),
    ({"rotary_percentage": 0.25}, RotaryClaim(dim=2)),
    ({"rope_condense_ratio": 8}, RotaryClaim(dim=8, kind="linear", factor=8.0)),
    ({"rope_adjustments": {"factor": 8.0}}, RotaryClaim(dim=8, kind="linear", factor=8.0)),
    ({"rope_adjustments": LLAMA3}, RotaryClaim(dim=8, kind="llama3", factor=8.0, original_length=64)),
]


@pytest.mark.parametrize(("changed", "claim"), ROTARY)
def test_rotary_of_a_configuration_of_litgpt(changed, claim):
    [found] = rotary_in(Config(**changed))

    assert replace(found, attention_factor=None) == claim
    assert found.score_factor(8) == 1.0


@pytest.mark.parametrize(("changed", "claim"), ROTARY)
def test_frequencies_are_those_of_litgpt(changed, claim):
    litgpt = pytest.importorskip("litgpt")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 61, "block_size": 64}
    config = litgpt.Config(**sizes, **{"rotary_percentage": 1.0, **changed})
    angles = litgpt.GPT(config).cos[1].acos()

    [found] = rotary_in(config)
    wanted = claim.frequencies(8)
    torch.testing.assert_close(found.frequencies(8), wanted)
    torch.testing.assert_close(angles[: len(wanted)].double(), wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("mscale", [{}, {"mscale": 1.0, "mscale_all_dim": 0.8}])
def test_yarn_of_a_configuration_of_litgpt(mscale):
    [claim] = rotary_in(Config(rope_adjustments=YARN | mscale))

    assert (claim.kind, claim.low, claim.high, claim.original_length) == ("yarn", 1.0, 32.0, 256)
    assert (claim.attention_factor == 1.0) == (not mscale)


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_condense_ratio": 8, "rope_adjustments": {"factor": 8.0}},
        {"rotary_percentage": 0.4},  # 3 elements
        {"rotary_percentage": 0.0},
        {"rope_indices": [0, 1]},  # a base for local layers is missing
    ],
)
def test_unknown_rotary_of_litgpt_is_no_claim(changed):
    assert rotary_in(Config(**changed)) == ()


def test_layers_of_litgpt_have_bases_of_their_own():
    changed = {"rope_base": 1000000, "rope_local_base_freq": 1e4, "rope_indices": [1, 0, 1]}
    config = Config(**changed, rope_adjustments={"factor": 8.0})

    assert [(x.theta, x.kind) for x in rotary_by_layer(config)] == [(1e4, "default"), (1e6, "linear")]
    assert len(rotary_in(config)) == 2


def test_model_with_another_base_than_its_configuration_fails():
    def build(base):
        model = Rotating()
        model.config = Config(rope_base=base)
        return model

    sound, broken = (ModelSpec.of(lambda base=base: build(base)) for base in (10000, 20000))

    assert "stated: rotary (config.rope_base: theta 10000, 8 elements)" in sound.notes
    assert ask(sound, "rotary_frequencies").status == "passed"
    assert ask(broken, "rotary_frequencies").status == "failed"


def test_declared_rotary_has_no_source():
    model = Rotating()
    model.config = Config()

    assert "rotary (" not in ModelSpec.of(model, rotary=RotaryClaim()).notes


def x_model(changed=lambda module: None, *, wrapper=None, **options):
    """Return a function that builds a decoder of x-transformers, and changes each module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts a function at import
        x = pytest.importorskip("x_transformers")

    def build():
        layers = x.Decoder(dim=32, depth=2, heads=4, **options)
        model = x.TransformerWrapper(num_tokens=61, max_seq_len=64, attn_layers=layers, **(wrapper or {}))
        for module in model.modules():
            changed(module)
        return model

    return build


def assign(kind, **values):
    """Return a function that gives modules of a class other attributes during each call."""

    def change(module):
        if type(module).__name__ == kind:
            own = {name: getattr(module, name) for name in values}
            module.register_forward_pre_hook(partial(put, values))
            module.register_forward_hook(partial(put, own), always_call=True)

    def put(values, module, *_):
        for name, value in values.items():
            setattr(module, name, value)

    return change


OPTIONS = [  # (fact, options, options of the wrapper, change, noted source)
    (
        "attention_cap",
        {"attn_softclamp_logits": True},
        {},
        assign("Attend", logit_softclamp_value=20.0),
        "Attend.logit_softclamp_value = 50.0",
    ),
    (
        "attention_dropout",
        {"attn_dropout": 0.3},
        {},
        assign("Attend", attn_dropout=torch.nn.Identity()),
        "Attend.dropout = 0.3",
    ),
    (
        "embedding_dropout",
        {},
        {"emb_dropout": 0.3},
        assign("TransformerWrapper", emb_dropout=torch.nn.Dropout(0.1)),
        "TransformerWrapper.emb_dropout",
    ),
    (
        "windows",
        {"attn_max_attend_past": 5},
        {},
        assign("Attention", max_attend_past=4),
        "Attention.max_attend_past = 5",
    ),
    (
        "alibi_slopes",
        {"alibi_pos_bias": True},
        {},
        assign("AlibiPositionalBias", slopes=torch.tensor(alibi_slopes(4)[::-1])[:, None, None]),
        "AlibiPositionalBias.total_heads = 4",
    ),
    (
        "relative_buckets",
        {"rel_pos_bias": True, "rel_pos_num_buckets": 8, "rel_pos_max_distance": 24},
        {},
        assign("RelativePositionBias", max_distance=12),
        "RelativePositionBias.num_buckets = 8",
    ),
    (
        "logit_scale",
        {},
        {"tie_embedding": True, "tie_embedding_scale": 0.5},
        assign("TransformerWrapper", tie_embedding_scale=1.0),
        "TransformerWrapper.tie_embedding_scale = 0.5",
    ),
]


@pytest.mark.parametrize(
    ("fact", "options", "wrapper", "change", "source"), OPTIONS, ids=[each[0] for each in OPTIONS]
)
def test_options_of_x_transformers_state_facts(fact, options, wrapper, change, source):
    sound = ModelSpec.of(x_model(wrapper=wrapper, **options))
    broken = ModelSpec.of(x_model(change, wrapper=wrapper, **options))

    assert f"{fact} ({source})" in sound.notes
    assert ask(sound, f"claimed_{fact}").status == "passed"
    assert ask(broken, f"claimed_{fact}").status == "failed"


@pytest.mark.parametrize(
    ("fact", "options"),
    [
        ("key_heads", {"attn_kv_heads": 2}),  # query heads 0 and 2 share a key head
        ("attention_cap", {}),
        ("windows", {}),
        ("alibi_slopes", {"alibi_pos_bias": True, "alibi_num_heads": 2}),
        ("relative_buckets", {"rel_pos_bias": True, "rel_pos_num_buckets": 2, "rel_pos_max_distance": 2}),
    ],
)
def test_options_with_another_meaning_are_not_inferred(fact, options):
    assert fact not in facts_in(x_model(**options)())[1]


def test_option_that_differs_between_layers_is_not_inferred():
    model = x_model()()
    attends = [module for module in model.modules() if type(module).__name__ == "Attend"]
    attends[0].dropout = 0.5

    assert "attention_dropout" not in facts_in(model)[1]


def test_model_that_only_contains_layers_of_x_transformers_states_no_facts():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 8, dropout=0.1)
            self.decoder = x_model(attn_softclamp_logits=True)().attn_layers

    assert facts_in(Mixed()) == (Facts(), {})


def test_dropout_before_a_projection_of_the_embedding_is_not_measured():
    spec = ModelSpec.of(x_model(wrapper={"emb_dim": 16, "emb_dropout": 0.2}))
    assert spec.facts.embedding_dropout == 0.2
    assert ask(spec, "claimed_embedding_dropout").status == "not applicable"
