"""Processes: processes of a training run that torchrun started, and the rank of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, distributed

from stackwise.config import TrainingConfig
from stackwise.support.arguments import require
from stackwise.support.device import resolve_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Processes"]

T = TypeVar("T")

_DEVICE, _STRATEGY = "training.device", "training.distributed.strategy"
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ONE_MORE_SEED = (
    0x9E3779B97F4A7C15  # odd and large, so that seeds that users choose do not collide between ranks
)


@dataclass(frozen=True)
class Processes:
    """Processes of a run. All of them run the same code; differences depend on `rank`.

    As a context manager, it destroys the process group at the end if it created the group.

    Only the main process (`is_main`) prints, shows progress and writes files. A collective operation must not
    depend on `is_main`: it would deadlock.

    Attributes:
        device: device that this process trains on.
        rank: rank of this process, from 0.
        local_rank: rank among the processes of this machine.
        world_size: number of processes.
        mesh: one-dimensional mesh of all processes; None: there is no process group.
        owns_group: True if the process group is destroyed at the end of the context.
    """

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    mesh: DeviceMesh | None = None
    owns_group: bool = False

    @classmethod
    def from_environment(
        cls,
        settings: TrainingConfig,
        environment: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> Processes:
        """Return the processes that the variables of torchrun describe; without torchrun only this process.

        An existing process group is used, and not destroyed. On CUDA each process uses the device of its
        `LOCAL_RANK`. The backend is nccl for CUDA tensors, and gloo for CPU tensors.

        Args:
            settings: `device` and `distributed` are read.
            environment: environment variables; None: `os.environ`.
            timeout: timeout of collective operations; None: torch's default, ten minutes for nccl and thirty
                for gloo.

        Raises:
            ValueError: a strategy without torchrun, several processes without a strategy, or a device that
                this process does not have. The message names the key.
        """
        variables = os.environ if environment is None else environment
        strategy = settings.distributed.strategy
        ready = distributed.is_available() and distributed.is_initialized()
        if not ready and "WORLD_SIZE" not in variables:
            torchrun = "'none', or a start by torchrun --nproc-per-node N"
            require(strategy == "none", _STRATEGY, strategy, torchrun)
            return cls(resolve_device(settings.device))
        if ready:
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        else:
            for name in _VARIABLES:
                require(name in variables, name, None, "what torchrun sets, beside WORLD_SIZE")
            rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        several = f"'ddp' or 'fsdp' for {world_size} processes, which would else train each for itself"
        require(strategy != "none" or world_size == 1, _STRATEGY, strategy, several)
        local_rank = int(variables.get("LOCAL_RANK", rank))
        device = _own_device(settings.device, local_rank, int(variables.get("LOCAL_WORLD_SIZE", world_size)))
        if strategy == "none":
            return cls(device)
        require(
            distributed.is_available(), _STRATEGY, strategy, "'none': this torch has no torch.distributed"
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not ready:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, timeout=timeout)
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("rank",))
        return cls(device, rank, local_rank, world_size, mesh, owns_group=not ready)

    @classmethod
    def alone(cls, settings: TrainingConfig) -> Processes:
        """Return a single process, for a trainer that was created without `processes`.

        Raises:
            ValueError: a strategy, or torchrun with several processes.
        """
        strategy = settings.distributed.strategy
        told = "'none', or ArchitectureTrainer(config, processes=Processes.from_environment(config.training))"
        require(strategy == "none", _STRATEGY, strategy, told)
        return cls.from_environment(settings)

    @property
    def is_main(self) -> bool:
        """True if this process prints, shows progress and writes files."""
        return self.rank == 0

    def seed(self, seed: int) -> int:
        """Return this rank's seed of random numbers that differ between processes, such as dropout.

        For rank 0 it is `seed`.
        """
        return (seed + self.rank * _ONE_MORE_SEED) % 2**63

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, equal in each. Collective. No host synchronisation.

        Args:
            values: tensor on the device, of equal shape in all processes.
        """
        if self.mesh is None:
            return values
        total = values.detach().clone()
        distributed.all_reduce(total)
        return total

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all processes, equal in each. Collective, like `sum`."""
        if self.mesh is None:
            return values
        largest = values.detach().clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return largest

    def as_in_main(self, value: T) -> T:
        """Return rank 0's value of a Python object in each process. Collective: every process has to call."""
        if self.mesh is None:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        if self.mesh is not None:
            self.sum(torch.zeros((), device=self.device)).item()

    def check_equal(self, what: str, value: Mapping[str, Any]) -> None:
        """Raise if values differ between processes. Collective: every process has to call.

        Raises:
            ValueError: raised in every process; names the first key and the rank that differs from rank 0.
        """
        if self.mesh is None:
            return
        everyone: list[Mapping[str, Any]] = [{}] * self.world_size
        distributed.all_gather_object(everyone, dict(value))
        first = everyone[0]
        for rank, theirs in enumerate(everyone):
            for key in [*first, *(key for key in theirs if key not in first)]:
                ours, other = first.get(key, "missing"), theirs.get(key, "missing")
                require(ours == other, f"{what}.{key} in rank {rank}", other, f"{ours!r}, as in rank 0")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, nccl would wait for other ranks, which may wait for this one. torchrun terminates
        # them when this process exits. With gloo they are notified.
        orderly = kind is None or self.device.type == "cpu"
        if self.owns_group and orderly and distributed.is_initialized():
            distributed.destroy_process_group()


def _own_device(name: str, local_rank: int, local_world_size: int) -> torch.device:
    device = resolve_device(name)
    if device.type != "cuda":
        return device
    if device != torch.device("cuda"):
        alone = local_world_size == 1
        require(alone, _DEVICE, name, f"auto, cuda or cpu: each of {local_world_size} processes has its own")
        return device
    count = torch.cuda.device_count()
    enough = f"at most {count} processes on this machine, which has {count} CUDA devices"
    require(local_rank < count, _DEVICE, f"{name}, LOCAL_RANK={local_rank}", enough)
    return torch.device("cuda", local_rank)
