"""Backends of softmax attention, and the selection of one.

Shapes: B batch, H query heads, K key/value heads, G = H/K, T queries, S keys, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stackwise.model.compilation import is_constant
from stackwise.model.mask import AttentionMask
from stackwise.model.sliced import sliced_attention
from stackwise.support.arguments import check_choice
from stackwise.support.logit_bound import note_logits

__all__ = ["attend", "tuning", "using"]

_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = ("sdpa", "sliced", *_KERNELS)

Signature = tuple[object, ...]


class _Call(NamedTuple):
    """Arguments of `attend`."""

    q_BHTD: Tensor
    k_BKSD: Tensor
    v_BKSD: Tensor
    mask: AttentionMask
    scale: float | None
    softcap: float | None
    dropout: float


_tuned: dict[Signature, str] = {}
_forced: str | None = None
_tuning = False


def attend(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: AttentionMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, str]:
    """softmax(scale * q k^T) v over the visible keys. Each query head uses key/value head h // G.

    Args:
        q_BHTD: queries.
        k_BKSD: keys.
        v_BKSD: values; their D may differ from that of queries and keys.
        mask: visibility of keys to queries.
        scale: factor of the logits; default D^-1/2.
        softcap: c bounds the logits by c * tanh(logit / c), as in Gemma 2 (arXiv:2408.00118).
        dropout: dropout probability of the attention weights.

    Returns:
        (B, H, T, D of the values), and the name of the backend that ran.
    """
    note_logits(q_BHTD, k_BKSD, scale)
    call = _Call(q_BHTD, k_BKSD, v_BKSD, mask, scale, softcap, dropout)
    name = _choose(call)
    return _run(name, call), name


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use this backend for attention in this context, except for operations that only "sliced" supports.

    "sliced" is always used for soft-capped logits, and for latent attention to a cache.

    Raises:
        ValueError: unknown backend.
    """
    global _forced
    check_choice("backend", name, BACKENDS)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@contextmanager
def tuning() -> Iterator[None]:
    """Benchmark all backends for each attention call in this context, and use the fastest from then on.

    Operations that `using` does not affect are not tuned either.

    The choice is stored per device, dtype, sizes, mask and need of gradients, until the process exits. A
    single query, as in decoding, is benchmarked once for each power of two of keys. Without tuning the choice
    follows fixed rules, so that two runs compute the same bits.
    """
    global _tuning
    before, _tuning = _tuning, True
    try:
        yield
    finally:
        _tuning = before


def _choose(call: _Call) -> str:
    if call.softcap is not None:
        return "sliced"
    if _forced is not None:
        return _forced
    if _tuned or _tuning:
        signature = _signature(call)
        if _tuning and signature not in _tuned:
            _tuned[signature] = _fastest(call)
        if signature in _tuned:
            return _tuned[signature]
    return _rule(call.q_BHTD, call.mask)


def _rule(q_BHTD: Tensor, mask: AttentionMask) -> str:
    """Return the backend by fixed rules, measured on two EPYC (Zen 5) cores; see docs/background/log.md."""
    if q_BHTD.device.type != "cpu":
        return "sdpa"
    compiling = torch.compiler.is_compiling()
    if compiling and not is_constant(mask.n_keys):
        return "sdpa"  # the compiler would need a graph per length for slices
    if mask.aligned and mask.window is not None:
        # Uncompiled, a slice is a dozen operations: slices are faster only if they skip many keys.
        least = 2 * mask.window if compiling else max(8 * mask.window, 1024)
        if mask.n_keys >= least:
            return "sliced"
    if compiling:
        return "sliced" if q_BHTD.dtype == torch.bfloat16 or mask.n_keys <= 1024 else "sdpa"
    return "sdpa"


def _signature(call: _Call) -> Signature:
    q, (batch_size, n_kv_heads, n_keys, head_dim), mask = call.q_BHTD, call.k_BKSD.shape, call.mask
    if mask.n_queries == 1:  # each decoded token adds one key
        n_keys = 1 << (n_keys - 1).bit_length()
    sizes = (*q.shape, batch_size, n_kv_heads, n_keys, head_dim, call.v_BKSD.shape[-1])
    rules = (mask.causal, mask.window, mask.is_plain, call.dropout > 0, q.requires_grad)
    return (q.device.type, q.dtype, *sizes, *rules)


def _fastest(call: _Call) -> str:
    """Return the backend with the lowest median time, with the backward pass if gradients are needed."""
    trains, device = call.q_BHTD.requires_grad, call.q_BHTD.device
    inputs = [each.detach().clone().requires_grad_(trains) for each in call[:3]]
    call = call._replace(q_BHTD=inputs[0], k_BKSD=inputs[1], v_BKSD=inputs[2])

    def once(name: str) -> float:
        _wait(device)
        start = time.perf_counter()
        with torch.set_grad_enabled(trains):
            y = _run(name, call)
            if trains:
                torch.autograd.grad(y, inputs, torch.ones_like(y))
        _wait(device)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {}
    for name in ("sdpa", "sliced", *_KERNELS) if device.type == "cuda" else ("sdpa", "sliced"):
        try:
            once(name)
        except RuntimeError:  # a kernel that does not support these sizes, dtypes or masks
            continue
        times[name] = []
    for _ in range(7):
        for name, seconds in times.items():
            seconds.append(once(name))
    return min(times, key=lambda name: median(times[name]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run(name: str, call: _Call) -> Tensor:
    q_BHTD, k_BKSD, v_BKSD, mask, scale, softcap, dropout = call
    if name == "sliced":
        return sliced_attention(q_BHTD, k_BKSD, v_BKSD, mask, scale=scale, softcap=softcap, dropout=dropout)
    if name in _KERNELS:
        with sdpa_kernel(_KERNELS[name]):
            return _run("sdpa", call)
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    if groups > 1 and mask.n_queries == 1:
        return _one_query(call)
    if groups > 1 and q_BHTD.is_cuda and not (mask.is_lower_triangle or mask.hides_nothing):
        # With a mask, only the slowest CUDA kernel supports grouped heads.
        k_BKSD, v_BKSD = (each.repeat_interleave(groups, dim=1) for each in (k_BKSD, v_BKSD))
        groups = 1
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=None if mask.is_lower_triangle else mask.dense(),
        dropout_p=dropout,
        is_causal=mask.is_lower_triangle,
        scale=scale,
        enable_gqa=groups > 1,
    )


def _one_query(call: _Call) -> Tensor:
    """Treat heads that share keys as queries with equal visibility: kernels are slow with grouped heads."""
    B, H, _, D = call.q_BHTD.shape
    K = call.k_BKSD.shape[1]
    y_BKGD = F.scaled_dot_product_attention(
        call.q_BHTD.reshape(B, K, H // K, D),
        call.k_BKSD,
        call.v_BKSD,
        attn_mask=call.mask.dense(),  # equal for all heads
        dropout_p=call.dropout,
        scale=call.scale,
    )
    return y_BKGD.reshape(B, H, 1, call.v_BKSD.shape[-1])
