"""Third-party models, tiny and with random weights, each as a function that `ModelSpec.of` understands.

They are not chosen: all language models, encoders, encoder-decoders, classifiers and image classifiers of
transformers that a table of small sizes can build, x-transformers with each option of its attention layers,
the families of litgpt, and the layers of torch.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["of_size", "sizes", "subjects", "tiny_config", "versions"]

VOCAB, WIDTH, LAYERS, HEADS, LENGTH = 61, 32, 2, 4, 64
IMAGE = 32  # pixels

# What configurations call each size.
NAMES = {
    "vocab": "vocab_size n_token vocab_size_per_layer_input",
    "width": "hidden_size n_embd d_model dim embedding_size embed_dim emb_dim word_embed_proj_dim "
    "attention_hidden_size input_embedding_size dim_model hidden_dim lru_width "
    "moe_intermediate_size moe_ffn_hidden_size expert_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size",
    "inner": "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size dim_ff d_inner decoder_ffn_dim "
    "encoder_ffn_dim dim_feedforward expert_ffn_hidden_size feed_forward_size mlp_hidden_size "
    "shared_intermediate_size dense_intermediate_size",
    "layers": "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_decoder_layers num_encoder_layers",
    "heads": "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads",
    "kv_heads": "num_key_value_heads n_kv_heads num_kv_heads multi_query_group_num",
    "length": "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_sequence_length",
    "head": "head_dim d_head kv_channels attention_head_dim dim_head",
    "experts": "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts",
    "chosen": "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k",
}
# Settings that only some have, as small as these allow.
RARE: dict[str, Any] = {
    "image_size": IMAGE,
    "patch_size": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_buckets": 4,
    "axial_pos_shape": [8, 8],
    "axial_pos_embds_dim": [8, 24],
    "attention_types": [[["global", "local"], 1]],
    "block_size": 8,
    "attention_type": "original_full",
    "index_head_dim": 8,
    "index_n_heads": 32,  # the top-k of few heads is arbitrary: scores of 0 are equal
    "index_topk": 8,
    "rotary_dim": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "time_step_rank": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "dim_model_base": WIDTH,  # by which logits are scaled; a width of its own, from which others are counted
    "moe_layer_start_index": 1,
    "attention_multiplier": 0.125,  # one over the head size, as in published models; the default is 1
}


def sizes(
    *, vocab: int = VOCAB, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, length: int = LENGTH
) -> dict[str, Any]:
    """Every setting of the table. Each is set where it exists."""
    values = {"vocab": vocab, "width": width, "inner": 2 * width, "layers": layers, "heads": heads}
    values |= {"kv_heads": 2, "length": length, "head": width // heads, "experts": 4, "chosen": 2}
    return {name: values[size] for size, names in NAMES.items() for name in names.split()} | RARE


# Tried in turn, where the table alone builds nothing.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"layer_types": ["linear_attention", "full_attention"]},
    {"layers_block_type": ["mamba", "attention"], "layer_types": ["mamba", "attention"]}
    | {"attn_layer_indices": [1], "attn_layer_period": 2, "attn_layer_offset": 1},
    {"is_decoder": True},
    {"num_experts_per_tok": 1},
    {"num_key_value_heads": HEADS, "num_kv_heads": HEADS, "n_kv_heads": HEADS},
    dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    {"head_dim": 16, "qk_rope_head_dim": 16, "index_head_dim": 16},
    {"attention_type": None, "block_size": None},
)
_MAX_PARAMETERS = 3_000_000


def subjects() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, factory) of each; a factory may raise, where the model cannot be built here."""
    yield from _transformers()
    yield from _x_transformers()
    yield from _litgpt()
    yield from _torch()


