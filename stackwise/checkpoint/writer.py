"""Writer: what is written while the training goes on. State is copied first, then written by a thread.

The memory of the copies stays and is used again: on the host once the size of the state, pinned for what is
on a CUDA device. There the copies are made by the device in its order of work; only the thread waits for
them. What only an optimizer changes may be copied beside the training, until the next step of one.
"""

from __future__ import annotations

import errno
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stackwise.checkpoint.tensor_file import Part

__all__ = ["Staging", "Writer"]

K = TypeVar("K", bound=Hashable)
_ALIGNMENT = 64  # bytes: a line of the cache, and more than any number is wide
# The allocator of pinned memory rounds up to powers of two: what is small shares a piece of this size.
_PINNED_PIECE = 2**26


class _Unchanged(Generic[K]):
    """Whether tensors are as they were when this was made, by torch's count of their changes.

    It is told once: by the thread when the copies are there, or by the host before a step of an optimizer
    that only the device keeps waiting. What is changed after that does not matter.
    """

    def __init__(self, tensors: Mapping[K, Tensor]) -> None:
        # A detached tensor shares the counter of the one that it is of.
        self._versions = {name: (tensor, tensor._version) for name, tensor in tensors.items()}
        self._lock = threading.Lock()
        self._changed: list[K] | None = None

    def changed(self) -> list[K]:
        """Those that were changed before this was asked for the first time."""
        with self._lock:
            if self._changed is None:
                held = self._versions.items()
                self._changed = [name for name, (tensor, count) in held if tensor._version != count]
                self._versions = {}
            return self._changed


class Staging(Generic[K]):
    """Copies of tensors as they are now, in memory that is kept for the copies after."""

    def __init__(self) -> None:
        self._buffers: dict[K, Tensor] = {}
        self._host: Tensor | None = None
        self._late = threading.Event()  # set: nothing is left that an optimizer has to wait for
        self._late.set()
        self._unchanged = _Unchanged[K]({})
        self._beside: list[tuple[torch.device, torch.cuda.Event]] = []
        self._hook: RemovableHandle | None = None

    def copy(
        self, parts: Mapping[K, Part], late: Collection[K] = ()
    ) -> tuple[dict[K, Part], Callable[[], None]]:
        """Copies of `parts`, in the memory of the copies before, and what waits until they are there.

        Args:
            parts: to be copied.
            late: those that are copied by what waits, and by CUDA devices on a stream of their own. Until
                then a step of any optimizer of torch waits: the host for its own, a device for its own.

        Returns:
            Copies, and a function for a thread: it raises an OSError if one of `late` was changed meanwhile.
        """
        sources = {name: part.tensor.detach() for name, part in parts.items()}
        if not self._fits(sources):
            self._place(sources)
        updated = {name: sources[name] for name in late if not sources[name].is_inference()}
        devices = {source.device for source in sources.values() if source.is_cuda}
        beside = {device: torch.cuda.Stream(device) for device in devices if updated}  # type: ignore[no-untyped-call]
        for device, stream in beside.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for name, source in sources.items():
            if not source.is_cuda:
                if name not in updated:
                    self._buffers[name].copy_(source)
                continue
            own = beside[source.device] if name in updated else None
            stream = torch.cuda.current_stream(source.device) if own is None else own
            with torch.cuda.stream(stream):
                self._buffers[name].copy_(source, non_blocking=True)
        arrived = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._beside = [(device, stream.record_event()) for device, stream in beside.items()]
        unchanged = self._unchanged = _Unchanged(updated)
        if updated:
            if not all(source.is_cuda for source in updated.values()):
                self._late.clear()
            self._hold_optimizers()

        def wait() -> None:
            try:
                for name, source in updated.items():
                    if not source.is_cuda:
                        self._buffers[name].copy_(source)
                for event in (*arrived, *(event for _, event in self._beside)):
                    event.synchronize()
                for name in unchanged.changed():
                    told = f"{name} was changed while it was copied, by another than an optimizer's step"
                    raise OSError(errno.EBUSY, told)
            finally:
                self._late.set()

        return {name: Part(self._buffers[name], part.offsets) for name, part in parts.items()}, wait

    def release(self) -> None:
        """Have no optimizer wait: what waits for the copies will not be called."""
        self._late.set()

    def close(self) -> None:
        """Be out of the way of optimizers."""
        self.release()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _hold_optimizers(self) -> None:
        if self._hook is not None:
            return
        mine = weakref.ref(self)

        def hold(*_: Any) -> None:
            staging = mine()
            if staging is not None:
                for device, event in staging._beside:
                    torch.cuda.current_stream(device).wait_event(event)
                staging._late.wait()
                # A device does not keep the host waiting, which counts the step before the copies are there.
                staging._unchanged.changed()

        self._hook = register_optimizer_step_pre_hook(hold)

    def _fits(self, sources: Mapping[K, Tensor]) -> bool:
        """Whether the copies before were of the same names, shapes, dtypes and kinds of memory."""
        return sources.keys() == self._buffers.keys() and all(
            (source.shape, source.dtype, source.is_cuda) == (held.shape, held.dtype, held.is_pinned())
            for source, held in ((source, self._buffers[name]) for name, source in sources.items())
        )

    def _place(self, sources: Mapping[K, Tensor]) -> None:
        """Give each a place: those of the host in the memory that there is, if it is large enough."""
        self._buffers = {}
        on_host = {name: source for name, source in sources.items() if not source.is_cuda}
        size = sum(_room(source) for source in on_host.values())
        if self._host is None or self._host.numel() < size:
            self._host = None  # not two at one time
            self._host = _host_memory(size)
        self._carve(on_host, self._host)
        shared: dict[K, Tensor] = {}
        taken = 0
        for name, source in sources.items():
            if not source.is_cuda:
                continue
            if taken + _room(source) > _PINNED_PIECE and shared:
                self._carve(shared, _pinned_memory(taken))
                shared, taken = {}, 0
            shared[name] = source
            taken += _room(source)
        if shared:
            self._carve(shared, _pinned_memory(taken))

    def _carve(self, sources: Mapping[K, Tensor], memory: Tensor) -> None:
        start = 0
        for name, source in sources.items():
            place = memory[start : start + source.numel() * source.element_size()]
            self._buffers[name] = place.view(source.dtype).view(source.shape)
            start += _room(source)


