"""DecodeBytes: exact number of bytes that a decoding step must move, for weights and for the cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.benchmark.flops.shape_reader import looked_up, matrices, read_shape
from stackwise.benchmark.flops.transformer_shape import (
    AttentionShape,
    KernelShape,
    LatentShape,
    SoftmaxShape,
    TransformerShape,
)
from stackwise.support.arguments import check_sizes, require

__all__ = ["DecodeBytes", "decode_bytes"]


@dataclass(frozen=True)
class DecodeBytes:
    """Minimum bytes that one decoding step moves, without activations.

    Attributes:
        weights: bytes of weights, which are read once for all rows.
        cache_read: bytes of earlier tokens in the cache that the new token may see.
        cache_written: bytes that the new token adds to the cache.
    """

    weights: int
    cache_read: int
    cache_written: int

    @property
    def total(self) -> int:
        """Total number of bytes."""
        return self.weights + self.cache_read + self.cache_written

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, including the total."""
        return asdict(self) | {"total": self.total}


def decode_bytes(
    model: nn.Module | TransformerShape,
    *,
    batch_size: int,
    seq_len: int,
    dtype: torch.dtype | None = None,
) -> DecodeBytes | None:
    """Return the minimum bytes for decoding one token per row. None: unknown.

    Weights are read once. Of tables that are only looked up, one row per token is read. The bytes are unknown
    if `read_shape` does not find the sizes, or if several rows use experts.

    Args:
        model: as in `model_flops`. For a shape, all weights are in `dtype`. For a model, weights count in
            their own dtype, quantised ones included, with biases and norms. Floating-point buffers count if
            they are vectors or random projections of kernel attention. For other buffers, such as a cache, a
            mask or a table of angles, the number of bytes read is unknown.
        batch_size: B.
        seq_len: number of tokens in the cache.
        dtype: dtype of the cache. None: that of the model's first parameter.

    Raises:
        ValueError: a shape without `dtype`, or sizes that are not positive integers.
    """
    check_sizes(batch_size=batch_size)
    check_sizes(0, seq_len=seq_len)
    shape = read_shape(model).shape
    if shape is None or (batch_size > 1 and shape.n_active != shape.n_weights):
        return None
    if isinstance(model, TransformerShape):
        require(dtype is not None, "dtype", dtype, "a torch.dtype, where the model is given by its shape")
        assert dtype is not None
        row = shape.d_model if shape.embedding_weights else 0
        weights = (shape.n_active + batch_size * row) * dtype.itemsize
    else:
        of_model = _weights(model, shape, batch_size)
        if of_model is None:
            return None
        weights, dtype = of_model, dtype or next(model.parameters()).dtype
    read = written = 0
    for attention in _attention(shape):
        match attention:
            case KernelShape():  # every token changes all sums
                sums = attention.cache_bytes(batch_size, seq_len, dtype)
                read, written = read + sums, written + sums
            case SoftmaxShape() | LatentShape():
                one = batch_size * attention.token_bytes(dtype)
                visible = seq_len if attention.window is None else min(seq_len, attention.window - 1)
                read, written = read + visible * one, written + one
    return DecodeBytes(weights, read, written)


def _weights(model: nn.Module, shape: TransformerShape, batch_size: int) -> int | None:
    """Return the bytes of parameters and buffers that one token per row reads, without unused experts."""
    tables = {id(table) for table in looked_up(model)}
    total = 0
    for parameter in model.parameters():  # shared parameters appear once
        nbytes = _nbytes(parameter)
        total += batch_size * (nbytes // len(parameter)) if id(parameter) in tables else nbytes
    drawn = _drawn(shape)
    for buffer in model.buffers():
        if buffer.is_floating_point() and (buffer.ndim < 2 or buffer.numel() in drawn):
            total += _nbytes(buffer)
    unread = shape.n_weights - shape.n_active
    if unread:
        widths = {parameter.element_size() for parameter in matrices(model)}
        if len(widths) > 1:  # the width of the unread matrices is unknown
            return None
        total -= unread * widths.pop()
    return total


def _drawn(shape: TransformerShape) -> set[int]:
    """Return the numbers of elements of the fixed random projections of kernel attention."""
    kernels = [each for each in _attention(shape) if isinstance(each, KernelShape)]
    return {each.n_kv_heads * each.head_dim * each.n_frequencies for each in kernels}


def _attention(shape: TransformerShape) -> list[AttentionShape]:
    return [attention for layer in shape.layers for attention in layer.attention]


def _nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor's storage.

    A quantised tensor reports the size of the tensor it represents.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    names, _ = flatten()
    return sum(_nbytes(getattr(tensor, name)) for name in names)
