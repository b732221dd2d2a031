"""BundleFolder: writes the diagnostic bundles of a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, distributed, nn

from stackwise.config import GuardPolicy
from stackwise.stability.guard.alarm import Alarm
from stackwise.stability.guard.diagnosis import Bundle, names_in, whole
from stackwise.stability.guard.replay_loader import DrawnBatch

__all__ = ["BundleFolder"]


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
        names = names_in(model)
        weights: dict[str, Tensor] | None = {} if self._policy.bundle_weights else None
        if weights is not None:
            # In every process, in the same order: sharded weights are gathered.
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                gathered = whole(tensor.detach())
                if first:
                    weights[names[name]] = gathered.to("cpu", copy=True)
        place, refused = [""], ""
        if first:
            notes = {"policy": self._policy.to_dict(), "loss_scale": loss_scale}
            of_names = {names.get(name, name): norm for name, norm in norms.items()}
            try:
                folder = self._free(alarm.step)
                told = replace(alarm, bundle=str(folder)).to_dict()
                bundle = Bundle(told, batches, of_names, model.training, weights, notes)
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
