"""CountedFlops: operations of a call as counted by torch's FlopCounterMode, and names of uncounted ones.

It counts the operations that run. Recomputed operations therefore count twice, and attention counts all pairs
of query and key, including those that causality or a window hides. Torch's own count (2.13) lacks attention
on the CPU (pytorch#195460) and products of a matrix and a vector; both are added here. Its count for the
backward pass of a grouped convolution is too high; it is corrected here.

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head size, N and M of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

__all__ = ["CountedFlops", "count_flops", "operation_flops"]

_aten = torch.ops.aten
# Products without a formula in this module. Operations outside of torch's namespaces are always reported.
_WITHOUT_FORMULA = (
    "_cdist_backward",
    "_cdist_forward",
    "_convert_weight_to_int4pack",
    "_cslt_sparse_mm",
    "_euclidean_dist",
    "_int_mm",
    "_native_multi_head_attention",
    "_pdist_backward",
    "_pdist_forward",
    "_scaled_grouped_mm",
    "_sparse_addmm",
    "_sparse_mm_reduce_impl",
    "_sparse_mm_reduce_impl_backward",
    "_sparse_semi_structured_addmm",
    "_sparse_semi_structured_linear",
    "_sparse_semi_structured_mm",
    "_sparse_sparse_matmul",
    "_transformer_encoder_layer_fwd",
    "_trilinear",
    "_triton_multi_head_attention",
    "_triton_scaled_dot_attention",
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_weight_int8pack_mm",
    "addr",
    "addr_",
    "conv_tbc",
    "conv_tbc_backward",
    "grouped_mm",
    "hspmm",
    "lstm_mps",
    "miopen_rnn",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "sspaddmm",
    "_cudnn_rnn",
    "_grouped_mm",
)
_OF_TORCH = ("aten", "prim", "prims", "profiler", "inductor", "c10d", "_c10d_functional", "higher_order")


@dataclass(frozen=True)
class CountedFlops:
    """Operations of one call. An addition and a multiplication are two operations.

    Attributes:
        total: number of counted operations.
        by_operation: counts by name of the operation, in descending order.
        by_dtype: counts by dtype of the factors, after autocast, in descending order.
        uncounted: names of operations that multiply, or may multiply, and are not in `total`: fused kernels
            of other packages, quantised and sparse products, and fused recurrent layers.
        recomputed: part of `total` from forward passes within a backward pass, such as those of checkpoint.
            It does not include recomputation within a fused kernel or within the backward of an
            autograd.Function, or any of a backward pass with create_graph=True.
    """

    total: int
    by_operation: dict[str, int]
    by_dtype: dict[torch.dtype, int]
    uncounted: tuple[str, ...]
    recomputed: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        by_dtype = {str(dtype).removeprefix("torch."): n for dtype, n in self.by_dtype.items()}
        return asdict(self) | {"by_dtype": by_dtype, "uncounted": list(self.uncounted)}


def count_flops(call: Callable[[], object]) -> CountedFlops:
    """Count the operations of one call.

    It must not be timed, because each operation is dispatched through Python.

    A compiled call is counted by the operations that it is compiled from.

    Args:
        call: function without arguments. Its backward pass, if any, is also counted.

    Raises:
        TypeError: the call has an operation that torch cannot run under a counter, such as flex_attention.
    """
    seen = _Seen()
    counter = FlopCounterMode(display=False, custom_mapping=dict(_FORMULAS))
    counter.mod_tracker = _NoModules()
    with seen, counter:
        call()
    counts = {str(name): int(n) for name, n in counter.get_flop_counts().get("Global", {}).items() if n}
    ordered = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    by_dtype = dict(seen.by_dtype.most_common())
    uncounted = tuple(sorted(seen.uncounted))
    return CountedFlops(sum(counts.values()), ordered, by_dtype, uncounted, seen.recomputed)


def operation_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of one dispatched operation: a product or attention. 0 for all other operations."""
    packet = function._overloadpacket
    if packet in _FORMULAS:
        return int(_FORMULAS[packet](*args, **kwargs, out_val=result))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record of the operations of a call: uncounted ones, counts by dtype, and recomputed ones."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uncounted: set[str] = set()
        self.by_dtype: Counter[torch.dtype] = Counter()
        # For each backward pass: the operations with gradients enabled, and a mark if any ran without.
        self._with_graph: Counter[int] = Counter()
        self._without_graph: set[int] = set()

    @property
    def recomputed(self) -> int:
        """Number of operations of forward passes within a backward pass.

        A backward pass has operations with gradients only if it repeats a forward pass, or, with
        create_graph, for all of its operations.
        """
        return sum(n for backward, n in self._with_graph.items() if backward in self._without_graph)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(function, "_overloadpacket", function)
        backward = torch._C._current_graph_task_id()  # -1: no backward pass is running
        if not torch.is_grad_enabled():
            self._without_graph.add(backward)
        if packet not in _FORMULAS and packet not in flop_registry:
            namespace, name = getattr(function, "namespace", "higher_order"), packet.__name__
            if namespace not in _OF_TORCH or name in _WITHOUT_FORMULA:
                self.uncounted.add(f"{namespace}.{name}")
            return function(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        factor = next((each for each in args if isinstance(each, Tensor)), None)
        if factor is not None:
            flops = operation_flops(function, args, kwargs or {}, result)
            self.by_dtype[factor.dtype] += flops
            if torch.is_grad_enabled() and backward != -1:
                self._with_graph[backward] += flops
        return result


class _NoModules(ModuleTracker):
    """Module tracker without effect, because only the total of a call is needed.

    To separate modules, torch's tracker hooks gradients, and it refuses those of a leaf.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    """Mark a formula as one that takes tensors instead of their shapes, in torch's format."""
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


@_raw
def _summed_products(_added: Tensor, left_BNM: Tensor, right_BMP: Tensor, *_: Any, **__: Any) -> int:
    return 2 * left_BNM.numel() * right_BMP.shape[-1]


@_raw
def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Return two products for each pair of a query (B, H, T, D) and a key (B, K, S, D)."""
    return _pairs(q, k) * (q.shape[-1] + v.shape[-1])


@_raw
def _attention_backward(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of the recomputed scores and of the derivatives of both products."""
    return _pairs(q, k) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(q_BHTD: Tensor, k_BKSD: Tensor) -> int:
    return 2 * prod(q_BHTD.shape[:3]) * k_BKSD.shape[2]


@_raw
def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias_sizes: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    wanted: Sequence[bool],
    **_: Any,
) -> int:
    """Return the forward count once for the gradient of the input and once for that of the weight.

    Torch's own formula for the weight (2.13) ignores that a channel is only combined with channels of its
    group.
    """
    positions = prod((x if transposed else gradient).shape[2:])
    return 2 * len(x) * positions * weight.numel() * sum(wanted[:2])


@_raw
def _vector(matrix_NM: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix_NM.numel()


@_raw
def _added_vector(_added_N: Tensor, matrix_NM: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix_NM.numel()


_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.mv: _vector,
    _aten.dot: _vector,
    _aten.vdot: _vector,
    _aten.addmv: _added_vector,
    _aten.addbmm: _summed_products,
    _aten._addmm_activation: _summed_products,
    _aten.convolution_backward: _convolution_backward,
    **{getattr(_aten, f"_scaled_dot_product_{kind}"): _attention for kind in _ATTENTION},
    **{getattr(_aten, f"_scaled_dot_product_{kind}_backward"): _attention_backward for kind in _ATTENTION},
}
