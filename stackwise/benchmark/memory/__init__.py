"""Peak memory of a call, and growth of memory from step to step."""

from stackwise.benchmark.memory.fresh_process import FreshPeak, FreshProcessError, fresh_peak_memory
from stackwise.benchmark.memory.growth import MemoryGrowth
from stackwise.benchmark.memory.growth_trial import memory_growth
from stackwise.benchmark.memory.peak import PeakMemory, high_water_mark, peak_memory, peak_memory_bytes

__all__ = [
    "FreshPeak",
    "FreshProcessError",
    "MemoryGrowth",
    "PeakMemory",
    "fresh_peak_memory",
    "high_water_mark",
    "memory_growth",
    "peak_memory",
    "peak_memory_bytes",
]
