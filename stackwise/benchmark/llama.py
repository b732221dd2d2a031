"""Llama baseline: a Llama of the same size as a model, to measure that model beside.

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

_STEP = 16  # of C: heads of 16, and of 64 where they fit
_USUAL_ASPECT = 64  # C over L: 64 for 124M parameters, 128 for 7B
_MOST_LAYERS = 128


@dataclass(frozen=True)
class LlamaSize:
    """The sizes of a Llama, each layer with 2 (H + K) D C + 3 C F + 2 C weights, and the last norm with C."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    tied: bool

    @property
    def n_parameters(self) -> int:
        """All of them; a tied head counts once."""
        tables = (1 if self.tied else 2) * self.vocab_size * self.d_model
        head_dim = self.d_model // self.n_heads
        attention = 2 * (self.n_heads + self.n_kv_heads) * head_dim * self.d_model
        layer = attention + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return tables + self.n_layers * layer + self.d_model


def llama_baseline(like: Any, *, name: str = "llama") -> ModelSpec:
    """A Llama of transformers with the vocabulary and, as near as can be, the number of parameters of `like`.

    Width, depth and heads too are those of `like` where its sizes are known and are a Llama's; the width of
    the feed-forward part makes up the difference. Its weights have the dtype that most of those of `like`
    have. It is causal: where `like` is not, its `notes` say so, and a table of `compare_architectures` too.

    Args:
        like: what `ModelSpec.of` understands, a model that takes tokens.
        name: of the baseline.

    Raises:
        ImportError: transformers is not there: pip install 'stackwise[hf]'.
        ValueError: a model that takes vectors, or is too small for any Llama with its vocabulary.
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
        # Not made.to(dtype), which would round what positions are computed from as well.
        for weight in made.parameters():
            weight.data = weight.data.to(dtype)
        return made

    found = ModelSpec.of(llama, name=name)
    if spec.causal is False:
        found = replace(found, notes=f"{found.notes}; it is causal, which {spec.name} is not")
    return found


def llama_size(model: nn.Module, *, vocab_size: int) -> LlamaSize:
    """The sizes of a Llama that is as large as `model`.

    Raises:
        ValueError: there is none so small.
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
    """Whether what is looked up is the head's weight too, as far as tables of the vocabulary's size tell."""
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
    """Width, depth and heads of a model all of whose layers have the softmax attention of a Llama.

    How far each of them sees, which may differ, is no matter of size.
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
    """The widest Llama of so many layers that is not too large with F = 8 C / 3, fitted; None: none fits."""

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
    """The same with the F that comes nearest to `n_parameters`; None: there is no room for any."""
    each = 3 * size.d_model * size.n_layers
    d_ff = size.d_ff + round((n_parameters - size.n_parameters) / each)
    if d_ff < 1:
        return None
    return LlamaSize(
        size.vocab_size, size.d_model, size.n_layers, size.n_heads, size.n_kv_heads, d_ff, size.tied
    )
