"""MemoryPlan: what a training run will hold, where, and what it will compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any

from rich.table import Table

__all__ = ["MemoryPlan", "PhasePlan"]


@dataclass(frozen=True)
class PhasePlan:
    """One phase of a run. Bytes of tensors; FLOPs of matrix products and attention, of one step.

    On the device:

    Attributes:
        name: of the unit.
        steps: how many.
        n_prefix: how many frozen Blocks are computed in front of it.
        ends: embedding, final norm and head; with `head: per_unit` also the copy that each unit starts from.
        trained: Blocks that train, as the model computes with them.
        frozen: Blocks that are computed with gradients and do not train.
        idle: other Blocks that are on the device because nothing is offloaded.
        in_flight: other Blocks that are there while the prefix is computed; two, with the one read ahead.
        masters: float32 originals of narrow weights.
        gradients: of all that trains.
        optimizer: what it keeps from step to step, masters apart.
        batch: ids and labels of a step, and what the prefix says of one of its micro-batches.
        activations: what Blocks and embedding leave for the backward pass, with autocast's copies of weights.
        loss: what final norm, head and loss leave for it.
        snapshot: what a guard can go back to, where that is on the device: of weights, `masters` and
            `optimizer`.
        peak: the most that is there at one time in a step, all of the above and intermediate results.

    Elsewhere, at the end of the phase:

    Attributes:
        host_blocks, disk_blocks: Blocks that are not on the device.
        host_prefix, disk_prefix: kept outputs of the prefix.
        host_snapshot: as `snapshot`, where that is in the memory of the host.

    To compute:

    Attributes:
        flops_forward, flops_backward: of what trains; the second with all that is recomputed.
        flops_optimizer: those of Muon.
        flops_prefix: of the prefix, had nothing been kept of it.
        flops_prefix_kept: of the prefix, mean over the steps of the phase, with what `cache_bytes` holds.
    """

    name: str
    steps: int
    n_prefix: int
    ends: int
    trained: int
    frozen: int
    idle: int
    in_flight: int
    masters: int
    gradients: int
    optimizer: int
    batch: int
    activations: int
    loss: int
    snapshot: int
    peak: int
    host_blocks: int
    host_prefix: int
    host_snapshot: int
    disk_blocks: int
    disk_prefix: int
    flops_forward: int
    flops_backward: int
    flops_optimizer: int
    flops_prefix: int
    flops_prefix_kept: float

    @property
    def weights(self) -> int:
        """Bytes of all weights on the device but for masters and what is in flight."""
        return self.ends + self.trained + self.frozen + self.idle

    @property
    def host(self) -> int:
        """Bytes in the memory of the host."""
        return self.host_blocks + self.host_prefix + self.host_snapshot

    @property
    def disk(self) -> int:
        """Bytes on disk."""
        return self.disk_blocks + self.disk_prefix

    @property
    def flops(self) -> float:
        """FLOPs of a step."""
        return self.flops_forward + self.flops_backward + self.flops_optimizer + self.flops_prefix_kept


@dataclass(frozen=True)
class MemoryPlan:
    """What a run holds and computes, phase by phase. `plan_memory` says what is not counted.

    Attributes:
        device: "cpu" or "cuda", where the run is to be.
        kernels: of which device the operations are that were gone through. "cpu" also for a run on CUDA where
            there is no CUDA; fused kernels of CUDA leave other intermediate results behind.
        tokens_per_step: that the model sees, of one process.
        prefix_bytes_per_token: of outputs of the prefix, kept or not; 0: there is no prefix.
        host_start: bytes in the memory of the host before the first phase.
        phases: in their order.
    """

    device: str
    kernels: str
    tokens_per_step: int
    prefix_bytes_per_token: int
    host_start: int
    phases: tuple[PhasePlan, ...]

    @property
    def peak(self) -> int:
        """The most bytes on the device at one time."""
        return max(phase.peak for phase in self.phases)

    @property
    def host(self) -> int:
        """The most bytes in the memory of the host at one time."""
        return max(self.host_start, *(phase.host for phase in self.phases))

    @property
    def disk(self) -> int:
        """The most bytes on disk at one time."""
        return max(phase.disk for phase in self.phases)

    @property
    def flops(self) -> float:
        """FLOPs of the run."""
        return sum(phase.steps * phase.flops for phase in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, with the totals."""
        totals = {"peak": self.peak, "host": self.host, "disk": self.disk, "flops": self.flops}
        return {**asdict(self), "phases": [asdict(phase) for phase in self.phases], **totals}

    def table(self) -> Table:
        """One row for neighbouring phases that hold the same."""
        table = Table(
            title=f"bytes on {self.device}, with the kernels of {self.kernels}; FLOPs of a step",
            caption=f"at most {_bytes(self.peak)} on the device, {_bytes(self.host)} in the memory of the "
            f"host, {_bytes(self.disk)} on disk; {_flops(self.flops)}FLOP in all",
        )
        table.add_column("unit")
        columns = ("steps", "weights", "optimizer", "gradients", "activations", "loss", "in flight", "peak")
        for column in (*columns, "host", "disk", "FLOPs", "prefix"):
            table.add_column(column, justify="right")
        for _, members in groupby(self.phases, key=_held):
            first, *_, last = group = [*members] * 2
            names = [first.name] if len(group) == 2 else [first.name, last.name]
            table.add_row(
                " to ".join(names),
                str(first.steps),
                _bytes(first.weights),
                _bytes(first.masters + first.optimizer),
                *(_bytes(each) for each in (first.gradients, first.activations, first.loss, first.in_flight)),
                _bytes(first.peak),
                _bytes(last.host),
                _bytes(last.disk),
                _flops(first.flops - first.flops_prefix_kept),
                _flops(last.flops_prefix_kept),
            )
        return table


def _held(phase: PhasePlan) -> tuple[object, ...]:
    apart = {"name", "n_prefix", "host_blocks", "host_prefix", "disk_blocks", "disk_prefix"}
    apart |= {"flops_prefix", "flops_prefix_kept"}
    return tuple(getattr(phase, each.name) for each in fields(phase) if each.name not in apart)


def _bytes(count: int) -> str:
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def _flops(count: float) -> str:
    return _scaled(count, ("", "k", "M", "G", "T", "P", "E", "Z", "Y"))


def _scaled(count: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if count < 999.5:
            return f"{count:.3g} {unit}".strip()
        count /= 1000
    return f"{count:,.3g} {units[-1]}"