def versions() -> dict[str, str]:
    """Of the libraries."""
    found = {}
    for name in ("torch", "transformers", "x-transformers", "litgpt"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


# transformers


def _transformers() -> Iterator[tuple[str, Callable[[], Any]]]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
    import transformers.generation  # here once, not in the process of each model
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    assert transformers.PreTrainedModel
    language_models = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked_models = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    masked, causal = transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM
    for kind in sorted(language_models):
        is_encoder = kind in masked_models and getattr(CONFIG_MAPPING[kind], "is_decoder", None) is False
        auto_class = masked if is_encoder else causal
        yield f"transformers/{kind}", lambda kind=kind, auto_class=auto_class: _smallest(kind, auto_class)
        if getattr(CONFIG_MAPPING[kind], "is_decoder", None) is False:
            yield (
                f"transformers/{kind} is_decoder",
                lambda kind=kind: _smallest(kind, causal, {"is_decoder": True}),
            )
    others = {
        "masked": (masked, masked_models),
        "seq2seq": (
            transformers.AutoModelForSeq2SeqLM,
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        ),
        "classifier": (
            transformers.AutoModelForSequenceClassification,
            modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        ),
        "images": (
            transformers.AutoModelForImageClassification,
            modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        ),
    }
    for task, (auto_class, kinds) in others.items():
        for kind in sorted(kinds.keys() - language_models.keys()):
            yield (
                f"transformers/{kind} {task}",
                lambda kind=kind, auto_class=auto_class: _smallest(kind, auto_class),
            )


def _smallest(
    kind: str, auto_class: Any, settings: Mapping[str, Any] | None = None
) -> Callable[[], nn.Module]:
    """Return a factory of the smallest model of a type: the first variant that can be built and called."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    errors: list[str] = []
    for variant in VARIANTS:
        try:
            config = tiny_config(CONFIG_MAPPING[kind], sizes() | variant | (settings or {}))
            with torch.device("meta"):
                model = auto_class.from_config(copy.deepcopy(config))
            if (size := sum(p.numel() for p in model.parameters())) > _MAX_PARAMETERS:
                raise ValueError(f"{size} parameters, the table does not shrink it")
            model = auto_class.from_config(copy.deepcopy(config)).eval()
            with torch.no_grad():
                model(**_example(model))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        return lambda config=config: auto_class.from_config(copy.deepcopy(config))
    raise ValueError(errors[0])


def _example(model: Any) -> dict[str, Any]:
    """Return inputs of a transformers model of tokens, of images, or of two sequences."""
    import torch

    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.rand(2, 3, IMAGE, IMAGE)}
    inputs = {"input_ids": torch.randint(VOCAB, (2, 8))}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(VOCAB, (2, 8))
    return inputs


def tiny_config(config_class: Any, chosen_sizes: Mapping[str, Any]) -> Any:
    """A configuration with every size set that it has, in nested configurations too."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    names = fields.keys() | getattr(config_class, "attribute_map", {}).keys()
    chosen = {
        name: value
        for name, value in chosen_sizes.items()
        if name in names and _fits(fields.get(name), value)
    }
    n_layers = {
        name: value for name, value in chosen_sizes.items() if value == chosen_sizes["num_hidden_layers"]
    }
    for name, field in fields.items():
        default = _default(field)
        if isinstance(default, list | tuple) and any(
            len(default) == _default(fields[n]) for n in n_layers if n in fields
        ):
            chosen[name] = type(default)(default[: chosen_sizes["num_hidden_layers"]])
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        if dataclasses.is_dataclass(sub_class):
            chosen[name] = tiny_config(sub_class, chosen_sizes)
    return config_class(**chosen)


def _fits(field: Any, value: Any) -> bool:
    """Whether a size is of the kind that the field holds by default."""
    if field is None:
        return True
    default = _default(field)
    return (
        default is None
        or isinstance(default, type(value))
        or not isinstance(default, int | str | list | tuple)
    )


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


# x-transformers

# Options of its attention layers, one at a time.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "rotary xpos": {"rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "relative bias": {"rel_pos_bias": True},
    "dynamic bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},
    "qk norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "sandwich": {"sandwich_coef": 1},
    "sandwich norm": {"sandwich_norm": True},
    "macaron": {"macaron": True},
    "rms norm": {"use_rmsnorm": True},
    "simple rms norm": {"use_simple_rmsnorm": True},
    "scale norm": {"use_scalenorm": True},
    "post norm": {"pre_norm": False},
    "residual attention": {"residual_attn": True},
    "gated residual": {"gate_residual": True},
    "scaled residual": {"scale_residual": True},
    "shifted tokens": {"shift_tokens": 1},
    "glu": {"ff_glu": True},
    "swish glu": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "relu squared": {"ff_relu_squared": True},
    "post-activation norm": {"ff_post_act_ln": True},
    "one kv head": {"attn_one_kv_head": True},
    "grouped queries": {"attn_kv_heads": 2},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "sparse top-k": {"attn_sparse_topk": 8},
    "attention gate": {"attn_gate_values": True},
    "memory keys": {"attn_num_mem_kv": 4},
    "flash": {"attn_flash": True},
    "on attention": {"attn_on_attn": True},
    "softclamped": {"attn_softclamp_logits": True},
    "value residual": {"attn_learned_value_residual_mix": True},
    "zero-init branch": {"zero_init_branch_output": True},
    "hybrid norm": {"attn_add_zero_kv": True},
    "parallel": {"par_ratio": 2},
    "weight ties": {"weight_tie_layers": True},
    "dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1, "layer_dropout": 0.1},
}


