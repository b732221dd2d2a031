"""Racks from and to transformers and folders: the same logits, the same bits, nothing believed blindly."""

import copy
import errno
import json
import os
import resource
import shutil
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from stackwise.model import Rack, create_rack_from_specs, create_simple_rack, weight_folder
from stackwise.model.embedding import BoundedEmbedding
from stackwise.model.hf_family import FAMILIES
from stackwise.model.initialization import initialize_rack
from stackwise.model.interop import _build
from tests.forked import printed

T = 24  # longer than every window below
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
CASES = {
    "llama": (LlamaConfig, {}),
    "llama-tied-llama3": (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-linear-wide-heads": (LlamaConfig, {"head_dim": 12, "rope_parameters": LINEAR}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "mistral-window": (MistralConfig, {"sliding_window": 5}),
    "mistral-full": (MistralConfig, {"sliding_window": None, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-later-windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-alternating": (
        Qwen3Config,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 4, "layer_types": ALTERNATING},
    ),
    "olmo2": (Olmo2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "olmo2-mqa": (Olmo2Config, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}
# Keys of create_simple_rack(2, 2, ...); the family that is then written.
PLAIN = {"n_kv_heads": 2, "norm_eps": 1e-5}
HF_RACKS = {
    "plain": (PLAIN, "llama"),
    "mha-untied": ({"tie_embeddings": False}, "llama"),
    "mqa": ({"attention_type": "mqa"}, "llama"),
    "wide heads": ({"n_kv_heads": 2, "head_dim": 14}, "llama"),
    "uneven heads": ({"n_heads": 3, "head_dim": 8}, "mistral"),
    "linear": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "llama"),
    "llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}},
        "llama",
    ),
    "window": ({**PLAIN, "sliding_window": 5}, "mistral"),
    "bias": ({**PLAIN, "qkv_bias": True}, "qwen2"),
    "bias and window": ({**PLAIN, "qkv_bias": True, "sliding_window": 5}, "qwen2"),
    "head norm": ({**PLAIN, "qk_norm": "head"}, "qwen3"),
    "width norm": ({**PLAIN, "qk_norm": "width", "norm_position": "post"}, "olmo2"),
}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
MLA = {"attention_type": "mla", "latent": {**LATENT, "q_lora_rank": 12}}
KERNELS = {
    kind: {"attention_type": "kernel", "kernel": {"feature_map": kind, **keys}}
    for kind, keys in {
        "favor": {"n_features": 8},
        "gaussian": {"n_features": 8, "bandwidth": 1.5},
        "laplacian": {"n_features": 8, "bandwidth": 1.5},
        "elu": {},
    }.items()
}
OWN_RACKS = {
    **{name: block for name, (block, _) in HF_RACKS.items()},
    **KERNELS,
    "mla": MLA,
    "mla without low-rank queries": {"attention_type": "mla", "latent": LATENT},
    "softcap": {"softcap": 5.0},
    "bidirectional": {"attention_mode": "bidirectional"},
    "layernorm": {"norm": "layernorm", "norm_eps": 1e-4},
    "no positions": {"use_rope": False},
    "frozen up": {"freeze_up_proj": True},
    "dropout": {"dropout": 0.1},
}


def scatter(model):
    """Weights far enough from zero and from one that every part moves the logits."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.1 if weight.ndim == 1 else 0.15)
    return model.eval()


def hf_model(case="llama", implementation="eager", **changes):
    kind, keys = CASES[case]
    config = kind(**copy.deepcopy({**SIZES, **keys, **changes}))
    return scatter(AutoModelForCausalLM.from_config(config, attn_implementation=implementation))


def own_rack(max_seq_len=64, n_heads=4, **block):
    rack = scatter(create_simple_rack(2, 2, 32, 48, n_heads, 61, **block))
    rack.max_seq_len = max_seq_len
    return rack


@pytest.fixture
def ids():
    return torch.randint(0, 61, (2, T))


@torch.no_grad()
def logits_of(model, ids, **options):
    output = model(ids, **options)
    return output if isinstance(output, torch.Tensor) else output.logits


def assert_close(ours, theirs):
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def assert_same(ours, theirs):
    """The same names, dtypes and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def hf_folder(tmp_path):
    folder = tmp_path / "hf"
    hf_model().save_pretrained(folder)
    return folder


# What transformers computes


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_live_model(case, implementation, ids):
    model = hf_model(case, implementation)
    rack = Rack.from_pretrained(model)
    assert_close(logits_of(rack, ids), logits_of(model, ids))


@pytest.mark.parametrize("case", ["llama", "mistral-window", "olmo2"])
def test_logits_of_a_padded_batch(case, ids):
    model = hf_model(case)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    ours = logits_of(Rack.from_pretrained(model), ids, attention_mask=mask)
    theirs = logits_of(model, ids, attention_mask=mask)
    assert_close(ours[0], theirs[0])
    assert_close(ours[1, :9], theirs[1, :9])


@settings(max_examples=12, derandomize=True, deadline=None)
@given(
    family=st.sampled_from([LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Olmo2Config]),
    n_kv_heads=st.sampled_from([1, 2, 3]),
    queries_per_key=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([2, 6, 8]),
    window=st.sampled_from([None, 1, 2, 7, 100]),
    first_window=st.integers(0, 3),
    theta=st.sampled_from([100.0, 10_000.0, 1e6]),
    tied=st.booleans(),
)
def test_logits_of_any_sizes(
    family, n_kv_heads, queries_per_key, head_dim, window, first_window, theta, tied
):
    keys = {"sliding_window": window, "head_dim": head_dim, "tie_word_embeddings": tied}
    keys |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    keys |= {"num_key_value_heads": n_kv_heads, "num_attention_heads": n_kv_heads * queries_per_key}
    if family in (Qwen2Config, Qwen3Config):
        keys |= {"use_sliding_window": window is not None, "max_window_layers": first_window}
    elif family is not MistralConfig:
        del keys["sliding_window"]
    config = family(**{**SIZES, **keys, "num_hidden_layers": 2, "hidden_size": 12})
    model = scatter(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    ids = torch.randint(0, 61, (1, 9))
    assert_close(logits_of(Rack.from_pretrained(model), ids), logits_of(model, ids))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "olmo2"])
