"""Diagnosis: bundles, which are folders with all data of a bad step, so that it can be recomputed.

A bundle has `bundle.json` (step, alarm, batches, norms and their histogram, versions), `tensors.safetensors`
(batches and random states) and, if requested, `weights.safetensors`. It contains no pickles.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, distributed, nn

from stackwise.checkpoint import tree
from stackwise.checkpoint.object_state import unwrapped
from stackwise.checkpoint.tensor_file import write_tensors
from stackwise.config import GuardPolicy
from stackwise.stability.buffers import elements
from stackwise.stability.guard.alarm import Alarm
from stackwise.stability.guard.examination import Replay, rerun
from stackwise.stability.guard.replay_loader import DrawnBatch, to_device
from stackwise.stability.locate.first_module import shown_name
from stackwise.support.arguments import check_number, require
from stackwise.support.files import parse_json, replacing

__all__ = ["Bundle", "BundleFolder", "Replay", "histogram", "replay"]

_FORMAT = 1
_FILES = ("bundle.json", "tensors.safetensors", "weights.safetensors")
_MAX_JSON = 64 * 2**20  # bytes; random states and norms need much less


@dataclass(frozen=True)
class Bundle:
    """Content of a diagnostic bundle: one bad step.

    Attributes:
        alarm: plain values of the alarm.
        batches: batches of the step, in order.
        norms: gradient norm of each parameter, by name.
        training: True if the model was in training mode.
        weights: parameters and buffers before the step, by name; None: not stored.
        notes: versions and other plain values; "loss_scale" is one of them.
    """

    alarm: dict[str, Any]
    batches: Sequence[DrawnBatch]
    norms: dict[str, float]
    training: bool = True
    weights: Mapping[str, Tensor] | None = None
    notes: Mapping[str, Any] | None = None

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in the backward pass; 1 if the notes do not contain it.

        Raises:
            ValueError: not a number above 0.
        """
        scale = (self.notes or {}).get("loss_scale", 1.0)
        check_number("loss_scale", scale, "a number above 0", lambda value: value > 0)
        return float(scale)

    def write(self, folder: Path | str) -> Path:
        """Write the bundle as `folder`, completely or not at all.

        Raises:
            ValueError: the folder exists, or a batch has a value that needs pickles, or a dtype that
                safetensors does not support.
            OSError: the disk refuses it. No partial folder remains.
        """
        folder = Path(folder)
        require(not folder.exists(), "folder", str(folder), "one that is not there yet")
        tensors: dict[str, Tensor] = {}
        batches = [
            {
                "step": given.step,
                "id": tree.encode(given.id, ("id", i), tensors),
                "batch": tree.encode(given.batch, ("batch", i), tensors),
                "random": tree.encode(given.random, ("random", i), tensors),
            }
            for i, given in enumerate(self.batches)
        ]
        content = {
            "format": _FORMAT,
            "alarm": tree.encode(self.alarm, ("alarm",), tensors),
            "batches": batches,
            "norms": tree.encode(self.norms, ("norms",), tensors),
            "histogram": histogram(self.norms),
            "training": self.training,
            "weights": self.weights is not None,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "notes": tree.encode(dict(self.notes or {}), ("notes",), tensors),
        }
        with replacing(folder) as part:
            part.mkdir(parents=True)
            try:
                _write(part / _FILES[1], tensors)
                if self.weights is not None:
                    _write(part / _FILES[2], self.weights)
                (part / _FILES[0]).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        return folder

    @classmethod
    def read(cls, folder: Path | str) -> Bundle:
        """Read a bundle that `write` wrote.

        Raises:
            ValueError: the folder is no bundle, or a damaged one; the message names the file.
        """
        folder = Path(folder)
        place = folder / _FILES[0]
        try:
            require(place.stat().st_size <= _MAX_JSON, str(place), place.stat().st_size, "a bundle's size")
            content = parse_json(place.read_bytes())
            place = folder / _FILES[1]
            tensors = load_file(place)
            place = folder / _FILES[2]
            weights = load_file(place) if content["weights"] else None
            place = folder / _FILES[0]
            require(content["format"] == _FORMAT, "format", content["format"], str(_FORMAT))

            def decoded(plain: Any) -> Any:
                # A copy: the alignment of mapped memory varies, and changes the rounding of sums.
                return tree.decode(plain, lambda name, shape, _: tensors[name].reshape(shape).clone())

            def mapping(held: Mapping[str, Any], key: str) -> dict[str, Any]:
                value = decoded(held[key])
                require(isinstance(value, dict), key, value, "a mapping")
                return dict(value)

            batches = [
                DrawnBatch(
                    int(each["step"]), decoded(each["id"]), decoded(each["batch"]), mapping(each, "random")
                )
                for each in content["batches"]
            ]
            norms = mapping(content, "norms")
            numbers = all(isinstance(norm, int | float) for norm in norms.values())
            require(numbers, "norms", norms, "numbers by name")
            return cls(
                alarm=mapping(content, "alarm"),
                batches=batches,
                norms=norms,
                training=bool(content["training"]),
                weights=weights,
                notes=mapping(content, "notes"),
            )
        except (
            OSError,
            SafetensorError,
            KeyError,
            TypeError,
            IndexError,
            OverflowError,  # an infinite step number
            RuntimeError,  # a wrong shape
            ValueError,
        ) as error:
            raise ValueError(f"{place}: no bundle, or a damaged one: {error!r}") from error


