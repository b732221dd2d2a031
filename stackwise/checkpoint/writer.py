"""Writer: what is written while the training goes on. State is copied first, then written by a thread.

Copies stay and are used again, so that a save allocates nothing after the first: on the host once the
size of the state, pinned for what is on a CUDA device. There the copies are made by the device in its
order of work; only the thread waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from stackwise.checkpoint.tensor_file import Part

__all__ = ["Staging", "Writer"]

K = TypeVar("K", bound=Hashable)


class Staging:
    """Copies of tensors as they are now."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def copy(self, parts: Mapping[K, Part]) -> tuple[dict[K, Part], Callable[[], None]]:
        """Copies of `parts`, in the memory of the copies before, and what waits until they are there."""
        copies: dict[K, Part] = {}
        devices: set[torch.device] = set()
        for name, part in parts.items():
            source = part.tensor.detach()
            buffer = self._buffers.get(name)
            fits = buffer is not None and (buffer.shape, buffer.dtype) == (source.shape, source.dtype)
            if buffer is None or not fits or buffer.is_pinned() != source.is_cuda:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda:
                devices.add(source.device)
            copies[name] = Part(buffer, part.offsets)
        self._buffers = {name: part.tensor for name, part in copies.items()}
        arrived = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> None:
            for event in arrived:
                event.synchronize()

        return copies, wait


class Writer:
    """One call at a time, in a thread. The process does not end before it has."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Begin a call; `wait` has to have been called since the one before."""
        assert self._thread is None

        def run() -> None:
            try:
                call()
            except BaseException as error:  # of the thread: it is the waiting one's to handle
                self._error = error

        self._thread = threading.Thread(target=run, name="stackwise-checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Go on when the call has ended.

        Raises:
            BaseException: that of the call.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