def test_a_key_left_out_means_what_transformers_takes_it_for(family, tmp_path, ids):
    needed = {"model_type": family, "vocab_size": 61, "hidden_size": 64, "intermediate_size": 16}
    needed |= {"num_hidden_layers": 1, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(needed))
    config = AutoConfig.from_pretrained(tmp_path)
    config.pad_token_id = None
    model = scatter(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    rack = Rack.from_pretrained(tmp_path)
    block = rack.get_stack(0).get_block(0).config
    assert rack.max_seq_len == config.max_position_embeddings
    assert block.sliding_window == getattr(config, "sliding_window", None)
    assert block.norm_eps == config.rms_norm_eps == rack.final_norm.eps
    assert_close(logits_of(rack, ids), logits_of(model, ids))


@pytest.mark.parametrize(
    "model_type, widths, keys, parameters",
    [
        ("llama", (128256, 4096, 14336, 32, 32, 8), {"rope_theta": 500000.0}, 8_030_261_248),
        ("mistral", (32000, 4096, 14336, 32, 32, 8), {"sliding_window": 4096}, 7_241_732_096),
        ("qwen2", (151936, 896, 4864, 24, 14, 2), {"tie_word_embeddings": True}, 494_032_768),
        ("qwen3", (151936, 1024, 3072, 28, 16, 8), {"tie_word_embeddings": True}, 596_049_920),
        ("olmo2", (100352, 2048, 8192, 16, 16, 16), {"rope_theta": 500000}, 1_484_916_736),
    ],
    ids=["Llama-3.1-8B", "Mistral-7B", "Qwen2.5-0.5B", "Qwen3-0.6B", "OLMo-2-1B"],
)
def test_published_models_have_as_many_parameters(model_type, widths, keys, parameters):
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    config = dict(zip([*names, "num_key_value_heads"], widths, strict=True)) | keys
    rack = _build(FAMILIES[model_type].describe(config, "config.json"), "config.json")
    assert rack.get_parameter_count() == parameters


def test_rope_under_the_names_of_transformers_4(hf_folder, ids):
    model = hf_model("llama-tied-llama3", tie_word_embeddings=False)
    shutil.rmtree(hf_folder)
    model.save_pretrained(hf_folder)
    old = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
    edit_config(
        hf_folder, rope_parameters="absent", rope_theta=500000, rope_scaling={"type": "llama3", **old}
    )
    assert_close(logits_of(Rack.from_pretrained(hf_folder), ids), logits_of(model, ids))
    edit_config(hf_folder, rope_scaling=None)
    block = Rack.from_pretrained(hf_folder).get_stack(0).get_block(0).config
    assert (block.rope_theta, block.rope_scaling) == (500000.0, None)


@pytest.mark.parametrize(
    "case, changes",
    [
        (
            "qwen2",
            {
                "use_sliding_window": False,
                "sliding_window": 3,
                "max_window_layers": 0,
                "layer_types": "absent",
            },
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 3,
                "max_window_layers": 1,
                "layer_types": "absent",
            },
        ),
        ("llama", {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        ("llama", {"rope_theta": 50.0, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 8.0}}),
        ("llama", {"original_max_position_embeddings": 8, "rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {k: v for k, v in LLAMA3.items() if not k.startswith("original")}}),
    ],
    ids=str,
)
def test_of_keys_that_compete_the_one_counts_that_transformers_takes(case, changes, tmp_path, ids):
    hf_model(case).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert_close(logits_of(Rack.from_pretrained(tmp_path), ids), logits_of(model, ids))


@pytest.mark.parametrize(
    "case", ["llama-tied-llama3", "mistral-window", "qwen2", "qwen3-alternating", "olmo2"]
)
def test_generates_what_transformers_generates(case):
    model = hf_model(case)
    rack = Rack.from_pretrained(model)
    ids = torch.randint(1, 61, (3, 7))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(rack.generate(ids, max_new_tokens=12), theirs)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    theirs = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(rack.generate(ids, attention_mask=mask, max_new_tokens=12), theirs)


# Folders of transformers


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_of_a_transformers_model(case, shard, tmp_path, ids):
    model = hf_model(case, "sdpa")
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs/model.safetensors").exists() == (shard == "5GB")
    rack = Rack.from_pretrained(tmp_path / "theirs")
    assert_same(rack.state_dict(), Rack.from_pretrained(model).state_dict())
    rack.save_pretrained(tmp_path / "ours", max_shard_bytes=20_000 if shard == "20KB" else 10**9)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="sdpa")
    assert type(again) is type(model)
    assert_same(again.state_dict(), model.state_dict())
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))
    before, after = model.config.to_dict(), again.config.to_dict()
    unread = {"_name_or_path", "head_dim", "max_window_layers"}  # said twice, or not used
    for key in before.keys() - unread:
        assert after[key] == before[key], key


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, torch.float32) for name in HF_RACKS), ("plain", torch.bfloat16), ("bias", torch.float16)],
)
def test_round_trip_of_a_rack_through_transformers(name, dtype, tmp_path, ids):
    block, family = HF_RACKS[name]
    rack = own_rack(**block).to(dtype)
    rack.save_pretrained(tmp_path / "rack")
    config = json.loads((tmp_path / "rack/config.json").read_text())
    assert config["model_type"] == family
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "rack", attn_implementation="eager")
    assert model.dtype == dtype
    assert model.config.eos_token_id is None
    if dtype == torch.float32:
        assert_close(logits_of(rack, ids), logits_of(model, ids))
    model.save_pretrained(tmp_path / "again")
    shutil.copytree(tmp_path / "rack", tmp_path / "old")
    edit_config(tmp_path / "old", rope_parameters="absent", dtype="absent")  # as transformers 4 reads it
    for folder in ("rack", "again", "old"):
        back = Rack.from_pretrained(tmp_path / folder, n_stacks=2)
        assert_same(back.state_dict(), rack.state_dict())
        assert str(back) == str(rack)
        assert back.max_seq_len == rack.max_seq_len
        assert torch.equal(logits_of(back, ids), logits_of(rack, ids))


