"""Is it fast? Workloads, clocks and measurements, for any model and any loop."""

from stackwise.benchmark.measurement import Measurement, call_once, measure
from stackwise.benchmark.workload import Workload, model_workload

__all__ = ["Measurement", "Workload", "call_once", "measure", "model_workload"]
