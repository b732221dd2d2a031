"""Seeds: the same random data on both sides of a round, if a test sets no seed of its own."""

from __future__ import annotations

import random
import secrets
import sys
import zlib
from typing import Any

__all__ = ["Seeds"]


class Seeds:
    """Seeds of the global generators of `random`, NumPy and torch, and of `numpy.random.default_rng()`.

    A seed that a fixture, a hook of a conftest or the test sets is set later, and wins. Generators that read
    entropy from the system in another way still differ: `random.Random()`, `os.urandom`, `uuid.uuid4`.

    Args:
        seed: seed of the round, the same in both of its processes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._entropy = random.Random(seed)  # noqa: S311
        # NumPy's `default_rng()` draws its entropy from `secrets.randbits`, which it looks up at import.
        places: list[Any] = [secrets, sys.modules.get("numpy.random.bit_generator")]
        for place in filter(None, places):
            place.randbits = self._entropy.getrandbits
        self.start("")

    def start(self, name: str) -> None:
        """Seed all loaded generators for the file or the test called `name`."""
        seed = zlib.crc32(f"{self._seed} {name}".encode())
        random.seed(seed)
        self._entropy.seed(seed)
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        for function in (getattr(numpy, "seed", None), getattr(torch, "manual_seed", None)):
            if function is not None:
                function(seed)
