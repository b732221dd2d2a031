"""Is a transformer architecture right, is it stable, is it fast?

The names below are handed on when they are first used: importing stackwise does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stackwise.benchmark import (
        ArchitectureBenchmark,
        Measurement,
        compare_architectures,
        measure,
    )
    from stackwise.checkpoint import CheckpointManager
    from stackwise.checks import CheckResult, check_model, check_trainer
    from stackwise.config import ConfigError, GuardPolicy, StackWiseConfig
    from stackwise.model import (
        Block,
        Rack,
        Stack,
        create_block_spec,
        create_rack_from_config,
        create_rack_from_specs,
        create_simple_rack,
        create_stack_from_spec,
    )
    from stackwise.report import Report
    from stackwise.stability import Guard, StabilityRun, stability_run
    from stackwise.subject.facts import Facts
    from stackwise.subject.rotary import RotaryClaim
    from stackwise.subject.spec import ModelSpec
    from stackwise.subject.trainer_spec import TrainerSpec
    from stackwise.training import ArchitectureTrainer

__version__ = "0.1.0"  # pyproject.toml reads it from here

_HOMES = {
    "ArchitectureBenchmark": "stackwise.benchmark",
    "ArchitectureTrainer": "stackwise.training",
    "Block": "stackwise.model",
    "CheckResult": "stackwise.checks",
    "CheckpointManager": "stackwise.checkpoint",
    "ConfigError": "stackwise.config",
    "Facts": "stackwise.subject.facts",
    "Measurement": "stackwise.benchmark",
    "Guard": "stackwise.stability",
    "GuardPolicy": "stackwise.config",
    "ModelSpec": "stackwise.subject.spec",
    "Rack": "stackwise.model",
    "Report": "stackwise.report",
    "RotaryClaim": "stackwise.subject.rotary",
    "StabilityRun": "stackwise.stability",
    "Stack": "stackwise.model",
    "StackWiseConfig": "stackwise.config",
    "TrainerSpec": "stackwise.subject.trainer_spec",
    "check_model": "stackwise.checks",
    "check_trainer": "stackwise.checks",
    "compare_architectures": "stackwise.benchmark",
    "create_block_spec": "stackwise.model",
    "create_rack_from_config": "stackwise.model",
    "create_rack_from_specs": "stackwise.model",
    "create_simple_rack": "stackwise.model",
    "create_stack_from_spec": "stackwise.model",
    "measure": "stackwise.benchmark",
    "stability_run": "stackwise.stability",
}
__all__ = [
    "ArchitectureBenchmark",
    "ArchitectureTrainer",
    "Block",
    "CheckResult",
    "CheckpointManager",
    "ConfigError",
    "Facts",
    "Guard",
    "GuardPolicy",
    "Measurement",
    "ModelSpec",
    "Rack",
    "Report",
    "RotaryClaim",
    "StabilityRun",
    "Stack",
    "StackWiseConfig",
    "TrainerSpec",
    "__version__",
    "check_model",
    "check_trainer",
    "compare_architectures",
    "create_block_spec",
    "create_rack_from_config",
    "create_rack_from_specs",
    "create_simple_rack",
    "create_stack_from_spec",
    "measure",
    "stability_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
