"""RackCheckpoints: a run's checkpoints, each with a Rack that can be loaded by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, distributed, nn

from stackwise.checkpoint import CheckpointManager, DirectoryUpload, Restored
from stackwise.checkpoint.folder import MANIFEST, Manifest, nameless_in, steps_in, verify_files
from stackwise.checkpoint.runs import newest, of_last_run, saved_in
from stackwise.config import StackWiseConfig
from stackwise.model.block import Block
from stackwise.model.build import create_rack_from_config
from stackwise.model.rack import Rack
from stackwise.support.arguments import require
from stackwise.support.random_state import keep_random_states, seeded
from stackwise.training.run_state import check_same_run

__all__ = ["ParameterNames", "RackCheckpoints", "latest_checkpoint", "load_rack"]

_TIED_COPY = "lm_head.weight"
_WEIGHTS, _CONFIG = "model.safetensors", "config.yaml"


class RackCheckpoints:
    """A directory of checkpoints, one folder a step, as `CheckpointManager` keeps them.

    Each has the weights as `model.safetensors`, `config.yaml`, and the state of whatever else there is.
    Several processes that train together call all methods, as the others do.

    Args:
        directory: created at the first save. A ValueError says if that is impossible.
        config: describes the Rack that is saved. How many are kept is `training.checkpoint`.
        group: of torch.distributed; None: all processes.
        upload: as of `CheckpointManager`; None: as `training.checkpoint` says.
    """

    def __init__(
        self,
        directory: str | Path,
        config: StackWiseConfig,
        group: Any = None,
        *,
        upload: Callable[[Path], None] | None = None,
    ) -> None:
        self.directory, self.config = Path(directory), config
        _check_can_be_made(self.directory)
        self._checked: Rack | None = None
        self._resumed: Restored | None = None
        kept = config.training.checkpoint
        if upload is None and kept.upload is not None:
            upload = DirectoryUpload(kept.upload, keep_last=kept.upload_keep_last)
        copies = [upload.directory] if isinstance(upload, DirectoryUpload) else []
        self._places = [self.directory, *copies]
        self._manager = CheckpointManager(
            directory,
            keep_last=kept.keep_last,
            keep_every=kept.keep_every,
            keep_best=kept.keep_best,
            asynchronous=kept.asynchronous,
            upload=upload,
            group=group,
        )

    def check(self, rack: Rack) -> None:
        """Refuse a Rack that the configuration would not build again.

        Raises:
            ValueError: naming a weight that differs.
        """
        with torch.device("meta"):
            twin = create_rack_from_config(self.config)
        wanted = {name: (*w.shape, w.dtype) for name, w in twin.state_dict().items()}
        given = {name: (*w.shape, w.dtype) for name, w in rack.state_dict().items()}
        for name in sorted(wanted.keys() | given.keys()):
            if wanted.get(name) != given.get(name):
                raise ValueError(
                    f"checkpoint_dir: the configuration does not describe this Rack: {name} is "
                    f"{given.get(name, 'missing')}, configured {wanted.get(name, 'missing')}"
                )
        # Equal shapes can mean different computations: heads, norm, window, positions, tying.
        for ours, theirs in zip_longest(_description(rack), _description(twin)):
            if ours != theirs:
                raise ValueError(
                    "checkpoint_dir: the configuration does not describe this Rack: "
                    f"{ours}, configured {theirs}"
                )
        self._checked = rack  # what it is computed with may change meanwhile, as in float8

    def save(
        self,
        step: int,
        rack: Rack,
        objects: Mapping[str, Any] | None = None,
        *,
        metric: float | None = None,
    ) -> Path | None:
        """Write the checkpoint of `step`, then remove those that are not kept.

        If the disk refuses there is a `CheckpointWarning`, and earlier checkpoints are as they were.

        Args:
            step: of the run.
            rack: all of its weights, of the first process. It is checked once.
            objects: what else the run needs to go on.
            metric: the lower, the better.

        Returns:
            The checkpoint's folder; None if it could not be written.

        Raises:
            ValueError: as `check`.
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
        """Give a Rack the weights of the newest checkpoint that is whole. Random states are left alone.

        With `training.scope.offload: disk` its Blocks take no memory for that: they are what is on the disk.

        Returns:
            its step; None: there is no checkpoint.

        Raises:
            ValueError: it is of a run with another configuration, naming each key.
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
        """Give objects, and the random states of this process, what the checkpoint of `step` has for them.

        That which `resume` has found whole is not read through again.
        """
        known = self._resumed is not None and self._resumed.step == step
        self._manager.restore(objects, self._resumed if known else step)

    def begin_run(self) -> str:
        """Return the identity of the resumed run. If no run was resumed, begin one."""
        return self._manager.run or self._manager.begin_run()

    def rewind(self, step: int) -> None:
        """As of `CheckpointManager`."""
        self._manager.rewind(step)

    def refuse_old_run(self) -> None:
        """Refuse a folder with checkpoints, or copies of them: a new run needs a folder of its own.

        Raises:
            ValueError: names the folder and the steps.
        """
        for key, place in zip(("checkpoint_dir", "checkpoint.upload"), self._places, strict=False):
            steps = sorted({*steps_in(place), *nameless_in(place)})
            if not steps:
                continue
            raise ValueError(
                f"training.{key}: {place} already holds checkpoints of steps {steps}; allowed: a folder "
                "without checkpoints, or training.resume=true, which resumes the run that saved "
                "last"
            )

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending as numbers."""
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

    def release(self) -> None:
        """Go on when weights may be changed by others than optimizers: "overlapped" copies them meanwhile."""
        if self.config.training.checkpoint.asynchronous == "overlapped":
            self._manager.wait()

    def close(self) -> None:
        """Wait for what is being written.

        Raises:
            OSError: the last checkpoint could not be.
        """
        self._manager.close()


