"""Prefetched: reads batches ahead in a thread. Its state is the position of the consumer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from stackwise.support.arguments import check_sizes

__all__ = ["Loader", "Prefetched"]


class Loader(Protocol):
    """Protocol of a loader: epochs of batches, and a position in them. `Batches` is an implementation."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[dict[str, Tensor]]: ...

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the first batch of `epoch`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`."""


class _Item(NamedTuple):
    batch: dict[str, Tensor] | None  # None: end of the pass
    state: dict[str, Any] | None
    error: BaseException | None


class _Pass(NamedTuple):
    items: queue.Queue[_Item]
    stop: threading.Event
    thread: threading.Thread


class Prefetched:
    """Iterable of the batches of `loader`, which a thread reads ahead while the consumer works.

    The state refers to the batches that were returned. After a resume, batches that were only read ahead are
    read again. An error of the loader is raised instead of its batch. The thread ends with the pass, even if
    the consumer stops early. A new pass, `set_epoch`, `load_state_dict` and `close` end the current pass.

    Args:
        loader: loader. Other code must not use it during a pass.
        depth: maximum number of waiting batches. The thread may have one more.

    Attributes:
        waited_seconds: total time that the consumer has waited for batches, in all passes.

    Raises:
        ValueError: a depth below 1.
    """

    def __init__(self, loader: Loader, depth: int = 2) -> None:
        check_sizes(depth=depth)
        self.loader, self.depth = loader, depth
        self.waited_seconds = 0.0
        self._state: dict[str, Any] | None = None  # after the last returned batch; None: state of the loader
        self._pass: _Pass | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.close()
        self._state = self.loader.state_dict()
        items: queue.Queue[_Item] = queue.Queue(self.depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=_read_ahead, args=(self.loader, items, stop), name="prefetch", daemon=True
        )
        mine = self._pass = _Pass(items, stop, thread)
        thread.start()
        try:
            while not stop.is_set():
                begin = time.perf_counter()
                item = items.get()
                self.waited_seconds += time.perf_counter() - begin
                if item.error is not None:
                    raise item.error
                self._state = item.state
                if item.batch is None:
                    return
                yield item.batch
        finally:
            if self._pass is mine:
                self.close()

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the first batch of `epoch`."""
        self.close()
        self.loader.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last returned batch."""
        return self.loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`.

        Raises:
            ValueError: an error of the loader.
        """
        self.close()
        self.loader.load_state_dict(state)
        self._state = None

    def close(self) -> None:
        """End the current pass and its thread."""
        if self._pass is None:
            return
        (items, stop, thread), self._pass = self._pass, None
        stop.set()
        while True:  # a thread that waits for space continues, and sees the stop event
            try:
                items.get_nowait()
            except queue.Empty:
                break
        thread.join()


def _read_ahead(loader: Loader, items: queue.Queue[_Item], stop: threading.Event) -> None:
    batches = iter(loader)
    try:
        for batch in batches:
            items.put(_Item(batch, loader.state_dict(), None))
            if stop.is_set():
                return
        items.put(_Item(None, loader.state_dict(), None))
    except BaseException as error:  # raised again in the consumer's thread
        items.put(_Item(None, None, error))
    finally:
        getattr(batches, "close", lambda: None)()  # here, because a later pass may use the loader at once
