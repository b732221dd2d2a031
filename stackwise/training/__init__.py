"""Trainer: scopes, objectives, optimizers, precision, memory planning, distributed training and the loop."""

from stackwise.training.checkpoint import RackCheckpoints, latest_checkpoint, load_rack
from stackwise.training.loop import NonFiniteStepError, TrainingTerminated
from stackwise.training.result import TrainingResult
from stackwise.training.schedule import get_lr_with_warmup
from stackwise.training.trainer import ArchitectureTrainer

__all__ = [
    "ArchitectureTrainer",
    "NonFiniteStepError",
    "RackCheckpoints",
    "TrainingResult",
    "TrainingTerminated",
    "get_lr_with_warmup",
    "latest_checkpoint",
    "load_rack",
]
