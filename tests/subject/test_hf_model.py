"""hf: and hf-tiny: models with the architecture of a configuration and random weights."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from stackwise import ModelSpec
from stackwise.subject.factory import TRUST, load_factory

# Published configurations, without the keys that have the default of their class.
LLAMA_3 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MISTRAL = {
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
GEMMA_2 = {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "q_lora_rank": 1536, "n_routed_experts": 256, "n_group": 8}
QWEN_3_MOE = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
PHI_3 = {
    "model_type": "phi3",
    "vocab_size": 32064,
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
}
FALCON = {"model_type": "falcon", "multi_query": True, "num_attention_heads": 71, "hidden_size": 4544}
GPT_2 = {"model_type": "gpt2"}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(TRUST, raising=False)


@pytest.fixture
def named(tmp_path):
    def named(config, prefix="hf-tiny"):
        folder = tmp_path / config["model_type"]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return load_factory(f"{prefix}:{folder}")

    return named


@pytest.mark.parametrize(
    "config", [LLAMA_3, MISTRAL, GEMMA_2, DEEPSEEK_V3, QWEN_3_MOE, PHI_3, FALCON, GPT_2], ids=str
)
def test_tiny_model_is_small_and_can_be_described(named, config):
    factory = named(config)
    assert sum(p.numel() for p in factory().parameters()) < 2_000_000
    spec = ModelSpec.of(factory)
    assert (spec.name, spec.inputs, spec.causal) == (config["model_type"], "tokens", True)


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 16}
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA_3, HEADS | {"num_hidden_layers": 2, "vocab_size": 256}),
        (LLAMA_3, {"bos_token_id": 255, "eos_token_id": [254, 253]}),
        (MISTRAL, HEADS | {"sliding_window": 8, "tie_word_embeddings": False}),
        (GEMMA_2, {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}),
        (GEMMA_2, SOFTCAPS),
        (DEEPSEEK_V3, {"n_routed_experts": 4, "n_group": 2}),
        (DEEPSEEK_V3, {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8}),
        (QWEN_3_MOE, {"num_experts": 4, "num_experts_per_tok": 2}),
        (FALCON, {"multi_query": True}),
    ],
    ids=str,
)
def test_tiny_model_keeps_the_architecture(named, config, settings):
    tiny = named(config).config
    assert {name: getattr(tiny, name) for name in settings} == settings


def test_tiny_model_keeps_dense_and_expert_layers(named):
    layers = named(DEEPSEEK_V3)().model.layers
    assert [type(layer.mlp).__name__ for layer in layers] == ["DeepseekV3MLP", "DeepseekV3MoE"]


def test_tiny_model_keeps_rotary_settings(named):
    rotary = named(LLAMA_3).config.rope_parameters
    assert (rotary["rope_theta"], rotary["rope_type"]) == (500000.0, "llama3")
    config = named(PHI_3).config
    head = config.hidden_size // config.num_attention_heads
    assert len(config.rope_parameters["long_factor"]) == head // 2


def test_class_is_named_by_the_configuration(named):
    assert type(named(BERT)()).__name__ == "BertForMaskedLM"


def test_changed_settings_are_noted(named):
    notes = ModelSpec.of(named(MISTRAL)).notes
    assert "sliding_window 4096 -> 8, so that short inputs reach its end" in notes


def test_full_model_has_the_sizes_of_the_configuration(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    model = load_factory(f"hf:{tmp_path}")()
    assert isinstance(model, LlamaForCausalLM) and len(model.model.layers) == 3


def test_model_that_does_not_fit_is_refused_before_it_is_built(named):
    huge = LLAMA_3 | {"hidden_size": 2**16, "num_hidden_layers": 200}
    with pytest.raises(ValueError, match=r"its checks need about .* TiB .* hf-tiny:.*llama has the same"):
        named(huge, prefix="hf")


def test_weights_are_random_and_new_for_each_model(named):
    factory = named(GPT_2)
    one, other = factory(), factory()
    assert not torch.equal(one.transformer.wte.weight, other.transformer.wte.weight)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "unheard_of"}, "unheard_of"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "--trust-remote-code"),
        ({"model_type": "vit"}, "supports token models only; this one takes pixel_values"),
        (LLAMA_3 | {"hidden_size": "big"}, "hidden_size"),
        (LLAMA_3 | {"hidden_size": -1}, "llama"),
        (LLAMA_3 | {"num_attention_heads": 0}, "Error"),
        (LLAMA_3 | {"rope_scaling": {"rope_type": "nope"}}, "nope"),
    ],
)
@pytest.mark.parametrize("prefix", ["hf", "hf-tiny"])
def test_configuration_with_a_mistake_is_refused_in_one_line(named, prefix, config, message):
    if prefix == "hf" and config["model_type"] == "vit":
        pytest.skip("hf: leaves the call to the checks")
    with pytest.raises(ValueError, match=message) as refused:
        named(config, prefix)
    assert str(refused.value).startswith(f"{prefix}:") and "\n" not in str(refused.value)


def test_code_of_the_hub_needs_permission(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked the user"))
    (tmp_path / "mod.py").write_text("raise SystemExit('code of the hub was executed')\n")
    config = {"model_type": "siglip_vision_model", "auto_map": {"AutoModelForCausalLM": "mod.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(load_factory(f"hf:{tmp_path}")()).__name__ == "SiglipVisionModel"
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "mod.M"}}))
    assert type(load_factory(f"hf:{tmp_path}")()).__name__ == "SiglipVisionModel"


def test_unknown_architecture_is_noted(named):
    factory = named(LLAMA_3 | {"architectures": ["OwnForCausalLM"]})
    assert "AutoModelForCausalLM instead of OwnForCausalLM, which transformers lacks" in factory.notes


def test_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; allowed: a folder with config\.json"):
        load_factory(f"hf-tiny:{tmp_path}")


def test_lists_of_layer_numbers_are_reduced_to_the_kept_layers(named):
    factory = named({"model_type": "llama4_text", "moe_layers": list(range(48)), "num_hidden_layers": 48})
    assert factory.config.num_hidden_layers <= 4
    assert set(factory.config.moe_layers) <= set(range(factory.config.num_hidden_layers))
    assert not any("kinds of layers" in note for note in factory.notes)


def test_name_that_is_not_found_is_refused_with_the_folder_form(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # the hub waits before it tries again
    wanted = r"hf-tiny:no/such: no configuration found \(there is no network.*hf:path/to/folder"
    with pytest.raises(ValueError, match=wanted) as refused:
        load_factory("hf-tiny:no/such")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("step", "most"),
    [pytest.param(6, 2, marks=pytest.mark.long), pytest.param(1, 10, marks=pytest.mark.slow)],
)
def test_model_types_of_transformers(tmp_path, step, most):
    """Nearly every type with a default configuration can be reduced: each sixth type, then all."""
    reduced, refused = [], []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[::step]:
        try:
            config = CONFIG_MAPPING[kind]()
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config)
            config.save_pretrained(tmp_path / kind)
        except Exception:
            continue
        try:
            ModelSpec.of(load_factory(f"hf-tiny:{tmp_path / kind}"))
            reduced.append(kind)
        except ValueError as error:
            refused.append(str(error))
    assert len(reduced) >= 60 / step
    assert len(refused) <= most, refused
    assert not [text for text in refused if "\n" in text]


@pytest.mark.parametrize("pad_token_id", [1, 4])
def test_limit_of_positions_that_start_after_the_padding_id(pad_token_id):
    """The rows of RoBERTa's table up to the padding id belong to no position."""
    import transformers

    config = transformers.RobertaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=40,
        is_decoder=True,
        pad_token_id=pad_token_id,
    )
    spec = ModelSpec.of(lambda: transformers.RobertaForCausalLM(config))
    assert spec.max_length == 40 - 1 - pad_token_id