def test_family_of_origin_and_tokens_are_kept(tmp_path):
    model = hf_model("mistral-full", bos_token_id=3, eos_token_id=[5, 6], pad_token_id=0)
    rack = Rack.from_pretrained(model)
    rack.save_pretrained(tmp_path / "own", format="stackwise")
    for source in (rack, copy.deepcopy(rack), Rack.from_pretrained(tmp_path / "own")):
        source.save_pretrained(tmp_path / "hf", overwrite=True)
        config = AutoConfig.from_pretrained(tmp_path / "hf")
        assert config.model_type == "mistral"
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, [5, 6], 0)
    rack.save_pretrained(tmp_path / "hf", model_type="llama", overwrite=True)
    assert AutoConfig.from_pretrained(tmp_path / "hf").model_type == "llama"
    with pytest.raises(ValueError, match=r"qkv_bias=False .qwen2 has True."):
        rack.save_pretrained(tmp_path / "other", model_type="qwen2")
    with pytest.raises(ValueError, match="model_type: got 'gpt2'; allowed: 'llama', 'mistral'"):
        rack.save_pretrained(tmp_path / "other", model_type="gpt2")


def test_some_windows_are_said_by_layer_types(tmp_path, ids):
    specs = [
        {"n_blocks": 2, "block_spec": {"d_model": 32, "d_ff": 48, "n_heads": 4, "qkv_bias": True, **w}}
        for w in ({"sliding_window": 5}, {})
    ]
    rack = scatter(create_rack_from_specs(61, 32, specs))
    rack.max_seq_len = 64
    rack.save_pretrained(tmp_path / "qwen2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2", attn_implementation="eager")
    assert model.config.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2
    assert_close(logits_of(rack, ids), logits_of(model, ids))


def test_layers_are_spread_over_stacks(ids):
    model = hf_model()
    rack = Rack.from_pretrained(model, n_stacks=2)
    assert [stack.num_blocks for stack in rack.stacks] == [2, 2]
    assert [stack.stack_id for stack in rack.stacks] == [0, 1]
    assert [stack.num_blocks for stack in Rack.from_pretrained(model).stacks] == [4]
    assert_close(logits_of(rack, ids), logits_of(model, ids))
    for n_stacks in (3, 0, 8):
        with pytest.raises(ValueError, match=f"n_stacks: got {n_stacks}; allowed: "):
            Rack.from_pretrained(model, n_stacks=n_stacks)


def test_dtype_is_that_of_the_file_or_the_one_asked_for(tmp_path):
    model = hf_model("qwen2").bfloat16()
    model.save_pretrained(tmp_path)
    rack = Rack.from_pretrained(tmp_path)
    assert {weight.dtype for weight in rack.parameters()} == {torch.bfloat16}
    wide = Rack.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(wide.state_dict(), rack.float().state_dict())
    with pytest.raises(ValueError, match=r"dtype: got torch.int8; allowed: None, torch.float16"):
        Rack.from_pretrained(tmp_path, dtype=torch.int8)


