"""Backends of softmax attention, and the selection of one.

Shapes: B batch, H query heads, K key/value heads, G = H/K, T queries, S keys, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

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
    name = _choose(q_BHTD, k_BKSD, v_BKSD, mask, scale, softcap, dropout)
    return _call(name, q_BHTD, k_BKSD, v_BKSD, mask, scale, softcap, dropout), name


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


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> str:
    if softcap is not None:
        return "sliced"
    if _forced is not None:
        return _forced
    if _tuned or _tuning:
        signature = _signature(q, k, v, mask, dropout)
        if _tuning and signature not in _tuned:
            _tuned[signature] = _fastest(q, k, v, mask, scale, dropout)
        if signature in _tuned:
            return _tuned[signature]
    return _rule(q, mask)


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


def _signature(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Signature:
    batch_size, n_kv_heads, n_keys, head_dim = k.shape
    if mask.n_queries == 1:  # each decoded token adds one key
        n_keys = 1 << (n_keys - 1).bit_length()
    sizes = (*q.shape, batch_size, n_kv_heads, n_keys, head_dim, v.shape[-1])
    rules = (mask.causal, mask.window, mask.is_plain, dropout > 0, q.requires_grad)
    return (q.device.type, q.dtype, *sizes, *rules)


def _fastest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float | None,
    dropout: float,
) -> str:
    """Return the backend with the lowest median time, with the backward pass if gradients are needed."""
    inputs = [each.detach().clone().requires_grad_(q.requires_grad) for each in (q, k, v)]

    def once(run: Callable[..., Tensor]) -> float:
        _wait(q.device)
        start = time.perf_counter()
        with torch.set_grad_enabled(q.requires_grad):
            y = run(*inputs, mask, scale, None, dropout)
            if q.requires_grad:
                torch.autograd.grad(y, inputs, torch.ones_like(y))
        _wait(q.device)
        return time.perf_counter() - start

    runs = {}
    on_device = ("sdpa", "sliced", *_KERNELS) if q.device.type == "cuda" else ("sdpa", "sliced")
    for name in on_device:
        run = partial(_call, name)
        try:
            once(run)
        except RuntimeError:  # a kernel that does not support these sizes, dtypes or masks
            continue
        runs[name] = run
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(7):
        for name, run in runs.items():
            times[name].append(once(run))
    return min(times, key=lambda name: median(times[name]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _call(
    name: str,
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: AttentionMask,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    if name == "sliced":
        return sliced_attention(q_BHTD, k_BKSD, v_BKSD, mask, scale=scale, softcap=softcap, dropout=dropout)
    if name in _KERNELS:
        with sdpa_kernel(_KERNELS[name]):
            return _call("sdpa", q_BHTD, k_BKSD, v_BKSD, mask, scale, softcap, dropout)
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    if groups > 1 and mask.n_queries == 1:
        return _one_query(q_BHTD, k_BKSD, v_BKSD, mask, scale, dropout)
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


def _one_query(
    q_BH1D: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: AttentionMask,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Treat heads that share keys as queries with equal visibility: kernels are slow with grouped heads."""
    B, H, _, D = q_BH1D.shape
    K = k_BKSD.shape[1]
    y_BKGD = F.scaled_dot_product_attention(
        q_BH1D.reshape(B, K, H // K, D),
        k_BKSD,
        v_BKSD,
        attn_mask=mask.dense(),  # equal for all heads
        dropout_p=dropout,
        scale=scale,
    )
    return y_BKGD.reshape(B, H, 1, v_BKSD.shape[-1])
