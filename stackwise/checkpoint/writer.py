"""Writer: asynchronous write of a state during the training. The state is copied, then a thread writes it.

The memory of the copies is reused. It is host memory of the size of the state, pinned for tensors on a CUDA
device. A device copies its tensors in stream order, and only the thread waits for the copies. Tensors that
only an optimizer changes may be copied during the training, until the next step of an optimizer.
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
_ALIGNMENT = 64  # bytes: a cache line, which is wider than any number
# The allocator of pinned memory rounds up to powers of two, so small tensors share a piece of this size.
_PINNED_PIECE = 2**26


class _Unchanged(Generic[K]):
    """Check that tensors are unchanged since this object was created, by torch's count of changes.

    The result is determined once: by the thread when the copies are complete, or by the host before a step of
    an optimizer for which only the device waits. Later changes do not matter.
    """

    def __init__(self, tensors: Mapping[K, Tensor]) -> None:
        # A detached tensor shares the counter of its original.
        self._versions = {name: (tensor, tensor._version) for name, tensor in tensors.items()}
        self._lock = threading.Lock()
        self._changed: list[K] | None = None

    def changed(self) -> list[K]:
        """Return the names of tensors that were changed before the first call."""
        with self._lock:
            if self._changed is None:
                held = self._versions.items()
                self._changed = [name for name, (tensor, count) in held if tensor._version != count]
                self._versions = {}
            return self._changed


class Staging(Generic[K]):
    """Copies of the current tensors, in memory that is reused for later copies."""

    def __init__(self) -> None:
        self._buffers: dict[K, Tensor] = {}
        self._host: Tensor | None = None
        self._late = threading.Event()  # set: optimizers do not have to wait
        self._late.set()
        self._unchanged = _Unchanged[K]({})
        self._beside: list[tuple[torch.device, torch.cuda.Event]] = []
        self._hook: RemovableHandle | None = None

    def copy(
        self, parts: Mapping[K, Part], late: Collection[K] = ()
    ) -> tuple[dict[K, Part], Callable[[], None]]:
        """Copy `parts` into the memory of the previous copies.

        Args:
            parts: tensors to be copied.
            late: names of the tensors that the function copies, and that CUDA devices copy on a separate
                stream. Until then, a step of any optimizer of torch waits: the host for its own copies, a
                device for its own.

        Returns:
            copies, and a function for a thread that waits until they are complete. It raises an OSError if a
            tensor of `late` was changed meanwhile.
        """
        sources = {name: part.tensor.detach() for name, part in parts.items()}
        if not self._fits(sources):
            self._place(sources)
        updated = {name: sources[name] for name in late if not sources[name].is_inference()}
        updated_on_host = {name: source for name, source in updated.items() if not source.is_cuda}
        arrived = self._copy_from_devices(sources, updated)
        for name, source in sources.items():
            if not source.is_cuda and name not in updated:
                self._buffers[name].copy_(source)
        unchanged = self._unchanged = _Unchanged(updated)
        if updated_on_host:
            self._late.clear()
        if updated:
            self._hold_optimizers()

        def wait() -> None:
            try:
                for name, source in updated_on_host.items():
                    self._buffers[name].copy_(source)
                for event in (*arrived, *(event for _, event in self._beside)):
                    event.synchronize()
                for name in unchanged.changed():
                    told = f"{name} was changed while it was copied, by another than an optimizer's step"
                    raise OSError(errno.EBUSY, told)
            finally:
                self._late.set()

        return {name: Part(self._buffers[name], part.offsets) for name, part in parts.items()}, wait

    def _copy_from_devices(
        self, sources: Mapping[K, Tensor], updated: Collection[K]
    ) -> list[torch.cuda.Event]:
        """Queue the copies, those of `updated` on separate streams. Return events after the others."""
        devices = {source.device for source in sources.values() if source.is_cuda}
        beside = {device: torch.cuda.Stream(device) for device in devices if updated}  # type: ignore[no-untyped-call]
        for device, stream in beside.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for name, source in sources.items():
            if source.is_cuda:
                current = torch.cuda.current_stream(source.device)
                with torch.cuda.stream(beside[source.device] if name in updated else current):
                    self._buffers[name].copy_(source, non_blocking=True)
        self._beside = [(device, stream.record_event()) for device, stream in beside.items()]
        return [torch.cuda.current_stream(device).record_event() for device in devices]

    def release(self) -> None:
        """Release the optimizers, since the function that waits for the copies will not be called."""
        self._late.set()

    def close(self) -> None:
        """Release the optimizers and remove the hook."""
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
                # A device does not block the host, which counts the step before the copies are complete.
                staging._unchanged.changed()

        self._hook = register_optimizer_step_pre_hook(hold)

    def _fits(self, sources: Mapping[K, Tensor]) -> bool:
        """Return True if the previous copies have the same names, shapes, dtypes and kinds of memory."""
        return sources.keys() == self._buffers.keys() and all(
            (source.shape, source.dtype, source.is_cuda) == (held.shape, held.dtype, held.is_pinned())
            for source, held in ((source, self._buffers[name]) for name, source in sources.items())
        )

    def _place(self, sources: Mapping[K, Tensor]) -> None:
        """Assign memory to each copy. Reuse the host memory if it is large enough."""
        self._buffers = {}
        on_host = {name: source for name, source in sources.items() if not source.is_cuda}
        size = sum(_room(source) for source in on_host.values())
        if self._host is None or self._host.numel() < size:
            self._host = None  # release the old memory first
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
    """Return host memory, in large pages if available: the first copy waits until each page is cleared."""
    area = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def _pinned_memory(size: int) -> Tensor:
    return torch.empty(max(1, size), dtype=torch.uint8, pin_memory=True)


class Writer:
    """One call at a time, in a thread. The process does not exit before the call has finished."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begins: Callable[[bool], None] = _nobody
        self._error: BaseException | None = None

    @property
    def runs(self) -> bool:
        """True if the call has not finished yet."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, call: Callable[[], None]) -> None:
        """Start a thread for a call, which `begin` runs or `drop` discards.

        `wait` must have been called since the previous call.

        Raises:
            RuntimeError: the system cannot start a thread.
        """
        assert self._thread is None
        decided, wanted = threading.Event(), [False]

        def run() -> None:
            decided.wait()
            if not wanted[0]:
                return
            try:
                call()
            except BaseException as error:  # raised by `wait`
                self._error = error

        def begins(is_wanted: bool) -> None:
            wanted[0] = is_wanted
            decided.set()

        thread = threading.Thread(target=run, name="stackwise-checkpoint", daemon=False)
        thread.start()
        self._thread, self._begins = thread, begins

    def begin(self) -> None:
        """Run the call of the prepared thread."""
        self._begins(True)

    def drop(self) -> None:
        """Discard the call of the prepared thread, if any."""
        self._begins(False)
        self.wait()

    def wait(self) -> None:
        """Wait until the call has finished.

        Raises:
            BaseException: error of the call.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread, self._begins = None, _nobody
        error, self._error = self._error, None
        if error is not None:
            raise error


def _nobody(_: bool) -> None:
    """Do nothing, since no call is prepared."""
