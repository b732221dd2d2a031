"""RackCheckpoints: checkpoints of a training run. Each contains a Rack that `load_rack` can load."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, distributed

from stackwise.checkpoint import CheckpointManager, Restored
from stackwise.checkpoint.folder import MANIFEST, Manifest, recover, steps_in, verify_files
from stackwise.config import StackWiseConfig
from stackwise.model.block import Block
from stackwise.model.build import create_rack_from_config
from stackwise.model.interop import modules_of
from stackwise.model.rack import Rack
from stackwise.model.weight_folder import check_tensors, read_tensors
from stackwise.support.arguments import require
from stackwise.support.random_state import keep_random_states, seeded
from stackwise.training.run_state import check_same_run

__all__ = ["RackCheckpoints", "latest_checkpoint", "load_rack"]

_TIED_COPY = "lm_head.weight"
_WEIGHTS, _CONFIG = "model.safetensors", "config.yaml"


class RackCheckpoints:
    """Directory of checkpoints, one folder per step, managed by `CheckpointManager`.

    Each checkpoint has the weights (`model.safetensors`), the configuration (`config.yaml`) and the state of
    the objects passed to `save`. All methods are collective: every process that trains the Rack has to call
    them.

    Args:
        directory: created at the first save. A directory that cannot be created raises a ValueError.
        config: configuration of the saved Rack. `training.checkpoint` sets the number of stored checkpoints.
        group: process group of torch.distributed; None: all processes.
        on_complete: called with the folder of each complete checkpoint, as in `CheckpointManager`.
    """

    def __init__(
        self,
        directory: str | Path,
        config: StackWiseConfig,
        group: Any = None,
        *,
        on_complete: Callable[[Path], None] | None = None,
    ) -> None:
        self.directory, self.config = Path(directory), config
        _check_can_be_made(self.directory)
        self._checked: Rack | None = None
        self._resumed: Restored | None = None
        kept = config.training.checkpoint
        self._manager = CheckpointManager(
            directory,
            keep_last=kept.keep_last,
            keep_every=kept.keep_every,
            keep_best=kept.keep_best,
            asynchronous=kept.asynchronous,
            on_complete=on_complete,
            group=group,
        )

    def check(self, rack: Rack) -> None:
        """Raise if the configuration does not describe this Rack.

        Raises:
            ValueError: names a weight, or a part of the Rack, that differs.
        """
        with torch.device("meta"):
            twin = create_rack_from_config(self.config)
        ours, theirs = _description(rack), _description(twin)
        for name in sorted(theirs | ours):
            if ours.get(name) != theirs.get(name):
                raise ValueError(
                    f"checkpoint_dir: the configuration does not describe this Rack: {name} is "
                    f"{ours.get(name, 'missing')}, configured {theirs.get(name, 'missing')}"
                )
        self._checked = rack  # its modules may change later, such as to float8 layers

    def save(
        self,
        step: int,
        rack: Rack,
        objects: Mapping[str, Any] | None = None,
        *,
        metric: float | None = None,
    ) -> Path | None:
        """Write the checkpoint of `step`, then remove checkpoints that the retention settings do not include.

        If the disk returns an error, a `CheckpointWarning` is issued and earlier checkpoints are unchanged.

        Args:
            step: step number in the run.
            rack: Rack with all weights; those of rank 0 are written. The first save checks it.
            objects: other objects with state that a resume needs.
            metric: value for `keep_best`; lower is better.

        Returns:
            Folder of the checkpoint; None if it could not be written.

        Raises:
            ValueError: see `check`.
        """
        if self._checked is not rack:
            self.check(rack)
        files: dict[str, Callable[[Path], None] | Mapping[str, Tensor]] = {
            _WEIGHTS: _weights(rack),
            _CONFIG: self.config.to_yaml,
        }
        notes = {"config": self.config.to_dict()}
        return self._manager.save(step, objects or {}, metric=metric, files=files, notes=notes)

    def resume(self, rack: Rack) -> int | None:
        """Load the weights of the newest complete checkpoint into `rack`. Random states are not changed.

        With `training.scope.offload: disk` the weights of the Blocks are memory-mapped, and occupy no memory.

        Returns:
            Step number of the checkpoint; None if no checkpoint exists.

        Raises:
            ValueError: the checkpoint belongs to a run with another configuration. Each key is named.
        """
        with keep_random_states():
            restored = self._manager.restore({})
        if restored is None:
            return None
        ours = distributed.get_world_size() if distributed.is_initialized() else 1
        processes = ours, restored.world_size
        check_same_run(self.config, restored.notes["config"], restored.path, processes, restored.step)
        _load_weights(rack, restored.path, mapped=self.config.training.scope.offload == "disk")
        self._resumed = restored
        return restored.step

    def restore(self, objects: Mapping[str, Any], step: int) -> None:
        """Restore objects, and the random states of this process, from the checkpoint of `step`.

        The checkpoint that `resume` has verified is not verified a second time.
        """
        known = self._resumed is not None and self._resumed.step == step
        self._manager.restore(objects, self._resumed if known else step)

    def begin_run(self) -> str:
        """Return the identity of the resumed run. If no run was resumed, start a new one."""
        return self._manager.run or self._manager.begin_run()

    def rewind(self, step: int) -> None:
        """See `CheckpointManager.rewind`."""
        self._manager.rewind(step)

    def refuse_old_run(self) -> None:
        """Raise if the folder already contains checkpoints: a new run needs an empty one.

        Raises:
            ValueError: names the folder and the steps.
        """
        recover(self.directory, clear=False)
        steps = steps_in(self.directory)
        allowed = (
            "a folder without checkpoints, or training.resume=true, which resumes the run that saved last"
        )
        got = f"{self.directory} already holds checkpoints of steps {steps}"
        if steps:
            raise ValueError(f"training.checkpoint_dir: {got}; allowed: {allowed}")

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        return self._manager.steps()

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint of the run, or None."""
        return self._manager.latest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.__exit__(kind, error, trace)

    def close(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            OSError: the last checkpoint could not be written.
        """
        self._manager.close()


def _check_can_be_made(directory: Path) -> None:
    """Raise if the directory cannot be created, so that a run does not fail at its first save."""
    there = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    allowed = f"a folder that can be created; {there} is no folder that can be written to"
    require(there.is_dir() and os.access(there, os.W_OK), "training.checkpoint_dir", str(directory), allowed)


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the newest complete checkpoint of the run that saved last in a directory, or None.

    Raises:
        ValueError: the directory is a file, or a checkpoint has the format of another version.
        OSError: a checkpoint cannot be inspected now.
    """
    return CheckpointManager(directory).latest()


def load_rack(path: str | Path) -> Rack:
    """Return the Rack that `RackCheckpoints.save` wrote, on the CPU, with bit-identical weights.

    A folder with only `config.yaml` and `model.safetensors` is enough.

    Raises:
        DamagedCheckpointError: a file differs from the manifest. The file is named.
        ConfigError, ValueError: the folder does not contain a Rack.
        OSError: the folder cannot be read.
    """
    path = Path(path)
    if path.name.startswith("step-") and (path / MANIFEST).exists():  # a copy may have any name
        files = Manifest.read(path).files
        verify_files(path, {name: files[name] for name in (_WEIGHTS, _CONFIG) if name in files})
    config = StackWiseConfig.from_yaml(path / _CONFIG)
    with seeded(0):
        rack = create_rack_from_config(config)
    _load_weights(rack, path)
    return rack


def _load_weights(rack: Rack, path: Path, *, mapped: bool = False) -> None:
    """Load the weights of a folder into a Rack. The file is memory-mapped, so it needs no second copy.

    Args:
        rack: Rack that the configuration in the folder describes.
        path: the folder.
        mapped: True: Blocks use the mapped tensors of the file, which occupy memory only after they are read.
    """
    weights = read_tensors(path / _WEIGHTS)
    if rack.tie_embeddings and "embedding.weight" in weights:
        weights[_TIED_COPY] = weights["embedding.weight"]
    wanted = {name: w.shape for name, w in rack.state_dict().items()}
    check_tensors(f"{path}: weights and configuration disagree", weights, wanted)
    blocks = {name: each for name, each in rack.named_modules() if mapped and isinstance(each, Block)}
    for name, block in blocks.items():
        own = {key: weights.pop(f"{name}.{key}") for key in block.state_dict()}
        block.load_state_dict(own, assign=True)
    rack.load_state_dict(weights, strict=not blocks)


def _description(rack: Rack) -> dict[str, str]:
    """Return the weights and modules by name: equal shapes can mean different heads, windows or positions."""
    weights = {name: f"{tuple(w.shape)} of {w.dtype}" for name, w in rack.state_dict().items()}
    return {"tie_embeddings": str(rack.tie_embeddings), **weights, **modules_of(rack)}


def _weights(rack: Rack) -> dict[str, Tensor]:
    """Return the weights to store, by name, without a tied copy. The tensors share the Rack's memory."""
    weights = {name: w.detach() for name, w in rack.state_dict().items()}
    if rack.tie_embeddings:
        del weights[_TIED_COPY]
    return weights
