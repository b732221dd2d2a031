"""AttentionLogit: largest attention logit of a model during training, computed on the device.

Shapes: ... any, H heads, T queries, S keys.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from stackwise.stability.recomputation import is_recomputation
from stackwise.support.logit_bound import LogitBound, watch

__all__ = ["AttentionLogit", "are_attention_scores"]

_SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
_BESIDE = 2  # number of keys that are not positions: sinks, biases
# Operations allowed between a product of queries and keys and its softmax, by their autograd names.
_MOVED = "View UnsafeView ReshapeAlias Permute Transpose T Unsqueeze Squeeze Expand Clone ToCopy Alias"
_CHANGED = "Mul Div Add Sub Neg Pow Tanh Clamp Minimum Maximum MaskedFill Where CopySlices"
_CUT = "Slice Select Split Cat ConstantPadNd"
_MOVES = frozenset(_MOVED.split())
_STEPS = _MOVES.union(_CHANGED.split(), _CUT.split())
_STEPS_AT_MOST = 64
_SUBTRACTIONS = (torch.sub, Tensor.sub, Tensor.sub_)


class AttentionLogit:
    """Source of the argument `logit` of `Guard.step(loss, logit=...)`, for any model.

    While the model is called with gradients, attention is observed in these forms:

    - `scaled_dot_product_attention` of torch, also inside `nn.MultiheadAttention`. The value is an upper
      bound of the logits, computed from the norms of queries and keys. The logits are not computed. An added
      bias, such as a floating-point mask, is not included.
    - Written-out attention. The value is the largest absolute value of the largest input of the softmax for
      each query, after a soft cap, if there is one. If the largest logit of each query is subtracted first,
      as in gpt-oss of transformers, the value is the subtracted logit. It is not observed in a compiled model
      or if it is detached.
    - Attention of a Rack, in every implementation.

    Third-party kernels, `flex_attention`, nested tensors and DTensors are not observed.

    Only attention to which gradients flow back is observed. Steps that the guard recomputes are not observed.
    Written-out attention is recognised by a product of two activations before its softmax, even if a weight
    mixes its heads, as in CaiT. If products are unknown, as in compiled code, it is recognised by its shape,
    (..., H, T, S) with S from T to T + 2.

    Args:
        model: model to observe until `remove`, compiled or not.

    Warns:
        UserWarning: at the first `take` after a call in which no attention was observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._bound, self._open = LogitBound(torch.device("cpu")), list[_Call]()
        self._unseen, self._warned = "", False
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def take(self) -> Tensor:
        """Return the largest logit since the last call, as a float32 scalar tensor.

        NaN means that no attention was observed, and is no signal.
        """
        self._end_interrupted()
        if self._unseen and not (self._warned or self._bound.seen):
            self._warned = True
            what = f"in a call of {self._unseen} AttentionLogit observed no attention with gradients"
            warnings.warn(f"{what}: its logit is NaN, which is no signal", UserWarning, stacklevel=2)
        self._unseen = ""
        return self._bound.take()

    def remove(self) -> None:
        """Stop observing the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_interrupted()

    # The compiler cannot trace the interpreter queries of these two methods.
    @_disable_dynamo
    def _enter(self, model: nn.Module, _args: Any) -> None:
        self._end_interrupted()
        call = _Call(_frame_of_call(), threading.get_ident())
        self._open.append(call)
        if torch.is_grad_enabled() and not is_recomputation():
            device = next((p.device for p in model.parameters()), None)
            if device is not None:
                self._bound.to(device)
            call.watch(self._bound)

    @_disable_dynamo
    def _leave(self, model: nn.Module, _args: Any, output: Any) -> None:
        mine = [call for call in self._open if call.thread == threading.get_ident()]
        if mine:
            self._open.remove(mine[-1])
            mine[-1].end()
            if mine[-1].mode is not None and output is not None:
                self._unseen = type(model).__name__

    def _end_interrupted(self) -> None:
        """End calls that were interrupted, for example by Ctrl-C.

        torch calls the forward hook after an `Exception`, but not after any other `BaseException`.
        """
        if self._open:
            under_way = set(_frames())
            for call in self._open[::-1]:
                if call.thread == threading.get_ident() and call.frame not in under_way:
                    self._open.remove(call)
                    call.end()


@dataclass(eq=False)
class _Call:
    """Call of the model.

    Attributes:
        frame: stack frame of the call.
        thread: thread of the call.
        mode: mode that observes the functions of the call. None: not observed.
        before: bound that was active before the call. It is restored at the end.
    """

    frame: FrameType
    thread: int
    mode: _Functions | None = None
    before: LogitBound | None = None

    def watch(self, bound: LogitBound) -> None:
        self.before, self.mode = watch(bound), _Functions(bound)
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        if self.mode is None:
            return
        watch(self.before, instead_of=self.mode.bound)
        # If the call was interrupted, other modes may be above its mode on the stack.
        above = []
        while self.mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            above.append(_pop_mode())  # type: ignore[no-untyped-call]
        for each in above[-2::-1]:
            _push_mode(each)  # type: ignore[no-untyped-call]


def _frame_of_call() -> FrameType:
    """Return the frame of the module call whose hook is running.

    If there is none, return the outermost frame.
    """
    frames = _frames()
    of_modules = (frame for frame in frames if frame.f_code is nn.Module._call_impl.__code__)
    return next(of_modules, frames[-1])


def _frames() -> list[FrameType]:
    """Return all stack frames of this thread, innermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def are_attention_scores(scores: Tensor, axis: int) -> bool:
    """Return True if a softmax over `axis` of (..., T, S) is over keys: S is T, or slightly larger."""
    if scores.ndim < 3 or axis % scores.ndim != scores.ndim - 1:
        return False
    T, S = scores.shape[-2:]
    return T > 1 and T <= S <= T + _BESIDE


