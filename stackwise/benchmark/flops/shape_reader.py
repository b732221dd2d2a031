"""ShapeReading: TransformerShape of a model from its configuration, verified by its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.benchmark.flops.transformer_shape import (
    AttentionShape,
    ExpertsShape,
    FeedForwardShape,
    KernelShape,
    LatentShape,
    LayerShape,
    SoftmaxShape,
    TransformerShape,
)
from stackwise.config import BlockConfig, KernelConfig, LatentConfig
from stackwise.subject.call_form import unwrapped

__all__ = ["RACK_CHUNK", "ShapeReading", "looked_up", "matrices", "read_shape", "weights_dtype"]

RACK_CHUNK = 128  # positions that kernel attention of a Rack computes as a square
_ALIKE, _BY_LAYER, _NONE = "alike", "by layer", "none"


@dataclass(frozen=True)
class ShapeReading:
    """Result of reading a shape.

    Attributes:
        shape: shape of the model. None: unknown.
        reason: reason why the shape is unknown. None if it is known.
    """

    shape: TransformerShape | None
    reason: str | None


class _UnknownError(Exception):
    """Error with the reason why a shape is unknown."""


def read_shape(model: nn.Module | TransformerShape) -> ShapeReading:
    """Return the sizes of a Rack, of a transformers model of a known family, or from `transformer_shape()`.

    The sizes are read from the model's configuration and verified: if the number of weights in matrices
    differs from that of the model, the shape is unknown. Adapters and modified layers are therefore detected.

    Args:
        model: a model, which may be compiled or in DistributedDataParallel, or a TransformerShape, which is
            returned unchanged.
    """
    if isinstance(model, TransformerShape):
        return ShapeReading(model, None)
    model = unwrapped(model)
    try:
        return ShapeReading(_confirmed(_told(model), model), None)
    except _UnknownError as error:
        return ShapeReading(None, str(error))


def looked_up(model: nn.Module) -> list[nn.Parameter]:
    """Return the tables of which only single rows are read: embeddings that are not also a head."""
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    tables = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
    return _unique(weight for weight in tables if id(weight) not in heads)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that multiply: at least two dimensions, not only looked up, each once."""
    tables = {id(table) for table in looked_up(model)}
    return [p for p in _unique(model.parameters()) if p.ndim > 1 and id(p) not in tables]


def weights_dtype(model: nn.Module) -> torch.dtype:
    """Return the most frequent dtype of the floating-point weights. Default: float32.

    8-bit dtypes are ignored, because they are rarely used for computation.
    """
    sizes: Counter[torch.dtype] = Counter()
    for p in model.parameters():
        if p.is_floating_point() and p.dtype.itemsize > 1:
            sizes[p.dtype] += p.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _told(model: nn.Module) -> TransformerShape:
    """Return the shape from the model's configuration."""
    offered = getattr(model, "transformer_shape", None)
    if callable(offered):
        shape = offered()
        if not isinstance(shape, TransformerShape):
            raise _UnknownError(f"transformer_shape() returned {type(shape).__name__}, no TransformerShape")
        return shape
    blocks = _blocks(model)
    if blocks:
        return _rack(model, blocks)
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if family is None:
        raise _UnknownError(
            f"{type(model).__name__} is no Rack, no transformers model, and has no transformer_shape()"
        )
    if family not in _FAMILIES:
        raise _UnknownError(f"model_type {family!r} is none of {', '.join(_FAMILIES)}")
    if getattr(config, "is_heterogeneous", False):
        raise _UnknownError("per_layer_config: the layers of one model differ")
    if _FAMILIES[family] is not _bert:
        _check_causal(config)
    try:
        return _FAMILIES[family](model, config)
    except (AttributeError, TypeError, ValueError) as error:
        # A third-party configuration may use the name of a family for another architecture.
        raise _UnknownError(f"the configuration is not that of a {family!r}: {error}") from error


def _check_causal(config: Any) -> None:
    """Raise _UnknownError for a decoder that sees later positions only in some versions of transformers.

    The direction also depends on the attention kernel.
    """
    for key, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        value = getattr(config, key, causal)
        if bool(value) is not causal:
            raise _UnknownError(f"{key}: {value!r}; who sees whom, the model does not say")


