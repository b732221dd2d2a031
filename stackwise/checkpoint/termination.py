"""Termination: a request to end, noted when it comes and acted on between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from mmap import mmap
from types import FrameType, TracebackType
from typing import Any, Self

from stackwise.argument import require
from stackwise.checkpoint.ranks import Ranks

__all__ = ["EXIT_CODE", "Termination"]

EXIT_CODE = 75
"""What a run exits with that has saved and is to be started again: EX_TEMPFAIL of sysexits.h."""

_HEARD = 2  # signals that do nothing but to ask
_WAITS = 0.5  # seconds, within which a signal to several processes has come to all of them


class Termination:
    """Inside, SIGTERM and SIGINT only set `requested`; a third signal acts as it would have without this.

    The second changes nothing: where a scheduler signals all processes of a job, torchrun is one of them,
    and passes its own on to the others, which are saving by then.

        with Termination() as termination:
            for step, batch in enumerate(batches):
                train(batch)
                if termination.requested:
                    manager.save(step, objects)
                    manager.close()
                    sys.exit(EXIT_CODE)

    A process that is forked inside, as multiprocessing does, still ends by SIGTERM half a second later, which
    is how whoever started it asks it to. Where a request was noted here, all processes of a job were asked,
    as far as it can tell: then it goes on, and ends by a second one.

    Args:
        signals: that are taken for a request.

    Attributes:
        requested: whether one has come.
        signal: which it was, or None.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)) -> None:
        require(len(signals) > 0, "signals", signals, "at least one")
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._heard = self._process = 0
        self._noted = mmap(-1, 1)  # shared with forked processes: whether one has come to this one
        self._ranks: tuple[Any, Ranks] | None = None
        self.requested = False
        self.signal: signal.Signals | None = None

    def requested_anywhere(self, group: Any = None) -> bool:
        """Whether one has come in any process, so that all end at the same step; every process has to call.

        The host waits for the others, some 0.1 ms: they are asked by gloo, whatever the group sends by. The
        first call makes the connections.

        Args:
            group: of torch.distributed; None: all processes. Without a group it is `requested`.
        """
        if self._ranks is None or self._ranks[0] is not group or self._ranks[1].size == 1:
            self._ranks = group, Ranks(group)  # there may be others by now
        return self._ranks[1].any(self.requested)

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        require(main, "Termination", "another thread", "the main thread, which alone hears signals")
        self.requested, self.signal, self._heard, self._ranks = False, None, 0, None
        self._process, self._noted[0] = os.getpid(), 0
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
        if os.getpid() == self._process:
            self._noted[0] = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._heard += 1
        forked = os.getpid() != self._process
        if not forked:
            self._noted[0] = 1
        # Ctrl-C is for all processes of a terminal: a forked one leaves the answer to this one.
        ends = forked and number == signal.SIGTERM and (self._heard > 1 or self._is_asked_alone())
        if ends or self._heard > _HEARD:
            self._put_back()
            os.kill(os.getpid(), number)
        if not self.requested:
            self.requested, self.signal = True, signal.Signals(number)

    def _is_asked_alone(self) -> bool:
        """Of a forked process: whether the one that it is forked from has no request."""
        until = time.monotonic() + _WAITS
        while not self._noted[0] and time.monotonic() < until:
            time.sleep(0.01)
        return not self._noted[0]

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None: it was set outside of Python, which cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
