"""Prefetched: a loader that reads ahead in a thread, and says where its consumer is, not where it is."""

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
    """Epochs of batches, with a place in them. `Batches` is one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[dict[str, Tensor]]: ...

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one of `epoch`."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is from."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` is."""


class _Item(NamedTuple):
    batch: dict[str, Tensor] | None  # None: the pass has ended
    state: dict[str, Any] | None
    error: BaseException | None


class _Pass(NamedTuple):
    items: queue.Queue[_Item]
    stop: threading.Event
    thread: threading.Thread


class Prefetched:
    """The batches of `loader`, made by a thread while the consumer works.

    State is that of the batches handed out: those read ahead are made again after a resume. An error of
    the loader is raised where its batch would have come. The thread ends with the pass, also with one that
    the consumer breaks off; a new pass, `set_epoch`, `load_state_dict` and `close` end the one in progress.

    Args:
        loader: used by nobody else meanwhile.
        depth: how many batches wait at most; one more is in the making.

    Attributes:
        waited_seconds: how long the consumer has waited for batches, all passes together.

    Raises:
        ValueError: a depth below 1.
    """

    def __init__(self, loader: Loader, depth: int = 2) -> None:
        check_sizes(depth=depth)
        self.loader, self.depth = loader, depth
        self.waited_seconds = 0.0
        self._state: dict[str, Any] | None = None  # of what was handed out; None: ask the loader
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

    @property
    def epoch(self) -> int:
        """The epoch of the next pass, of a loader that says it."""
        epoch: int = self.loader.epoch  # type: ignore[attr-defined]
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one of `epoch`."""
        self.close()
        self.loader.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Where the batch after the last one handed out is from."""
        return self.loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` is.

        Raises:
            ValueError: as the loader.
        """
        self.close()
        self.loader.load_state_dict(state)
        self._state = None

    def close(self) -> None:
        """End the pass in progress, and its thread."""
        if self._pass is None:
            return
        (items, stop, thread), self._pass = self._pass, None
        stop.set()
        while True:  # a thread that waits for room finds it, and sees that it is to stop
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
    except BaseException as error:  # raised in the consumer's thread
        items.put(_Item(None, None, error))
    finally:
        getattr(batches, "close", lambda: None)()  # here, since a thread that reads again waits for none