def _room(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT


def _host_memory(size: int) -> Tensor:
    """In large pages where the system has them: a first copy waits until each page is cleared."""
    area = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def _pinned_memory(size: int) -> Tensor:
    return torch.empty(max(1, size), dtype=torch.uint8, pin_memory=True)


class Writer:
    """One call at a time, in a thread. The process does not end before it has."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begins: Callable[[bool], None] = _nobody
        self._error: BaseException | None = None

    @property
    def runs(self) -> bool:
        """Whether the call has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, call: Callable[[], None]) -> None:
        """Have a thread for a call, which `begin` or `drop` decides on.

        `wait` has to have been called since the one before.

        Raises:
            RuntimeError: the system has no thread.
        """
        assert self._thread is None
        decided, wanted = threading.Event(), [False]

        def run() -> None:
            decided.wait()
            if not wanted[0]:
                return
            try:
                call()
            except BaseException as error:  # of the thread: it is the waiting one's to handle
                self._error = error

        def begins(is_wanted: bool) -> None:
            wanted[0] = is_wanted
            decided.set()

        thread = threading.Thread(target=run, name="stackwise-checkpoint", daemon=False)
        thread.start()
        self._thread, self._begins = thread, begins

    def begin(self) -> None:
        """Make the call that there is a thread for."""
        self._begins(True)

    def drop(self) -> None:
        """Do not make the call, if there is a thread for one."""
        self._begins(False)
        self.wait()

    def wait(self) -> None:
        """Go on when the call has ended.

        Raises:
            BaseException: that of the call.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread, self._begins = None, _nobody
        error, self._error = self._error, None
        if error is not None:
            raise error


def _nobody(_: bool) -> None:
    """No call waits."""
