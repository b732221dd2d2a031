"""Can it go on? Checkpoints that are whole or not there, of any model, any loop, any number of processes."""

from stackwise.checkpoint.export import export
from stackwise.checkpoint.folder import DamagedCheckpointError
from stackwise.checkpoint.manager import CheckpointManager, CheckpointWarning, Restored
from stackwise.checkpoint.termination import EXIT_CODE, Termination
from stackwise.checkpoint.upload import DirectoryUpload

__all__ = [
    "EXIT_CODE",
    "CheckpointManager",
    "CheckpointWarning",
    "DamagedCheckpointError",
    "DirectoryUpload",
    "Restored",
    "Termination",
    "export",
]
