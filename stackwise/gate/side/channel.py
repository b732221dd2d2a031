"""Channel: messages between the gate and the process of a side, one JSON object per line."""

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

# Environment variables that configure the process of a side.
DESCRIPTOR, TREE, TESTS, OWN, FOREIGN, WATCH, CALLABLE, SEED = (
    f"STACKWISE_GATE_{name}"
    for name in ("CHANNEL", "TREE", "TESTS", "OWN", "FOREIGN", "WATCH", "CALLABLE", "SEED")
)
CONFTEST = "--stackwise-side-conftest"  # option of a side: a conftest to load at the start
ROLE = "STACKWISE_SIDE"  # "base" or "head"; fixtures may read it
_CHUNK = 65536


class ChannelClosedError(ConnectionError):
    """The other end of the channel is closed."""


class Channel:
    """One end of a pair of sockets.

    Args:
        end: connected stream socket, which the channel owns from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = b""

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        """Return the channel of an inherited socket."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: dict[str, Any], seconds: float | None = None) -> None:
        """Send a message.

        Args:
            message: values that JSON can encode.
            seconds: time limit for the other end to read the message, if it exceeds the buffer of the socket;
                None: no limit.

        Raises:
            ChannelClosedError: the other end is closed.
            TimeoutError: the other end has not read the message. The channel cannot send any more.
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
        """Return the next message; None if no message arrives within `seconds`.

        Raises:
            ChannelClosedError: the other end is closed.
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
