"""Host state: the properties of the host that affect its speed, at the time of a measurement."""

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
    """State of the host at one moment. Unlike a fingerprint, it changes over time.

    Attributes:
        threads: number of threads that torch uses within an operation.
        cpus: number of CPUs that this process may use.
        omp_num_threads: environment variable `OMP_NUM_THREADS`. None: not set.
        wait_policy: environment variable `OMP_WAIT_POLICY`: idle threads spin ("ACTIVE") or sleep
            ("PASSIVE"). None: not set, so idle threads spin for a while. It is read only once, when torch is
            loaded.
        governor: governor of the processors' clocks. Several are joined by commas. None: not reported, as in
            a virtual machine.
        frequency_mhz: mean of the processors' current clocks. None: not reported.
        load: mean number of running or waiting processes over the last minute. None: not reported.
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
        """Note that idle threads spin, which affects timings. None if they sleep."""
        if self.threads < 2 or (self.wait_policy or "").upper() == "PASSIVE":
            return None
        how = "is not set" if self.wait_policy is None else f"is {self.wait_policy!r}"
        return (
            f"OMP_WAIT_POLICY {how}: threads that wait spin, and take the cores from whatever else runs; "
            "PASSIVE, set before torch is loaded, lets them sleep"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def host_state() -> HostState:
    """Return the current state of the host. Values that cannot be read are None."""
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
