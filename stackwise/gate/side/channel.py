"""Channel: messages between the gate and the process of a side, one JSON object a line."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

from .clock import real_time

__all__ = [
    "CALLABLE",
    "CONFTEST",
    "DESCRIPTOR",
    "FOREIGN",
    "OWN",
    "ROLE",
    "SEED",
    "TESTS",
    "TREE",
    "WATCH",
    "Channel",
    "ChannelClosedError",
]

# Variables of the environment that say what a process of a side is.
DESCRIPTOR, TREE, TESTS, OWN, FOREIGN, WATCH, CALLABLE, SEED = (
    f"STACKWISE_GATE_{name}"
    for name in ("CHANNEL", "TREE", "TESTS", "OWN", "FOREIGN", "WATCH", "CALLABLE", "SEED")
)
CONFTEST = "--stackwise-side-conftest"  # option of a side: a conftest to load at the start
ROLE = "STACKWISE_SIDE"  # "base" or "head"; fixtures may read it
_CHUNK = 65536


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a pair of sockets.

    Args:
        end: a connected stream socket, which belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = b""

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        """The channel of an inherited socket."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: dict[str, Any], seconds: float | None = None) -> None:
        """Send a message.

        Args:
            message: what can be written as JSON.
            seconds: that the other end has to take it, if it is more than lies between two processes; None:
                as long as it does.

        Raises:
            ChannelClosedError: the other end is gone.
            TimeoutError: it has not taken it; nothing can be sent any more.
        """
        try:
            self._end.settimeout(seconds)
            self._end.sendall(json.dumps(message).encode() + b"\n")
            self._end.settimeout(None)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message; None if there was none within `seconds`.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        deadline = None if seconds is None else real_time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = None if deadline is None else max(0.0, deadline - real_time.monotonic())
            if not select.select([self._end], [], [], left)[0]:
                return None
            try:
                chunk = self._end.recv(_CHUNK)
            except OSError as error:
                raise ChannelClosedError(str(error)) from None
            if not chunk:
                raise ChannelClosedError("the other end was closed")
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close this end."""
        self._end.close()