def test_weights_of_several_dtypes_are_cast_only_when_asked(hf_folder):
    def narrow(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()

    edit_weights(hf_folder, narrow)
    with pytest.raises(ValueError, match=r"torch.bfloat16 and torch.float32; allowed: one dtype, or dtype="):
        Rack.from_pretrained(hf_folder)
    rack = Rack.from_pretrained(hf_folder, dtype=torch.float64)
    assert {weight.dtype for weight in rack.parameters()} == {torch.float64}


def test_a_rack_shares_no_memory_and_draws_no_numbers(hf_folder):
    model = hf_model()
    state = torch.get_rng_state()
    racks = Rack.from_pretrained(model), Rack.from_pretrained(hf_folder)
    assert torch.equal(torch.get_rng_state(), state)
    before = [copy.deepcopy(rack.state_dict()) for rack in racks]
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    with (hf_folder / "model.safetensors").open(
        "r+b"
    ) as file:  # in place, as a mapping of the file would see
        file.seek(-1000, os.SEEK_END)
        file.write(b"\0" * 1000)
    for rack, weights in zip(racks, before, strict=True):
        assert_same(rack.state_dict(), weights)
        assert not rack.training
        assert all(weight.requires_grad for weight in rack.parameters())


def test_tied_weights_stay_one_and_are_stored_once(tmp_path):
    rack = Rack.from_pretrained(hf_model("qwen2"))
    assert rack.lm_head.weight is rack.embedding.weight
    rack.save_pretrained(tmp_path / "hf")
    rack.save_pretrained(tmp_path / "own", format="stackwise")
    assert "lm_head.weight" not in load_file(tmp_path / "hf/model.safetensors")
    assert "lm_head.weight" not in load_file(tmp_path / "own/model.safetensors")
    back = Rack.from_pretrained(tmp_path / "own")
    assert back.lm_head.weight is back.embedding.weight
    rack.lm_head.weight = nn.Parameter(rack.lm_head.weight.detach() + 1)
    with pytest.raises(ValueError, match="tie_embeddings: got True; allowed: False, as the weights are"):
        rack.save_pretrained(tmp_path / "loose", format="stackwise")


def test_a_tied_file_may_repeat_the_matrix_but_not_bring_another(tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    Rack.from_pretrained(tmp_path)
    edit_weights(tmp_path, lambda w: w["lm_head.weight"].mul_(2))
    with pytest.raises(ValueError, match="tie_word_embeddings: got True; allowed: false"):
        Rack.from_pretrained(tmp_path)


def test_loading_and_saving_need_no_transformers(tmp_path, ids):
    model = hf_model("qwen3-alternating")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    torch.save(ids, tmp_path / "ids")
    script = """
    import sys
    from pathlib import Path

    assert "transformers" not in sys.modules
    sys.modules["transformers"] = None  # importing it raises ImportError
    import torch
    from stackwise.model import Rack

    folder = Path(sys.argv[1])
    rack = Rack.from_pretrained(folder / "theirs")
    rack.save_pretrained(folder / "ours")
    with torch.no_grad():
        torch.save(rack(torch.load(folder / "ids")), folder / "logits")
    """
    printed(textwrap.dedent(script), str(tmp_path))
    assert_close(torch.load(tmp_path / "logits"), logits_of(model, ids))
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())


def test_dropout_is_warned_of(tmp_path):
    model = hf_model(attention_dropout=0.25)
    with pytest.warns(UserWarning, match=r"dropout=0.25 is read from .* as dropout"):
        rack = Rack.from_pretrained(model)
    assert rack.get_stack(0).get_block(0).config.dropout == 0.25
    with pytest.warns(UserWarning, match=r"dropout=0.25 is written as attention_dropout"):
        rack.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).attention_dropout == 0.25


# Our own layout


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.float32) for name in OWN_RACKS),
        *((name, torch.bfloat16) for name in ("plain", "bias", "mla", "favor", "laplacian")),
    ],
)
def test_own_format_holds_every_rack(name, dtype, tmp_path, ids):
    rack = own_rack(max_seq_len=None, **OWN_RACKS[name]).to(dtype)
    rack.save_pretrained(tmp_path, format="stackwise")
    back = Rack.from_pretrained(tmp_path)
    assert_same(back.state_dict(), rack.state_dict())
    assert str(back) == str(rack)
    assert back.max_seq_len is None
    assert configs_of(back) == configs_of(rack)
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in rack.parameters()]
    assert torch.equal(logits_of(back, ids), logits_of(rack, ids))


def configs_of(rack):
    return [[block.config for block in stack.blocks] for stack in rack.stacks]


def mixed_rack():
    block = {"d_model": 32, "d_ff": 48, "n_heads": 4}
    specs = [
        {"n_blocks": 2, "block_spec": {**block, "sliding_window": 5, "norm": "layernorm"}, "stack_id": 7},
        {
            "n_blocks": 1,
            "block_spec": {**block, **KERNELS["laplacian"]},
            "freeze_blocks": True,
            "stack_id": -1,
        },
        {"n_blocks": 1, "block_spec": {**block, **MLA, "freeze_up_proj": True}, "stack_id": 3},
    ]
    return scatter(create_rack_from_specs(61, 32, specs, tie_embeddings=False))