class ParameterNames(nn.Module):
    """The parameters of a Rack by name, and no state: an optimizer beside it is kept by these names.

    Its weights are a file of their own. With the names the state of an optimizer fits any number of
    processes, also where each has a part of it.
    """

    def __init__(self, rack: Rack) -> None:
        super().__init__()
        self._named = dict(rack.named_parameters())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As they were when this was made."""
        return iter(self._named.items())

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Nothing."""


def _check_can_be_made(directory: Path) -> None:
    """Refuse a directory that cannot be created. A run would otherwise learn of it at its first save."""
    there = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    allowed = f"a folder that can be created; {there} is no folder that can be written to"
    require(there.is_dir() and os.access(there, os.W_OK), "training.checkpoint_dir", str(directory), allowed)


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the newest complete checkpoint in a directory of the run that saved last, or None.

    Raises:
        DamagedCheckpointError: the run of a checkpoint is unknown, and may be the one that saved last.
        OSError: a checkpoint cannot be inspected now.
    """
    return newest(of_last_run(saved_in(Path(directory))))


def load_rack(path: str | Path) -> Rack:
    """The Rack that `RackCheckpoints.save` wrote, on the CPU, bit for bit.

    A folder with nothing but `config.yaml` and `model.safetensors` will do.

    Raises:
        DamagedCheckpointError: a file is not what was written, naming it.
        ConfigError, ValueError: the folder does not hold a Rack.
        OSError: it cannot be read.
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
    """Give a Rack the weights of a folder. The file is mapped: what is copied of it takes no second memory.

    Args:
        rack: of the configuration that is in the folder.
        path: of the folder.
        mapped: let the Blocks have the tensors of the file, which take memory once they are read.
    """
    try:
        weights = load_file(path / _WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{path}: {_WEIGHTS} is damaged: {error}") from None
    if rack.tie_embeddings and "embedding.weight" in weights:
        weights[_TIED_COPY] = weights["embedding.weight"]
    wanted = {name: tuple(w.shape) for name, w in rack.state_dict().items()}
    given = {name: tuple(w.shape) for name, w in weights.items()}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"{path}: weights and configuration disagree: {name} is {given.get(name, 'missing')}, "
                f"configured {wanted.get(name, 'missing')}"
            )
    blocks = {name: each for name, each in rack.named_modules() if mapped and isinstance(each, Block)}
    for name, block in blocks.items():
        own = {key: weights.pop(f"{name}.{key}") for key in block.state_dict()}
        block.load_state_dict(own, assign=True)
    rack.load_state_dict(weights, strict=not blocks)


def _description(rack: Rack) -> list[str]:
    return [f"tie_embeddings={rack.tie_embeddings}", *(line.strip() for line in str(rack).splitlines())]


def _weights(rack: Rack) -> dict[str, Tensor]:
    """What is written of a Rack, by name; the tensors are its own."""
    weights = {name: w.detach() for name, w in rack.state_dict().items()}
    if rack.tie_embeddings:
        del weights[_TIED_COPY]
    return weights
