"""AttentionLogit: how large the attention logits of a model become as it trains, on the device.

Shapes: ... any, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.argument import require
from stackwise.logit_bound import LogitBound, watching

__all__ = ["AttentionLogit", "are_attention_scores"]

_SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
_BESIDE = 2  # keys that are no positions: sinks, biases


class AttentionLogit:
    """What `Guard.step(loss, logit=...)` takes, of any model that is not compiled.

    While the model is called with gradients, each `scaled_dot_product_attention` of torch is seen, also that
    of `nn.MultiheadAttention`, and its logits are bounded by the norms of queries and keys: no logit is
    larger, and none is computed for it. Of attention that is written out the largest number that its softmax
    takes is seen. Attention of a Rack is seen whichever way it is computed; kernels of other libraries are
    not.

    Args:
        model: whose calls are watched until `remove`.

    Raises:
        ValueError: the model is compiled: what it computes runs in no call that could be seen.
    """

    def __init__(self, model: nn.Module) -> None:
        compiled = isinstance(model, torch._dynamo.OptimizedModule)
        require(not compiled, "model", type(model).__name__, "one that is not compiled, or its `_orig_mod`")
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._bound, self._open = LogitBound(device), list[ExitStack]()
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def take(self) -> Tensor:
        """The largest since the last call, float32 of no dimension; NaN, which is no signal: none."""
        return self._bound.take()

    def remove(self) -> None:
        """Watch the model no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, _model: nn.Module, _args: Any) -> None:
        opened = ExitStack()
        if torch.is_grad_enabled():
            opened.enter_context(watching(self._bound))
            opened.enter_context(_Functions(self._bound))
        self._open.append(opened)

    def _leave(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        if self._open:
            self._open.pop().close()


def are_attention_scores(scores: Tensor, axis: int) -> bool:
    """Whether a softmax over `axis` of (..., T, S) is over keys: S is T, or a few more."""
    if scores.ndim < 3 or axis % scores.ndim != scores.ndim - 1:
        return False
    T, S = scores.shape[-2:]
    return T > 1 and T <= S <= T + _BESIDE


class _Functions(TorchFunctionMode):
    """Sees attention by the functions of torch that it calls."""

    def __init__(self, bound: LogitBound) -> None:
        super().__init__()
        self._bound = bound

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            query, key = _given("query", 0, args, kwargs), _given("key", 1, args, kwargs)
            self._bound.note(query.detach(), key.detach(), _given("scale", 6, args, kwargs))
        elif function in _SOFTMAX:
            scores, axis = _given("input", 0, args, kwargs), _given("dim", 1, args, kwargs)
            _note_softmax(self._bound, scores, axis)
        elif function is F.multi_head_attention_forward:
            # What it calls itself is seen one level below.
            with _Operators(self._bound):
                return function(*args, **kwargs)
        return function(*args, **kwargs)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees attention by the operators that run."""

    def __init__(self, bound: LogitBound) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bound = bound

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_") and not name.endswith("_backward"):
            self._bound.note(args[0], args[1], kwargs.get("scale"))
        elif name in ("_softmax", "_safe_softmax"):
            _note_softmax(self._bound, args[0], args[1])
        return function(*args, **kwargs)


def _note_softmax(bound: LogitBound, scores: Tensor, axis: int | None) -> None:
    if axis is not None and are_attention_scores(scores, axis):
        bound.note_scores(scores)


def _given(name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An argument, by its place or its name; None: it is not given."""
    return args[place] if len(args) > place else kwargs.get(name)