def test_own_format_holds_stacks_their_names_and_what_is_frozen(tmp_path, ids):
    rack = mixed_rack()
    rack.get_stack(1).to(torch.bfloat16)
    rack.embedding.requires_grad_(False)
    for block in rack.get_stack(0).get_blocks()[1:]:
        block.freeze()
    rack.get_stack(2).get_block(0).feedforward.up.requires_grad_(True)
    rack.final_norm = nn.LayerNorm(32, eps=1e-2, bias=False)
    rack.embedding = scatter(BoundedEmbedding(61, 32, 0.5)).requires_grad_(False)
    rack.max_seq_len = 99
    for max_shard_bytes in (10**9, 10_000):
        rack.save_pretrained(tmp_path, format="stackwise", max_shard_bytes=max_shard_bytes, overwrite=True)
        back = Rack.from_pretrained(str(tmp_path))
        assert_same(back.state_dict(), rack.state_dict())
        assert configs_of(back) == configs_of(rack)
        assert [stack.stack_id for stack in back.stacks] == [7, -1, 3]
        trained = {name: p.requires_grad for name, p in rack.named_parameters()}
        assert {name: p.requires_grad for name, p in back.named_parameters()} == trained
        assert (type(back.final_norm), back.final_norm.eps) == (nn.LayerNorm, 1e-2)
        assert torch.equal(logits_of(back.float(), ids), logits_of(copy.deepcopy(rack).float(), ids))
        assert (back.max_seq_len, back.tie_embeddings) == (99, False)
    wide = Rack.from_pretrained(tmp_path, dtype=torch.float64)
    assert {tensor.dtype for tensor in wide.state_dict().values()} == {torch.float64}
    with pytest.raises(ValueError, match="n_stacks: got 2; allowed: None"):
        Rack.from_pretrained(tmp_path, n_stacks=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frequencies_of_a_kernel_are_not_rounded_with_the_weights(tmp_path, dtype):
    rack = own_rack(**KERNELS["laplacian"])
    rack.save_pretrained(tmp_path, format="stackwise")
    assert_same(Rack.from_pretrained(tmp_path, dtype=dtype).state_dict(), rack.to(dtype).state_dict())


def test_what_a_rack_came_from_is_kept(tmp_path):
    assert own_rack().hf_origin == {}
    rack = Rack.from_pretrained(hf_model("mistral-full", bos_token_id=3, eos_token_id=[5, 6], pad_token_id=0))
    expected = {"bos_token_id": 3, "eos_token_id": [5, 6], "pad_token_id": 0, "model_type": "mistral"}
    assert expected.items() <= rack.hf_origin.items()
    rack.save_pretrained(tmp_path, format="stackwise")
    assert Rack.from_pretrained(tmp_path).hf_origin == copy.deepcopy(rack).hf_origin == rack.hf_origin


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format_version": 2}, "format_version: got 2; allowed: 1"),
        ({"stacks": "absent"}, "config.json: got .* allowed: .*stacks"),
        ({"surprise": 1}, "surprise"),
        (
            {"final_norm": {"kind": "batchnorm", "eps": 1.0}},
            "final_norm: got 'batchnorm'; allowed: 'rmsnorm'",
        ),
        ({"stacks": []}, "stacks: got none"),
        ({"stacks": [{"stack_id": 0}]}, "no description of a Rack"),
        ({"stacks": [{"stack_id": 0, "blocks": [{"d_model": 32}]}]}, "d_ff"),
        ({"vocab_size": 60}, "misshapen embedding.weight .61, 32. where .60, 32. is wanted"),
    ],
    ids=str,
)
def test_own_config_that_is_not_whole_is_refused(change, message, tmp_path):
    own_rack().save_pretrained(tmp_path, format="stackwise")
    edit_config(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        Rack.from_pretrained(tmp_path)


# What is refused


@pytest.mark.parametrize(
    "block, reason",
    [
        (MLA, "attention_type='mla'"),
        (KERNELS["favor"], "attention_type='kernel'"),
        ({"attention_mode": "bidirectional"}, "attention_mode='bidirectional'"),
        ({"softcap": 5.0}, "softcap=5.0"),
        ({"norm": "layernorm"}, "norm='layernorm'"),
        ({"use_rope": False}, "use_rope=False"),
        ({"max_seq_len": None}, "max_seq_len=None .*set rack.max_seq_len"),
        ({"qk_norm": "width"}, "llama: qk_norm='width'.*olmo2: norm_position='pre' .olmo2 has 'post'"),
        ({"qk_norm": "head", "qkv_bias": True}, "qwen2: qk_norm='head'.*qwen3: qkv_bias=True"),
        ({"qk_norm": "width", "norm_position": "post", "sliding_window": 5}, "olmo2: sliding_window"),
    ],
    ids=str,
)
def test_what_no_family_can_say_is_refused(block, reason, tmp_path):
    with pytest.raises(ValueError, match=f"format: 'hf' cannot say .*{reason}.*allowed: format='stackwise'"):
        own_rack(**block).save_pretrained(tmp_path / "rack")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "second, reason",
    [
        ({"d_ff": 40}, "d_ff differs between Blocks"),
        ({"norm_eps": 1e-5}, "norm_eps differs between Blocks"),
        ({"n_kv_heads": 2, "attention_type": "gqa"}, "n_kv_heads differs"),
        ({"dropout": 0.1}, "dropout differs"),
        ({"sliding_window": 5}, "mistral: sliding_window that differs between Blocks"),
        ({"softcap": 2.0}, "softcap differs"),
    ],
    ids=str,
)
def test_blocks_that_differ_are_refused(second, reason, tmp_path):
    block = {"d_model": 32, "d_ff": 48, "n_heads": 4}
    specs = [{"n_blocks": 1, "block_spec": {**block, **change}} for change in ({}, second)]
    rack = create_rack_from_specs(61, 32, specs)
    rack.max_seq_len = 64
    with pytest.raises(ValueError, match=reason):
        rack.save_pretrained(tmp_path / "rack")


def test_blocks_that_differ_in_what_they_began_with_are_written(tmp_path):
    block = {"d_model": 32, "d_ff": 48, "n_heads": 4}
    kinds = ("normal", "small", "zero_out")
    specs = [{"n_blocks": 1, "block_spec": {**block, "initialization": kind}} for kind in kinds]
    rack = create_rack_from_specs(61, 32, specs)
    rack.max_seq_len = 64
    rack.save_pretrained(tmp_path / "rack", format="hf")
    ids = torch.randint(61, (2, 7))
    assert torch.equal(Rack.from_pretrained(tmp_path / "rack")(ids), rack(ids))


def test_windows_of_two_widths_are_refused(tmp_path):
    block = {"d_model": 32, "d_ff": 48, "n_heads": 4, "qkv_bias": True}
    specs = [{"n_blocks": 1, "block_spec": {**block, "sliding_window": w}} for w in (5, 6)]
    rack = create_rack_from_specs(61, 32, specs)
    rack.max_seq_len = 64
    with pytest.raises(ValueError, match="qwen2: sliding_window of several widths"):
        rack.save_pretrained(tmp_path / "rack")


