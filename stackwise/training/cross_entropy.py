"""Cross-entropy, summed over positions: from logits, or from hidden states one chunk of tokens at a time.

Shapes: N positions, M positions of one chunk, C model width, V vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stackwise.model.linear import Linear
from stackwise.support.arguments import check_sizes
from stackwise.training.targets import IGNORED

__all__ = ["chunked_cross_entropy", "cross_entropy", "plain_weight"]


def cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, z_loss: float = 0.0
) -> Tensor:
    """Return the cross-entropy summed over positions, in nats, computed in float32.

    Args:
        logits_NV: logits of any floating-point dtype.
        labels_N: int64; -100 at positions without a prediction.
        weights_N: float32, loss weight of each position; None: 1.
        z_loss: coefficient of the z-loss, the square of the softmax denominator's logarithm, which is added
            to the loss of each position (Chowdhery et al. 2022, arXiv:2204.02311, section 5).

    Returns:
        A float32 scalar.
    """
    logits_NV = logits_NV.float()
    if weights_N is None and not z_loss:
        return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    loss_N = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="none")
    if z_loss:
        square_N = logits_NV.logsumexp(-1).square()
        loss_N = loss_N + z_loss * square_N.masked_fill(labels_N == IGNORED, 0.0)
    return (loss_N if weights_N is None else loss_N * weights_N).sum()


def chunked_cross_entropy(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    weights_N: Tensor | None = None,
    z_loss: float = 0.0,
    chunk: int = 1024,
) -> Tensor:
    """Return `cross_entropy(hidden_NC @ weight_VC.T, ...)`, computed in chunks of `chunk` positions.

    Only the logits of one chunk are in memory at a time.

    The gradients are computed together with the loss, so nothing is recomputed. The backward pass only
    multiplies them by the incoming gradient. Under autocast the matrix products use its dtype, otherwise the
    dtype of the operands. The softmax is computed in float32, and the gradient of the weight is summed over
    the chunks in float32. Differentiable once.

    Args:
        hidden_NC: input of the head.
        weight_VC: weight of the head.
        labels_N: int64; -100 at positions without a prediction.
        weights_N: float32, loss weight of each position; None: 1.
        z_loss: see `cross_entropy`.
        chunk: number of positions in a chunk.

    Returns:
        A float32 scalar; float64 for operands in float64.

    Raises:
        ValueError: `chunk` is below 1, or the dtype is float16. Small float16 gradients underflow before a
            loss scale is applied.
    """
    check_sizes(chunk=chunk)
    kind, dtype = hidden_NC.device.type, hidden_NC.dtype
    casts = kind != "meta" and torch.is_autocast_enabled(kind)  # the meta device has no autocast
    if casts and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    if dtype == torch.float16:
        raise ValueError(
            "logits_chunk: got float16; allowed: bfloat16 or float32, since the gradient is rounded before "
            "the loss scale reaches it"
        )
    keep_N = labels_N != IGNORED
    wide = torch.promote_types(dtype, torch.float32)
    factor_N = keep_N.to(wide) if weights_N is None else weights_N.to(wide) * keep_N
    target_N = labels_N.masked_fill(~keep_N, 0)
    of_hidden, of_weight = (torch.is_grad_enabled() and x.requires_grad for x in (hidden_NC, weight_VC))
    arguments = (hidden_NC, weight_VC, target_N, factor_N, z_loss, chunk, dtype, of_hidden, of_weight)
    total: Tensor
    if torch.compiler.is_dynamo_compiling():
        # Tracing would unroll the loop: compilation takes minutes, and uses as much memory as without chunks.
        total, _, _ = _operator(*arguments)
    else:
        total = _ChunkedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return total


def _total_and_gradients(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    target_N: Tensor,
    factor_N: Tensor,
    z_loss: float,
    chunk: int,
    dtype: torch.dtype,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total and its gradients for the first two arguments. An unneeded gradient is empty."""
    loss_N = torch.zeros_like(factor_N)
    hidden_gradient = torch.empty_like(hidden_NC if of_hidden else hidden_NC[:0])
    weight_gradient = torch.zeros_like(weight_VC if of_weight else weight_VC[:0], dtype=factor_N.dtype)
    narrow_VC = weight_VC.to(dtype)
    for start in range(0, len(target_N), chunk):
        rows = slice(start, start + chunk)
        hidden_MC = hidden_NC[rows].to(dtype)
        target_M1, factor_M1 = target_N[rows, None], factor_N[rows, None]
        # Logits, log probabilities and gradients share one buffer.
        logits_MV = (hidden_MC @ narrow_VC.t()).to(factor_N.dtype)
        denominator_M1 = logits_MV.logsumexp(-1, keepdim=True)
        logits_MV.sub_(denominator_M1)
        loss_M1 = z_loss * denominator_M1.square() - logits_MV.gather(1, target_M1)
        loss_N[rows] = (loss_M1 * factor_M1).squeeze(1)
        if of_hidden or of_weight:
            logits_MV.exp_().mul_(factor_M1 * (1 + 2 * z_loss * denominator_M1))
            logits_MV.scatter_add_(1, target_M1, -factor_M1)
            logits_MV = logits_MV.to(dtype)
        if of_hidden:
            hidden_gradient[rows] = logits_MV @ narrow_VC
        if of_weight and dtype == weight_gradient.dtype:
            # This needs no temporary product. The FLOP counter would not count `addmm_`.
            torch.addmm(weight_gradient, logits_MV.t(), hidden_MC, out=weight_gradient)
        elif of_weight:
            weight_gradient += logits_MV.t() @ hidden_MC
        del logits_MV  # before the logits of the next chunk are allocated
    return loss_N.sum(), hidden_gradient, weight_gradient.to(weight_VC.dtype)


def _scaled(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    scaled = (x * gradient if asked else None for x, asked in zip(ctx.saved_tensors, ctx.asked, strict=True))
    return (*scaled, None, None, None, None, None, None, None)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        total, *gradients = _total_and_gradients(*arguments)
        ctx.save_for_backward(*gradients)
        ctx.asked = arguments[-2:]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _scaled(ctx, *gradients)


_operator = torch.library.custom_op("stackwise::chunked_cross_entropy", _total_and_gradients, mutates_args=())


@_operator.register_fake
def _(
    hidden_NC: Tensor, weight_VC: Tensor, _target: Tensor, factor_N: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    of_hidden, of_weight = rest[-2:]
    return (
        factor_N.new_empty(()),
        torch.empty_like(hidden_NC if of_hidden else hidden_NC[:0]),
        torch.empty_like(weight_VC if of_weight else weight_VC[:0]),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.asked = inputs[-2:]


_operator.register_autograd(_scaled, setup_context=_remember)


def plain_weight(head: nn.Module) -> Tensor:
    """Return the weight (V, C) of a head that can be multiplied in chunks.

    Raises:
        ValueError: the head is not an `nn.Linear` without bias, or its weight is a tensor subclass, such as a
            quantised, float8 or sharded weight.
    """
    weight = getattr(head, "weight", None)
    if type(head) not in (nn.Linear, Linear):
        reason = f"of class {type(head).__name__}"
    elif not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter):
        reason = f"with a weight of class {type(weight).__name__}"
    elif getattr(head, "bias", None) is not None:
        reason = "with a bias"
    else:
        return weight
    raise ValueError(f"logits_chunk: got a head {reason}; allowed: a plain nn.Linear without bias, or null")
