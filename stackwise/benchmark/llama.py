"""Llama baseline: a Llama of the same size as a model, for comparison with that model.

Sizes: V vocabulary, C width, L layers, F width of the feed-forward part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from stackwise.benchmark.flops.shape_reader import read_shape, weights_dtype
from stackwise.benchmark.flops.transformer_shape import SoftmaxShape
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import require

__all__ = ["LlamaSize", "llama_baseline", "llama_size"]

_STEP = 16  # step of C: a head has 16 features, or 64 if C is a multiple of 64
_USUAL_ASPECT = 64  # C / L: 64 for 124M parameters, 128 for 7B
_MOST_LAYERS = 128


@dataclass(frozen=True)
class LlamaSize:
    """Sizes of a Llama. A layer has 2 (H + K) D C + 3 C F + 2 C weights, and the last norm has C."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    tied: bool

    @property
    def n_parameters(self) -> int:
        """Total number of parameters. A tied head counts once."""
        tables = (1 if self.tied else 2) * self.vocab_size * self.d_model
        head_dim = self.d_model // self.n_heads
        attention = 2 * (self.n_heads + self.n_kv_heads) * head_dim * self.d_model
        layer = attention + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return tables + self.n_layers * layer + self.d_model


def llama_baseline(like: Any, *, name: str = "llama") -> ModelSpec:
    """Return a Llama of transformers with the vocabulary and about the number of parameters of `like`.

    Width, depth and heads are the same as in `like` if its sizes are known and possible for a Llama. The
    width of the feed-forward part is adjusted to reach the number of parameters. The weights have the most
    frequent dtype of the weights of `like`. The Llama is causal. If `like` is not, the `notes` of the spec
    report it, and so does a table of `compare_architectures`.

    Args:
        like: anything that `ModelSpec.of` accepts, for a model that takes tokens.
        name: name of the baseline.

    Raises:
        ImportError: transformers is not installed: pip install 'stackwise[hf]'.
        ValueError: a model that takes vectors, or that is too small for any Llama with its vocabulary.
    """
    spec = ModelSpec.of(like)
    require(spec.inputs == "tokens", "like", spec.name, "a model that takes tokens")
    model = spec.create()
    size, dtype = llama_size(model, vocab_size=spec.width), weights_dtype(model)
    del model
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ImportError("llama_baseline needs transformers: pip install 'stackwise[hf]'") from error

    def llama() -> nn.Module:
        made: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size.vocab_size,
                hidden_size=size.d_model,
                intermediate_size=size.d_ff,
                num_hidden_layers=size.n_layers,
                num_attention_heads=size.n_heads,
                num_key_value_heads=size.n_kv_heads,
                max_position_embeddings=spec.max_length or 1 << 20,
                tie_word_embeddings=size.tied,
            )
        )
        # `made.to(dtype)` would also round the buffers that positions are computed from.
        for weight in made.parameters():
            weight.data = weight.data.to(dtype)
        return made

    found = ModelSpec.of(llama, name=name)
    if spec.causal is False:
        found = replace(found, notes=f"{found.notes}; it is causal, which {spec.name} is not")
    return found


def llama_size(model: nn.Module, *, vocab_size: int) -> LlamaSize:
    """Return the sizes of a Llama with the number of parameters of `model`.

    Raises:
        ValueError: no Llama is that small.
    """
    n_parameters = sum(p.numel() for p in model.parameters())
    tied = _is_tied(model, vocab_size)
    size = _same_shape(model, vocab_size, tied)
    fitted = None if size is None else _fitted(size, n_parameters)
    if fitted is not None:
        return fitted
    candidates = [
        fitted
        for n_layers in range(1, _MOST_LAYERS + 1)
        if (fitted := _of_depth(n_layers, n_parameters, vocab_size, tied)) is not None
    ]
    least = LlamaSize(vocab_size, _STEP, 1, 1, 1, 1, tied).n_parameters
    require(
        bool(candidates), "like", f"{n_parameters:,} parameters", f"at least {least:,}, of the least Llama"
    )
    return min(candidates, key=lambda size: abs(math.log(size.d_model / (_USUAL_ASPECT * size.n_layers))))


def _is_tied(model: nn.Module, vocab_size: int) -> bool:
    """Return True if the head shares its weight with the embedding.

    Without an embedding or a linear head of the vocabulary's size, return True if at most one matrix has a
    dimension of that size.
    """
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings >= vocab_size
    }
    heads = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features >= vocab_size
    ]
    if not heads or not tables:
        return sum(p.ndim == 2 and vocab_size in p.shape for p in model.parameters()) <= 1
    return any(id(weight) in tables for weight in heads)


def _same_shape(model: nn.Module, vocab_size: int, tied: bool) -> LlamaSize | None:
    """Return width, depth and heads of a model if all its layers have the softmax attention of a Llama.

    The attention windows may differ, because they do not affect the size. None: another kind of model.
    """
    shape = read_shape(model).shape
    if shape is None or not shape.layers:
        return None
    every = [attention for layer in shape.layers for attention in layer.attention]
    softmax = [each for each in every if isinstance(each, SoftmaxShape)]
    kinds = {(each.n_heads, each.n_kv_heads, each.head_dim) for each in softmax}
    if len(kinds) != 1 or len(softmax) < len(every):
        return None
    first = softmax[0]
    if first.n_heads * first.head_dim != shape.d_model or first.head_dim % 2:
        return None
    heads = (first.n_heads, first.n_kv_heads)
    return LlamaSize(vocab_size, shape.d_model, len(shape.layers), *heads, 1, tied)


def _of_depth(n_layers: int, n_parameters: int, vocab_size: int, tied: bool) -> LlamaSize | None:
    """Return the widest Llama of `n_layers` layers that is not too large with F = 8 C / 3, with adjusted F.

    None: no F fits.
    """

    def of_width(d_model: int) -> LlamaSize:
        heads = d_model // (64 if d_model % 64 == 0 else _STEP)
        return LlamaSize(vocab_size, d_model, n_layers, heads, heads, 8 * d_model // 3, tied)

    low, high = 0, 1
    while of_width(high * _STEP).n_parameters <= n_parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if of_width(middle * _STEP).n_parameters <= n_parameters:
            low = middle
        else:
            high = middle
    return _fitted(of_width(max(low, 1) * _STEP), n_parameters)


def _fitted(size: LlamaSize, n_parameters: int) -> LlamaSize | None:
    """Return the sizes with the F that is closest to `n_parameters`. None: F would be less than 1."""
    each = 3 * size.d_model * size.n_layers
    d_ff = size.d_ff + round((n_parameters - size.n_parameters) / each)
    if d_ff < 1:
        return None
    return LlamaSize(
        size.vocab_size, size.d_model, size.n_layers, size.n_heads, size.n_kv_heads, d_ff, size.tied
    )
