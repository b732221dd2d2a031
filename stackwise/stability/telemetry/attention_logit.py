"""AttentionLogit: how large the attention logits of a model become as it trains, on the device.

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
_BESIDE = 2  # keys that are no positions: sinks, biases
# What may be between a product of queries and keys and its softmax, by the names of autograd.
_MOVED = "View UnsafeView ReshapeAlias Permute Transpose T Unsqueeze Squeeze Expand Clone ToCopy Alias"
_CHANGED = "Mul Div Add Sub Neg Pow Tanh Clamp Minimum Maximum MaskedFill Where CopySlices"
_CUT = "Slice Select Split Cat ConstantPadNd"
_MOVES = frozenset(_MOVED.split())
_STEPS = _MOVES.union(_CHANGED.split(), _CUT.split())
_STEPS_AT_MOST = 64
_SUBTRACTIONS = (torch.sub, Tensor.sub, Tensor.sub_)


class AttentionLogit:
    """What `Guard.step(loss, logit=...)` takes, of any model.

    While the model is called with gradients, each `scaled_dot_product_attention` of torch is seen, also that
    of `nn.MultiheadAttention`, and its logits are bounded by the norms of queries and keys: no logit is
    larger, and none is computed for it. A bias that is added, as a mask of numbers, is not counted. Of
    attention that is written out the numbers that its softmax takes are seen, behind a soft cap if there is
    one: of each query the largest, and of these the largest absolute value. Where the largest of each query
    is subtracted first, as in gpt-oss of transformers, that is what is seen, but not in a compiled model, nor
    if it is detached. Attention of a Rack is seen whichever way it is computed. Kernels of other libraries,
    `flex_attention`, nested tensors and DTensors are not seen.

    Seen is what gradients come back to. What the guard computes again is no part of a step, and not seen.
    Attention that is written out is known by a product of two activations that its softmax comes from, also
    where a weight mixes its heads, as in CaiT. Where nothing tells of products, as the compiler does not, it
    is known by its shape, (..., H, T, S) with S from T to T + 2.

    Args:
        model: whose calls are watched until `remove`; compiled or not.

    Warns:
        UserWarning: at the first `take` behind a call in which nothing was seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._bound, self._open = LogitBound(torch.device("cpu")), list[_Call]()
        self._unseen, self._warned = "", False
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def take(self) -> Tensor:
        """The largest since the last call, float32 of no dimension; NaN, which is no signal: none."""
        self._end_interrupted()
        if self._unseen and not (self._warned or self._bound.seen):
            self._warned = True
            what = f"in a call of {self._unseen} AttentionLogit saw no attention that is trained"
            warnings.warn(f"{what}: its logit is NaN, which is no signal", UserWarning, stacklevel=2)
        self._unseen = ""
        return self._bound.take()

    def remove(self) -> None:
        """Watch the model no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_interrupted()

    # The compiler could not follow what these two ask of the interpreter.
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
        """End calls that were ended as by Ctrl-C: torch calls hooks behind an `Exception` only."""
        if self._open:
            under_way = set(_frames())
            for call in self._open[::-1]:
                if call.thread == threading.get_ident() and call.frame not in under_way:
                    self._open.remove(call)
                    call.end()


@dataclass(eq=False)
class _Call:
    """A call of the model.

    Attributes:
        frame: that it runs in.
        thread: that it runs in.
        mode: sees what it computes; None: nothing does.
        before: who was told of attention until then.
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
        # Where the call was interrupted others may lie above it.
        above = []
        while self.mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            above.append(_pop_mode())  # type: ignore[no-untyped-call]
        for each in above[-2::-1]:
            _push_mode(each)  # type: ignore[no-untyped-call]


def _frame_of_call() -> FrameType:
    """That of the call of the module whose hook this is; where torch has another, the outermost."""
    frames = _frames()
    of_modules = (frame for frame in frames if frame.f_code is nn.Module._call_impl.__code__)
    return next(of_modules, frames[-1])


