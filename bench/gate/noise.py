"""`python -m bench.gate.noise KIND SEED`: what disturbs a measurement, the same again for the same seed.

"bursts": each core has bursts of arithmetic of 20 to 500 ms with pauses of the same length on average, and
one more thread copies memory in such bursts. "phases": 15 to 50 s in which all of them work, then as long in
which none does. It ends when its standard input is closed, and so never stays longer than who started it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

__all__ = ["CONDITIONS", "IDLE", "noise", "spans"]

IDLE = "idle"
KINDS = ("bursts", "phases")
CONDITIONS = (IDLE, *KINDS)
_BURST = (0.02, 0.5)
_PHASE = (15.0, 50.0)
_BLOCK = np.ones(1 << 20, dtype=np.uint8).tobytes()


class Span(NamedTuple):
    """Seconds from the start, within which a thread works."""

    start: float
    end: float


def spans(kind: str, seed: int, thread: int) -> Iterator[Span]:
    """When a thread works, without end. Those of "phases" are the same for all threads.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; allowed: {', '.join(KINDS)}")
    shortest, longest = _PHASE if kind == "phases" else _BURST
    generator = random.Random(f"{seed} {'all' if kind == 'phases' else thread}")
    # Half of the seeds begin with a pause.
    moment = 0.0 if generator.random() < 0.5 else generator.uniform(shortest, longest)
    while True:
        end = moment + generator.uniform(shortest, longest)
        yield Span(moment, end)
        moment = end + generator.uniform(shortest, longest)


@contextmanager
def noise(condition: str, seed: int) -> Iterator[None]:
    """Have the noise of a condition, in a process of its own, for as long as this lasts; none for "idle"."""
    if condition == IDLE:
        yield
        return
    command = [sys.executable, "-m", "bench.gate.noise", condition, str(seed)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline() != b"begins\n":
            raise RuntimeError(f"the noise {condition!r} did not begin")
        yield
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _work(kind: str, seed: int, thread: int, once: Callable[[], object], start: float) -> None:
    for span in spans(kind, seed, thread):
        time.sleep(max(0.0, start + span.start - time.monotonic()))
        while time.monotonic() < start + span.end:
            once()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gate.noise", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("seed", type=int)
    options = parser.parse_args(arguments)
    source = np.ones(64 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    # Both let go of the interpreter while they work.
    works: list[Callable[[], object]] = [lambda: hashlib.sha256(_BLOCK)] * (os.cpu_count() or 1)
    works.append(lambda: np.copyto(target, source))
    start = time.monotonic()
    for number, once in enumerate(works):
        each = (options.kind, options.seed, number, once, start)
        threading.Thread(target=_work, args=each, daemon=True).start()
    print("begins", flush=True)
    sys.stdin.buffer.read()
    # Threads within a copy are not waited for.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