def test_a_rack_that_would_not_come_back_is_refused(tmp_path):
    def changed(change):
        rack = own_rack()
        change(rack)
        return rack

    def other_eps(rack):
        rack.final_norm.eps = 0.5

    def mixed_dtypes(rack):
        rack.final_norm.bfloat16()

    def other_module(rack):
        rack.get_stack(0).get_block(0).feedforward.gate = nn.Sequential(nn.Linear(32, 48, bias=False))

    def other_norm(rack):
        rack.get_stack(0).get_block(0).attention_norm = nn.LayerNorm(32, bias=False)

    def more_modules(rack):
        rack.get_stack(1).adapter = nn.Linear(2, 2)

    def fewer_modules(rack):
        rack.get_stack(1).get_block(1).config.qk_norm = "head"

    def more_weights(rack):
        rack.get_stack(1).scale = nn.Parameter(torch.ones(1))

    def adapter(rack):
        rack.get_stack(0).get_block(0).attention.scale = nn.Parameter(torch.ones(1))

    def shared(rack):
        first, second = rack.get_stack(0).get_block(0), rack.get_stack(1).get_block(1)
        second.feedforward.up.weight = first.feedforward.up.weight

    def repeated(rack):
        rack.stacks[1] = rack.stacks[0]

    def other_size(rack):
        rack.embedding.weight = rack.lm_head.weight = nn.Parameter(torch.ones(50, 32))

    def bounded(rack):
        rack.embedding = BoundedEmbedding(61, 32, 2.0)
        rack.lm_head.weight = rack.embedding.weight

    def no_data(rack):
        rack.final_norm.to("meta")

    def integers(rack):
        rack.final_norm.weight = nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)

    for change, format, message in (  # noqa: A001
        (other_eps, "hf", "final norm's eps=0.5"),
        (mixed_dtypes, "hf", "weights of torch.bfloat16 and torch.float32"),
        (other_module, "stackwise", "feedforward.gate is Sequential.*; allowed: Linear.*, as configured"),
        (other_norm, "hf", "attention_norm is LayerNorm.*; allowed: RMSNorm"),
        (more_modules, "stackwise", "stacks.1.adapter is Linear.*; allowed: nothing, as configured"),
        (fewer_modules, "stackwise", "stacks.1.blocks.1.attention.q_norm is missing; allowed: RMSNorm"),
        (more_weights, "stackwise", "unexpected stacks.1.scale$"),
        (adapter, "hf", "unexpected stacks.0.blocks.0.attention.scale$"),
        (
            shared,
            "stackwise",
            r"got \['stacks.1.blocks.1.feedforward.up.weight'\]; allowed: no weight in two",
        ),
        (repeated, "stackwise", "stacks.1 is missing; allowed: Stack"),
        (other_size, "stackwise", r"misshapen embedding.weight \(50, 32\) where \(61, 32\) is wanted"),
        (bounded, "hf", "embedding is BoundedEmbedding.*; allowed: TokenEmbedding"),
        (no_data, "stackwise", "without data; allowed: plain tensors"),
        (integers, "stackwise", "torch.int8; allowed: plain tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            changed(change).save_pretrained(tmp_path / "rack", format=format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, "model_type: got 'gpt2'; allowed: 'llama', 'mistral', 'qwen2', "),
        ({"model_type": "absent"}, "model_type: got None"),
        ({"hidden_size": "absent", "vocab_size": None}, "vocab_size, hidden_size missing; needed: "),
        ({"architectures": ["LlamaBiForMNTP"]}, r"got \['LlamaBiForMNTP'\]; allowed: \['LlamaForCausalLM'\]"),
        ({"auto_map": {"AutoModel": "m.Other"}}, "auto_map: got {'AutoModel': 'm.Other'}; allowed: None"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'; allowed: 'silu' or 'swish'"),
        ({"attention_bias": True}, "attention_bias: got True; allowed: False or None"),
        ({"mlp_bias": True}, "mlp_bias: got True; allowed: False or None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5; allowed: 1.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got .*; allowed: None"),
        ({"sliding_window": 8}, "sliding_window: got 8; allowed: null in 'llama'"),
        ({"layer_types": ALTERNATING}, "layer_types: got .*; allowed: null or .* in 'llama'"),
        ({"num_key_value_heads": 3}, "n_kv_heads: got 3 .*must divide n_heads=4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0; allowed: an integer >= 1"),
        ({"rms_norm_eps": None}, "norm_eps: got None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "got 'yarn'; allowed: 'default', 'linear', 'llama3'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: got 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "got 'llama3'; allowed: 'linear'"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: got .*full_attention"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: got .*; allowed: the keys factor"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": None}}, "the keys factor, low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: got 0.5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor: got 0.5"),
        ({"rope_parameters": [1]}, "rope_parameters: got .1.; allowed: null or a mapping"),
    ],
    ids=str,
)  # fmt: skip
def test_config_that_no_rack_has_is_refused(change, message, hf_folder):
    edit_config(hf_folder, **change)
    with pytest.raises(ValueError, match=message):
        Rack.from_pretrained(hf_folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: got .*; allowed: 4 of 'full_attention'"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types: got .*; allowed: 4 of 'full_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types: got .*; allowed: 4 of 'full_attention'"),
        ({"max_window_layers": "many"}, "max_window_layers: got 'many'"),
    ],
    ids=str,
)
def test_layer_types_that_no_rack_has_are_refused(change, message, tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        Rack.from_pretrained(tmp_path)


def test_biases_of_qwen2_are_not_a_question_of_attention_bias(tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path)
    edit_config(tmp_path, attention_bias=True)
    assert Rack.from_pretrained(tmp_path).get_stack(0).get_block(0).config.qkv_bias


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda w: w.pop("model.norm.weight"), "missing model.norm.weight$"),
        (
            lambda w: [w.pop(name) for name in sorted(w)[:9]],
            r"missing (\S+, ){3}\S+ and 5 more$",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "unexpected model.layers.0.self_attn.q_proj.bias$",
        ),
        (
            lambda w: w.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(48, 32)}),
            "unexpected model.layers.4.mlp.up_proj.weight$",
        ),
        (
            lambda w: w.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(32, 32)}),
            r"misshapen model.layers.1.self_attn.k_proj.weight \(32, 32\) where \(16, 32\) is wanted$",
        ),
        (
            lambda w: w.update({"lm_head.weight": torch.zeros(61, 32, dtype=torch.int8)}),
            "lm_head.weight is Tensor of torch.int8; allowed: plain tensors of torch.float16",
        ),
    ],
)
def test_tensors_that_are_not_the_ones_wanted_are_refused(edit, message, hf_folder):
    edit_weights(hf_folder, edit)
    with pytest.raises(ValueError, match=message):
        Rack.from_pretrained(hf_folder)


