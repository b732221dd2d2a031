"""Facts: constants of a model, as its author or its configuration states them.

A wrong constant changes every call in the same way, so only a comparison with a stated value finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stackwise.support.arguments import check_number, check_sizes, require

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Facts", "alibi_slopes", "facts_in", "value_in"]

_OF_EACH_LAYER = ("attention_scale", "residual_scale")
_DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")
_COUNTS = {"key_heads": 1, "position_offset": 0, "experts_per_token": 1}  # fact -> smallest value
_TUPLES = {"windows": 1, "block_weights": 0, "relative_buckets": 2}


@dataclass(frozen=True)
class Facts:
    """Constants of a model. None: no claim.

    Attributes:
        attention_scale: factor between q k^T and the scores. q and k are the outputs of the projections, or
            of norms of RMS 1. A tuple has one value for each layer.
        attention_cap: c, if the scores are capped by c * tanh(score / c).
        alibi_slopes: for each head, the decrease of a score per position of distance.
        relative_buckets: number of buckets of relative positions that share a bias, as in T5
            (arXiv:1910.10683), and the distance from which all positions are in the last bucket. If keys
            after the query are visible, they have half of the buckets.
        key_heads: number of key heads. Consecutive query heads of the projection share a key head.
        embedding_scale: factor of the token embedding.
        residual_scale: factor of each branch that is added to the residual stream. A tuple has one
            value for each layer.
        logit_scale: factor of the logits, or of the input of the head.
        logit_cap: c, if the logits are capped by c * tanh(logit / c).
        position_offset: row of the first position in the table of positions.
        windows: for each layer, the number of positions that a query reads, including its own. None: all.
        embedding_dropout, attention_dropout, residual_dropout: dropout rate of the embedding, the attention
            weights, and the branches.
        initial_std: pattern of names of parameters, such as "*.q_proj.weight" -> standard deviation.
        norm_eps: eps of norms over the width of the residual stream.
        qk_norm_eps: eps of norms over other widths, such as those of queries and keys.
        block_weights: for each layer, the index of its set of weights: (0, 0, 1, 1) if neighbours share.
        experts_per_token: number of experts that process each token.
        routing_sum: sum of the weights of the experts of a token.
        router_loss: coefficient of the auxiliary loss in the model's own loss.
    """

    attention_scale: float | tuple[float, ...] | None = None
    attention_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    relative_buckets: tuple[int, int] | None = None
    key_heads: int | None = None
    embedding_scale: float | None = None
    residual_scale: float | tuple[float, ...] | None = None
    logit_scale: float | None = None
    logit_cap: float | None = None
    position_offset: int | None = None
    windows: tuple[int | None, ...] | None = None
    embedding_dropout: float | None = None
    attention_dropout: float | None = None
    residual_dropout: float | None = None
    initial_std: Mapping[str, float] | None = None
    norm_eps: float | None = None
    qk_norm_eps: float | None = None
    block_weights: tuple[int, ...] | None = None
    experts_per_token: int | None = None
    routing_sum: float | None = None
    router_loss: float | None = None

    def __post_init__(self) -> None:
        for fact, value in vars(self).items():
            if value is None:
                continue
            if fact in _COUNTS:
                check_sizes(_COUNTS[fact], **{fact: value})
            elif fact in _TUPLES:
                least, takes_none = _TUPLES[fact], fact == "windows"
                is_valid = isinstance(value, tuple) and bool(value)
                is_valid = is_valid and all(
                    (type(x) is int and x >= least) or (x is None and takes_none) for x in value
                )
                require(is_valid, fact, value, f"a tuple of integers >= {least}" + " or None" * takes_none)
                if fact == "relative_buckets":
                    is_pair = len(value) == 2 and _is_bucketed(*value)
                    require(is_pair, fact, value, "(number >= 4, distance > number / 2)")
            elif fact in _DROPOUTS:
                check_number(fact, value, "a number >= 0 and < 1", lambda rate: 0 <= rate < 1)
            else:
                self._check_positive(fact, value)

    def filled_from(self, others: Facts) -> Facts:
        """Return these facts, and the others that have no claim here."""
        return replace(others, **{fact: value for fact, value in vars(self).items() if value is not None})

    def _check_positive(self, fact: str, value: Any) -> None:
        """Require numbers above 0: one, a tuple with one for each layer or head, or a dict of patterns."""
        several = (value,)
        if fact == "initial_std":
            require(isinstance(value, Mapping) and bool(value), fact, value, "a dict of patterns")
            several = tuple(value.values())
        elif fact == "alibi_slopes" or (fact in _OF_EACH_LAYER and isinstance(value, tuple)):
            require(isinstance(value, tuple) and bool(value), fact, value, "a tuple of numbers > 0")
            several = value
        for number in several:
            check_number(fact, number, "finite numbers > 0", lambda number: number > 0)


def alibi_slopes(n_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Return the slopes of ALiBi (arXiv:2108.12409) for a number of heads."""
    n = 2 ** math.ceil(math.log2(n_heads))
    slopes = [2 ** (-max_bias * (i + 1) / n) for i in range(n)]
    return tuple(slopes if n == n_heads else (slopes[1::2] + slopes[::2])[:n_heads])


