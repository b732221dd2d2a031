"""Can it go on? Checkpoints that are whole or not there, of any model, any loop, any number of processes."""

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
]
