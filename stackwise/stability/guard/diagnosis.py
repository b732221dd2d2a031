"""Diagnosis: bundles, which are folders with all data of a bad step, so that it can be recomputed.

A bundle has `bundle.json` (step, alarm, batches, norms and their histogram, versions), `tensors.safetensors`
(batches and random states) and, if requested, `weights.safetensors`. It contains no pickles.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, distributed, nn

from stackwise.checkpoint import tree
from stackwise.checkpoint.object_state import unwrapped
from stackwise.checkpoint.tensor_file import write_tensors
from stackwise.stability.buffers import Buffers, elements
from stackwise.stability.guard.replay_loader import DrawnBatch, to_device
from stackwise.stability.locate import ModuleScales, locate
from stackwise.stability.locate.first_module import shown_name
from stackwise.stability.recomputation import recomputation
from stackwise.stability.telemetry.gradient_norm import global_norm, gradient_norms
from stackwise.support.arguments import check_number, require
from stackwise.support.files import parse_json, replacing
from stackwise.support.random_state import keep_random_states, set_random_states

__all__ = [
    "Bundle",
    "Replay",
    "forget_gradients",
    "histogram",
    "names_in",
    "replay",
    "rerun",
    "scaled",
    "whole",
]

_FORMAT = 1
_FILES = ("bundle.json", "tensors.safetensors", "weights.safetensors")
_MAX_JSON = 64 * 2**20  # bytes; random states and norms need much less


class Replay(NamedTuple):
    """Result of recomputing a bad step.

    Attributes:
        loss: sum over the batches of the step.
        grad_norm: global L2 norm of the sum of their gradients.
        parameter_norms: gradient norm of each parameter, by name.
        where: first bad place; "": none.
        spike: True if the alarm's number is finite and the recomputed number is above the alarm's limit too.
            None: unknown, because it is an attention logit or the limit is not known.
    """

    loss: float
    grad_norm: float
    parameter_norms: dict[str, float]
    where: str
    spike: bool | None = False

    @property
    def broken(self) -> bool:
        """True if loss or gradient is not finite, a bad place was found, or the spike was reproduced."""
        finite = math.isfinite(self.loss) and math.isfinite(self.grad_norm)
        return bool(self.where) or not finite or bool(self.spike)


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
        told = {
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
                (part / _FILES[0]).write_text(json.dumps(told, indent=1, allow_nan=False) + "\n")
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
            told = parse_json(place.read_bytes())
            place = folder / _FILES[1]
            tensors = load_file(place)
            place = folder / _FILES[2]
            weights = load_file(place) if told["weights"] else None
            place = folder / _FILES[0]
            require(told["format"] == _FORMAT, "format", told["format"], str(_FORMAT))

            def untold(plain: Any) -> Any:
                # A copy: the alignment of mapped memory varies, and changes the rounding of sums.
                return tree.decode(plain, lambda name, shape, _: tensors[name].reshape(shape).clone())

            def mapping(held: Mapping[str, Any], key: str) -> dict[str, Any]:
                value = untold(held[key])
                require(isinstance(value, dict), key, value, "a mapping")
                return dict(value)

            batches = [
                DrawnBatch(
                    int(each["step"]), untold(each["id"]), untold(each["batch"]), mapping(each, "random")
                )
                for each in told["batches"]
            ]
            norms = mapping(told, "norms")
            numbers = all(isinstance(norm, int | float) for norm in norms.values())
            require(numbers, "norms", norms, "numbers by name")
            return cls(
                alarm=mapping(told, "alarm"),
                batches=batches,
                norms=norms,
                training=bool(told["training"]),
                weights=weights,
                notes=mapping(told, "notes"),
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
        names = names_in(model)
        found = found._replace(parameter_norms={names[n]: x for n, x in found.parameter_norms.items()})
        return found._replace(spike=_is_spike(bundle, found))
    finally:
        model.train(was_training)


def rerun(
    model: nn.Module,
    batches: Sequence[DrawnBatch],
    loss_of: Callable[[nn.Module, Any], Tensor],
    scales: Callable[[], ModuleScales | None] | None = None,
    group: distributed.ProcessGroup | None = None,
    *,
    named: Sequence[tuple[str, nn.Parameter]] = (),
    buffers: Buffers | None = None,
    loss_scale: float = 1.0,
) -> Replay:
    """Run forward and backward over `batches` under hooks. The gradients of `named` are deleted.

    Random states, buffers and all other gradients are restored, also after an error. The other processes of
    `group` do not learn of the error. They may be in a collective of the model, and wait until this process
    exits.

    Args:
        model: model with the weights of the step.
        batches: batches of the step.
        loss_of: function that returns the part of a batch, as it is passed to `backward`.
        scales: function that returns the scales of healthy steps. It is called first. None: only non-finite
            values are found.
        group: processes that all recompute the step and average their gradients.
        named: trained parameters with their names. They need not belong to the model.
        buffers: copies of the model's buffers and of weights that its forward passes write. The copies are
            renewed. None: copies of the buffers only.
        loss_scale: factor of the losses in the backward pass. Norms are divided by it.

    Raises:
        Exception: any error of `loss_of`.
    """
    losses: list[float] = []
    where = ""
    buffers = buffers or Buffers(model)
    # Not by zero_grad: a hook on it would treat the step as finished.
    with buffers.looking(), _forgotten_gradients(model, named):
        known_scales = None if scales is None else scales()
        with recomputation(), keep_random_states(), torch.enable_grad():
            for given in batches:

                def run(given: DrawnBatch = given) -> None:
                    set_random_states(given.random)
                    loss = loss_of(model, given.batch)
                    losses.append(float(loss.detach()))
                    scaled(loss, loss_scale).backward()  # type: ignore[no-untyped-call]

                location = locate(model, run, scales=known_scales)
                if location is not None and not where:
                    of_loss = location.direction == "loss"
                    where = location.module if of_loss else f"{location.module} ({location.direction})"
            if not where and (broken := buffers.broken()) is not None:
                where = next(iter(broken.names()), "")
        everything = _with_others(model, named)
        if group is not None:
            _average_gradients(everything.values(), group)
        known = {name: p for name, p in everything.items() if p.grad is not None}
        norms_P = gradient_norms(known.values()) / loss_scale
        total = float(global_norm(norms_P))
        norms = dict(zip(known, norms_P.tolist(), strict=True))
    return Replay(sum(losses), total, norms, where)


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


def scaled(loss: Tensor, loss_scale: float) -> Tensor:
    """Return the scaled loss, from which the backward pass starts.

    The scale is a float32 tensor, as in `torch.amp.GradScaler`. Multiplied by a Python number, a loss would
    stay float16 and could overflow although it does not in training.
    """
    if loss_scale == 1.0:
        return loss
    return loss * torch.tensor(loss_scale, dtype=torch.float32, device=loss.device)


def _with_others(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return the parameters of the model and of `named`, each once, by name."""
    found = dict(model.named_parameters())
    mine = {id(p) for p in found.values()}
    return found | {name: p for name, p in named if id(p) not in mine}


