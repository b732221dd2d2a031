"""Models of transformers, built from a configuration: hf:NAME_OR_FOLDER and hf-tiny:NAME_OR_FOLDER.

Only config.json is read. The weights are random. A tiny model has the architecture of the configuration, with
two to four layers and small widths.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stackwise.support.units import byte_text

__all__ = ["HFModel", "hf_factory", "load_hf_model"]

_PREFIXES = ("hf:", "hf-tiny:")
_FORM = f"a folder with config.json, such as {_PREFIXES[0]}path/to/folder, or a name on the hub"
_TRUST_ADVICE = "--trust-remote-code (pytest: --stackwise-trust-remote-code) allows it"

# Configuration keys for each size.
_SIZE_NAMES = {
    "vocab": "vocab_size n_token vocab_size_per_layer_input",
    "width": "hidden_size n_embd d_model dim embedding_size embedding_dim embed_dim emb_dim "
    "word_embed_proj_dim attention_hidden_size input_embedding_size dim_model hidden_dim lru_width",
    "inner": "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size dim_ff d_inner decoder_ffn_dim "
    "encoder_ffn_dim dim_feedforward expert_ffn_hidden_size feed_forward_size mlp_hidden_size "
    "shared_intermediate_size dense_intermediate_size moe_intermediate_size moe_ffn_hidden_size "
    "expert_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    "layers": "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_decoder_layers num_encoder_layers num_blocks num_layers_per_stack",
    "heads": "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads",
    "kv_heads": "num_key_value_heads n_kv_heads num_kv_heads multi_query_group_num",
    "length": "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_sequence_length",
    "head": "head_dim d_head kv_channels attention_head_dim dim_head d_kv",
    "experts": "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts",
    "chosen": "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k",
    "window": "sliding_window window_size attention_window attention_window_size attention_chunk_size "
    "local_attention",
    "rotary": "rotary_dim",
}
_VOCAB, _HEAD, _WINDOW, _LAYERS, _EXPERTS, _LENGTH = 256, 16, 8, 2, 4, 512
_MAX_HEADS_PER_KV, _MAX_KINDS = 8, 4
# Sizes that few architectures have, by their upper limit.
_RARE = {
    0: "num_kv_shared_layers num_nextn_predict_layers",
    1: "first_k_dense_replace moe_layer_start_index attn_layer_offset",
    2: "linear_num_key_heads attn_layer_period decoder_sparse_step full_attention_interval",
    4: "mamba_n_heads mamba_num_heads linear_num_heads time_step_rank linear_num_value_heads num_buckets",
    8: "kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim state_size ssm_state_size "
    "mamba_d_state index_topk mamba_n_groups linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input",
    16: "q_lora_rank mamba_d_head mamba_head_dim linear_head_dim",
    32: "index_n_heads",  # the top-k of few heads is arbitrary: scores of 0 are equal
}
# Overrides, tried in order until the reduced model can be built and called.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"layer_types": ["linear_attention", "full_attention"]},
    {"layers_block_type": ["mamba", "attention"], "layer_types": ["mamba", "attention"]},
    {"num_experts_per_tok": 1},
    {"num_key_value_heads": "heads", "num_kv_heads": "heads", "n_kv_heads": "heads"},
    dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48], "max_position_embeddings": 64},
    {"attention_types": [[["global", "local"], 1]]},
    {"default_language": "en_XX"},
)
_MAX_TINY = 16_000_000  # parameters
# Bytes per parameter in a check: float32 weights, a float64 copy, gradients, two moments, another copy.
_BYTES_PER_PARAMETER = 4 + 8 + 4 + 8 + 8


@dataclass(frozen=True, eq=False)
class HFModel:
    """Factory for `ModelSpec.of` that builds a model with random weights.

    Attributes:
        config: configuration of transformers.
        model_class: transformers class for the configuration.
        name: the name of the configuration.
        notes: differences from the named configuration.
        trust_remote_code: allow code from the Hugging Face Hub.
    """

    config: Any
    model_class: Any
    name: str
    notes: tuple[str, ...] = ()
    trust_remote_code: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self) -> nn.Module:
        """Build a model."""
        build, config = self.model_class, copy.deepcopy(self.config)
        if hasattr(build, "from_config"):
            # Without an explicit False, transformers asks the user on a terminal.
            build = partial(build.from_config, trust_remote_code=self.trust_remote_code)
        model: nn.Module = build(config)
        return model


def load_hf_model(target: str, *, search: Path | None = None, trust_remote_code: bool = False) -> HFModel:
    """Return the factory that hf:NAME_OR_FOLDER or hf-tiny:NAME_OR_FOLDER names.

    Args:
        target: the name. A folder has a config.json.
        search: base of a relative folder. None: the current folder.
        trust_remote_code: allow code from the Hugging Face Hub.

    Raises:
        ValueError: no such configuration, a mistake in it, an unknown model type, code of the hub without
            permission, too little memory, or an architecture that cannot be reduced.
        ImportError: transformers is not installed.
    """
    prefix = next(each for each in _PREFIXES if target.startswith(each))
    name = target.removeprefix(prefix)
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{target}: needs transformers: pip install 'stackwise[hf]' ({error})") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    folder = (search or Path()) / Path(name).expanduser()
    try:
        found = _read_config(folder if folder.is_dir() or not name else name, trust_remote_code)
        config, notes = _text_part(found)
        model_class, more = _model_class(config, trust_remote_code)
        full = HFModel(config, model_class, Path(name).name, (*notes, *more), trust_remote_code)
        if prefix == "hf-tiny:":
            return _reduced(full)
        needed = _BYTES_PER_PARAMETER * _n_parameters(full)
    except Exception as error:
        raise ValueError(f"{target}: {_one_line(error)}") from None
    if needed > (available := _available_bytes()):
        raise ValueError(
            f"{target}: its checks need about {byte_text(needed)} of memory, and {byte_text(available)} are "
            f"available; {_PREFIXES[1]}{name} has the same architecture with small sizes"
        )
    return full


def hf_factory(config: Any) -> HFModel:
    """Return the factory of models with a configuration of transformers, and random weights.

    The class is that of `architectures`, otherwise one with a head for the type of configuration. Code from
    the Hugging Face Hub is never run.
    """
    model_class, notes = _model_class(config, trust_remote_code=False)
    return HFModel(config, model_class, type(config).__name__, notes)


def _tiny_config(config: Any, more: Mapping[str, Any] | None = None) -> tuple[Any, tuple[str, ...]]:
    """Return the reduced configuration, and notes on other changed settings.

    Args:
        config: configuration of transformers.
        more: overrides for keys that the configuration has.
    """
    given = config.to_dict()
    notes: list[str] = []
    found = {size: _first(given, names) for size, names in _SIZE_NAMES.items()}
    small = _small_sizes(found, notes)
    rows = _layers(given, found["layers"], notes)
    changed = given | _resized(given, found, small, len(rows), notes) | _rare(given, notes)
    for key in ("n_group", "num_expert_group"):  # two expert groups if the original has several
        if (given.get(key) or 1) > 1:
            changed |= {key: 2, "topk_group": 1 if given["topk_group"] < given[key] else 2}
    _fit_mamba(given, changed, small["width"])
    _fit_heads(given, changed, found["head"], small["head"])
    changed |= _per_layer(given, rows, found["layers"])
    for key in getattr(type(config), "sub_configs", {}):
        if isinstance(changed.get(key), dict):
            changed[key] = _tiny_config(getattr(config, key))[0].to_dict()
    for key, value in (more or {}).items():
        if key in given:
            changed[key] = small["heads"] if value == "heads" else value
    _move_token_ids(changed, small["vocab"])
    return type(config).from_dict(changed), tuple(notes)


def _one_line(error: Exception) -> str:
    """Return an exception of transformers, or one of ours, as one line."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return f"the model needs its own code: {_TRUST_ADVICE}"
    return f"{text:.300}" if type(error) is ValueError else f"{type(error).__name__}: {text:.300}"


