"""Trace: readings of the inputs and outputs of every module call in one run, forward and backward.

A call is identified by the time at which it ran, and in the backward graph by the sequence numbers of its
operations. Autograd counts them up in each thread, so a call has a range of numbers. The trace changes
neither the values nor the graph of the model. So it does not affect in-place operations, shared modules or
arguments of any form.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from stackwise.stability.locate.first_module import ROOT, shown_name, uncompiled
from stackwise.stability.locate.reading import Reading, Readings

__all__ = ["Call", "Operation", "SizeKey", "Trace"]

# The operation that torch adds around a module with backward hooks.
_HOOKED = "BackwardHookFunctionBackward"


# Type, name of the module or parameter, number of the call, index of the tensor. The type is "input" or
# "output"; "incoming", "outgoing" or "weights" for all gradients that a call receives, passes to other calls,
# or passes to parameters; "parameter"; "loss".
SizeKey = tuple[str, str, int, int]


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        module: name of the module.
        number: number of the call of this module, from 1.
        parent: enclosing call.
        started: time of the start, in events of the trace.
        first: sequence number of the first operation.
        end: sequence number after the last operation; None if the call did not return.
        ended: time of the return.
        thread: thread of the call.
        recomputes: True if the call runs in the backward pass and recomputes an earlier call.
        hooked: True if the module has backward hooks.
        inputs: indices of the readings of the arguments.
        outputs: indices of the readings of the output.
    """

    module: str
    number: int
    parent: Call | None
    started: int
    first: int
    thread: int
    recomputes: bool
    hooked: bool
    inputs: list[int]
    outputs: list[int] = field(default_factory=list)
    end: int | None = None
    ended: int = -1

    def chain(self) -> Iterator[Call]:
        """Yield the call, its enclosing call, and so on."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def places(self) -> Iterator[tuple[SizeKey, int]]:
        """Yield (key, index of the reading) of each input and output."""
        for what, places in (("input", self.inputs), ("output", self.outputs)):
            for index, place in enumerate(places):
                yield (what, self.module, self.number, index), place


@dataclass(eq=False)
class Operation:
    """One operation of a backward pass.

    Attributes:
        node: node of the graph. It is invalid after the graph is freed, if an `autograd.Function` created it.
        name: name of the node.
        number: sequence number of the node; None for a leaf, which has none.
        thread: thread whose sequence numbers are used.
        leaf: tensor to which the operation adds a gradient; None: the operation computes.
        is_root: True if a backward pass starts at this operation.
        edges: operations that receive the gradients of the inputs.
        given: indices of the readings of the gradients of its outputs, as it received them.
        gave: (edge, index of the reading) of each gradient of its inputs.
        ran: time of the execution.
        call: innermost call that created the operation; None: created outside the calls.
    """

    node: Node
    name: str
    number: int | None
    thread: int
    leaf: Tensor | None
    is_root: bool
    edges: list[Operation | None] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    gave: list[tuple[int, int]] = field(default_factory=list)
    ran: int = -1
    call: Call | None = None

    def calls(self) -> Iterator[Call]:
        """Yield the calls that contain the operation, innermost first."""
        return iter(()) if self.call is None else self.call.chain()


class Trace:
    """Observes a model while a `with` block runs it forward and backward.

    Attributes:
        calls: calls in the order of their return; filled at the end of the block.
        operations: operations of the backward passes in execution order; filled at the end of the block.
        readings: readings, to which the indices in `Call` and `Operation` refer.
        losses: indices of the readings of the tensors on which backward() was called.
        parameters: readings of the parameters before the block, by name. All shards of a sharded one are
            included.
        buffers: readings of the buffers before the block, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.operations: list[Operation] = []
        self.readings: list[Reading] = []
        self.losses: list[int] = []
        self.parameters: dict[str, Reading] = {}
        self.buffers: dict[str, Reading] = {}
        self._model = model
        self._readings = Readings()
        self._clock = itertools.count()
        self._counts: Counter[str] = Counter()
        self._open: dict[int, list[tuple[nn.Module, Call]]] = {}
        self._by_node: dict[Node, Operation] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> Trace:
        self.parameters = _read(self._model.named_parameters())
        self.buffers = _read(self._model.named_buffers())
        with ExitStack() as undo:
            for name, module in self._model.named_modules():
                after = module.register_forward_hook(self._after)
                before = module.register_forward_pre_hook(
                    self._before(shown_name(name), after), prepend=True, with_kwargs=True
                )
                undo.callback(after.remove)
                undo.callback(before.remove)
            undo.enter_context(_watching_backward(self._on_backward))
            undo.enter_context(uncompiled(self._model))
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()
        for operation in self._by_node.values():
            if operation.ran >= 0:
                self.operations.append(operation)
        self._by_node.clear()
        self.operations.sort(key=lambda operation: operation.ran)
        self.readings = self._readings.settle()
        self._number_recomputed()
        self._assign()

    def of(self, places: list[int]) -> list[Reading]:
        """Return the readings at these indices."""
        return [self.readings[place] for place in places]

    def owner(self, leaf: Tensor | None) -> str | None:
        """Return the name of the module that a parameter belongs to; None if the model does not have it."""
        for name, parameter in self._model.named_parameters():
            if parameter is leaf:
                return shown_name(name.rpartition(".")[0])
        return None

    def tensors_of(self, module: str) -> list[str]:
        """Return the parameter and buffer names of a module, and of submodules that were not called."""
        called = {call.module for call in self.calls}
        first = {
            id(t): shown_name(n) for n, t in (*self._model.named_parameters(), *self._model.named_buffers())
        }
        names: dict[str, None] = {}
        for name, part in self._model.named_modules():
            shown = shown_name(name)
            within = shown == module or module == ROOT or shown.startswith(f"{module}.")
            if within and (shown == module or shown not in called):
                tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
                names |= dict.fromkeys(first[id(tensor)] for tensor in tensors)
        return list(names)

    # Forward

    def _before(self, name: str, after: RemovableHandle) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Last, so that the effects of other hooks are attributed to this module.
            module._forward_hooks.move_to_end(after.id)  # type: ignore[attr-defined]
            thread = threading.get_ident()
            stack = self._open.setdefault(thread, [])
            recomputes = _in_backward()
            if not recomputes:
                self._counts[name] += 1
                # Recomputation aborts a call as soon as it has the required values.
                while stack and stack[-1][1].recomputes:
                    stack.pop()
            call = Call(
                name,
                self._counts[name],
                stack[-1][1] if stack else None,
                next(self._clock),
                torch._C._autograd._get_sequence_nr(),
                thread,
                recomputes,
                bool(module._backward_hooks or module._backward_pre_hooks),
                self._readings.take((args, kwargs)),
            )
            stack.append((module, call))

        return hook

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        stack = self._open[threading.get_ident()]
        while stack:  # aborted calls remain on top
            opened, call = stack.pop()
            if opened is module:
                call.outputs = self._readings.take(output)
                call.end = torch._C._autograd._get_sequence_nr()
                call.ended = next(self._clock)
                self.calls.append(call)
                return

    # Backward

    def _on_backward(self, roots: list[Any]) -> None:
        inner = _in_backward()
        if not inner:
            self.losses += self._readings.take([root for root in roots if isinstance(root, Tensor)])
        waiting: list[Operation] = []

        def reach(node: Node, *, is_root: bool = False) -> Operation:
            if node not in self._by_node:
                waiting.append(self._operation(node, is_root=is_root))
            return self._by_node[node]

        for root in roots:
            node = root.grad_fn if isinstance(root, Tensor) else root.node
            if node is not None:
                reach(node, is_root=not inner)
        while waiting:
            operation = waiting.pop()
            for target, _ in operation.node.next_functions:
                operation.edges.append(None if target is None else reach(target))

    def _operation(self, node: Node, *, is_root: bool) -> Operation:
        leaf = getattr(node, "variable", None)
        number = None if leaf is not None else node._sequence_nr()
        operation = Operation(node, node.name(), number, threading.get_ident(), leaf, is_root)

        def hook(gave: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
            if operation.ran < 0:
                operation.ran = next(self._clock)
            operation.given += self._readings.take(given)
            for edge, gradient in enumerate(gave):
                place = self._readings.take_one(gradient)
                if place is not None:
                    operation.gave.append((edge, place))

        self._cleanup.callback(node.register_hook(hook).remove)
        self._by_node[node] = operation
        return operation

    def _number_recomputed(self) -> None:
        """Give each recomputed call the number of the original call, which had the same inputs."""
        first = [call for call in self.calls if not call.recomputes]
        taken: set[Call] = set()
        for call in self.calls:
            if call.recomputes:
                same = [each for each in first if each.module == call.module and each not in taken]
                equal = [each for each in same if self._print(each) == self._print(call)]
                # The backward pass starts with the last call.
                for each in (equal or same)[-1:]:
                    call.number = each.number
                    taken.add(each)

    def _print(self, call: Call) -> str:
        return repr(self.of(call.inputs))

    def _assign(self) -> None:
        """Find the innermost call of each operation. Inner calls return first."""
        by_thread: dict[int, list[tuple[int, Operation]]] = {}
        for operation in self.operations:
            if operation.number is not None:
                by_thread.setdefault(operation.thread, []).append((operation.number, operation))
        for thread, numbered in by_thread.items():
            numbered.sort(key=lambda each: each[0])
            numbers = [number for number, _ in numbered]
            for call in self.calls:
                if call.thread != thread or call.end is None:
                    continue
                for place in range(bisect_left(numbers, call.first), bisect_left(numbers, call.end)):
                    operation = numbered[place][1]
                    operation.call = operation.call or call
                # The operation that a module with backward hooks adds after its last forward hook.
                place = bisect_left(numbers, call.end)
                if call.hooked and place < len(numbers) and numbers[place] == call.end:
                    operation = numbered[place][1]
                    if operation.name == _HOOKED:
                        operation.call = operation.call or call

    # Sizes

    def delivered(self) -> Iterator[tuple[Operation, Operation, int]]:
        """Yield (source, target, index of the reading) for each gradient between operations."""
        for operation in self.operations:
            for edge, place in operation.gave:
                target = operation.edges[edge] if edge < len(operation.edges) else None
                if target is not None:
                    yield operation, target, place

    def sizes(self) -> dict[SizeKey, float]:
        """Return the root mean squares by key, without tensors that have non-finite values."""
        parts: dict[SizeKey, list[Reading]] = {}
        for key, place in self._places():
            parts.setdefault(key, []).append(self.readings[place])
        for name, reading in self.parameters.items():
            parts["parameter", name, 0, 0] = [reading]
        return {
            key: math.sqrt(sum(r.square for r in readings) / sum(r.count for r in readings))
            for key, readings in parts.items()
            if all(r.is_finite for r in readings)
        }

    def _places(self) -> Iterator[tuple[SizeKey, int]]:
        """Yield (key, index of the reading) of each tensor in a pass."""
        for call in self.calls:
            if not call.recomputes:
                yield from call.places()
        parameters = set(self._model.parameters())
        for source, target, place in self.delivered():
            what = "weights" if target.leaf in parameters else "outgoing"
            for call in set(source.calls()).difference(target.calls()):
                yield (what, call.module, call.number, 0), place
        for call, place in self._incoming():
            yield ("incoming", call.module, call.number, 0), place
        for place in self.losses:
            yield ("loss", "", 0, 0), place

    def _incoming(self) -> Iterator[tuple[Call, int]]:
        """Yield (call, index of the reading) for each gradient that enters a call in the backward pass.

        Gradients for one operation are summed before it receives them, and may cancel out. If none of them
        comes from inside the call, the sum is used; otherwise each gradient from outside is.
        """
        handed: dict[Operation, list[tuple[Operation, int]]] = {}
        for source, target, place in self.delivered():
            handed.setdefault(target, []).append((source, place))
        for target, parts in handed.items():
            for call in target.calls():
                outside = [place for source, place in parts if call not in source.calls()]
                whole = target.given if len(outside) == len(parts) else outside
                for place in whole:
                    yield call, place


def _read(named: Iterable[tuple[str, Tensor]]) -> dict[str, Reading]:
    tensors = {shown_name(name): tensor for name, tensor in named}
    readings = Readings()
    places = {name: readings.take_one(tensor) for name, tensor in tensors.items()}
    settled = readings.settle()
    taken = {name: settled[place] for name, place in places.items() if place is not None}
    return _over_ranks(taken, tensors)


def _over_ranks(readings: Mapping[str, Reading], tensors: Mapping[str, Tensor]) -> dict[str, Reading]:
    """Return the readings by name. For a sharded tensor, combine the readings of all shards."""
    whole = dict(readings)
    meshes = {name: t.device_mesh for name, t in tensors.items() if hasattr(t, "device_mesh")}
    for mesh in dict.fromkeys(meshes.values()):
        names = [name for name, of_name in meshes.items() if of_name == mesh]
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            every: list[Any] = [None] * group.size()
            torch.distributed.all_gather_object(every, [whole.get(name) for name in names], group=group)
            for name, parts in zip(names, zip(*every, strict=True), strict=True):
                whole |= {name: Reading.of_parts([part for part in parts if part is not None])}
    return whole


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _watching_backward(seen: Callable[[list[Any]], None]) -> Iterator[None]:
    """Call `seen` with the roots of each backward pass.

    This replaces `torch.autograd.backward`, which `Tensor.backward` looks up by name.
    """
    plain: Callable[..., Any] = torch.autograd.backward

    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A GradientEdge is a tuple too.
        tensors = [tensors] if isinstance(tensors, Tensor) or hasattr(tensors, "node") else list(tensors)
        seen(tensors)
        return plain(tensors, *args, **kwargs)

    with patch.object(torch.autograd, "backward", watched):
        yield
