"""Rows of a RingBuffer on the CPU, copied and waited for as on a device."""

from contextlib import nullcontext

import torch

from stackwise.stability.telemetry.ring_buffer import RecordBuffer


def late_copies(monkeypatch, *, arrive=False):
    """From here on no copy has arrived before it is waited for.

    Args:
        monkeypatch: puts it back.
        arrive: they have, where one asks.

    Returns:
        of each wait, how many rows were written behind those waited for.
    """
    written, waits = [], []
    made, write = RecordBuffer.__init__, RecordBuffer.write

    def made_with_a_stream(self, *args):
        made(self, *args)
        self._host_CW = self._rows_CW.clone()
        self._stream = type("Stream", (), {"wait_stream": lambda self, other: None})()

    class Event:
        def record(self, stream):
            self.begun = len(written)

        def query(self):
            return arrive

        def synchronize(self):
            waits.append(len(written) - self.begun)

    monkeypatch.setattr(RecordBuffer, "__init__", made_with_a_stream)
    monkeypatch.setattr(RecordBuffer, "write", lambda *args: written.append(1) or write(*args))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return waits
