"""Checkpoints of any model, training loop and number of processes, each of them complete or absent."""

from stackwise.checkpoint.export import export
from stackwise.checkpoint.folder import DamagedCheckpointError
from stackwise.checkpoint.manager import CheckpointManager, CheckpointWarning, Restored
from stackwise.checkpoint.termination import EXIT_CODE, Termination

__all__ = [
    "EXIT_CODE",
    "CheckpointManager",
    "CheckpointWarning",
    "DamagedCheckpointError",
    "Restored",
    "Termination",
    "export",
]
