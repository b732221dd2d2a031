"""Checkpoints: a Rack's weights and configuration, published whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stackwise.argument import check_sizes
from stackwise.config import StackWiseConfig
from stackwise.model.build import create_rack_from_config
from stackwise.model.rack import Rack
from stackwise.seed import seeded

__all__ = ["CheckpointManager", "latest_checkpoint", "load_rack"]

_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_TIED_COPY = "lm_head.weight"


class CheckpointManager:
    """A directory of checkpoints, one folder a step: `step-N/model.safetensors` and `config.yaml`.

    A checkpoint is written under a temporary name, flushed to disk and renamed, so that a folder
    named `step-N` is always whole. Order is by the number N, never by name or time.

    Args:
        directory: created at the first save.
        config: describes the Rack that is saved; stored beside the weights.
        keep_last: how many of the newest to keep.
    """

    def __init__(self, directory: str | Path, config: StackWiseConfig, *, keep_last: int = 3) -> None:
        check_sizes(keep_last=keep_last)
        self.directory, self.config, self.keep_last = Path(directory), config, keep_last

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

    def save(self, step: int, rack: Rack) -> Path:
        """Write the checkpoint of `step`, then remove those beyond `keep_last`.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: as `check`.
            OSError: the disk refused; earlier checkpoints are as they were.
        """
        self.check(rack)
        target = self.directory / f"step-{step}"
        scratch = self.directory / f".step-{step}.{os.getpid()}"
        replaced = self.directory / f".step-{step}.{os.getpid()}.old"
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            save_file(_weights(rack), scratch / "model.safetensors")
            self.config.to_yaml(scratch / "config.yaml")
            for path in (*scratch.iterdir(), scratch):
                _flush(path)
            if target.exists():
                target.rename(replaced)
            try:
                scratch.rename(target)
            except OSError:
                if replaced.exists():
                    replaced.rename(target)
                raise
            _flush(self.directory)
            shutil.rmtree(replaced, ignore_errors=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for old in self.steps()[: -self.keep_last]:
            if old != step:
                shutil.rmtree(self.directory / f"step-{old}")
        return target

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending as numbers."""
        return _steps(self.directory)

    def latest(self) -> Path | None:
        """The checkpoint with the highest step number, or None."""
        return latest_checkpoint(self.directory)


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The checkpoint with the highest step number in a directory, or None."""
    steps = _steps(Path(directory))
    return Path(directory) / f"step-{steps[-1]}" if steps else None


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in names if match)


def load_rack(path: str | Path) -> Rack:
    """The Rack that `CheckpointManager.save` wrote, on the CPU, bit for bit.

    Raises:
        ConfigError, ValueError: the folder does not hold one.
        OSError: it cannot be read.
    """
    path = Path(path)
    config = StackWiseConfig.from_yaml(path / "config.yaml")
    with seeded(0):
        rack = create_rack_from_config(config)
    try:
        weights = load_file(path / "model.safetensors")
    except SafetensorError as error:
        raise ValueError(f"{path}: model.safetensors is damaged: {error}") from None
    if rack.tie_embeddings and "embedding.weight" in weights:
        weights[_TIED_COPY] = weights["embedding.weight"]
    try:
        rack.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path}: weights and configuration disagree: {error}") from None
    return rack


def _description(rack: Rack) -> list[str]:
    return [f"tie_embeddings={rack.tie_embeddings}", *(line.strip() for line in str(rack).splitlines())]


def _weights(rack: Rack) -> dict[str, torch.Tensor]:
    weights = {name: w.detach().cpu().contiguous() for name, w in rack.state_dict().items()}
    if rack.tie_embeddings:
        del weights[_TIED_COPY]
    return weights


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
