"""Workloads to be timed: work of a model, a step of a training loop, or any callable."""

from stackwise.benchmark.workload.of_model import MODES, check_shape, model_workload
from stackwise.benchmark.workload.of_trainer import trainer_workload
from stackwise.benchmark.workload.workload import PEAKS, Workload, callable_workload, check_workload

__all__ = [
    "MODES",
    "PEAKS",
    "Workload",
    "callable_workload",
    "check_shape",
    "check_workload",
    "model_workload",
    "trainer_workload",
]