class BundleFolder:
    """Writer of the first `policy.max_bundles` bundles of a run. Rank 0 writes them, with its own batches.

    Args:
        folder: folder for the bundles; None: none are written.
        policy: maximum number of bundles, and whether they contain weights.
        group: processes that train together. All of them must call `write`. None: this process only.

    Attributes:
        written: number of bundles.
    """

    def __init__(
        self, folder: Path | str | None, policy: GuardPolicy, group: distributed.ProcessGroup | None
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._policy, self._group = policy, group
        self.written = 0

    def write(
        self,
        model: nn.Module,
        batches: Sequence[DrawnBatch],
        alarm: Alarm,
        norms: Mapping[str, float],
        loss_scale: float,
    ) -> Alarm:
        """Return the alarm, with the path of its bundle if one is written.

        Args:
            model: model in its state before the bad step.
            batches: batches of the step.
            alarm: alarm of the step.
            norms: gradient norm of each parameter.
            loss_scale: factor of the loss in the backward pass.
        """
        if self._folder is None or self.written >= self._policy.max_bundles:
            return alarm
        self.written += 1
        first = self._group is None or distributed.get_rank(self._group) == 0
        names = _names_in(model)
        weights: dict[str, Tensor] | None = {} if self._policy.bundle_weights else None
        if weights is not None:
            # In every process, in the same order: sharded weights are gathered.
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                gathered = _whole(tensor.detach())
                if first:
                    weights[names[name]] = gathered.to("cpu", copy=True)
        place, refused = [""], ""
        if first:
            notes = {"policy": self._policy.to_dict(), "loss_scale": loss_scale}
            of_names = {names.get(name, name): norm for name, norm in norms.items()}
            try:
                folder = self._free(alarm.step)
                content = replace(alarm, bundle=str(folder)).to_dict()
                bundle = Bundle(content, batches, of_names, model.training, weights, notes)
                place = [str(bundle.write(folder))]
            except Exception as error:  # any error: the other processes wait for the path
                refused = f"no diagnostic bundle of step {alarm.step}: {error}"
        if self._group is not None:
            source = distributed.get_global_rank(self._group, 0)
            distributed.broadcast_object_list(place, src=source, group=self._group)
        if refused:  # training can continue without a bundle
            warnings.warn(refused, stacklevel=2)
        return replace(alarm, bundle=place[0])

    def _free(self, step: int) -> Path:
        """Return a path that does not exist yet. An earlier run may have written bundles."""
        assert self._folder is not None
        number = self.written
        while (folder := self._folder / f"step-{step:08d}-{number}").exists():
            number += 1
        return folder


def replay(
    bundle: Bundle | Path | str,
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], Tensor],
    device: torch.device | str | None = None,
) -> Replay:
    """Recompute a bad step with its batches and random states, and its weights if the bundle has them.

    The loss is scaled as in the original step, so a float16 overflow is reproduced. The model keeps the
    weights of the bundle. Its training mode, gradients and random states are restored.

    Args:
        bundle: bundle, or its folder.
        model: same architecture, with or without the wrappers of compiling and data parallelism.
        loss_of: function that returns the loss of a batch.
        device: device for the batches; None: the model's.

    Raises:
        ValueError: not a bundle, or weights that do not fit the model.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.read(bundle)
    if bundle.weights is not None:
        _load(model, bundle.weights)
    first = next(model.parameters(), None)
    device = torch.device(device) if device is not None else first.device if first is not None else None
    was_training = model.training
    model.train(bundle.training)
    try:
        batches = [DrawnBatch(b.step, b.id, to_device(b.batch, device), b.random) for b in bundle.batches]
        found = rerun(model, batches, loss_of, loss_scale=bundle.loss_scale)
        names = _names_in(model)
        found = found._replace(parameter_norms={names[n]: x for n, x in found.parameter_norms.items()})
        return found._replace(spike=_is_spike(bundle, found))
    finally:
        model.train(was_training)


def _is_spike(bundle: Bundle, found: Replay) -> bool | None:
    """Return `Replay.spike`, for the loss or for the norm of the parameters in the bundle."""
    alarm = bundle.alarm
    kind, value, limit = (alarm.get(key) for key in ("kind", "value", "limit"))
    if kind not in ("gradient spike", "loss spike", "logit growth"):
        return False
    if kind == "logit growth" or value is None or limit is None:
        return None
    again = found.loss
    if kind == "gradient spike":
        known = [found.parameter_norms[name] for name in bundle.norms if name in found.parameter_norms]
        again = math.hypot(*known) or found.grad_norm
    # As in the guard: at most half of the alarm's value is no reproduction.
    own = alarm.get("reproduced") is False and 2 * again <= value
    return again > limit and not own


def histogram(norms: Mapping[str, float]) -> dict[str, Any]:
    """Return the number of gradient norms in each decade, as plain values.

    Returns:
        `decades`: exponents of ten, in order. `counts`: number of norms in [10**d, 10**(d+1)) for each.
        `zero` and `non_finite`: number of such norms.
    """
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    decades = [math.floor(math.log10(norm)) for norm in finite if norm > 0]
    shown = list(range(min(decades), max(decades) + 1)) if decades else []
    return {
        "decades": shown,
        "counts": [decades.count(decade) for decade in shown],
        "zero": sum(norm == 0 for norm in finite),
        "non_finite": len(norms) - len(finite),
    }


def _names_in(model: nn.Module) -> dict[str, str]:
    """Return names without the prefixes of compiling and data parallelism, by parameter or buffer name."""
    inner = unwrapped(model)
    wrapped = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    plain = [shown_name(name) for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
    return dict(zip(wrapped, plain, strict=True))


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    names = _names_in(model)
    mine = {names[name]: own for name, own in (*model.named_parameters(), *model.named_buffers())}
    unknown, missing = sorted(weights.keys() - mine.keys()), sorted(mine.keys() - weights.keys())
    require(not unknown, "weights", unknown[:3], "the names of this model's parameters and buffers")
    require(not missing, "weights", f"none of {missing[:3]}", "all of this model's parameters and buffers")
    for name, own in mine.items():
        fits = own.shape == weights[name].shape
        require(fits, f"weights[{name!r}]", tuple(weights[name].shape), str(tuple(own.shape)))
    with torch.no_grad():
        for name, own in mine.items():
            place = elements(own)
            place.copy_(weights[name][tuple(map(slice, place.shape))])


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor. A sharded one (DTensor) is gathered, so all processes must call this."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    write_tensors(path, {name: _whole(tensor.detach()) for name, tensor in tensors.items()})
