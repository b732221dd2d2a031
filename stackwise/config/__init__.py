"""Configuration of a Rack, its training and its data.

All errors of a file are reported at once, each with the key, the value seen and the values allowed.
"""

from stackwise.config.data import DataConfig, TaskKind
from stackwise.config.guard import GuardPolicy
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
    "GuardPolicy",
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
