"""FLOPs of a transformer in closed form: forward, backward, recomputed, and with a cache.

An addition and a multiplication are two operations. As usual, only matrix products are counted. Attention has
two counts. "visible" has the pairs of query and key that may see each other, which the model requires. "all"
ignores causality, but not a window. It is used by the convention 6 N + 12 L H Q T of Chowdhery et al. (2022,
arXiv:2204.02311, appendix B), and therefore by most published utilizations.

Shapes: B batch, T positions of a pass, S positions including the cache, H query heads, K key/value heads, D
head size, R rank of a latent, N and P the parts of a latent head without and with position, V its value size,
M features, F frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from stackwise.benchmark.flops.shape_reader import read_shape
from stackwise.benchmark.flops.transformer_shape import (
    AttentionShape,
    KernelShape,
    LatentShape,
    SoftmaxShape,
    TransformerShape,
)
from stackwise.support.arguments import check_choice, check_sizes

__all__ = [
    "FlopCount",
    "Flops",
    "backward_flops",
    "convention_flops_per_token",
    "forward_flops",
    "model_flops",
    "n_pairs",
]

MODES = ("forward", "train", "prefill", "decode")
Pairs = Literal["all", "visible"]
Recompute = Literal["none", "blocks"]


@dataclass(frozen=True)
class Flops:
    """Operations of one pass over a batch.

    Attributes:
        weights: operations of products with weights.
        visible: operations of attention between queries and keys that may see each other.
        all_pairs: operations of attention including the pairs that causality hides, whose results are
            discarded.
    """

    weights: int
    visible: int
    all_pairs: int

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.weights + other.weights, self.visible + other.visible, self.all_pairs + other.all_pairs
        )

    def times(self, factor: int) -> Flops:
        """Return the operations multiplied by `factor`."""
        return Flops(factor * self.weights, factor * self.visible, factor * self.all_pairs)

    def total(self, pairs: Pairs = "all") -> int:
        """Return the total with the attention count `pairs`.

        Raises:
            ValueError: `pairs` is neither "all" nor "visible".
        """
        check_choice("pairs", pairs, ("all", "visible"))
        return self.weights + (self.all_pairs if pairs == "all" else self.visible)


NOTHING = Flops(0, 0, 0)


@dataclass(frozen=True)
class FlopCount:
    """Operations of one call of a workload.

    Attributes:
        mode: "forward", "train", "prefill" or "decode".
        batch_size: B.
        seq_len: T; for "decode", the number of tokens in the cache.
        tokens: number of tokens of the call: B T, or B for "decode".
        forward: operations of the forward pass.
        backward: operations of the backward pass. Zero except in "train".
        recomputed: operations that the backward pass repeats.
    """

    mode: str
    batch_size: int
    seq_len: int
    tokens: int
    forward: Flops
    backward: Flops = NOTHING
    recomputed: Flops = NOTHING

    def model(self, pairs: Pairs = "all") -> int:
        """Return the operations that the model requires, without recomputation. MFU is derived from them."""
        return (self.forward + self.backward).total(pairs)

    def hardware(self, pairs: Pairs = "all") -> int:
        """Return the operations that are computed, including recomputation. HFU is derived from them.

        A kernel that skips the pairs hidden by causality computes the "visible" count.
        """
        return (self.forward + self.backward + self.recomputed).total(pairs)

    def per_token(self, pairs: Pairs = "all") -> float:
        """Return `model` per token."""
        return self.model(pairs) / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, including the totals."""
        totals = {f"model_{pairs}": self.model(pairs) for pairs in ("all", "visible")}
        return asdict(self) | totals


