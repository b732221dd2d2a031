"""TransformerShape: sizes of a transformer that determine its FLOPs and the bytes of its cache.

Shapes: B batch, S positions in a cache, C model width, H query heads, K key/value heads, D head size, R rank
of a latent, N and P the parts of a latent head without and with position, V its value size, M features, E
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from stackwise.support.arguments import check_sizes, require

__all__ = [
    "AttentionShape",
    "ExpertsShape",
    "FeedForwardShape",
    "KernelShape",
    "LatentShape",
    "LayerShape",
    "SoftmaxShape",
    "TransformerShape",
]


@dataclass(frozen=True)
class SoftmaxShape:
    """Softmax attention: multi-head (K = H), grouped-query, or multi-query (K = 1).

    Attributes:
        n_heads: H.
        n_kv_heads: K, a divisor of H.
        head_dim: D.
        causal: True if a query sees no later key.
        window: W. A query sees its own position and the W - 1 positions before it; without causality, also W
            - 1 positions after it. None: no window.
        cached_tokens: maximum number of tokens in the cache. None: no limit.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    cached_tokens: int | None = None

    def __post_init__(self) -> None:
        check_sizes(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim)
        _check_heads(self.n_heads, self.n_kv_heads)
        _check_window(self.window, self.cached_tokens)

    def n_weights(self, d_model: int) -> int:
        """Return the number of weights of the projections of queries, keys, values and output."""
        return 2 * d_model * (self.n_heads + self.n_kv_heads) * self.head_dim

    def cache_bytes(self, batch_size: int, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of 2 B S K D numbers. S is the number of cached tokens."""
        return batch_size * _kept(tokens, self.cached_tokens) * self.token_bytes(dtype)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token of one row adds to the cache."""
        return 2 * self.n_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        n_heads: H.
        rank: R, the rank of the latent that all keys and values are expanded from.
        nope_dim: N.
        rope_dim: P.
        value_dim: V.
        q_rank: rank of the latent that queries are expanded from. None: no such latent.
        causal: True if a query sees no later key.
        window: as in `SoftmaxShape`.
        cached_tokens: as in `SoftmaxShape`.
        absorbs: True if a pass over a cache applies the expansion to queries and outputs, so that all heads
            read the latent itself. False: every pass expands the entire cache.
    """

    n_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    causal: bool = True
    window: int | None = None
    cached_tokens: int | None = None
    absorbs: bool = True

    def __post_init__(self) -> None:
        check_sizes(n_heads=self.n_heads, rank=self.rank, nope_dim=self.nope_dim, value_dim=self.value_dim)
        check_sizes(rope_dim=self.rope_dim)
        if self.q_rank is not None:
            check_sizes(q_rank=self.q_rank)
        _check_window(self.window, self.cached_tokens)

    def n_weights(self, d_model: int) -> int:
        """Return the number of weights of all projections: down, up and output."""
        queries = self.n_heads * (self.nope_dim + self.rope_dim)
        from_width = d_model * queries if self.q_rank is None else self.q_rank * (d_model + queries)
        out = self.n_heads * self.value_dim * d_model
        return from_width + d_model * (self.rank + self.rope_dim) + self.n_expanding + out

    @property
    def n_expanding(self) -> int:
        """Number of weights that expand a latent to the keys and values of all heads: R H (N + V)."""
        return self.rank * self.n_heads * (self.nope_dim + self.value_dim)

    def cache_bytes(self, batch_size: int, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of B S (R + P) numbers: the latent and the one key with position."""
        return batch_size * _kept(tokens, self.cached_tokens) * self.token_bytes(dtype)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token of one row adds to the cache."""
        return (self.rank + self.rope_dim) * dtype.itemsize


@dataclass(frozen=True)
class KernelShape:
    """Attention by features of queries and keys, in time linear in the number of positions.

    Attributes:
        n_heads: H.
        n_kv_heads: K, a divisor of H.
        head_dim: D.
        n_features: M, per head.
        n_frequencies: number of fixed factors for each of the D numbers of a query or key. 0: features need
            no product.
        causal: True if a query sees no later key.
        chunk: number of positions that are computed as a square in the causal case. None: one position at a
            time.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_features: int
    n_frequencies: int = 0
    causal: bool = True
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_sizes(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim)
        check_sizes(n_features=self.n_features)
        check_sizes(0, n_frequencies=self.n_frequencies)
        if self.chunk is not None:
            check_sizes(chunk=self.chunk)
        _check_heads(self.n_heads, self.n_kv_heads)

    def n_weights(self, d_model: int) -> int:
        """Return the number of weights of the projections. Fixed random projections are not weights."""
        return 2 * d_model * (self.n_heads + self.n_kv_heads) * self.head_dim

    def cache_bytes(self, batch_size: int, tokens: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        """Return the bytes of B K (M D + M + 1) numbers, independent of `tokens`.

        The numbers are sums of values, sums of weights, and their scale. The dtype is at least float32,
        because a sum in bfloat16 stops growing after a few hundred terms.
        """
        wide = torch.promote_types(dtype, torch.float32)
        numbers = self.n_features * (self.head_dim + 1) + 1
        return batch_size * self.n_kv_heads * numbers * wide.itemsize


AttentionShape = SoftmaxShape | LatentShape | KernelShape


@dataclass(frozen=True)
class FeedForwardShape:
    """Feed-forward part that is applied to every token.

    Attributes:
        d_ff: width.
        n_matrices: number of matrices: 2, or 3 with a gate.
    """

    d_ff: int
    n_matrices: int = 3

    def __post_init__(self) -> None:
        check_sizes(d_ff=self.d_ff)
        require(self.n_matrices in (2, 3), "n_matrices", self.n_matrices, "2, 3")

    def n_weights(self, d_model: int) -> int:
        """Return the number of weights."""
        return self.n_matrices * d_model * self.d_ff

    n_active = n_weights


@dataclass(frozen=True)
class ExpertsShape:
    """Router and experts, of which each token uses some.

    Attributes:
        d_ff: width of an expert.
        n_experts: E.
        n_routed: number of experts per token.
        shared_d_ff: width of the additional part that every token uses. 0: no such part.
        n_matrices: number of matrices per expert: 2, or 3 with a gate.
    """

    d_ff: int
    n_experts: int
    n_routed: int
    shared_d_ff: int = 0
    n_matrices: int = 3

    def __post_init__(self) -> None:
        check_sizes(d_ff=self.d_ff, n_experts=self.n_experts, n_routed=self.n_routed)
        check_sizes(0, shared_d_ff=self.shared_d_ff)
        require(self.n_matrices in (2, 3), "n_matrices", self.n_matrices, "2, 3")
        require(
            self.n_routed <= self.n_experts, "n_routed", self.n_routed, f"at most n_experts={self.n_experts}"
        )

    def n_weights(self, d_model: int) -> int:
        """Return the number of weights of the router and of all experts."""
        return self._of(d_model, self.n_experts)

    def n_active(self, d_model: int) -> int:
        """Return the number of weights of the router and of the experts that one token uses."""
        return self._of(d_model, self.n_routed)

    def _of(self, d_model: int, n_experts: int) -> int:
        width = n_experts * self.d_ff + self.shared_d_ff
        return d_model * (self.n_experts + self.n_matrices * width)


@dataclass(frozen=True)
class LayerShape:
    """One layer: one or several attention parts, and a feed-forward part."""

    attention: tuple[AttentionShape, ...]
    feedforward: FeedForwardShape | ExpertsShape | None

    def n_weights(self, d_model: int) -> int:
        """Return the number of weights of all matrices."""
        return self._attention(d_model) + (self.feedforward.n_weights(d_model) if self.feedforward else 0)

    def n_active(self, d_model: int) -> int:
        """Return the number of weights of the matrices that one token uses."""
        return self._attention(d_model) + (self.feedforward.n_active(d_model) if self.feedforward else 0)

    def _attention(self, d_model: int) -> int:
        return sum(each.n_weights(d_model) for each in self.attention)


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer. Biases, norms and positions are not matrices and are not included.

    Attributes:
        d_model: C.
        layers: layers in order.
        head_weights: weights of the matrices after the last layer. For a language model, C times the
            vocabulary, shared with the embedding or not. 0: no head.
        embedding_weights: weights of tables that are only looked up. A table that is also the head is counted
            as the head.
        n_frozen: weights of matrices without a gradient, if the gradient still passes through all of them.
            None: unknown.
    """

    d_model: int
    layers: tuple[LayerShape, ...]
    head_weights: int
    embedding_weights: int
    n_frozen: int | None = 0

    def __post_init__(self) -> None:
        check_sizes(d_model=self.d_model)
        check_sizes(0, head_weights=self.head_weights, embedding_weights=self.embedding_weights)
        if self.n_frozen is not None:
            check_sizes(0, n_frozen=self.n_frozen)

    @classmethod
    def uniform(
        cls,
        *,
        n_layers: int,
        d_model: int,
        n_heads: int,
        d_ff: int,
        vocab_size: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        n_matrices: int = 3,
        tied: bool = False,
        causal: bool = True,
        window: int | None = None,
    ) -> TransformerShape:
        """Return a shape of equal layers with softmax attention, an embedding and a head.

        Args:
            n_layers: number of layers.
            d_model: C.
            n_heads: H.
            d_ff: width of the feed-forward part.
            vocab_size: rows of the embedding and outputs of the head.
            n_kv_heads: K. None: H.
            head_dim: D. None: C / H.
            n_matrices: number of matrices of the feed-forward part, 3 with a gate.
            tied: True if the head shares the weight of the embedding.
            causal: see `SoftmaxShape`.
            window: see `SoftmaxShape`. It is also the maximum number of tokens in the cache.

        Raises:
            ValueError: a size that is not a positive integer, or numbers of heads that do not divide.
        """
        check_sizes(n_layers=n_layers, d_model=d_model, n_heads=n_heads, vocab_size=vocab_size)
        if head_dim is None:
            require(d_model % n_heads == 0, "n_heads", n_heads, f"what divides d_model={d_model}")
        kv = n_heads if n_kv_heads is None else n_kv_heads
        size = d_model // n_heads if head_dim is None else head_dim
        attention = SoftmaxShape(n_heads, kv, size, causal, window, cached_tokens=window)
        layer = LayerShape((attention,), FeedForwardShape(d_ff, n_matrices))
        table = vocab_size * d_model
        return cls(d_model, (layer,) * n_layers, table, 0 if tied else table)

    @property
    def n_weights(self) -> int:
        """Number of weights of all matrices, with the head and without tables that are only looked up."""
        return self.head_weights + sum(layer.n_weights(self.d_model) for layer in self.layers)

    @property
    def n_active(self) -> int:
        """Number of weights of the matrices that one token uses. With experts, it is below `n_weights`."""
        return self.head_weights + sum(layer.n_active(self.d_model) for layer in self.layers)

    def cache_bytes(self, *, batch_size: int, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of a cache with `tokens` tokens in each of `batch_size` rows.

        Raises:
            ValueError: `batch_size` is not positive, or `tokens` is below 0.
        """
        check_sizes(batch_size=batch_size)
        check_sizes(0, tokens=tokens)
        kinds = [attention for layer in self.layers for attention in layer.attention]
        return sum(kind.cache_bytes(batch_size, tokens, dtype) for kind in kinds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, including the sums."""
        return {
            "d_model": self.d_model,
            "layers": [
                {
                    "attention": [_named(each) for each in layer.attention],
                    "feedforward": None if layer.feedforward is None else _named(layer.feedforward),
                }
                for layer in self.layers
            ],
            "head_weights": self.head_weights,
            "embedding_weights": self.embedding_weights,
            "n_frozen": self.n_frozen,
            "n_weights": self.n_weights,
            "n_active": self.n_active,
        }


def _named(part: AttentionShape | FeedForwardShape | ExpertsShape) -> dict[str, Any]:
    kind = type(part).__name__.removesuffix("Shape").lower()
    return {"kind": kind} | {field.name: getattr(part, field.name) for field in fields(part)}


def _kept(tokens: int, most: int | None) -> int:
    return tokens if most is None else min(tokens, most)


def _check_heads(n_heads: int, n_kv_heads: int) -> None:
    require(n_heads % n_kv_heads == 0, "n_kv_heads", n_kv_heads, f"what divides n_heads={n_heads}")


def _check_window(window: int | None, cached_tokens: int | None) -> None:
    if window is not None:
        check_sizes(window=window)
    if cached_tokens is not None:
        check_sizes(0, cached_tokens=cached_tokens)
