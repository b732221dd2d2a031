"""Export: the weights of a module in a checkpoint as one safetensors file."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from stackwise.checkpoint.content import tensors_of
from stackwise.checkpoint.folder import DamagedCheckpointError, Manifest, flush, verify_files
from stackwise.checkpoint.tensor_file import MalformedFileError, write_tensors
from stackwise.support.arguments import require
from stackwise.support.files import replacing

__all__ = ["export"]


def export(checkpoint: str | Path, name: str, file: str | Path) -> None:
    """Write the state of a module as a safetensors file, with the keys of its state_dict and full tensors.

    Every byte of the checkpoint is verified first. Tensors are read one at a time, so the required memory is
    that of the largest tensor. When the file is complete, it replaces an existing one.

    Args:
        checkpoint: folder of the checkpoint, such as `CheckpointManager.latest()`.
        name: name of the module among the saved objects.
        file: path of the new file.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged.
        ValueError: the checkpoint has no such module, or the module's state is more than tensors.
        OSError: a file cannot be read or written.
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
            write_tensors(scratch, likes, read=read)
    except MalformedFileError as error:
        raise DamagedCheckpointError(folder, None, str(error)) from error
    flush(file.parent)
