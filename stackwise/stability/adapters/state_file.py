"""State file: the guard's state next to a checkpoint of another library, as safetensors without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stackwise.checkpoint import tree
from stackwise.checkpoint.tensor_file import write_tensors
from stackwise.support.arguments import require
from stackwise.support.files import replacing

__all__ = ["read_state", "write_state"]

_FORMAT = "1"


def write_state(state: Mapping[str, Any], folder: Path, rank: int) -> Path:
    """Write the state of one process as a file in `folder`, completely or not at all.

    Raises:
        ValueError: a value in the state needs pickle.
        OSError: the disk refuses it.
    """
    tensors: dict[str, Tensor] = {}
    plain = tree.encode(dict(state), ("guard",), tensors)
    told = {"format": _FORMAT, "state": json.dumps(plain, allow_nan=False)}
    folder.mkdir(parents=True, exist_ok=True)
    place = _place(folder, rank)
    with replacing(place) as scratch:
        write_tensors(scratch, tensors, metadata=told)
    return place


def read_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return the state that `write_state` wrote; None if there is no such file.

    Raises:
        ValueError: a damaged file; the message names it.
    """
    place = _place(folder, rank)
    if not place.exists():
        return None
    try:
        with safe_open(place, framework="pt") as file:
            told = file.metadata() or {}
            if told.get("format") != _FORMAT:
                raise ValueError(f"format: got {told.get('format')!r}; allowed: {_FORMAT!r}")
            state: dict[str, Any] = tree.decode(
                json.loads(told["state"]), lambda name, shape, _: file.get_tensor(name).reshape(shape).clone()
            )
            require(isinstance(state, dict), "state", type(state).__name__, "a mapping")
            return state
    # RuntimeError: a wrong shape, or JSON that is nested too deeply.
    except (SafetensorError, OSError, KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{place}: no state of a guard, or a damaged one: {error!r}") from error


def _place(folder: Path, rank: int) -> Path:
    return folder / f"guard_{rank}.safetensors"
