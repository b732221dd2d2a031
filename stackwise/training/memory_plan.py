"""MemoryPlan: memory and FLOPs of a training run, per phase and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any

from rich.table import Table

__all__ = ["MemoryPlan", "PhasePlan"]


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """Memory and FLOPs of one phase. Bytes of tensors; FLOPs of matrix products and attention, per step.

    On the device:

    Attributes:
        name: name of the unit.
        steps: number of steps.
        n_prefix: number of frozen Blocks that are computed before the unit.
        ends: embedding, final norm and head; with `head: per_unit` also the initial copy for each unit.
        trained: Blocks that train, in their compute dtype.
        frozen: Blocks that are computed with gradients and do not train.
        idle: other Blocks that are on the device because nothing is offloaded.
        in_flight: other Blocks that are on the device while the prefix is computed: two, with the
            prefetched one.
        masters: float32 master weights.
        gradients: gradients of all trained parameters.
        optimizer: state of the optimizer without master weights.
        batch: ids and labels of a step, and the prefix output of one of its micro-batches.
        activations: saved for the backward pass by Blocks and embedding, with autocast's copies of weights.
        loss: saved for the backward pass by final norm, head and loss.
        snapshot: the guard's snapshot of weights, `masters` and `optimizer`, if it is on the device.
        peak: peak memory of a step, with all of the above and intermediate results.

    On the host and on disk, at the end of the phase:

    Attributes:
        host_blocks, disk_blocks: Blocks that are not on the device.
        host_prefix, disk_prefix: cached outputs of the prefix.
        host_snapshot: the guard's snapshot, if it is in host memory.

    FLOPs:

    Attributes:
        flops_forward, flops_backward: FLOPs of the trained part; the backward pass includes recomputation.
        flops_optimizer: FLOPs of Muon.
        flops_prefix: FLOPs of the prefix without a cache.
        flops_prefix_kept: FLOPs of the prefix with a cache of `cache_bytes`, mean over the steps of the
            phase.
    """

    name: str
    steps: int
    n_prefix: int
    ends: int
    trained: int
    frozen: int
    idle: int = 0
    in_flight: int = 0
    masters: int
    gradients: int
    optimizer: int
    batch: int
    activations: int
    loss: int
    snapshot: int
    peak: int
    host_blocks: int = 0
    host_prefix: int = 0
    host_snapshot: int
    disk_blocks: int = 0
    disk_prefix: int = 0
    flops_forward: int
    flops_backward: int
    flops_optimizer: int
    flops_prefix: int = 0
    flops_prefix_kept: float = 0.0

    @property
    def weights(self) -> int:
        """Bytes of all weights on the device, without master weights and Blocks in flight."""
        return self.ends + self.trained + self.frozen + self.idle

    @property
    def host(self) -> int:
        """Bytes in host memory."""
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
    """Memory and FLOPs of a run, phase by phase. `plan_memory` lists the omissions.

    Attributes:
        device: "cpu" or "cuda", device of the planned run.
        kernels: device whose operations were measured. "cpu" also for a run on CUDA if CUDA is not available;
            fused CUDA kernels have other intermediate results.
        tokens_per_step: number of tokens per step that the model sees, per process.
        prefix_bytes_per_token: bytes of the prefix output, cached or not; 0: there is no prefix.
        host_start: bytes in host memory before the first phase.
        phases: plans of the phases, in their order.
    """

    device: str
    kernels: str
    tokens_per_step: int
    prefix_bytes_per_token: int
    host_start: int
    phases: tuple[PhasePlan, ...]

    @property
    def peak(self) -> int:
        """Peak memory on the device in bytes."""
        return max(phase.peak for phase in self.phases)

    @property
    def host(self) -> int:
        """Peak memory on the host in bytes."""
        return max(self.host_start, *(phase.host for phase in self.phases))

    @property
    def disk(self) -> int:
        """Peak disk space in bytes."""
        return max(phase.disk for phase in self.phases)

    @property
    def flops(self) -> float:
        """FLOPs of the run."""
        return sum(phase.steps * phase.flops for phase in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, with the totals."""
        totals = {"peak": self.peak, "host": self.host, "disk": self.disk, "flops": self.flops}
        return {**asdict(self), "phases": [asdict(phase) for phase in self.phases], **totals}

    def table(self) -> Table:
        """Return a table with one row for neighbouring phases of equal memory."""
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
