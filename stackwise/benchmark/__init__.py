"""Measurement of speed and memory: workloads, clocks, FLOPs and comparisons for models and training loops."""

from stackwise.benchmark.comparison import (
    ArchitectureBenchmark,
    Case,
    ComparisonConfig,
    compare_architectures,
)
from stackwise.benchmark.generation import GenerationMeasurement, generate_once, measure_generation
from stackwise.benchmark.llama import LlamaSize, llama_baseline
from stackwise.benchmark.table import ComparisonTable
from stackwise.benchmark.timing import Interleaved, Measurement, call_once, interleave, measure
from stackwise.benchmark.workload import Workload, callable_workload, model_workload, trainer_workload

__all__ = [
    "ArchitectureBenchmark",
    "Case",
    "ComparisonConfig",
    "ComparisonTable",
    "GenerationMeasurement",
    "Interleaved",
    "LlamaSize",
    "Measurement",
    "Workload",
    "call_once",
    "callable_workload",
    "compare_architectures",
    "generate_once",
    "interleave",
    "llama_baseline",
    "measure",
    "measure_generation",
    "model_workload",
    "trainer_workload",
]