def test_frequencies_that_old_files_carry_are_passed_over(hf_folder, ids):
    before = Rack.from_pretrained(hf_folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(hf_folder, lambda w: w.update({name: torch.zeros(4)}))
    assert_same(Rack.from_pretrained(hf_folder).state_dict(), before.state_dict())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "consolidated.00.pth"])
def test_a_pickle_is_refused(name, hf_folder):
    weights = load_file(hf_folder / "model.safetensors")
    torch.save(weights, hf_folder / name)
    Rack.from_pretrained(hf_folder)  # beside safetensors it is not looked at
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"got {name}; allowed: model.safetensors .*pickle runs the code"):
        Rack.from_pretrained(hf_folder)


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "sharded"
    hf_model().save_pretrained(folder, max_shard_size="20KB")
    return folder


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/secret.safetensors", "sub/secret.safetensors", "", "..",
     "pytorch_model.bin", "model.safetensors.bin", "config.json"],
)  # fmt: skip
def test_an_index_names_only_safetensors_beside_it(file, sharded):
    save_file({"model.norm.weight": torch.zeros(32)}, sharded.parent / "secret.safetensors")
    edit_index(sharded, lambda places: places.update({"model.norm.weight": file}))
    with pytest.raises(ValueError, match=r"weight_map: got .*; allowed: names of .safetensors files beside"):
        Rack.from_pretrained(sharded)


def test_an_index_that_does_not_fit_its_files_is_refused(sharded):
    def refused(message, edit=lambda places: None):
        edit_index(sharded, edit)
        with pytest.raises(ValueError, match=message):
            Rack.from_pretrained(sharded)
        index.write_text(kept)

    index = sharded / "model.safetensors.index.json"
    kept = index.read_text()
    places = json.loads(kept)["weight_map"]
    first, last = places["model.embed_tokens.weight"], places["model.norm.weight"]
    assert first != last
    refused("model-00099.safetensors: missing", lambda p: p.update({"a": "model-00099.safetensors"}))
    refused("weight_map: got {}; allowed", lambda p: p.clear())
    for text, message in (
        ("{", "no JSON"),
        ("[]", "got 'list'; allowed: a JSON object"),
        ("{}", "weight_map"),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=message):
            Rack.from_pretrained(sharded)
    index.write_text(kept)
    shutil.copy(sharded / first, sharded / "model.safetensors")
    refused("got both model.safetensors and model.safetensors.index.json; allowed: one")


