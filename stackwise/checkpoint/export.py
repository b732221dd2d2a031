"""Export: the weights of a module in a checkpoint as one safetensors file."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from stackwise.checkpoint.content import tensors_of
from stackwise.checkpoint.folder import DamagedCheckpointError, Manifest, flush, verify_files
from stackwise.checkpoint.tensor_file import MalformedFileError, write_read
from stackwise.support.arguments import require
from stackwise.support.files import replacing

__all__ = ["export"]


def export(checkpoint: str | Path, name: str, file: str | Path) -> None:
    """Write the state of a module as a safetensors file by the keys of its state_dict, each tensor whole.

    Every byte of the checkpoint is checked first. Tensors are read one at a time, so that the largest of
    them is what it takes of memory. The file is there when it is whole, in the place of one that was there.

    Args:
        checkpoint: folder of it, as `CheckpointManager.latest()` gives it.
        name: of the module among the objects that were saved.
        file: to be written.

    Raises:
        DamagedCheckpointError: the checkpoint is not what was written.
        ValueError: it has no such module, or one that keeps more than tensors.
        OSError: a file cannot be read, or written.
    """
    folder, file = Path(checkpoint), Path(file)
    require("\0" not in str(file), "file", str(file), "a path without a null character")
    require(folder.is_dir(), "checkpoint", str(folder), "the folder of a checkpoint")
    manifest = Manifest.read(folder)
    verify_files(folder, manifest.files)
    index, likes, names = tensors_of(folder, manifest, name)

    def read(key: str) -> Tensor:
        shape = tuple(likes[key].shape)
        return index.read(names[key], (0,) * len(shape), shape)

    try:
        with replacing(file) as scratch:
            write_read(scratch, likes, read)
    except MalformedFileError as error:
        raise DamagedCheckpointError(folder, None, str(error)) from error
    flush(file.parent)