def model_flops(
    model: nn.Module | TransformerShape,
    *,
    batch_size: int,
    seq_len: int,
    mode: str,
    logits: Literal["all", "last"] | None = None,
    recompute: Recompute = "none",
    fused: bool = False,
) -> FlopCount | None:
    """Return the FLOPs of one call. None: the sizes of the model are unknown. They are never estimated.

    `read_shape(model).reason` is the reason. If frozen weights have an unknown effect on the backward pass,
    only "train" is None.

    Args:
        model: a Rack, a transformers model of a known family, a model with a method `transformer_shape()`, or
            a TransformerShape.
        batch_size: B.
        seq_len: T; for "decode", the number of tokens in the cache. The decoded token sees them and itself.
        mode: "forward"; "train", a forward and a backward pass without the optimizer; "prefill"; "decode",
            one token per row.
        logits: positions for which the head is computed: "all", or "last" for the last one of each row. None:
            "last" for "prefill", "all" otherwise.
        recompute: "blocks": the backward pass repeats the forward pass of all layers, without the head.
            PyTorch's checkpoint does so, except for the last product of each layer, whose result is not
            needed.
        fused: True if attention does not store its scores and recomputes them in the backward pass.

    Raises:
        ValueError: invalid mode, or sizes that are not positive integers.
    """
    check_choice("mode", mode, MODES)
    check_choice("recompute", recompute, ("none", "blocks"))
    check_sizes(batch_size=batch_size)
    check_sizes(0 if mode == "decode" else 1, seq_len=seq_len)
    shape = read_shape(model).shape
    if shape is None or (mode == "train" and shape.n_frozen is None):
        return None
    if mode == "decode":
        step = forward_flops(shape, batch_size=batch_size, seq_len=1, context=seq_len)
        return FlopCount(mode, batch_size, seq_len, batch_size, step)
    logits = logits or ("last" if mode == "prefill" else "all")
    forward = forward_flops(shape, batch_size=batch_size, seq_len=seq_len, logits=logits)
    backward = recomputed = NOTHING
    if mode == "train":
        backward = backward_flops(shape, batch_size=batch_size, seq_len=seq_len, logits=logits)
        if recompute == "blocks":
            recomputed = forward_flops(replace(shape, head_weights=0), batch_size=batch_size, seq_len=seq_len)
        if fused:
            recomputed += _scores(shape, seq_len).times(batch_size)
    return FlopCount(mode, batch_size, seq_len, batch_size * seq_len, forward, backward, recomputed)


def forward_flops(
    shape: TransformerShape,
    *,
    batch_size: int,
    seq_len: int,
    context: int = 0,
    logits: Literal["all", "last"] = "all",
) -> Flops:
    """Return the operations of a forward pass over T positions after `context` positions in a cache.

    Raises:
        ValueError: sizes that are not positive integers.
    """
    check_sizes(batch_size=batch_size, seq_len=seq_len)
    check_sizes(0, context=context)
    check_choice("logits", logits, ("all", "last"))
    heads = seq_len if logits == "all" else 1
    total = Flops(2 * shape.head_weights * heads, 0, 0)
    for layer in shape.layers:
        if layer.feedforward is not None:
            total += Flops(2 * seq_len * layer.feedforward.n_active(shape.d_model), 0, 0)
        for attention in layer.attention:
            weights = _projections(attention, shape.d_model, seq_len, context)
            total += Flops(2 * weights, 0, 0) + _attention(attention, seq_len, context)
    return total.times(batch_size)


def backward_flops(
    shape: TransformerShape, *, batch_size: int, seq_len: int, logits: Literal["all", "last"] = "all"
) -> Flops:
    """Return the operations of a backward pass from a loss to every weight, without recomputation.

    A product has two derivatives, each of which is a product of the same size. A frozen weight or a fixed
    random projection has no derivative.

    Raises:
        ValueError: sizes that are not positive integers, or an unknown `n_frozen`.
    """
    if shape.n_frozen is None:
        raise ValueError("n_frozen: got None; allowed: an integer >= 0")
    twice = forward_flops(shape, batch_size=batch_size, seq_len=seq_len, logits=logits).times(2)
    missing = Flops(2 * seq_len * shape.n_frozen, 0, 0)
    for layer in shape.layers:
        for attention in layer.attention:
            if isinstance(attention, KernelShape):
                missing += _without_derivative(attention, seq_len)
    return twice + missing.times(-batch_size)


def convention_flops_per_token(
    shape: TransformerShape,
    seq_len: int,
    *,
    embeddings: bool = False,
    recompute: bool = False,
) -> float:
    """Return the training FLOPs per token in the convention of papers: 6 N + 12 L H Q T.

    With recomputation, it is 8 N + 16 L H Q T. Without `embeddings` and `recompute`, the result is that of
    `model_flops(..., mode="train").per_token("all")`.

    Args:
        shape: shape of the model.
        seq_len: T.
        embeddings: True if N includes the tables that are only looked up, as in PaLM, but not in torchtitan.
            A head that shares the weight of the embedding is always part of N.
        recompute: True to include a second forward pass of the entire model with its head, as in figures of
            HFU.

    Raises:
        ValueError: a length that is not a positive integer, or `n_frozen` other than 0.
    """
    if shape.n_frozen != 0:
        raise ValueError(f"n_frozen: got {shape.n_frozen!r}; allowed: 0, as in the convention all trains")
    forward = forward_flops(shape, batch_size=1, seq_len=seq_len).times(2 if recompute else 1)
    backward = backward_flops(shape, batch_size=1, seq_len=seq_len)
    total = (forward + backward).total("all") / seq_len
    return total + (8 if recompute else 6) * shape.embedding_weights * embeddings


