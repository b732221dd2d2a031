"""DecodeBytes: what a decoding step has to move, exactly: weights, and what earlier tokens left behind."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.benchmark.flops.shape_reader import looked_up, matrices, read_shape
from stackwise.benchmark.flops.transformer_shape import (
    AttentionShape,
    CrossShape,
    KernelShape,
    LatentShape,
    SoftmaxShape,
    TransformerShape,
)
from stackwise.support.arguments import check_sizes, require

__all__ = ["DecodeBytes", "decode_bytes"]


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes that one decoding step moves at least, activations apart.

    Attributes:
        weights: read once for all rows.
        cache_read: what earlier tokens left and this one may see.
        cache_written: what this token leaves.
    """

    weights: int
    cache_read: int
    cache_written: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache_read + self.cache_written

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the total."""
        return asdict(self) | {"total": self.total}


def decode_bytes(
    model: nn.Module | TransformerShape,
    *,
    batch_size: int,
    seq_len: int,
    dtype: torch.dtype | None = None,
) -> DecodeBytes | None:
    """Bytes that decoding one token in each row moves at least; None where they are not known.

    Weights are read once, of tables that are only looked up one row for each token; not those that have made
    keys and values of another sequence before. Not known are sizes that `read_shape` does not find, and which
    experts several rows go through.

    Args:
        model: as in `model_flops`. Of a shape all weights are in `dtype`; of a model they are as they are,
            quantised ones included, with biases and norms. Of floating-point buffers vectors count, and the
            numbers that kernel attention has drawn; of others, such as a cache, a mask or a table of angles,
            nobody says how much is read.
        batch_size: B.
        seq_len: tokens in the cache already.
        dtype: of the cache; None: that of the model's first parameter.

    Raises:
        ValueError: a shape without `dtype`; sizes that are no positive integers.
    """
    check_sizes(batch_size=batch_size)
    check_sizes(0, seq_len=seq_len)
    shape = read_shape(model).shape
    if shape is None or (batch_size > 1 and shape.n_active != shape.n_weights):
        return None
    unread = _weights_of_memory(shape) if seq_len else 0
    if isinstance(model, TransformerShape):
        require(dtype is not None, "dtype", dtype, "a torch.dtype, where the model is given by its shape")
        assert dtype is not None
        row = shape.d_model if shape.embedding_weights else 0
        weights = (shape.n_active - unread + batch_size * row) * dtype.itemsize
    else:
        of_model = _weights(model, shape, batch_size, unread)
        if of_model is None:
            return None
        weights, dtype = of_model, dtype or next(model.parameters()).dtype
    read = written = 0
    for attention in _attention(shape):
        match attention:
            case KernelShape():  # every token changes all of it
                sums = attention.cache_bytes(batch_size, seq_len, dtype)
                read, written = read + sums, written + sums
            case CrossShape():
                read += attention.cache_bytes(batch_size, seq_len, dtype)
            case SoftmaxShape() | LatentShape():
                one = batch_size * attention.token_bytes(dtype)
                visible = seq_len if attention.window is None else min(seq_len, attention.window - 1)
                read, written = read + visible * one, written + one
    return DecodeBytes(weights, read, written)


def _weights(model: nn.Module, shape: TransformerShape, batch_size: int, unread: int) -> int | None:
    """Bytes of parameters and buffers that one token in each row reads: not `unread`, nor all experts."""
    tables = {id(table) for table in looked_up(model)}
    total = 0
    for parameter in model.parameters():  # each once, also where several modules share it
        nbytes = _nbytes(parameter)
        total += batch_size * (nbytes // len(parameter)) if id(parameter) in tables else nbytes
    drawn = _drawn(shape)
    for buffer in model.buffers():
        if buffer.is_floating_point() and (buffer.ndim < 2 or buffer.numel() in drawn):
            total += _nbytes(buffer)
    unread += shape.n_weights - shape.n_active
    if unread:
        widths = {parameter.element_size() for parameter in matrices(model)}
        if len(widths) > 1:  # how wide those that are not read are, is not told
            return None
        total -= unread * widths.pop()
    return total


def _weights_of_memory(shape: TransformerShape) -> int:
    return sum(each.n_weights_of_memory for each in _attention(shape) if isinstance(each, CrossShape))


def _drawn(shape: TransformerShape) -> set[int]:
    """How many numbers an attention by features multiplies with and does not train."""
    kernels = [each for each in _attention(shape) if isinstance(each, KernelShape)]
    return {each.n_kv_heads * each.head_dim * each.n_frequencies for each in kernels}


def _attention(shape: TransformerShape) -> list[AttentionShape]:
    return [attention for layer in shape.layers for attention in layer.attention]


def _nbytes(tensor: Tensor) -> int:
    """Of what a tensor is made of: one of a quantised class calls itself as large as what it stands for."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    names, _ = flatten()
    return sum(_nbytes(getattr(tensor, name)) for name in names)
