"""Weight folder: config.json and safetensors files, validated when read and published atomically."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stackwise.checkpoint.folder import flush, publish
from stackwise.support.arguments import check_sizes, require
from stackwise.support.files import parse_json
from stackwise.support.system_errors import safetensors_as_os_error

__all__ = ["FLOATS", "check_tensors", "read_config", "read_tensors", "read_weights", "write_folder"]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OURS = re.compile(rf"{CONFIG}|{WEIGHTS}|{INDEX}|model-\d{{5,}}-of-\d{{5,}}\.safetensors")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 4


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        ValueError: the folder or file does not exist, or it is not a JSON object.
    """
    require(folder.is_dir(), "path", str(folder), "a folder, or a live transformers model")
    return _read_json(folder / CONFIG)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return every tensor by name, read-only and memory-mapped: unread data occupies no memory.

    The folder has one file, or shards with an index. Pickles are always rejected, because loading one runs
    the code in it.

    Raises:
        ValueError: no safetensors; an index with entries that are not safetensors files of the folder; a
            damaged file.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.exists() and index.exists():
        raise ValueError(f"{folder}: got both {WEIGHTS} and {INDEX}; allowed: one of them")
    if single.exists():
        return read_tensors(single)
    if not index.exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.name.endswith(_PICKLES))
        if pickles:
            raise ValueError(
                f"{folder}: got {_listed(pickles)}; allowed: {WEIGHTS} or {INDEX} (loading a pickle runs the "
                "code in it)"
            )
        raise ValueError(f"{folder}: {WEIGHTS} and {INDEX} missing; one of them is needed")
    places = _read_json(index).get("weight_map")
    require(isinstance(places, dict) and bool(places), f"{index}: weight_map", places, "names to files")
    assert isinstance(places, dict)
    weights: dict[str, Tensor] = {}
    for name in sorted(set(map(str, places.values()))):
        plain = name == Path(name).name and name.endswith(".safetensors")
        require(plain, f"{index}: weight_map", name, "names of .safetensors files beside the index")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: missing")
        weights |= read_tensors(folder / name)
    return weights


def check_tensors(source: str, given: Mapping[str, Tensor], wanted: Mapping[str, Iterable[int]]) -> None:
    """Raise unless the weights are exactly the expected ones, before any of them is used.

    Args:
        source: origin of the weights, for messages.
        given: the tensors.
        wanted: shape of each expected tensor.

    Raises:
        ValueError: names missing and unexpected tensors, and wrong shapes or dtypes.
    """
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in wanted]
    problems = []
    if missing:
        problems.append(f"missing {_listed(missing)}")
    if unexpected:
        problems.append(f"unexpected {_listed(unexpected)}")
    shapes = [
        f"{name} {tuple(given[name].shape)} where {tuple(shape)} is wanted"
        for name, shape in wanted.items()
        if name in given and given[name].shape != torch.Size(shape)
    ]
    if shapes:
        problems.append(f"misshapen {_listed(shapes)}")
    for name, tensor in given.items():
        if type(tensor) is not Tensor or tensor.dtype not in FLOATS or tensor.is_meta:
            kind = "without data" if tensor.is_meta else f"{type(tensor).__name__} of {tensor.dtype}"
            problems.append(f"{name} is {kind}; allowed: plain tensors of {', '.join(map(str, FLOATS))}")
            break
    if problems:
        raise ValueError(f"{source}: {'; '.join(problems)}")


def _check_target(path: str | Path, overwrite: bool) -> Path:
    """Return the folder to write, if that is allowed.

    Raises:
        ValueError: the path is a file, is not empty and `overwrite` is False, is a mount point with content,
            or contains files that a save does not write.
    """
    target = Path(path).resolve()
    require(target.is_dir() or not target.exists(), "path", str(path), "a folder")
    held = sorted(entry.name for entry in target.iterdir()) if target.exists() else []
    if held and not overwrite:
        raise ValueError(f"path: {target} holds {_listed(held)}; allowed: an empty folder, or overwrite=True")
    if held and target.is_mount():
        raise ValueError(
            f"path: {target} is a mount point, which cannot be replaced; allowed: a folder below it"
        )
    foreign = [name for name in held if not _OURS.fullmatch(name)]
    if foreign:
        raise ValueError(
            f"path: {target} holds {_listed(foreign)}, which would be lost; allowed: another folder, or one "
            "that only save_pretrained wrote to"
        )
    return target


def write_folder(
    path: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    max_shard_bytes: int,
    overwrite: bool,
) -> Path:
    """Write a temporary folder, flush it and rename it: the target is the old or the new one, never a mix.

    Two renames replace a folder. If the process is killed between them, the old folder remains next to the
    target, as `.NAME.XXXXXXXX.old`. An empty folder is not replaced, because it may be a mount point: files
    are written into it, config.json last, which makes it a model.

    Args:
        path: the folder; created with its parents.
        config: content of config.json.
        weights: tensors on any device.
        max_shard_bytes: maximum size of a file, unless a single tensor is larger.
        overwrite: replace an earlier save.

    Returns:
        The folder.

    Raises:
        ValueError: a target with other files, one with an earlier save if `overwrite` is False, or a
            mount point with content.
        OSError: the disk returned an error; an earlier save is unchanged.
    """
    check_sizes(max_shard_bytes=max_shard_bytes)
    target = _check_target(path, overwrite)
    is_there = target.is_dir() and not any(target.iterdir())
    scratch = target if is_there else target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    scratch.mkdir(parents=True, exist_ok=is_there)
    try:
        _write_weights(scratch, weights, max_shard_bytes)
        _write_json(scratch / CONFIG, config)
        if is_there:
            flush(target)
        else:
            publish(scratch, target)
    except BaseException:
        if is_there:
            for path in target.iterdir():
                path.unlink()
        else:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    return target


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise ValueError(f"{path}: no JSON: {error}") from None
    require(isinstance(content, dict), str(path), type(content).__name__, "a JSON object")
    assert isinstance(content, dict)
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of a safetensors file. They occupy memory only after they are read.

    Raises:
        ValueError: the file is damaged.
        OSError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged: {error}") from None


def _write_weights(folder: Path, weights: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in weights.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    count = len(shards)
    places: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = WEIGHTS if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        shard = {name: weights[name].detach().cpu().contiguous() for name in names}
        with safetensors_as_os_error(folder / file):
            save_file(shard, folder / file, metadata={"format": "pt"})
        flush(folder / file)
        places |= dict.fromkeys(names, file)
    if count > 1:
        total = sum(tensor.nbytes for tensor in weights.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    path.write_text(text, encoding="utf-8")
    flush(path)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