def _confirmed(shape: TransformerShape, model: nn.Module) -> TransformerShape:
    """Return the shape with its frozen weights. Raise _UnknownError if the number of weights differs."""
    of_model = matrices(model)
    found = sum(p.numel() for p in of_model)
    if found != shape.n_weights:
        raise _UnknownError(
            f"the matrices of {type(model).__name__} have {found} weights; by its settings {shape.n_weights}"
        )
    # A tied table is counted as the head, so only tables that are looked up remain.
    shape = replace(shape, embedding_weights=sum(table.numel() for table in looked_up(model)))
    frozen = sum(p.numel() for p in of_model if not p.requires_grad)
    if not frozen:
        return replace(shape, n_frozen=0)
    # If an embedding is trained, the gradient passes through all layers. Otherwise it stops at an unknown
    # layer.
    inputs = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    passes = any(weight.requires_grad for weight in inputs) and shape.n_active == shape.n_weights
    return replace(shape, n_frozen=frozen if passes else None)


def _unique(parameters: Iterable[nn.Parameter | Tensor]) -> list[nn.Parameter]:
    return list({id(p): p for p in parameters if isinstance(p, nn.Parameter)}.values())


def _blocks(model: nn.Module) -> list[BlockConfig]:
    """Return the configurations of the Blocks of a Rack in order. Empty for other models."""
    stacks = getattr(model, "stacks", None)
    if not isinstance(stacks, nn.ModuleList):
        return []
    blocks = [block for stack in stacks for block in getattr(stack, "blocks", [])]
    configs = [getattr(block, "config", None) for block in blocks]
    return [config for config in configs if isinstance(config, BlockConfig)]


def _rack(model: Any, blocks: list[BlockConfig]) -> TransformerShape:
    layers = [LayerShape((_block_attention(block),), FeedForwardShape(block.d_ff)) for block in blocks]
    return TransformerShape(model.d_model, tuple(layers), model.vocab_size * model.d_model, 0)


def _block_attention(block: BlockConfig) -> AttentionShape:
    causal, window = block.attention_mode == "causal", block.sliding_window
    if block.attention_type == "mla":
        latent = block.latent or LatentConfig()
        return LatentShape(
            block.n_heads,
            latent.kv_lora_rank,
            latent.qk_nope_head_dim,
            latent.qk_rope_head_dim,
            latent.v_head_dim,
            latent.q_lora_rank,
            causal,
            window,
            cached_tokens=window,
        )
    n_kv_heads = 1 if block.attention_type == "mqa" else block.n_kv_heads or block.n_heads
    head_dim = block.head_dim or block.d_model // block.n_heads
    if block.attention_type != "kernel":
        return SoftmaxShape(block.n_heads, n_kv_heads, head_dim, causal, window, cached_tokens=window)
    kernel = block.kernel or KernelConfig()
    features, frequencies = kernel.n_features, kernel.n_features
    match kernel.feature_map:
        case "elu":
            features, frequencies = head_dim, 0
        case "gaussian" | "laplacian":
            frequencies = features // 2  # one cosine and one sine per frequency
        case "favor":
            pass
    return KernelShape(block.n_heads, n_kv_heads, head_dim, features, frequencies, causal, RACK_CHUNK)


def _decoder(windows: str, feedforward: Callable[[Any, int], Any]) -> Callable[[nn.Module, Any], Any]:
    """Return a reader for families with one type of causal attention in all layers.

    The projections may be separate or fused.
    """

    def shape(model: nn.Module, config: Any) -> TransformerShape:
        n_layers, n_heads = config.num_hidden_layers, config.num_attention_heads
        n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
        layers = []
        for i, window in enumerate(_windows(config, windows, n_layers)):
            # transformers caches the tokens that the next token may see, without that token itself.
            kept = None if window is None else window - 1
            attention = SoftmaxShape(n_heads, n_kv_heads, head_dim, True, window, kept)
            layers.append(LayerShape((attention,), feedforward(config, i)))
        return _whole(model, config.hidden_size, layers, config.vocab_size)

    return shape


def _windows(config: Any, windows: str, n_layers: int) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if windows == _NONE or window is None:
        return [None] * n_layers
    if windows == _ALIKE and set(types or ["sliding_attention"]) == {"sliding_attention"}:
        return [window] * n_layers
    if types is None or len(types) != n_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise _UnknownError(f"layer_types {types!r} does not say which layers have the sliding_window")
    return [window if kind == "sliding_attention" else None for kind in types]


def _gated(config: Any, _: int) -> FeedForwardShape:
    return FeedForwardShape(config.intermediate_size)


def _plain(config: Any, _: int) -> FeedForwardShape:
    return FeedForwardShape(config.intermediate_size, n_matrices=2)


