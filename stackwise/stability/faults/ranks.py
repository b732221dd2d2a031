"""Rank faults: a slow rank, and a rank that dies."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import distributed

from stackwise.stability.faults.fault import Acted, Anatomy, Fault
from stackwise.support.arguments import check_choice, check_number, check_sizes

__all__ = ["DeadRank", "SlowRank"]


@dataclass(frozen=True)
class _OfRank(Fault):
    breaks: ClassVar[str] = "ranks"

    rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(0, **{f"{self.name}: rank": self.rank})

    @property
    def here(self) -> bool:
        return distributed.get_rank() == self.rank

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: ARG002
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ValueError(f"{self.name}: needs an initialised torch.distributed; there is none")
        if self.rank >= distributed.get_world_size():
            raise ValueError(f"{self.name}: rank: got {self.rank}; there are {distributed.get_world_size()}")
        return self


@dataclass(frozen=True)
class SlowRank(_OfRank):
    """Fault that delays one rank before its step.

    Attributes:
        rank: number of the rank.
        seconds: delay in seconds, above 0.
    """

    name: ClassVar[str] = "slow_rank"

    seconds: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(
            f"{self.name}: seconds", self.seconds, "a finite number > 0", lambda seconds: seconds > 0
        )

    def on_start(self, acted: Acted) -> None:  # noqa: D102
        acted()
        time.sleep(self.seconds)


@dataclass(frozen=True)
class DeadRank(_OfRank):
    """Fault that ends one rank when its step begins, without a message to the other ranks.

    The action is recorded in the journal.

    Attributes:
        rank: number of the rank.
        kind: "kill" ends it by SIGKILL, "exit" with code 1 and without cleanup.
    """

    name: ClassVar[str] = "dead_rank"

    kind: str = "kill"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: kind", self.kind, ("kill", "exit"))

    def on_start(self, acted: Acted) -> None:  # noqa: D102
        acted()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