def _average_gradients(parameters: Iterable[nn.Parameter], group: distributed.ProcessGroup) -> None:
    """Average gradients over the processes. Values that DDP has averaged stay the same."""
    processes = distributed.get_world_size(group)
    for p in parameters:
        if p.requires_grad and not hasattr(p, "full_tensor"):
            # All processes must reduce the same parameters, even if one has no gradient.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            distributed.all_reduce(p.grad, group=group)
            p.grad /= processes


@contextmanager
def _forgotten_gradients(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """Run the block without gradients, and delete the gradients that it computes.

    After it, the gradients of parameters outside `named` are restored.
    """
    # Of another optimizer, which has not updated yet.
    own = {id(p) for _, p in named}
    of_others = [(p, p.grad) for p in model.parameters() if id(p) not in own]
    # Views of DDP's buckets, which it will overwrite.
    viewed = [(g, g.clone()) for _, g in of_others if g is not None and g._is_view()]
    forget_gradients(model, named)
    try:
        yield
    finally:
        forget_gradients(model, named)
        for p, gradient in of_others:
            p.grad = gradient
        for gradient, values in viewed:
            gradient.copy_(values)


def forget_gradients(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]] = ()) -> None:
    """Delete the gradients of the model and of the parameters in `named`."""
    for p in (*model.parameters(), *(p for _, p in named)):
        p.grad = None


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


def names_in(model: nn.Module) -> dict[str, str]:
    """Return names without the prefixes of compiling and data parallelism, by parameter or buffer name."""
    inner = unwrapped(model)
    wrapped = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    plain = [shown_name(name) for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
    return dict(zip(wrapped, plain, strict=True))


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    names = names_in(model)
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


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor. A sharded one (DTensor) is gathered, so all processes must call this."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    write_tensors(path, {name: whole(tensor.detach()) for name, tensor in tensors.items()})
