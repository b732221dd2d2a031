"""Shapes of real models: what torch counts of them and what their caches hold is what the shape says."""

import types
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from stackwise.benchmark.flops.closed_form import model_flops
from stackwise.benchmark.flops.counted import count_flops
from stackwise.benchmark.flops.shape_reader import RACK_CHUNK, looked_up, matrices, read_shape
from stackwise.benchmark.flops.transformer_shape import SoftmaxShape, TransformerShape
from stackwise.model import create_simple_rack
from stackwise.model.kernel import CHUNK
from stackwise.model.quantization import quantize_stack

V, C, T = 31, 16, 9
_SIZES = {
    "vocab_size": V,
    "hidden_size": C,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_LATENT = {
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "moe_intermediate_size": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_ENCODER = {**_SIZES, "type_vocab_size": 2}
# By model_type: its class, and what its configuration says beyond the family's own defaults.
FAMILIES = {
    "bert": ("BertForMaskedLM", _ENCODER),
    "cohere": ("CohereForCausalLM", _GROUPED),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**_SIZES, **_LATENT, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**_SIZES, **_LATENT, "num_key_value_heads": 4, "q_lora_rank": 7},
    ),
    "gemma": ("GemmaForCausalLM", {**_GROUPED, "head_dim": 6}),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 6, "sliding_window": 4}),
    "gemma3_text": ("Gemma3ForCausalLM", {**_GROUPED, "head_dim": 6, "sliding_window": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": V,
            "n_embd": C,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", _SIZES),
    "granite": ("GraniteForCausalLM", _GROUPED),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "mixtral": (
        "MixtralForCausalLM",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "olmo": ("OlmoForCausalLM", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "olmo3": ("Olmo3ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "olmoe": ("OlmoeForCausalLM", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": V,
            "hidden_size": C,
            "word_embed_proj_dim": C,
            "num_hidden_layers": 2,
            "ffn_dim": 24,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "phi": ("PhiForCausalLM", _GROUPED),
    "phi3": ("Phi3ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 6}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_GROUPED,
            "head_dim": 6,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "mlp_only_layers": [0],
        },
    ),
    "roberta": ("RobertaForMaskedLM", {**_ENCODER, "max_position_embeddings": 80}),
    "smollm3": ("SmolLM3ForCausalLM", _GROUPED),
    # A quarter of a head is rotated, in pairs.
    "stablelm": ("StableLmForCausalLM", {**_GROUPED, "num_attention_heads": 2}),
    "starcoder2": ("Starcoder2ForCausalLM", {**_GROUPED, "sliding_window": 4}),
}


def model_of(family):
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**options)
    assert config.model_type == family
    config._experts_implementation = "eager"
    return kind._from_config(config, attn_implementation="eager").eval()


def open_windows(shape):
    """The eager kernel computes what a window hides, and throws it away."""
    layers = []
    for layer in shape.layers:
        attention = tuple(
            replace(each, window=None) if isinstance(each, SoftmaxShape) else each for each in layer.attention
        )
        layers.append(replace(layer, attention=attention))
    return replace(shape, layers=tuple(layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers(family):
    model = model_of(family)
    reading = read_shape(model)
    assert reading.reason is None
    ids = torch.randint(V, (2, T))
    shape, size = open_windows(reading.shape), {"batch_size": 2, "seq_len": T}
    with torch.no_grad():
        forward = count_flops(lambda: model(ids, use_cache=False))
    step = count_flops(lambda: model(ids, use_cache=False).logits.sum().backward())
    assert forward.uncounted == step.uncounted == ()
    assert forward.total == model_flops(shape, **size, mode="forward").model("all")
    assert step.total == model_flops(shape, **size, mode="train").model("all")


DECODERS = [family for family in FAMILIES if family not in ("bert", "roberta")]


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_caches_of_transformers(family):
    """Bytes of every key and value that is kept, with fewer and with more tokens than a window."""
    model = model_of(family)
    shape = read_shape(model).shape
    cache, tokens = None, 0
    for more in (2, 1, T):
        cache = model(torch.randint(V, (2, more)), past_key_values=cache, use_cache=True).past_key_values
        tokens += more
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert kept == shape.cache_bytes(batch_size=2, tokens=tokens, dtype=torch.float32)


RACKS = {
    "mha": {},
    "gqa": {"attention_type": "gqa", "n_kv_heads": 2},
    "mqa": {"attention_type": "mqa"},
    "head_dim": {"head_dim": 6},
    "window": {"sliding_window": 5},
    "windows": {"sliding_window": [5, None]},
    "mla": {
        "attention_type": "mla",
        "latent": {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5},
    },
    "mla, window": {
        "attention_type": "mla",
        "sliding_window": 5,
        "latent": {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5},
    },
    "favor": {"attention_type": "kernel", "kernel": {"n_features": 6}},
    "gaussian": {"attention_type": "kernel", "kernel": {"feature_map": "gaussian", "n_features": 6}},
    "elu": {"attention_type": "kernel", "n_kv_heads": 2, "kernel": {"feature_map": "elu"}},
}


def rack_of(kind, **options):
    sizes = {"d_model": C, "d_ff": 24, "n_heads": 4, "n_kv_heads": None, "vocab_size": V}
    return create_simple_rack(2, 2, **{**sizes, "attention_type": "mha", **RACKS[kind], **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", RACKS)
def test_caches_of_racks(kind, dtype):
    rack = rack_of(kind)
    shape = read_shape(rack).shape
    for capacity in (3, 5, 40):
        cache = rack.new_cache(3, capacity, dtype=dtype)
        assert cache.nbytes == shape.cache_bytes(batch_size=3, tokens=capacity, dtype=dtype)


def test_the_chunk_is_that_of_the_rack():
    assert RACK_CHUNK == CHUNK


def test_weights_are_sorted():
    rack = rack_of("gqa", tie_embeddings=False)
    assert [len(table) for table in looked_up(rack)] == [V]
    shape = read_shape(rack).shape
    assert shape.embedding_weights == V * C
    assert sum(p.numel() for p in matrices(rack)) == shape.n_weights
    tied = rack_of("gqa", tie_embeddings=True)
    assert looked_up(tied) == []
    assert read_shape(tied).shape.n_weights == shape.n_weights


def test_a_block_in_two_places_is_refused():
    """Its weights are there once and multiply twice; as the settings have it, there would be more of them."""
    rack = rack_of("mha")
    rack.stacks[1] = rack.stacks[0]
    reading = read_shape(rack)
    assert reading.shape is None
    assert "by its settings" in reading.reason


def test_an_adapter_is_not_overlooked():
    model = model_of("llama")
    model.model.layers[0].adapter = nn.Linear(C, 2, bias=False)
    reading = read_shape(model)
    assert reading.shape is None
    assert f"{sum(p.numel() for p in matrices(model))} weights" in reading.reason
    assert model_flops(model, batch_size=1, seq_len=2, mode="forward") is None


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: nn.Linear(2, 2), "Linear is no Rack, no transformers model, and has no"),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=V, hidden_size=C, num_hidden_layers=1)
            ),
            "model_type 'mamba' is none of bert,",
        ),
        (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=V, n_embd=C, n_layer=1, n_head=2, add_cross_attention=True, bos_token_id=0
                )
            ),
            "add_cross_attention",
        ),
        (
            lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_ENCODER)),
            "the matrices of BertForSequenceClassification have",
        ),
    ],
    ids=["no transformer", "another family", "cross-attention", "another head"],
)
def test_reasons(make, reason):
    reading = read_shape(make())
    assert reading.shape is None
    assert reason in reading.reason