def test_shards_may_be_links(sharded, tmp_path):
    """As they are where transformers caches what it downloads."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in sharded.iterdir():
        (linked / file.name).symlink_to(file)
    assert_same(Rack.from_pretrained(linked).state_dict(), Rack.from_pretrained(sharded).state_dict())


@pytest.mark.parametrize("keep", [0, 7, 100, -8])
def test_a_damaged_file_is_refused(keep, hf_folder):
    path = hf_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors: damaged: "):
        Rack.from_pretrained(hf_folder)


def test_a_folder_without_a_model_is_refused(tmp_path, hf_folder):
    for source, message in (
        (tmp_path / "nowhere", "path: got .*nowhere'; allowed: a folder, or a live transformers model"),
        ("meta-llama/Llama-3.2-1B", "path: got 'meta-llama/Llama-3.2-1B'; allowed: a folder"),
        (tmp_path, "config.json: missing"),
        (nn.Linear(2, 2), "source: got 'Linear'; allowed: a folder, or a live transformers model"),
        (3, "source: got 'int'"),
    ):
        with pytest.raises(ValueError, match=message):
            Rack.from_pretrained(source)
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors and model.safetensors.index.json missing"):
        Rack.from_pretrained(hf_folder)
    (hf_folder / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match=r"config.json: no JSON"):
        Rack.from_pretrained(hf_folder)


def test_a_live_model_of_another_class_is_refused(ids):
    class Scaled(LlamaForCausalLM):
        """Of the same configuration and weights."""

    model = hf_model()
    model.config.architectures, model.config.auto_map = ["Other"], {"AutoModel": "other.Other"}
    assert torch.allclose(Rack.from_pretrained(model)(ids), model(ids).logits, atol=1e-5)
    model.__class__ = Scaled
    with pytest.raises(ValueError, match=r"Scaled: architectures: got \[.*Scaled'\]; allowed: \['LlamaForC"):
        Rack.from_pretrained(model)
    Scaled.__qualname__ = Scaled.__name__ = "LlamaForCausalLM"  # as code that comes with weights is called
    with pytest.raises(ValueError, match=r"architectures: got \['.*test_interop.LlamaForCausalLM'\]"):
        Rack.from_pretrained(model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_live_model_without_data_is_refused(tied):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    with pytest.raises(ValueError, match="without data"):
        Rack.from_pretrained(model)


# Files


@pytest.mark.parametrize("format", ["hf", "stackwise"])
def test_shards_are_no_larger_than_asked(format, tmp_path):  # noqa: A002
    rack = own_rack(n_kv_heads=2, tie_embeddings=False)
    limit = 7_000  # less than the embedding, which comes first
    rack.save_pretrained(tmp_path, format=format, max_shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert {path.name for path in shards} == set(index["weight_map"].values())
    assert shards[-1].name == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    sizes = []
    for path in shards:
        weights = load_file(path)
        sizes.append(sum(weight.nbytes for weight in weights.values()))
        assert sizes[-1] <= limit or len(weights) == 1
        assert all(index["weight_map"][name] == path.name for name in weights)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}  # without it transformers 4 loads nothing
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(size + following > limit for size, following in pairwise(sizes))  # none is begun early
    options = {"n_stacks": 2} if format == "hf" else {}
    assert_same(Rack.from_pretrained(tmp_path, **options).state_dict(), rack.state_dict())
    with pytest.raises(ValueError, match="max_shard_bytes: got 0; allowed: an integer >= 1"):
        rack.save_pretrained(tmp_path, max_shard_bytes=0)


def test_a_folder_with_something_in_it_is_kept(tmp_path):
    rack, other = own_rack(), own_rack()
    rack.save_pretrained(tmp_path / "empty" / "deeper", max_shard_bytes=10_000)
    target = tmp_path / "empty" / "deeper"
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(
        ValueError, match=r"holds config.json, .*; allowed: an empty folder, or overwrite=True"
    ):
        other.save_pretrained(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    (target / "tokenizer.json").write_text("precious")
    with pytest.raises(ValueError, match=r"holds tokenizer.json, which would be lost"):
        other.save_pretrained(target, overwrite=True)
    assert {path.name for path in target.iterdir()} == {*before, "tokenizer.json"}
    (target / "tokenizer.json").unlink()
    other.save_pretrained(target, overwrite=True)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors"}
    assert_same(Rack.from_pretrained(target, n_stacks=2).state_dict(), other.state_dict())
    with pytest.raises(ValueError, match=r"path: got .*config.json'; allowed: a folder"):
        rack.save_pretrained(target / "config.json", overwrite=True)
    assert [path.name for path in target.parent.iterdir()] == ["deeper"]


@pytest.mark.parametrize("when", ["weights", "config", "flush", "away", "publish"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_was_there_survives_a_write_that_fails(when, error, tmp_path, monkeypatch):
    rack, other = own_rack(), own_rack()
    target = tmp_path / "model"
    rack.save_pretrained(target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    rename, calls = Path.rename, []

    def fail(*args, **kwargs):
        raise error

    def fail_at(number):
        def renamed(self, to):
            calls.append(to)
            if len(calls) == number:
                raise error
            return rename(self, to)

        return renamed

    places = {
        "weights": (weight_folder, "save_file", fail),
        "config": (Path, "write_text", fail),
        "flush": (os, "fsync", fail),
        "away": (Path, "rename", fail_at(1)),
        "publish": (Path, "rename", fail_at(2)),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[when])
        with pytest.raises(type(error)):
            other.save_pretrained(target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize("format", ["hf", "stackwise"])
def test_a_disk_that_is_full_is_an_os_error(format, tmp_path):  # noqa: A002
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # of each file
    try:
        with pytest.raises(OSError, match=r"File too large.*model\.safetensors") as caught:
            own_rack(n_kv_heads=2).save_pretrained(tmp_path / "model", format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_not_replaced(tmp_path, monkeypatch):
    """It may be a mount point, which no folder can replace, or in a folder that is not ours to write to."""
    target, rack = tmp_path / "parent" / "model", own_rack()
    target.mkdir(parents=True)
    before = target.stat().st_ino, target.parent.stat().st_mtime_ns
    rack.save_pretrained(target, format="stackwise", max_shard_bytes=10_000)
    assert (target.stat().st_ino, target.parent.stat().st_mtime_ns) == before
    assert_same(Rack.from_pretrained(target).state_dict(), rack.state_dict())
    assert all(path.is_file() for path in target.iterdir())
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    with pytest.raises(ValueError, match=r"model is a mount point, .*; allowed: a folder below it"):
        rack.save_pretrained(target, overwrite=True)


@pytest.mark.parametrize("name", ["save_file", "_write_json"])
def test_an_empty_folder_is_empty_again_after_a_write_that_fails(name, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(weight_folder, name, fail)
    with pytest.raises(OSError, match="disk full"):
        own_rack().save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_write_left_in_a_folder_is_no_model(tmp_path):
    own_rack().save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()  # it is written last
    with pytest.raises(ValueError, match=r"config\.json: missing"):
        Rack.from_pretrained(tmp_path)
    own_rack().save_pretrained(tmp_path, overwrite=True)
    Rack.from_pretrained(tmp_path)


@pytest.mark.parametrize("is_there", [False, True])
def test_files_reach_the_disk_before_they_are_published(is_there, tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def noted_rename(self, target):
        events.append(f"to {Path(target).name}")
        return rename(self, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    if is_there:
        (tmp_path / "model").mkdir()
    own_rack().save_pretrained(tmp_path / "model")
    if is_there:
        assert [event for event in events if "model" in event or "config" in event] == [
            "model.safetensors",
            "config.json",
            "model",
        ]
    else:
        published = events.index("to model")
        assert {"config.json", "model.safetensors"} <= set(events[:published])
        assert any(event.startswith(".model.") for event in events[:published])
        assert events[published + 1 :] == [tmp_path.name]


def test_a_format_or_option_that_is_none_is_refused(tmp_path):
    rack = own_rack()
    with pytest.raises(ValueError, match="format: got 'onnx'; allowed: 'hf', 'stackwise'"):
        rack.save_pretrained(tmp_path, format="onnx")
    with pytest.raises(ValueError, match="model_type: got 'llama'; allowed: None, with format='stackwise'"):
        rack.save_pretrained(tmp_path, format="stackwise", model_type="llama")


def test_the_base_of_mup_is_kept(tmp_path):
    rack = create_simple_rack(1, 2, d_model=32, d_ff=64, n_heads=4, vocab_size=20)
    initialize_rack(rack, "mup", base_width=16)
    rack.save_pretrained(tmp_path / "rack", format="stackwise")
    assert Rack.from_pretrained(tmp_path / "rack").mup_base_width == 16