def _opt(config: Any, _: int) -> FeedForwardShape:
    return FeedForwardShape(config.ffn_dim, n_matrices=2)


def _olmoe(config: Any, _: int) -> ExpertsShape:
    return ExpertsShape(config.intermediate_size, config.num_experts, config.num_experts_per_tok)


def _mixtral(config: Any, _: int) -> ExpertsShape:
    return ExpertsShape(config.intermediate_size, config.num_local_experts, config.num_experts_per_tok)


def _qwen3_experts(config: Any, layer: int) -> FeedForwardShape | ExpertsShape:
    sparse = layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    if not sparse or not config.num_experts:
        return _gated(config, layer)
    return ExpertsShape(config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok)


def _deepseek(model: nn.Module, config: Any) -> TransformerShape:
    if not any(hasattr(module, "expand_kv") for module in model.modules()):
        raise _UnknownError("this version of transformers caches the expanded heads of latent attention")
    attention = LatentShape(
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.q_lora_rank,
        absorbs=False,
    )
    width = config.moe_intermediate_size
    shared = width * (config.n_shared_experts or 0)
    experts = ExpertsShape(width, config.n_routed_experts, config.num_experts_per_tok, shared)
    dense = FeedForwardShape(config.intermediate_size)
    layers = [
        LayerShape((attention,), dense if i < config.first_k_dense_replace else experts)
        for i in range(config.num_hidden_layers)
    ]
    return _whole(model, config.hidden_size, layers, config.vocab_size)


def _gpt2(model: nn.Module, config: Any) -> TransformerShape:
    if config.add_cross_attention:
        raise _UnknownError("add_cross_attention: how long the other sequence is, the model does not say")
    attention = SoftmaxShape(config.n_head, config.n_head, config.n_embd // config.n_head)
    layer = LayerShape((attention,), FeedForwardShape(config.n_inner or 4 * config.n_embd, n_matrices=2))
    return _whole(model, config.n_embd, [layer] * config.n_layer, config.vocab_size)


def _bert(model: nn.Module, config: Any) -> TransformerShape:
    if config.is_decoder or getattr(config, "add_cross_attention", False):
        raise _UnknownError("is_decoder, add_cross_attention: neither is known of an encoder")
    n_heads, width = config.num_attention_heads, config.hidden_size
    attention = SoftmaxShape(n_heads, n_heads, width // n_heads, causal=False)
    layer = LayerShape((attention,), FeedForwardShape(config.intermediate_size, n_matrices=2))
    # The head for masked tokens has an additional matrix (width, width).
    return _whole(model, width, [layer] * config.num_hidden_layers, config.vocab_size, before_head=width**2)


def _whole(
    model: Any, d_model: int, layers: list[LayerShape], vocab_size: int, before_head: int = 0
) -> TransformerShape:
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    head = vocab_size * d_model + before_head if get_head() is not None else 0
    return TransformerShape(d_model, tuple(layers), head, 0)


_FAMILIES: dict[str, Callable[[nn.Module, Any], TransformerShape]] = {
    "bert": _bert,
    "cohere": _decoder(_NONE, _gated),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _decoder(_NONE, _gated),
    "gemma2": _decoder(_BY_LAYER, _gated),
    "gemma3_text": _decoder(_BY_LAYER, _gated),
    "gpt2": _gpt2,
    "gpt_neox": _decoder(_NONE, _plain),
    "granite": _decoder(_NONE, _gated),
    "llama": _decoder(_NONE, _gated),
    "mistral": _decoder(_ALIKE, _gated),
    "mixtral": _decoder(_ALIKE, _mixtral),
    "olmo": _decoder(_NONE, _gated),
    "olmo2": _decoder(_NONE, _gated),
    "olmo3": _decoder(_BY_LAYER, _gated),
    "olmoe": _decoder(_NONE, _olmoe),
    "opt": _decoder(_NONE, _opt),
    "phi": _decoder(_NONE, _plain),
    "phi3": _decoder(_ALIKE, _gated),
    "qwen2": _decoder(_BY_LAYER, _gated),
    "qwen3": _decoder(_BY_LAYER, _gated),
    "qwen3_moe": _decoder(_ALIKE, _qwen3_experts),
    "roberta": _bert,
    "smollm3": _decoder(_BY_LAYER, _gated),
    "stablelm": _decoder(_NONE, _gated),
    "starcoder2": _decoder(_ALIKE, _plain),
}