def facts_in(model: nn.Module) -> tuple[Facts, dict[str, str]]:
    """Return the facts that a model of transformers, litgpt or x-transformers states, with their sources.

    Models of x-transformers have no configuration. Public attributes of their modules keep some options.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "model_type") and hasattr(config, "get_text_config"):
        config, rows = config.get_text_config(), _ROWS
    elif hasattr(config, "n_query_groups"):
        rows = _ROWS_OF_LITGPT
    else:
        return _facts_of_options(model)
    found: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for fact, names, read in rows:
        for key in names.split():
            value = value_in(config, key)
            stated = None if fact in found or value is None else read(value, config)
            if stated is not None:
                found[fact], keys[fact] = stated, _text(f"config.{key}", value)
    std = getattr(config, "initializer_range", None)
    # With a further factor, as in CLIP, each kind of weight has a formula of its own.
    is_plain = isinstance(std, float) and not hasattr(config, "initializer_factor")
    if is_plain and any(name.endswith(_QUERIES[1:]) for name, _ in model.named_parameters()):
        found["initial_std"], keys["initial_std"] = {_QUERIES: std}, _text("config.initializer_range", std)
    return Facts(**found), keys


def _facts_of_options(model: nn.Module) -> tuple[Facts, dict[str, str]]:
    """Return the facts in public attributes of a model of x-transformers that have the name of an option.

    A model that only contains layers of x-transformers may have other layers, so nothing is inferred for it.
    """
    if not type(model).__module__.startswith("x_transformers."):
        return Facts(), {}
    found: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for fact, option, read in _ROWS_OF_X_TRANSFORMERS:
        kind, _, name = option.partition(".")
        owners = [x for x in model.modules() if type(x).__name__ == kind and hasattr(x, name)]
        stated = {read(getattr(owner, name), owner) for owner in owners}
        if len(stated) == 1 and (value := stated.pop()) is not None:
            found[fact] = (value,) * len(owners) if fact == "windows" else value
            keys[fact] = _text(option, getattr(owners[0], name))
    return Facts(**found), keys


def value_in(config: Any, key: str) -> Any:
    """Return a value of a configuration. None: it has none, or layers with different ones."""
    try:
        return getattr(config, key, None)
    except RuntimeError:  # of transformers, for a value that differs between layers
        return None


def _text(key: str, value: Any) -> str:
    return f"{key} = {value}" if isinstance(value, int | float | str) else key


def _number(value: Any, _: Any) -> Any:
    return value if type(value) in (int, float) and value > 0 else None


def _rate(value: Any, _: Any) -> Any:
    return float(value) if type(value) in (int, float) and 0 <= value < 1 else None


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _scale_of_gpt2(is_scaled: bool, config: Any) -> float | tuple[float, ...]:
    scale = _head_dim(config) ** -0.5 if is_scaled else 1.0
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return tuple(scale / (layer + 1) for layer in range(config.num_hidden_layers))
    return scale


def _key_heads(value: Any, config: Any) -> int | None:
    # These models share heads in another way, or ignore the key.
    if config.model_type in ("diffllama", "inkling_text", "jetmoe", "mimo_v2_flash", "whisper", "zaya"):
        return None
    if value is True:  # multi_query
        return None if getattr(config, "new_decoder_architecture", False) else 1
    # Latent attention has keys for each head.
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    is_known = type(value) is int and value > 0 and not is_latent
    return value if is_known and config.num_attention_heads % value == 0 else None


def _windows(window: Any, config: Any) -> tuple[int | None, ...] | None:
    sizes = {"full_attention": None, "sliding_attention": window}
    types = getattr(config, "layer_types", None) or ()
    is_known = type(window) is int and all(x in sizes for x in types) and "sliding_attention" in types
    return tuple(sizes[x] for x in types) if is_known else None


def _slopes(kind: str, config: Any) -> tuple[float, ...] | None:
    n_heads = getattr(config, "num_attention_heads", None) or 1
    if kind == "bloom":
        return alibi_slopes(n_heads)
    if kind == "mpt" and config.attn_config.alibi:
        return alibi_slopes(n_heads, config.attn_config.alibi_bias_max)
    if kind == "falcon" and config.alibi:  # scores and biases are scaled together
        return tuple(x * _head_dim(config) ** -0.5 for x in alibi_slopes(n_heads))
    return None


def _offset(kind: str, config: Any) -> int | None:
    if kind in ("roberta", "xlm-roberta", "camembert", "data2vec-text", "xlm-roberta-xl"):
        return None if config.pad_token_id is None else int(config.pad_token_id) + 1
    return {"opt": 2, "bart": 2, "mbart": 2, "biogpt": 2, "gpt2": 0, "bert": 0}.get(kind)


def _buckets(number: Any, config: Any) -> tuple[int, int] | None:
    distance: Any = getattr(config, "relative_attention_max_distance", None)
    is_known = type(number) is type(distance) is int and _is_bucketed(number, distance)
    return (number, distance) if is_known else None


def _is_bucketed(number: int, distance: int) -> bool:
    """Return True if the buckets are those of single positions first, and of growing ranges after them."""
    return distance > number // 2 >= 2


def _routing_sum(is_normalised: Any, config: Any) -> float | None:
    return float(getattr(config, "routed_scaling_factor", None) or 1.0) if is_normalised is True else None


def _windows_of_litgpt(window: Any, config: Any) -> tuple[int | None, ...] | None:
    chosen = value_in(config, "sliding_window_indices")  # earlier versions have other keys
    return chosen and tuple(window if is_local else None for is_local in chosen[: config.n_layer])


def _scale_of_litgpt(size: Any, config: Any) -> float | None:
    # YaRN with this key, and latent attention, have further factors.
    is_other = "mscale_all_dim" in (value_in(config, "rope_adjustments") or {}) or _is_latent(config)
    return None if is_other or not hasattr(config, "attention_scores_scalar") else float(size**-0.5)


def _eps_of_queries(eps: Any, config: Any) -> Any:
    return _number(eps, config) if value_in(config, "norm_qk") else None


def _is_latent(config: Any) -> bool:
    return value_in(config, "latent_attention") is not None


_QUERIES = "*.q_proj.weight"
# (fact, keys of a configuration, (value, configuration) -> value of the fact, or None)
_ROWS: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = (
    ("attention_scale", "query_pre_attn_scalar", lambda value, _: value**-0.5),
    ("attention_scale", "attention_multiplier", _number),
    ("attention_scale", "scale_attn_weights", _scale_of_gpt2),
    ("attention_cap", "attn_logit_softcapping", _number),
    ("alibi_slopes", "model_type", _slopes),
    ("relative_buckets", "relative_attention_num_buckets", _buckets),
    ("key_heads", "multi_query num_key_value_heads num_kv_heads", _key_heads),
    ("embedding_scale", "embedding_multiplier", _number),
    ("embedding_scale", "scale_embedding", lambda value, config: config.hidden_size**0.5 if value else None),
    ("residual_scale", "residual_multiplier", _number),
    ("logit_scale", "logits_scaling", lambda value, _: 1 / value),
    ("logit_scale", "logit_scale lm_head_multiplier", _number),
    ("logit_cap", "final_logit_softcapping", _number),
    ("position_offset", "model_type", _offset),
    ("windows", "sliding_window", _windows),
    ("embedding_dropout", "embd_pdrop", _rate),
    ("attention_dropout", "attention_dropout attn_pdrop attention_probs_dropout_prob", _rate),
    ("residual_dropout", "resid_pdrop residual_dropout hidden_dropout dropout", _rate),
    ("norm_eps", "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon", _number),
    ("experts_per_token", "num_experts_per_tok num_experts_per_token", _number),
    ("routing_sum", "norm_topk_prob", _routing_sum),
    ("router_loss", "router_aux_loss_coef", _number),
)
_ROWS_OF_LITGPT: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = (
    ("attention_scale", "attention_scores_scalar head_size", _scale_of_litgpt),
    ("attention_cap", "attention_logit_softcapping", _number),
    ("key_heads", "n_query_groups", lambda value, config: None if _is_latent(config) else value),
    ("embedding_scale", "scale_embeddings", lambda value, config: config.n_embd**0.5 if value else 1.0),
    ("logit_cap", "final_logit_softcapping", _number),
    ("windows", "sliding_window_size", _windows_of_litgpt),
    ("norm_eps", "norm_eps", _number),
    ("qk_norm_eps", "norm_eps", _eps_of_queries),
    ("experts_per_token", "n_expert_per_token", _number),
    ("routing_sum", "norm_topk_prob", _routing_sum),
)
# (fact, class and attribute, (value, module) -> value of the fact, or None)
_ROWS_OF_X_TRANSFORMERS: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = (
    (
        "attention_cap",
        "Attend.logit_softclamp_value",
        lambda value, x: value if getattr(x, "softclamp_logits", False) else None,
    ),
    ("embedding_dropout", "TransformerWrapper.emb_dropout", lambda module, _: _rate(module.p, None)),
    ("attention_dropout", "Attend.dropout", _rate),
    ("windows", "Attention.max_attend_past", lambda n, _: None if n is None else n + 1),
    # Heads that share a key head are not consecutive.
    ("key_heads", "Attention.kv_heads", lambda n, x: n if n in (1, getattr(x, "heads", n)) else None),
    (
        "alibi_slopes",
        "AlibiPositionalBias.total_heads",
        lambda n, x: alibi_slopes(n) if n == x.heads else None,
    ),
    (
        "relative_buckets",
        "RelativePositionBias.num_buckets",
        lambda n, x: (n, x.max_distance) if _is_bucketed(n, x.max_distance) else None,
    ),
    ("logit_scale", "TransformerWrapper.tie_embedding_scale", _number),
)
