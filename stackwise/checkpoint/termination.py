"""Termination: deferred handling of SIGTERM and Ctrl-C, so that a run stops between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from mmap import mmap
from types import FrameType, TracebackType
from typing import Any, Self

from stackwise.checkpoint.ranks import Ranks
from stackwise.support.arguments import require

__all__ = ["EXIT_CODE", "Termination"]

EXIT_CODE = 75
"""Exit code of a run that was asked to end, has saved and can be resumed: EX_TEMPFAIL of sysexits.h."""

_INTERRUPTED = 128 + signal.SIGINT  # the exit code after Ctrl-C in every shell
_NOTICE = b"Ctrl-C: the run ends after this step. Press Ctrl-C again to end it at once.\n"
_HEARD = 2  # signals that only request the end
_WAITS = 0.5  # seconds in which a signal to several processes reaches all of them


class Termination:
    """Context in which SIGTERM and SIGINT (Ctrl-C) only set `requested`.

    The second Ctrl-C acts as without this class, and so does the third signal of any kind. The second SIGTERM
    has no effect: if a scheduler signals all processes of a job, torchrun receives the signal too and
    forwards it to its processes, which are saving by then. A signal that was ignored before remains ignored.

        with Termination() as termination:
            for step, batch in enumerate(batches):
                train(batch)
                if termination.requested:
                    manager.save(step, objects)
                    manager.close()
                    sys.exit(termination.exit_code)

    A process that is forked inside, for example by multiprocessing, is still terminated by SIGTERM, half a
    second later. If its parent has received a request too, the forked process assumes that all processes of a
    job were signalled. It then continues until a second SIGTERM.

    Args:
        signals: signals that request the end.

    Attributes:
        requested: True if a signal has arrived.
        signal: the first signal, or None.
        exit_code: exit code for the saved run: 130 after Ctrl-C, otherwise 75; 0 without a request. After
            `requested_anywhere` it is the same in all processes.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)) -> None:
        require(len(signals) > 0, "signals", signals, "at least one")
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._heard = self._process = 0
        self._interrupted = False
        self._noted = mmap(-1, 1)  # shared with forked processes: 1 after a signal
        self._ranks: tuple[Any, Ranks] | None = None
        self.requested = False
        self.signal: signal.Signals | None = None
        self.exit_code = 0

    def requested_anywhere(self, group: Any = None) -> bool:
        """Return True if any process has a request, so that all processes stop at the same step.

        Every process has to call. The host waits for all processes, about 0.1 ms, by gloo for any backend of
        the group. The first call creates the connections.

        Args:
            group: group of torch.distributed; None: all processes. Without a group, the result is
                `requested`.
        """
        if self._ranks is None or self._ranks[0] is not group or self._ranks[1].size == 1:
            self._ranks = group, Ranks(group)  # a group may exist by now
        self.exit_code = self._ranks[1].maximum(self.exit_code)
        return self.exit_code > 0

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        require(main, "Termination", "another thread", "the main thread, which alone hears signals")
        self.requested, self.signal, self.exit_code = False, None, 0
        self._heard, self._interrupted, self._ranks = 0, False, None
        self._process, self._noted[0] = os.getpid(), 0
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:  # such as SIGINT in a background job
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
        again = self._interrupted and number == signal.SIGINT
        self._interrupted = self._interrupted or number == signal.SIGINT
        forked = os.getpid() != self._process
        if not forked:
            self._noted[0] = 1
        # Ctrl-C reaches all processes of a terminal. A forked process leaves the reaction to its parent.
        ends = forked and number == signal.SIGTERM and (self._heard > 1 or self._is_asked_alone())
        if ends or again or self._heard > _HEARD:
            self._put_back()
            os.kill(os.getpid(), number)
        if not self.requested:
            self.requested, self.signal = True, signal.Signals(number)
            self.exit_code = _INTERRUPTED if number == signal.SIGINT else EXIT_CODE
            if number == signal.SIGINT and not forked:
                os.write(2, _NOTICE)  # print() may be running

    def _is_asked_alone(self) -> bool:
        """Return True if the parent of a forked process has no request."""
        until = time.monotonic() + _WAITS
        while not self._noted[0] and time.monotonic() < until:
            time.sleep(0.01)
        return not self._noted[0]

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None: the handler was set outside of Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
