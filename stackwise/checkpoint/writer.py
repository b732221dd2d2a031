"""Writer: asynchronous write of a state. The state is copied, then a thread writes it during the training."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

from stackwise.checkpoint.tensor_file import Part

__all__ = ["Staging", "Writer"]

K = TypeVar("K", bound=Hashable)


class Staging(Generic[K]):
    """Copies of tensors in host memory, which later copies reuse. For CUDA tensors, it is pinned."""

    def __init__(self) -> None:
        self._buffers: dict[K, Tensor] = {}

    def copy(self, parts: Mapping[K, Part]) -> tuple[dict[K, Part], Callable[[], None]]:
        """Copy `parts` into the memory of the previous copies.

        Returns:
            copies, and a function for a thread that waits until CUDA devices have completed them. Each device
            copies in the order of its current stream.
        """
        previous, self._buffers = self._buffers, {}
        for name, part in parts.items():
            source, buffer = part.tensor.detach(), previous.pop(name, None)
            wanted = source.shape, source.dtype, source.is_cuda
            if buffer is None or (buffer.shape, buffer.dtype, buffer.is_pinned()) != wanted:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[name] = buffer.copy_(source, non_blocking=source.is_cuda)
        devices = {part.tensor.device for part in parts.values() if part.tensor.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return {name: Part(self._buffers[name], part.offsets) for name, part in parts.items()}, wait


class Writer:
    """One call at a time, in a thread. The process does not exit before the call has finished."""

    def __init__(self) -> None:
        self._call: Future[None] | None = None

    @property
    def runs(self) -> bool:
        """True if the call has not finished yet."""
        return self._call is not None and not self._call.done()

    def begin(self, call: Callable[[], None]) -> None:
        """Run a call in a thread. `wait` must have been called since the previous call."""
        executor = ThreadPoolExecutor(1, "stackwise-checkpoint")
        self._call = executor.submit(call)
        executor.shutdown(wait=False)  # the thread ends after this call

    def wait(self) -> None:
        """Wait until the call has finished.

        Raises:
            BaseException: error of the call.
        """
        call, self._call = self._call, None
        if call is not None:
            call.result()