def _frames() -> list[FrameType]:
    """Whatever runs in this thread, innermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


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
        self.bound = bound

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            # What it calls itself is seen one level below.
            with _Operators(self.bound):
                return function(*args, **kwargs)
        output = function(*args, **kwargs)
        # Behind it: what it refuses is its own affair.
        if function is F.scaled_dot_product_attention:
            query, key = _given("query", 0, args, kwargs), _given("key", 1, args, kwargs)
            if _are_trained(query, key):
                self.bound.note(query.detach(), key.detach(), _given("scale", 6, args, kwargs))
        elif function in _SOFTMAX:
            scores, axis = _given("input", 0, args, kwargs), _given("dim", 1, args, kwargs)
            if axis is not None and _are_trained(scores) and _is_of_keys(scores, axis):
                self.bound.note_scores(scores.detach(), axis)
        elif not torch.compiler.is_compiling() and function in _SUBTRACTIONS:
            # A softmax that takes scores less the largest of each query takes none above 0.
            scores, largest = _given("input", 0, args, kwargs), _given("other", 1, args, kwargs)
            are_tensors = isinstance(scores, Tensor) and isinstance(largest, Tensor)
            if are_tensors and _are_trained(scores) and _is_largest(output, largest):
                self.bound.note_scores(largest.detach().reshape(-1, 1))
        return output


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees attention by the operators that run inside of a function that computes nothing else."""

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
    """Whether gradients come back to one of them, also where that is found out later."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # A reentrant checkpoint computes without gradients first.
    return any(frame.f_code is CheckpointFunction.forward.__code__ for frame in _frames())


def _is_of_keys(scores: Tensor, axis: int) -> bool:
    """Whether a softmax over `axis` is attention: by what the scores come from; else by their shape."""
    # The compiler does not follow graphs of autograd.
    if not torch.compiler.is_compiling():
        products = _products(scores.grad_fn, scores)
        if products:
            return scores.ndim > 2 and True in products
    return scores.ndim > 3 and are_attention_scores(scores, axis)


def _is_largest(difference: Tensor, largest: Tensor) -> bool:
    """Whether what was subtracted is a maximum, and this from attention scores."""
    if difference.ndim < 3 or difference.grad_fn is None or _operation(difference.grad_fn) != "Sub":
        return False
    minuend, subtrahend = (node for node, _ in difference.grad_fn.next_functions)
    is_maximum = subtrahend is not None and _operation(_behind_moves(subtrahend)) in ("Max", "Amax")
    return is_maximum and largest.numel() > 0 and True in _products(minuend, difference)


def _products(node: Any, scores: Tensor) -> set[bool]:
    """What is known of the products that scores come from: whether of two activations.

    Args:
        node: of autograd, that they come from.
        scores: where they are (..., H, T, S) a weight may mix heads, once: a product (T, S) is behind it.
    """
    found, open_nodes, left = set[bool](), [(node, False)], _STEPS_AT_MOST
    while open_nodes and left:
        (node, mixed), left = open_nodes.pop(), left - 1
        if node is None:
            continue
        operation = _operation(node)
        if operation in _STEPS:
            open_nodes += [(following, mixed) for following, _ in node.next_functions]
            continue
        # The last two are the factors; of a weight it is a linear layer.
        factors = [factor for factor, _ in node.next_functions[-2:]]
        if operation in ("Bmm", "Baddbmm"):
            of_activations = not any(map(_is_parameter, factors))
        elif operation in ("Mm", "Addmm") and any(each is None or _is_parameter(each) for each in factors):
            of_activations = False
        else:
            continue
        # Behind a router there is attention as well, but of other shapes.
        found.add(of_activations and (not mixed or _matrix(node) == scores.shape[-2:]))
        if not (of_activations or mixed) and scores.ndim > 3 and scores.shape[-3] in _matrix(node):
            open_nodes += [(factor, True) for factor in factors]
    return found


def _matrix(node: Any) -> tuple[int, ...]:
    """The last two sizes of what a node of autograd is of."""
    return tuple(node._input_metadata[0].shape[-2:])


def _is_parameter(node: Any) -> bool:
    """Whether what a node of autograd is of is a parameter, but for its shape."""
    return node is not None and _operation(_behind_moves(node)) == "AccumulateGrad"


def _behind_moves(node: Any) -> Any:
    """The node of autograd whose numbers are only in another shape in this one; None: no gradients."""
    while node is not None and _operation(node) in _MOVES:
        node = node.next_functions[0][0]
    return node


def _operation(node: Any) -> str:
    """`Bmm` of `BmmBackward0`; "": there is no node."""
    name: str = node.name() if node is not None else ""
    return name.rpartition("::")[2].partition("Backward")[0]


def _given(name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An argument, by its place or its name; None: it is not given."""
    return args[place] if len(args) > place else kwargs.get(name)