def _x_transformers() -> Iterator[tuple[str, Callable[[], Any]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts a function at import
        try:
            import x_transformers as x
        except ImportError:
            return

    def build(layers: str, options: dict[str, Any]) -> nn.Module:
        attn_layers = getattr(x, layers)(dim=WIDTH, depth=LAYERS, heads=HEADS, **options)
        return x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=LENGTH, attn_layers=attn_layers)

    for name, options in OPTIONS.items():
        yield f"x-transformers/decoder {name}", lambda options=options: build("Decoder", options)
    yield "x-transformers/encoder", lambda: build("Encoder", {})
    yield "x-transformers/encoder rotary", lambda: build("Encoder", {"rotary_pos_emb": True})


# litgpt

# By which its configurations differ in kind.
LITGPT_OPTIONS = (
    *("norm_class_name", "mlp_class_name", "parallel_residual", "bias", "rotary_percentage", "norm_qk"),
    *("sliding_window_size", "attention_logit_softcapping", "scale_embeddings", "post_mlp_norm"),
)


def _litgpt() -> Iterator[tuple[str, Callable[[], Any]]]:
    """One of each set of options that its own configurations have."""
    try:
        from litgpt.config import Config, configs
        from litgpt.model import GPT
    except ImportError:
        return
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "intermediate_size": 2 * WIDTH, "block_size": LENGTH}
    sizes |= {"vocab_size": VOCAB, "padded_vocab_size": VOCAB, "n_head": HEADS, "head_size": 8}
    seen = set()

    def tiny(settings: Mapping[str, Any]) -> Any:
        groups = min(settings.get("n_query_groups") or HEADS, 2) if settings.get("n_query_groups") else HEADS
        small = {"n_query_groups": groups}
        if settings.get("n_expert"):
            small |= {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": WIDTH}
        if settings.get("sliding_window_size"):
            small |= {"sliding_window_size": 8, "sliding_window_indices": [1, 0]}
        if int(8 * settings.get("rotary_percentage", 0.25)) % 2:  # elements are rotated in pairs
            small |= {"rotary_percentage": 0.5}
        if settings.get("rope_indices"):
            small |= {"rope_indices": settings["rope_indices"][:LAYERS]}
        known = {field.name for field in dataclasses.fields(Config)}
        return Config(**{k: v for k, v in (dict(settings) | sizes | small).items() if k in known})

    for settings in configs:
        sort = tuple(str(settings.get(name)) for name in LITGPT_OPTIONS)
        if sort not in seen:
            seen.add(sort)
            yield f"litgpt/{settings['name']}", lambda settings=settings: GPT(tiny(settings))


# torch


def _torch() -> Iterator[tuple[str, Callable[[], Any]]]:
    def encoder(**options: Any) -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **options)
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    yield "torch/TransformerEncoder", encoder
    yield "torch/TransformerEncoder batch first", lambda: encoder(batch_first=True)
    yield "torch/TransformerEncoder norm first", lambda: encoder(batch_first=True, norm_first=True)
    yield "torch/TransformerEncoder gelu", lambda: encoder(batch_first=True, activation="gelu", dropout=0.0)
    for recurrent in (nn.GRU, nn.LSTM, nn.RNN):
        yield f"torch/{recurrent.__name__}", lambda kind=recurrent: kind(WIDTH, WIDTH, 2, batch_first=True)


def of_size(kind: str, *, width: int, layers: int) -> Callable[[], nn.Module]:
    """A factory of a transformers model of a type, so wide and deep, with heads of 16 and 512 tokens."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    chosen = sizes(vocab=512, width=width, layers=layers, heads=width // 16, length=256)
    config = tiny_config(CONFIG_MAPPING[kind], chosen)
    return lambda: AutoModelForCausalLM.from_config(copy.deepcopy(config))
