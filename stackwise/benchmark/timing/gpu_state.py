"""GPU state: clocks, temperature, power and throttling of an NVIDIA GPU.

It is read through NVML (`pip install 'stackwise[gpu]'`) between slices of a measurement, never within one.
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

# Event reasons of NVML by bit. These reasons are not throttling: idle, clocks set by a user, clocks that are
# synchronised with other GPUs, and the clocks of a display.
_THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class GpuState:
    """State of a GPU at one moment. Values that the driver does not report are None.

    Attributes:
        sm_clock_mhz: clock of the processors.
        memory_clock_mhz: clock of the memory.
        temperature_celsius: temperature of the chip.
        power_watts: power as averaged by the driver. On A100 and H100, the average covers a quarter of the
            time (Yang et al. 2023, arXiv:2312.02741).
        throttle_reasons: reasons for which the clocks are lowered. Empty if they are not.
    """

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_celsius: int | None
    power_watts: float | None
    throttle_reasons: tuple[str, ...] | None

    @property
    def throttled(self) -> bool:
        """True if a power cap, heat or a brake lowers the clocks. False if this cannot be read."""
        return bool(self.throttle_reasons)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        reasons = self.throttle_reasons
        return asdict(self) | {"throttle_reasons": None if reasons is None else list(reasons)}


def gpu_range(states: Sequence[GpuState]) -> dict[str, Any] | None:
    """Return the ranges of several readings as plain values for JSON. None if `states` is empty.

    For each number, the range is the minimum and the maximum, or None if no reading has it. For each reason
    for throttling, it is the number of readings.
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
    """Reader of the state of one device.

    Args:
        device: any device. Only NVIDIA GPUs have a state.

    Attributes:
        note: reason why a CUDA device cannot be read. None if it can, and for other devices.
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
            # The index cannot be used, because CUDA_VISIBLE_DEVICES changes the numbers of CUDA but not of
            # NVML.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except (self._nvml.NVMLError, AttributeError) as error:
            self.note = f"clocks, temperature and throttling of the GPU were not read: {error}"

    def read(self) -> GpuState | None:
        """Return the current state of the device. None if it has none."""
        if self._handle is None:
            return None
        nvml = self._nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # name before driver 535
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
        """Return an answer of NVML about the device.

        None if the driver or the library does not support the query.
        """
        question: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if question is None:
            return None
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None