class _Functions(TorchFunctionMode):
    """Mode that observes attention through the torch functions that a model calls."""

    def __init__(self, bound: LogitBound) -> None:
        super().__init__()
        self.bound = bound

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            # Its inner calls are observed one level below.
            with _Operators(self.bound):
                return function(*args, **kwargs)
        output = function(*args, **kwargs)
        # Record after the call, so that an invalid call raises its own error.
        if function is F.scaled_dot_product_attention:
            query, key = _given("query", 0, args, kwargs), _given("key", 1, args, kwargs)
            if _are_trained(query, key):
                self.bound.note(query.detach(), key.detach(), _given("scale", 6, args, kwargs))
        elif function in _SOFTMAX:
            scores, axis = _given("input", 0, args, kwargs), _given("dim", 1, args, kwargs)
            if axis is not None and _are_trained(scores) and _is_of_keys(scores, axis):
                self.bound.note_scores(scores.detach(), axis)
        elif not torch.compiler.is_compiling() and function in _SUBTRACTIONS:
            # After this subtraction, no input of the softmax is above 0.
            scores, largest = _given("input", 0, args, kwargs), _given("other", 1, args, kwargs)
            are_tensors = isinstance(scores, Tensor) and isinstance(largest, Tensor)
            if are_tensors and _are_trained(scores) and _is_largest(output, largest):
                self.bound.note_scores(largest.detach().reshape(-1, 1))
        return output


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that observes attention through the operators inside a function that computes only attention."""

    def __init__(self, bound: LogitBound) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bound = bound

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        output = function(*args, **kwargs)
        if name.startswith("_scaled_dot_product_") and not name.endswith("_backward"):
            if _are_trained(args[0], args[1]):
                self._bound.note(args[0].detach(), args[1].detach(), kwargs.get("scale"))
        elif name in ("_softmax", "_safe_softmax") and _are_trained(args[0]):
            self._bound.note_scores(args[0].detach(), args[1])
        return output


def _are_trained(*tensors: Tensor) -> bool:
    """Return True if gradients flow back to one of the tensors, even if autograd does not know it yet."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # A reentrant checkpoint runs the forward pass without gradients first.
    return any(frame.f_code is CheckpointFunction.forward.__code__ for frame in _frames())


