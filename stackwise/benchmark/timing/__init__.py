"""Duration of a call: clocks, warm-up, conditions of the machine, and samples."""

from stackwise.benchmark.timing.cache_state import RotatingCall, rotating_inputs
from stackwise.benchmark.timing.clock import Clock, DeviceClock, HostClock
from stackwise.benchmark.timing.gpu_state import GpuState
from stackwise.benchmark.timing.host_state import HostState
from stackwise.benchmark.timing.interleaved import Interleaved, Ratio, interleave
from stackwise.benchmark.timing.measurement import Measurement, call_once, measure
from stackwise.benchmark.timing.percentile import Percentile
from stackwise.benchmark.timing.warmup import WarmUp

__all__ = [
    "Clock",
    "DeviceClock",
    "GpuState",
    "HostClock",
    "HostState",
    "Interleaved",
    "Measurement",
    "Percentile",
    "Ratio",
    "RotatingCall",
    "WarmUp",
    "call_once",
    "interleave",
    "measure",
    "rotating_inputs",
]
