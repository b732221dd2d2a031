"""GPU state: clocks, temperature and power of an NVIDIA GPU, and what holds its clocks down.

Read through NVML (`pip install 'stackwise[gpu]'`) between slices of a measurement, never inside one.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["READING_INTERVAL", "GpuSensor", "GpuState", "gpu_range"]

# Seconds of samples between two readings.
READING_INTERVAL = 0.2

# Event reasons of NVML by their bits. Idle, clocks that a user has set, clocks kept in step with other GPUs
# and a display's are no throttling.
_THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment. What its driver does not tell is None.

    Attributes:
        sm_clock_mhz: of its processors.
        memory_clock_mhz: of its memory.
        temperature_celsius: of the chip.
        power_watts: as the driver averages it. On A100 and H100 that is of a quarter of the time (Yang et al.
            2023, arXiv:2312.02741).
        throttle_reasons: what holds the clocks down, in words; none while they are free.
    """

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_celsius: int | None
    power_watts: float | None
    throttle_reasons: tuple[str, ...] | None

    @property
    def throttled(self) -> bool:
        """Whether a power cap, heat or a brake holds the clocks down; not where that cannot be read."""
        return bool(self.throttle_reasons)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        reasons = self.throttle_reasons
        return asdict(self) | {"throttle_reasons": None if reasons is None else list(reasons)}


def gpu_range(states: Sequence[GpuState]) -> dict[str, Any] | None:
    """How far a GPU went over several readings, as plain values for JSON; None where there are none.

    Of each number the least and the largest, None where no reading has it; of the reasons for throttling how
    many readings had each.
    """
    if not states:
        return None
    numbers = ("sm_clock_mhz", "memory_clock_mhz", "temperature_celsius", "power_watts")
    found: dict[str, Any] = {"readings": len(states)}
    for name in numbers:
        seen = [value for state in states if (value := getattr(state, name)) is not None]
        found[name] = [min(seen), max(seen)] if seen else None
    found["throttled"] = dict(Counter(reason for state in states for reason in state.throttle_reasons or ()))
    return found


class GpuSensor:
    """Reads the state of one device.

    Args:
        device: any; of other than NVIDIA GPUs there is nothing to read.

    Attributes:
        note: why a CUDA device cannot be read; None where it can, and for other devices.
    """

    def __init__(self, device: torch.device) -> None:
        self.note: str | None = None
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            self.note = (
                "clocks, temperature and throttling of the GPU were not read: pip install 'stackwise[gpu]'"
            )
            return
        try:
            self._nvml.nvmlInit()
            # Not by its index: CUDA_VISIBLE_DEVICES gives CUDA another count than NVML has.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except (self._nvml.NVMLError, AttributeError) as error:
            self.note = f"clocks, temperature and throttling of the GPU were not read: {error}"

    def read(self) -> GpuState | None:
        """The device now; None where there is nothing to read."""
        if self._handle is None:
            return None
        nvml = self._nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before driver 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        power = self._ask("nvmlDeviceGetPowerUsage")
        return GpuState(
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            temperature_celsius=self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            power_watts=None if power is None else power / 1e3,
            throttle_reasons=(
                None if reasons is None else tuple(text for bit, text in _THROTTLING.items() if reasons & bit)
            ),
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        """An answer of NVML about the device; None where driver or library do not know the question."""
        question: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if question is None:
            return None
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None
