"""The trainer: data, objective, schedule, optimizer, precision, checkpoints and the loop."""

from stackwise.training.checkpoint import CheckpointManager, latest_checkpoint, load_rack
from stackwise.training.data import TokenWindows, create_data
from stackwise.training.loop import NonFiniteStepError
from stackwise.training.result import TrainingResult
from stackwise.training.schedule import get_lr_with_warmup
from stackwise.training.trainer import ArchitectureTrainer

__all__ = [
    "ArchitectureTrainer",
    "CheckpointManager",
    "NonFiniteStepError",
    "TokenWindows",
    "TrainingResult",
    "create_data",
    "get_lr_with_warmup",
    "latest_checkpoint",
    "load_rack",
]