def _read_config(name: Path | str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if isinstance(name, Path) and not (name / "config.json").is_file():
        raise ValueError(f"{name} has no config.json; allowed: {_FORM}")
    if str(name).startswith(("/", ".", "~")) and not isinstance(name, Path):
        raise ValueError(f"there is no folder {name}; allowed: {_FORM}")
    try:
        return AutoConfig.from_pretrained(str(name), trust_remote_code=trust_remote_code)
    except OSError as error:
        text = " ".join(str(error).split())
        offline = "connect" in text or "offline" in text.lower()
        reason = "there is no network, and it is not in the cache" if offline else f"{text:.200}"
        raise ValueError(f"no configuration found ({reason}); allowed: {_FORM}") from None


def _text_part(config: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the text configuration of a multimodal model, with a note."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True) if type(config).sub_configs else config
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config, ()
    return text, (f"only the text model of {config.model_type}",)


def _model_class(config: Any, trust_remote_code: bool) -> tuple[Any, tuple[str, ...]]:
    """Return the class of `architectures`, otherwise one with a head, otherwise the base model; and notes."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    is_remote = trust_remote_code and bool(getattr(config, "auto_map", None))
    names = tuple(config.architectures or ())
    for name in names:
        named = getattr(transformers, name, None)
        if isinstance(config, getattr(named, "config_class", None) or ()):
            return named, ()
    kinds = {
        "CausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "MaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING,
        "Seq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "ImageClassification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        "CTC": auto.MODEL_FOR_CTC_MAPPING,
        "AudioClassification": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
    }
    heads = [kind for kind, mapping in kinds.items() if type(config) in mapping]
    if is_remote:
        head = "CausalLM"
    elif "MaskedLM" in heads and getattr(config, "is_decoder", None) is False:
        head = "MaskedLM"
    else:
        head = next(iter(heads), "")
    found = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    if not names or is_remote:
        return found, ()
    return found, (f"{found.__name__} instead of {', '.join(names)}, which transformers lacks",)


def _reduced(full: HFModel) -> HFModel:
    """Return the factory of the smallest model of the architecture that can be built and called."""
    problem = ""
    for variant in _VARIANTS:
        try:
            config, notes = _tiny_config(full.config, variant)
            notes += tuple(f"{key} = {value}" for key, value in variant.items() if key in config.to_dict())
            model = replace(full, config=config, notes=(*full.notes, *notes))
            _try(model)
            return model
        except Exception as error:
            problem = problem or _one_line(error)
    kind = full.config.model_type
    raise ValueError(f"{kind} cannot be reduced ({problem}); write a small configuration and use hf:")


def _try(model: HFModel) -> None:
    """Raise if a reduced model is too large, or cannot be built and called."""
    ids = torch.randint(3, 16, (2, 12), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if (n_parameters := _n_parameters(model)) > _MAX_TINY:
            raise ValueError(f"it still has {n_parameters:,} parameters")
        built = model().eval()
        if (name := getattr(built, "main_input_name", "input_ids")) != "input_ids":
            raise ValueError(f"hf-tiny: supports token models only; this one takes {name}")
        built(ids)


def _n_parameters(model: HFModel) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model().parameters())


def _available_bytes() -> int:
    """Return the available memory of the machine or of the control group, whichever is smaller."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    amounts = [pages]
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        amounts.append(1024 * int(lines["MemAvailable"].split()[0]))
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        amounts.append(int(limit) - int((group / "memory.current").read_text()) + int(used["inactive_file"]))
    return max(0, min(amounts))


def _small_sizes(found: Mapping[str, int | None], notes: list[str]) -> dict[str, int]:
    """Return the reduced value of each size."""
    heads, kv_heads = _heads(found["heads"], found["kv_heads"], notes)
    head = min(_HEAD, found["head"] or _HEAD)
    is_full = found["head"] is None or found["head"] * (found["heads"] or 1) == found["width"]
    old_head = found["head"] or max(1, (found["width"] or _HEAD) // (found["heads"] or 1))
    return {
        "vocab": min(_VOCAB, found["vocab"] or _VOCAB),
        "width": heads * head if is_full else max(32, heads * head // 2),
        "heads": heads,
        "kv_heads": kv_heads,
        "head": head,
        "experts": min(_EXPERTS, found["experts"] or _EXPERTS),
        "chosen": max(1, min(2, found["chosen"] or 1)),
        "length": min(_LENGTH, found["length"] or _LENGTH),
        "window": min(_WINDOW, found["window"] or _WINDOW),
        "rotary": max(2, 2 * round(head * (found["rotary"] or 0) / old_head / 2)),
    }


def _resized(
    given: Mapping[str, Any],
    found: Mapping[str, int | None],
    small: Mapping[str, int],
    n_layers: int,
    notes: list[str],
) -> dict[str, int]:
    """Return the new value of each size setting."""
    changed = {}
    names = [(size, key) for size, keys in _SIZE_NAMES.items() for key in keys.split()]
    for size, key in names:
        old = given.get(key)
        if not isinstance(old, int) or isinstance(old, bool) or old <= 0:
            continue
        if size == "layers":
            changed[key] = n_layers if old == found["layers"] else min(old, _LAYERS)
        elif size == "inner" or (size == "width" and old != found["width"]):
            changed[key] = max(16, 8 * round(small["width"] * old / (found["width"] or old) / 8))
        else:
            changed[key] = small[size]
        if size == "window" and old > _WINDOW:
            notes.append(f"{key} {old} -> {_WINDOW}, so that short inputs reach its end")
    return changed


def _rare(given: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the new value of each setting that only some architectures have."""
    limits = {key: most for most, keys in _RARE.items() for key in keys.split()}
    large = {k: most for k, most in limits.items() if isinstance(given.get(k), int) and given[k] > most}
    notes += [f"{key} {given[key]} -> 0" for key, most in large.items() if most == 0]
    return large | ({"attn_layer_indices": [1]} if given.get("attn_layer_indices") else {})


def _fit_heads(given: Mapping[str, Any], changed: dict[str, Any], head: int | None, small: int) -> None:
    """Set the sizes that depend on the head dimension (`head` before, `small` now)."""
    rotary = changed.get("qk_rope_head_dim")
    if rotary and given.get("head_dim") == given["qk_rope_head_dim"]:
        changed["head_dim"] = rotary
    if rotary and "qk_head_dim" in given:
        changed["qk_head_dim"] = rotary + changed["qk_nope_head_dim"]
    if head is not None and given.get("query_pre_attn_scalar") == head:
        changed["query_pre_attn_scalar"] = small
    for key, value in given.items():
        if key.startswith("rope") and isinstance(value, dict):
            changed[key] = _rotary(value, rotary or small, given)


def _per_layer(given: Mapping[str, Any], rows: list[int], n_layers: int | None) -> dict[str, Any]:
    """Return per-layer lists and dictionaries, reduced to the layers in `rows`."""
    changed: dict[str, Any] = {}
    for key, value in given.items():
        if _is_index_list(key, value, n_layers):
            changed[key] = [rows.index(row) for row in value if row in rows]
        elif isinstance(value, list | tuple) and len(value) == n_layers and len(value) > 1:
            changed[key] = [value[row % len(value)] for row in rows]
        elif isinstance(value, dict) and value and key != "id2label" and all(str(k).isdigit() for k in value):
            changed[key] = {rows.index(int(k)): of for k, of in value.items() if int(k) in rows}
    return changed


def _first(given: Mapping[str, Any], names: str) -> int | None:
    values = (given.get(name) for name in names.split())
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _heads(heads: int | None, kv_heads: int | None, notes: list[str]) -> tuple[int, int]:
    """Return small numbers of query and key heads with the same ratio."""
    if heads is None:
        return 4, 4
    if kv_heads is None or kv_heads == heads:
        return min(4, heads), min(4, heads)
    ratio = heads // kv_heads
    if ratio > _MAX_HEADS_PER_KV:
        notes.append(f"{_MAX_HEADS_PER_KV} query heads per KV head instead of {ratio}")
        ratio = _MAX_HEADS_PER_KV
    small = min(kv_heads, 2)
    return small * ratio, small


def _fit_mamba(given: Mapping[str, Any], changed: dict[str, Any], width: int) -> None:
    """Set the number of state-space heads from the expanded width."""
    for heads, head, groups in (
        ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
        ("mamba_num_heads", "mamba_head_dim", "n_groups"),
        ("num_heads", "head_dim", "n_groups"),
        ("n_mamba_heads", "mamba_headdim", "mamba_ngroups"),
    ):
        expand = given.get("mamba_expand") or given.get("expand")
        if expand and given.get(heads) and given.get(head):
            changed |= {heads: int(expand * width) // _HEAD, head: _HEAD}
            if given.get(groups):
                changed[groups] = min(given[groups], 2)
            for key in ("mamba_d_ssm", "mamba_intermediate_size"):
                if given.get(key):
                    changed[key] = int(expand * width)
            return


def _layers(given: Mapping[str, Any], n_layers: int | None, notes: list[str]) -> list[int]:
    """Return the indices of the remaining layers: one per kind, two to four."""
    if n_layers is None or n_layers <= _LAYERS:
        return list(range(n_layers or _LAYERS))
    lists = {key: value for key, value in given.items() if isinstance(value, list | tuple)}
    indices = [value for key, value in lists.items() if _is_index_list(key, value, n_layers)]
    per_layer = [value for value in lists.values() if len(value) == n_layers and value not in indices]
    kinds: dict[str, int] = {}
    for row in range(n_layers):
        kind = [each[row] for each in per_layer] + [row in each for each in indices]
        kinds.setdefault(str(kind), row)
    rows = sorted(kinds.values())
    if len(rows) > _MAX_KINDS:
        notes.append(f"only {_MAX_KINDS} of {len(rows)} kinds of layers are kept")
        rows = rows[:_MAX_KINDS]
    return rows if len(rows) >= _LAYERS else [0, n_layers - 1]


def _is_index_list(key: str, value: Any, n_layers: int | None) -> bool:
    """Return True for a setting that lists layers by number, such as `moe_layers`."""
    if not isinstance(value, list | tuple) or not value or n_layers is None:
        return False
    if not any(word in key for word in ("layer", "idx", "ind")):
        return False
    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    return numbers and list(value) == sorted(set(value)) and value[0] >= 0 and value[-1] < n_layers


def _rotary(parameters: Mapping[str, Any], head: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Resize the rotary settings for the small head dimension."""
    partial = parameters.get("partial_rotary_factor") or given.get("partial_rotary_factor") or 1.0
    half = int(head * partial) // 2
    changed = dict(parameters)
    for key, value in parameters.items():
        if isinstance(value, dict):
            changed[key] = _rotary(value, head, given)
        elif key in ("long_factor", "short_factor"):
            changed[key] = value[:half]
        elif key == "mrope_section":
            parts = [max(1, math.floor(half * each / sum(value))) for each in value]
            parts[0] += half - sum(parts)
            changed[key] = parts
    return changed


def _move_token_ids(changed: dict[str, Any], vocab: int) -> None:
    """Move the ids of special tokens into the small vocabulary, each to its own place at the end."""
    free = iter(range(vocab - 1, 0, -1))
    for key, value in changed.items():
        if not key.endswith(("_token_id", "_token_index")):
            continue
        if isinstance(value, int) and value >= vocab:
            changed[key] = next(free)
        elif isinstance(value, list) and any(isinstance(each, int) and each >= vocab for each in value):
            changed[key] = [next(free) if each >= vocab else each for each in value]
