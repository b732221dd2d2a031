"""Host state: what of the host decides how fast it is, as it was when something was measured."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["HostState", "host_state"]

_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class HostState:
    """The host at one moment. Unlike a fingerprint it is another at the next.

    Attributes:
        threads: that torch computes an operation with.
        cpus: that this process may run on.
        omp_num_threads: the environment's `OMP_NUM_THREADS`; None where it is not set.
        wait_policy: the environment's `OMP_WAIT_POLICY`: whether threads without work spin ("ACTIVE") or
            sleep ("PASSIVE"); None where it is not set, which lets them spin for a while. It is read when
            torch is loaded, and never again.
        governor: that chooses the processors' clocks; several are joined by commas; None where none is told,
            as in a virtual machine.
        frequency_mhz: mean of the processors' clocks now; None where none is told.
        load: processes that were running or waiting to, on average over the last minute; None where
            the system does not say.
    """

    threads: int
    cpus: int
    omp_num_threads: str | None
    wait_policy: str | None
    governor: str | None
    frequency_mhz: float | None
    load: float | None

    @property
    def note(self) -> str | None:
        """That threads without work spin, which a reader of timings must know; None where they sleep."""
        if self.threads < 2 or (self.wait_policy or "").upper() == "PASSIVE":
            return None
        how = "is not set" if self.wait_policy is None else f"is {self.wait_policy!r}"
        return (
            f"OMP_WAIT_POLICY {how}: threads that wait spin, and take the cores from whatever else runs; "
            "PASSIVE, set before torch is loaded, lets them sleep"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def host_state() -> HostState:
    """The host now. What cannot be read is None."""
    governors = sorted({text for cpu in _cpus() if (text := _read(cpu / "cpufreq/scaling_governor"))})
    clocks = [int(text) / 1e3 for cpu in _cpus() if (text := _read(cpu / "cpufreq/scaling_cur_freq"))]
    return HostState(
        threads=torch.get_num_threads(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        governor=",".join(governors) or None,
        frequency_mhz=sum(clocks) / len(clocks) if clocks else None,
        load=_load(),
    )


def _cpus() -> list[Path]:
    return sorted(_CPUS.glob("cpu[0-9]*"))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
