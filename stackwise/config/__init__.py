"""The configuration: what to build, how to train it and on what.

Every problem of a file is reported at once, each with the path of its key, the value seen and what is
allowed.
"""

from stackwise.config.data import DataConfig, TaskKind
from stackwise.config.guard import GuardConfig
from stackwise.config.model import (
    ArchitectureConfig,
    AttentionMode,
    AttentionType,
    BlockConfig,
    FeatureMapKind,
    InitializationKind,
    KernelConfig,
    LatentConfig,
    ModelConfig,
    NormKind,
    NormPosition,
    QueryKeyNorm,
    RopeScalingConfig,
)
from stackwise.config.section import ConfigError
from stackwise.config.training import (
    CheckpointConfig,
    DistributedConfig,
    ObjectiveConfig,
    ObjectiveKind,
    OptimizerConfig,
    Precision,
    RecomputeConfig,
    ScheduleConfig,
    ScheduleKind,
    ScopeConfig,
    StackOptimizerConfig,
    TelemetryConfig,
    TrainingConfig,
)
from stackwise.config.whole import StackWiseConfig

__all__ = [
    "ArchitectureConfig",
    "AttentionMode",
    "AttentionType",
    "BlockConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DistributedConfig",
    "FeatureMapKind",
    "GuardConfig",
    "InitializationKind",
    "KernelConfig",
    "LatentConfig",
    "ModelConfig",
    "NormKind",
    "NormPosition",
    "ObjectiveConfig",
    "ObjectiveKind",
    "OptimizerConfig",
    "Precision",
    "QueryKeyNorm",
    "RecomputeConfig",
    "RopeScalingConfig",
    "ScheduleConfig",
    "ScheduleKind",
    "ScopeConfig",
    "StackOptimizerConfig",
    "StackWiseConfig",
    "TaskKind",
    "TelemetryConfig",
    "TrainingConfig",
]
