"""Is it fast? Workloads, clocks and measurements, for any model and any loop."""

from stackwise.benchmark.measurement import Measurement, measure
from stackwise.benchmark.workload import Workload, model_workload

__all__ = ["Measurement", "Workload", "measure", "model_workload"]
