"""Replay: the command that replays a training step with an alarm, from the bundle that a guard wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stackwise.stability.guard.diagnosis import Replay as StepReplay

__all__ = ["Replay"]


@dataclass(frozen=True)
class Replay:
    """Replay the broken step stored in a bundle and name the module that breaks first.

    Exit code 1 if the step still breaks.
    """

    bundle: tyro.conf.Positional[Path]
    """Folder that a guard with `bundles` wrote."""
    subject: tyro.conf.Positional[str]
    """MODULE:FACTORY, or path/to/file.py:FACTORY; FACTORY() returns an object with `model` and `loss(batch)`,
    or a model, if the batches are only inputs."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:N."""

    def run(self) -> int:
        """Print the alarm and the result of the replay. Return 1 if the step has a problem again, else 0."""
        from stackwise.stability.guard.diagnosis import Bundle, replay
        from stackwise.subject.factory import load_factory
        from stackwise.support.device import resolve_device, threads_for

        bundle = Bundle.read(self.bundle)
        device = resolve_device(self.device)
        model, loss_of = _training_of(load_factory(self.subject, search=Path.cwd()), self.subject)
        with threads_for(sum(p.numel() for p in model.parameters())):
            found = replay(bundle, model.to(device), loss_of, device)
        alarm = bundle.alarm
        place = f" in {alarm['where']}" if alarm.get("where") else ""
        print(f"then: step {alarm['step']}, {alarm['kind']}{place}")
        print(f"now:  loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}; ", end="")
        print(_said(found, alarm))
        return int(found.broken)


def _said(found: StepReplay, alarm: Mapping[str, Any]) -> str:
    """Return the problem of the replayed step in words, or "nothing breaks"."""
    if found.spike and not found.where:
        return f"{alarm['kind']} again, above {alarm['limit']:.6g}"
    if found.broken:
        return f"breaks first: {found.where or 'nothing that was found'}"
    unseen = f", but {alarm['kind']} is not looked at" if found.spike is None else ""
    return f"nothing breaks{unseen}"


def _training_of(factory: Any, subject: str) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor]]:
    from torch import nn

    from stackwise.subject.spec import ModelSpec
    from stackwise.support.random_state import seeded

    with seeded(0):
        made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    if isinstance(getattr(made, "model", None), nn.Module) and callable(getattr(made, "loss", None)):
        return made.model, lambda _, batch: made.loss(batch)
    try:
        spec = ModelSpec.of(made)
    except (TypeError, ValueError) as error:
        wanted = "an object with model and loss(batch), or a model"
        raise TypeError(f"{subject}: got {type(made).__name__}; wanted {wanted}: {error}") from None
    return made if isinstance(made, nn.Module) else spec.create("cpu", 0), spec.loss_of