def _is_of_keys(scores: Tensor, axis: int) -> bool:
    """Return True if a softmax over `axis` is attention.

    The decision uses the products from which the scores were computed or, if they are unknown, the shape.
    """
    # Compiled code has no autograd graph.
    if not torch.compiler.is_compiling():
        products = _products(scores.grad_fn, scores)
        if products:
            return scores.ndim > 2 and True in products
    return scores.ndim > 3 and are_attention_scores(scores, axis)


def _is_largest(difference: Tensor, largest: Tensor) -> bool:
    """Return True if the subtrahend is a maximum, and the minuend consists of attention scores."""
    if difference.ndim < 3 or difference.grad_fn is None or _operation(difference.grad_fn) != "Sub":
        return False
    minuend, subtrahend = (node for node, _ in difference.grad_fn.next_functions)
    is_maximum = subtrahend is not None and _operation(_behind_moves(subtrahend)) in ("Max", "Amax")
    return is_maximum and largest.numel() > 0 and True in _products(minuend, difference)


def _products(node: Any, scores: Tensor) -> set[bool]:
    """Return the kinds of products from which scores were computed.

    The set contains True for a product of two activations and False for a product with a parameter.

    Args:
        node: autograd node of the scores.
        scores: the scores. If their shape is (..., H, T, S), a weight may mix the heads once, after a product
            of shape (T, S).
    """
    found, open_nodes, left = set[bool](), [(node, False)], _STEPS_AT_MOST
    while open_nodes and left:
        (node, mixed), left = open_nodes.pop(), left - 1
        if _operation(node) in _STEPS:
            open_nodes += [(following, mixed) for following, _ in node.next_functions]
        elif (of_activations := _is_of_activations(node)) is not None:
            # Attention may also precede a router, but with other shapes.
            found.add(of_activations and (not mixed or _matrix(node) == scores.shape[-2:]))
            if not (of_activations or mixed) and scores.ndim > 3 and scores.shape[-3] in _matrix(node):
                open_nodes += [(factor, True) for factor in _factors(node)]
    return found


def _is_of_activations(node: Any) -> bool | None:
    """Return True for a product of two activations, False for a linear layer. None: another operation."""
    operation = _operation(node)
    if operation in ("Bmm", "Baddbmm"):
        return not any(map(_is_parameter, _factors(node)))
    if operation in ("Mm", "Addmm") and any(each is None or _is_parameter(each) for each in _factors(node)):
        return False
    return None


def _factors(node: Any) -> list[Any]:
    """Return the nodes of the factors of a product: of its last two inputs."""
    return [factor for factor, _ in node.next_functions[-2:]]


def _matrix(node: Any) -> tuple[int, ...]:
    """Return the last two sizes of the output of an autograd node."""
    return tuple(node._input_metadata[0].shape[-2:])


def _is_parameter(node: Any) -> bool:
    """Return True if the output of an autograd node is a parameter, possibly reshaped."""
    return node is not None and _operation(_behind_moves(node)) == "AccumulateGrad"


def _behind_moves(node: Any) -> Any:
    """Return the nearest autograd node that is more than a reshape, a copy or a cast.

    Return None if there are no gradients.
    """
    while node is not None and _operation(node) in _MOVES:
        node = node.next_functions[0][0]
    return node


def _operation(node: Any) -> str:
    """Return the name of a node's operation: `Bmm` for `BmmBackward0`, "" for None."""
    name: str = node.name() if node is not None else ""
    return name.rpartition("::")[2].partition("Backward")[0]


def _given(name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument by its position or name. Return None if it is missing."""
    return args[place] if len(args) > place else kwargs.get(name)
