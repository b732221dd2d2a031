"""HfFamily: conversion between a Rack and one architecture of transformers.

All five families have RMSNorm, rotary positions and SwiGLU, without biases. They differ in additions to a
Block, in names, and in defaults of keys that config.json omits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stackwise.config import BlockConfig
from stackwise.model.block import Block
from stackwise.model.rack import Rack
from stackwise.support.arguments import check_choice, check_sizes, require

__all__ = ["FAMILIES", "HfFamily", "family_for", "family_named"]

FULL, SLIDING = "full_attention", "sliding_attention"
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "sliding_window": None,
    "layer_types": None,
}
_WINDOWED = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
# Values that a Rack supports; any other value is a different computation.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "per_layer_config": (None,),
    "auto_map": (None,),
    "quantization_config": (None,),
}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PARTS = {
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}
_WHOLE = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_PRE = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
_POST = {"attention_norm": "post_attention_layernorm", "feedforward_norm": "post_feedforward_layernorm"}


@dataclass(frozen=True)
class HfFamily:
    """One `model_type` of transformers.

    Attributes:
        model_type: name in config.json.
        architecture: name of the class with a language-model head.
        defaults: transformers' defaults of keys that config.json omits.
        block: keys of `BlockConfig` in which its Blocks differ from other families.
        norms: its names of the two norms of a Block.
        windows: "none"; "uniform": equal in every Block; "by layer": one width in some of the Blocks.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    block: Mapping[str, Any]
    norms: Mapping[str, str]
    windows: Literal["none", "uniform", "by layer"]

    def describe(self, config: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return the description from which a Rack is built, with all Blocks in one Stack.

        Args:
            config: content of config.json, or the configuration of a loaded model.
            source: origin of the configuration, for messages.

        Raises:
            ValueError: names the key that is missing, or has a value that a Rack does not support.
        """
        missing = [key for key in _NEEDED if config.get(key) is None]
        if missing:
            raise ValueError(f"{source}: {', '.join(missing)} missing; needed: {', '.join(_NEEDED)}")
        config = {**_DEFAULTS, **self.defaults, **config}
        for key, allowed in {**_FIXED, "architectures": ([self.architecture], None)}.items():
            if key == "attention_bias" and self.block.get("qkv_bias"):
                continue  # the family always has these biases
            some = " or ".join(map(repr, allowed))
            require(config.get(key) in allowed, f"{source}: {key}", config.get(key), some)
        check_sizes(num_hidden_layers=config["num_hidden_layers"])
        n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        theta, scaling = _rope(config, source)
        block = {
            "d_model": config["hidden_size"],
            "d_ff": config["intermediate_size"],
            "n_heads": n_heads,
            "n_kv_heads": None if n_kv_heads == n_heads else n_kv_heads,
            "attention_type": "mha" if n_kv_heads == n_heads else "gqa",
            "head_dim": config["head_dim"],
            "norm_eps": config["rms_norm_eps"],
            "dropout": config["attention_dropout"] or 0.0,
            "rope_theta": theta,
            "rope_scaling": scaling,
            **self.block,
        }
        windows = self._windows(config, source)
        blocks = [BlockConfig.from_dict({**block, "sliding_window": w}, source=source) for w in windows]
        return {
            "vocab_size": config["vocab_size"],
            "d_model": config["hidden_size"],
            "tie_embeddings": config["tie_word_embeddings"],
            "max_seq_len": config["max_position_embeddings"],
            "embedding_bound": None,
            "final_norm": {"kind": "rmsnorm", "eps": config["rms_norm_eps"]},
            "stacks": [{"stack_id": 0, "blocks": [block.to_dict() for block in blocks]}],
        }

    def _windows(self, config: Mapping[str, Any], source: str) -> list[int | None]:
        """Return the window of every layer: as in a Rack, W is the token itself and W-1 tokens before it."""
        if self.windows == "by layer":
            return _windows_by_layer(config, source)
        window, given, n_layers = config["sliding_window"], config["layer_types"], config["num_hidden_layers"]
        if self.windows == "none":
            require(window is None, f"{source}: sliding_window", window, f"null in {self.model_type!r}")
        types = [FULL if window is None else SLIDING] * n_layers
        allowed = f"null or {types} in {self.model_type!r}"
        require(given in (None, types), f"{source}: layer_types", given, allowed)
        return [window] * n_layers

    def obstacles(self, rack: Rack) -> list[str]:
        """Return the reasons against writing `rack` as this family; an empty list if it can be written."""
        blocks = [block.config for block in rack.get_blocks()]
        first = blocks[0]
        found = _obstacles_of_all(rack, blocks)
        differing = {"qkv_bias": False, "qk_norm": None, "norm_position": "pre", **self.block}
        for key, value in differing.items():
            if getattr(first, key) != value:
                found.append(f"{key}={getattr(first, key)!r} ({self.model_type} has {value!r})")
        windows = {block.sliding_window for block in blocks}
        if self.windows == "none" and windows != {None}:
            found.append(f"sliding_window ({self.model_type} has none)")
        elif self.windows == "uniform" and len(windows) > 1:
            found.append(f"sliding_window that differs between Blocks ({self.model_type} has one for all)")
        elif len(windows - {None}) > 1:
            found.append(f"sliding_window of several widths ({self.model_type} has one)")
        if self.model_type == "llama" and first.d_model % first.n_heads:
            found.append(
                f"n_heads={first.n_heads} does not divide d_model={first.d_model} (llama needs that)"
            )
        return found

    def config_of(self, rack: Rack) -> dict[str, Any]:
        """Return the config.json of a Rack without `obstacles`, for transformers 4.57 and 5."""
        blocks = [block.config for block in rack.get_blocks()]
        first, sizes = blocks[0], _normal(blocks[0])
        dtype = str(rack.embedding.weight.dtype).removeprefix("torch.")
        scaling = None
        if first.rope_scaling is not None:
            kind = first.rope_scaling.rope_type
            scaling = {"rope_type": kind} | {k: getattr(first.rope_scaling, k) for k in _ROPE_KEYS[kind]}
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": rack.vocab_size,
            "hidden_size": rack.d_model,
            "intermediate_size": first.d_ff,
            "num_hidden_layers": len(blocks),
            "num_attention_heads": first.n_heads,
            "num_key_value_heads": sizes["n_kv_heads"],
            "head_dim": sizes["head_dim"],
            "hidden_act": "silu",
            "rms_norm_eps": first.norm_eps,
            "max_position_embeddings": rack.max_seq_len,
            "tie_word_embeddings": rack.tie_embeddings,
            "attention_dropout": first.dropout,
            "rope_parameters": {"rope_theta": first.rope_theta, **(scaling or {"rope_type": "default"})},
            "rope_theta": first.rope_theta,  # this key and the next one are read by transformers 4
            "rope_scaling": scaling,
            "dtype": dtype,
            "torch_dtype": dtype,
            # Without these keys, some families would use token ids 1 or 2, and generation would stop at them.
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        windows = [block.sliding_window for block in blocks]
        widest = next((window for window in windows if window is not None), None)
        if self.windows != "none":
            config["sliding_window"] = widest
        if self.windows == "by layer":
            config["use_sliding_window"] = widest is not None
            config["layer_types"] = [FULL if window is None else SLIDING for window in windows]
            config["max_window_layers"] = windows.index(widest) if widest is not None else len(blocks)
        return config

    def correspondence(self, rack: Rack) -> dict[str, dict[str, int]]:
        """Return, for each weight of the Rack, the family's tensors that it concatenates and their rows."""
        state = rack.state_dict()
        names = {ours: {theirs: len(state[ours])} for ours, theirs in _WHOLE.items()}
        if rack.tie_embeddings:
            del names["lm_head.weight"]
        parts = {**_PARTS, **self.norms}
        blocks = {name: module for name, module in rack.named_modules() if isinstance(module, Block)}
        for layer, (path, block) in enumerate(blocks.items()):
            sizes = _normal(block.config)
            heads = (sizes["n_heads"], sizes["n_kv_heads"], sizes["n_kv_heads"])
            qkv = dict(zip(_QKV, (n * sizes["head_dim"] for n in heads), strict=True))
            for name, weight in block.state_dict().items():
                part, _, kind = name.rpartition(".")
                theirs = qkv if part == "attention.qkv" else {parts[part]: len(weight)}
                names[f"{path}.{name}"] = {
                    f"model.layers.{layer}.{t}.{kind}": rows for t, rows in theirs.items()
                }
        return names


FAMILIES = {
    family.model_type: family
    for family in (
        HfFamily("llama", "LlamaForCausalLM", {"max_position_embeddings": 2048}, {}, _PRE, "none"),
        HfFamily(
            "mistral",
            "MistralForCausalLM",
            {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
            {},
            _PRE,
            "uniform",
        ),
        HfFamily("qwen2", "Qwen2ForCausalLM", _WINDOWED, {"qkv_bias": True}, _PRE, "by layer"),
        HfFamily(
            "qwen3", "Qwen3ForCausalLM", {**_WINDOWED, "head_dim": 128}, {"qk_norm": "head"}, _PRE, "by layer"
        ),
        HfFamily(
            "olmo2",
            "Olmo2ForCausalLM",
            {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
            {"qk_norm": "width", "norm_position": "post"},
            _POST,
            "none",
        ),
    )
}


def family_named(model_type: object, source: str) -> HfFamily:
    """Return the family of a `model_type`.

    Raises:
        ValueError: unknown family.
    """
    check_choice(f"{source}: model_type", model_type, FAMILIES)
    return FAMILIES[str(model_type)]


def family_for(rack: Rack, model_type: str | None, preferred: str | None) -> HfFamily:
    """Return a family that `rack` can be written as.

    Args:
        rack: Rack to write.
        model_type: requested family; None: `preferred` if it fits, otherwise the first of `FAMILIES`.
        preferred: a `model_type`, or None.

    Raises:
        ValueError: no family fits; the message has the reasons.
    """
    if model_type is not None:
        candidates: Sequence[HfFamily] = [family_named(model_type, "save_pretrained")]
    else:
        candidates = sorted(FAMILIES.values(), key=lambda family: family.model_type != preferred)
    reasons = {}
    for family in candidates:
        reasons[family.model_type] = family.obstacles(rack)
        if not reasons[family.model_type]:
            return family
    shared = [each for each in next(iter(reasons.values())) if all(each in r for r in reasons.values())]
    said = "; ".join(shared or [f"{name}: {', '.join(found)}" for name, found in reasons.items()])
    raise ValueError(f"format: 'hf' cannot say what this Rack is: {said}; allowed: format='stackwise'")


def _obstacles_of_all(rack: Rack, blocks: Sequence[BlockConfig]) -> list[str]:
    """Return the properties of a Rack that no family supports."""
    found = []
    first, shared = blocks[0], _normal(blocks[0])
    for key, allowed in (
        ("attention_type", ("mha", "gqa", "mqa")),
        ("attention_mode", ("causal",)),
        ("softcap", (None,)),
        ("norm", ("rmsnorm",)),
        ("use_rope", (True,)),
    ):
        if getattr(first, key) not in allowed:
            found.append(f"{key}={getattr(first, key)!r}")
    mixed = sorted({key for block in blocks for key, value in _normal(block).items() if value != shared[key]})
    found += [f"{key} differs between Blocks" for key in mixed]
    eps = getattr(rack.final_norm, "eps", None)
    if eps != first.norm_eps:
        found.append(f"the final norm's eps={eps} is not the Blocks' norm_eps={first.norm_eps}")
    dtypes = sorted({str(weight.dtype) for weight in rack.state_dict().values()})
    if len(dtypes) > 1:
        found.append(f"weights of {' and '.join(dtypes)}")
    if rack.max_seq_len is None:
        found.append("max_seq_len=None (max_position_embeddings is a number; set rack.max_seq_len)")
    return found


def _normal(block: BlockConfig) -> dict[str, Any]:
    """Return the configuration of a Block without its window, with all defaults filled in."""
    config = block.to_dict()
    for key in ("sliding_window", "freeze_up_proj", "initialization", "mup_base_width"):
        del config[key]
    config["head_dim"] = block.head_dim or block.d_model // block.n_heads
    if block.attention_type in ("mha", "gqa", "mqa"):
        config["n_kv_heads"] = 1 if block.attention_type == "mqa" else block.n_kv_heads or block.n_heads
        config["attention_type"] = "softmax"
    return config


def _windows_by_layer(config: Mapping[str, Any], source: str) -> list[int | None]:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types, first, n_layers = config["layer_types"], config["max_window_layers"], config["num_hidden_layers"]
    check_sizes(0, max_window_layers=first)
    known = [FULL] if window is None else [FULL, SLIDING]
    if types is None:
        types = [known[-1] if i >= first else FULL for i in range(n_layers)]
    sound = isinstance(types, list) and len(types) == n_layers and all(t in known for t in types)
    allowed = f"{n_layers} of {FULL!r} and, with a sliding_window, {SLIDING!r}"
    require(sound, f"{source}: layer_types", types, allowed)
    return [window if kind == SLIDING else None for kind in types]


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, dict[str, Any] | None]:
    """Return theta and `rope_scaling` of a Block, from the keys of transformers 4 or 5."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    where = f"{source}: {key}"
    given = config.get(key) or {}
    require(isinstance(given, Mapping), where, given, "null or a mapping")
    rope = {name: value for name, value in given.items() if value is not None}
    theta = rope.pop("rope_theta", config.get("rope_theta", 10_000.0))
    kinds = [rope.pop(name) for name in ("type", "rope_type") if name in rope] or ["default"]
    for kind in kinds:
        check_choice(f"{where}.rope_type", kind, _ROPE_KEYS)
    require(kind == kinds[0], f"{where}.rope_type", kind, f"{kinds[0]!r}, as its type says")
    partial = rope.pop("partial_rotary_factor", 1.0)
    require(partial == 1.0, f"{where}.partial_rotary_factor", partial, "1.0")
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        if config.get("original_max_position_embeddings") is not None:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    keys = _ROPE_KEYS[kind]
    require(rope.keys() == set(keys), where, given, f"the keys {', '.join(keys) or 'of no scaling'}")
    return theta, None if kind == "default" else {"rope_type": kind, **rope}