def n_pairs(n_queries: int, context: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    """Return the pairs of a query and a key that it may see, and the same number without causality.

    Args:
        n_queries: T.
        context: number of keys before the key of the first query.
        causal: True if a query sees no later key.
        window: W, as in `SoftmaxShape`. None: no window.
    """
    T, S = n_queries, context + n_queries
    if causal:
        # Query t sees context + t + 1 keys, up to a maximum of W.
        growing = T if window is None else min(T, max(0, window - context))
        visible = growing * context + growing * (growing + 1) // 2
        if window is None:
            return visible, T * S
        return visible + (T - growing) * window, T * min(S, window)
    if window is None:
        return T * S, T * S
    behind = n_pairs(T, context, causal=True, window=window)[0]
    ahead = n_pairs(T, 0, causal=True, window=window)[0] - T
    return behind + ahead, behind + ahead


def _projections(attention: AttentionShape, d_model: int, n_queries: int, context: int) -> int:
    """Return the number of multiplications with weights in one row."""
    weights = attention.n_weights(d_model)
    if isinstance(attention, LatentShape) and not attention.absorbs:
        return n_queries * weights + context * attention.n_expanding
    return n_queries * weights


def _attention(attention: AttentionShape, n_queries: int, context: int) -> Flops:
    """Return the operations between queries and keys in one row."""
    match attention:
        case SoftmaxShape():
            width = 2 * attention.head_dim
        case LatentShape():
            if context and attention.absorbs:
                width = 2 * attention.rank + attention.rope_dim
            else:
                width = attention.nope_dim + attention.rope_dim + attention.value_dim
        case KernelShape():
            return _kernel(attention, n_queries)
    visible, every = n_pairs(n_queries, context, causal=attention.causal, window=attention.window)
    return _of_pairs(visible, every, attention.n_heads, width)


def _of_pairs(visible: int, every: int, n_heads: int, width: int) -> Flops:
    return Flops(0, 2 * visible * n_heads * width, 2 * every * n_heads * width)


def _kernel(attention: KernelShape, n_queries: int) -> Flops:
    """Return the operations of features and of products with sums over the keys.

    In chunks, "all" adds the pairs within each chunk. "visible" is the recurrent form, which updates and then
    reads a state.
    """
    H, K, D, M = attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.n_features
    linear = 2 * n_queries * ((H + K) * D * attention.n_frequencies + K * M * D + H * M * (D + 1))
    within = sum(2 * length * length * H * (M + D) for length in _chunks(attention, n_queries))
    return Flops(0, linear, linear + within)


def _without_derivative(attention: KernelShape, n_queries: int) -> Flops:
    """Return the operations that the backward pass lacks.

    Frequencies are fixed, the first sums are zero, and the last sums are not read.
    """
    H, K, D, M = attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.n_features
    features = 2 * n_queries * (H + K) * D * attention.n_frequencies
    lengths = list(_chunks(attention, n_queries))
    if not lengths:
        return Flops(0, features, features)
    ends = 2 * lengths[0] * H * M * (D + 1) + 2 * 2 * lengths[-1] * K * M * D
    return Flops(0, features, features + ends)


def _chunks(attention: KernelShape, n_queries: int) -> Iterator[int]:
    """Yield the lengths of the squares in which a causal pass is computed. Nothing for other passes."""
    if attention.causal and attention.chunk is not None:
        for start in range(0, n_queries, attention.chunk):
            yield min(attention.chunk, n_queries - start)


def _scores(shape: TransformerShape, seq_len: int) -> Flops:
    """Return the products of queries and keys of one row, which a fused backward pass recomputes."""
    total = NOTHING
    for attention in (each for layer in shape.layers for each in layer.attention):
        if isinstance(attention, KernelShape):
            continue
        visible, every = n_pairs(seq_len, 0, causal=attention.causal, window=attention.window)
        match attention:
            case LatentShape():
                width = attention.nope_dim + attention.rope_dim
            case SoftmaxShape():
                width = attention.head_dim
        total += _of_pairs(visible, every, attention.n_heads, width)
    return total