@pytest.mark.parametrize(
    "family, setting",
    [
        *((family, ("use_bidirectional_attention", True)) for family in ("gemma", "gemma2", "gemma3_text")),
        ("llama", ("is_causal", False)),
    ],
)
def test_a_decoder_that_may_see_what_follows(family, setting):
    model = model_of(family)
    setattr(model.config, *setting)
    reading = read_shape(model)
    assert reading.shape is None
    assert reading.reason == f"{setting[0]}: {setting[1]}; who sees whom, the model does not say"
    setattr(model.config, setting[0], not setting[1])
    assert read_shape(model).reason is None


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_an_encoder_sees_what_follows_whatever_it_says_of_it(family):
    model = model_of(family)
    shape = read_shape(model).shape
    model.config.is_causal = False
    assert read_shape(model).shape == shape
    assert not shape.layers[0].attention[0].causal


class Told(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.embedding, self.inside = nn.Embedding(5, 4), nn.Linear(4, 4 * 12)
        self.head = nn.Linear(4, 5)
        self.answer = answer

    def transformer_shape(self):
        return self.answer


def test_a_model_may_say_it_itself():
    # 4 * 16 of attention and 4 * 4 * 2 * 4 of the feed-forward part.
    shape = TransformerShape.uniform(
        n_layers=1, d_model=4, n_heads=2, d_ff=16, n_matrices=2, vocab_size=5, tied=False
    )
    assert read_shape(Told(shape)).shape == shape
    larger = replace(shape, head_weights=21)
    assert "212 weights; by its settings 213" in read_shape(Told(larger)).reason
    assert "returned dict" in read_shape(Told({})).reason


def test_a_model_without_a_head():
    model = model_of("llama")
    inside = read_shape(model.model).shape
    assert inside.head_weights == 0
    assert read_shape(model).shape == replace(inside, head_weights=V * C)


def test_a_configuration_that_only_has_the_name():
    model = model_of("llama")
    model.config = types.SimpleNamespace(model_type="llama", num_hidden_layers=2)
    reason = read_shape(model).reason
    assert "the configuration is not that of a 'llama'" in reason
    assert "num_attention_heads" in reason


def test_layers_of_a_kind_that_is_not_known():
    model = model_of("qwen2")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert "does not say which layers" in read_shape(model).reason


def test_a_shape_is_its_own():
    shape = TransformerShape.uniform(n_layers=1, d_model=4, n_heads=2, d_ff=16, vocab_size=5)
    assert read_shape(shape).shape is shape


def test_a_compiled_model_is_the_model():
    rack = rack_of("gqa")
    assert read_shape(torch.compile(rack)).shape == read_shape(rack).shape


def test_what_is_frozen():
    rack = rack_of("gqa", freeze_up_proj=True)
    assert read_shape(rack).shape.n_frozen == 4 * 24 * C
    rack.unfreeze()
    assert read_shape(rack).shape.n_frozen == 4 * 24 * C
    # Where the gradient ends is not told by how many weights are frozen.
    rack.embedding.requires_grad_(False)
    assert read_shape(rack).shape.n_frozen is None
    assert model_flops(rack, batch_size=1, seq_len=4, mode="train") is None
    assert model_flops(rack, batch_size=1, seq_len=4, mode="forward") is not None


def test_a_quantised_stack_has_the_same_shape():
    pytest.importorskip("torchao")
    rack = rack_of("gqa", d_model=32)
    before = read_shape(rack).shape
    quantize_stack(rack, 0, "int8")
    assert replace(read_shape(rack).shape, n_frozen=0) == before
