"""Processes: those that torchrun started for one training run, and which of them this one is."""

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
    0x9E3779B97F4A7C15  # odd and far from small numbers: no two seeds meet that someone would choose
)


@dataclass(frozen=True)
class Processes:
    """The processes of a run. All of them do the same, and what is not the same goes by `rank`.

    A context manager: the group of processes ends with it, where it began with it.

    What only one process is to do (print, show progress, write files) is behind `is_main`, and nothing that
    the others take part in may be: they would wait for ever.

    Attributes:
        device: that this process trains on.
        rank: of this process, from 0.
        local_rank: the same among those on this machine.
        world_size: how many there are.
        mesh: all of them in a row; None: there is no group.
        owns_group: whether the group ends with this.
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
        """Those that the variables of torchrun tell of; without torchrun this process alone.

        A group that is there already is taken, and stays. On CUDA each process has the device of its
        `LOCAL_RANK`; tensors there are sent by nccl, those on the CPU by gloo.

        Args:
            settings: `device` and `distributed` are read.
            environment: of this process; None: `os.environ`.
            timeout: how long to wait for the others; None: as torch does, ten minutes for nccl and
                thirty for gloo.

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
        """The one process that this is where nobody has said that there are others.

        Raises:
            ValueError: a strategy, or torchrun with several processes.
        """
        strategy = settings.distributed.strategy
        told = "'none', or ArchitectureTrainer(config, processes=Processes.from_environment(config.training))"
        require(strategy == "none", _STRATEGY, strategy, told)
        return cls.from_environment(settings)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints, shows progress and writes files."""
        return self.rank == 0

    def seed(self, seed: int) -> int:
        """Of what is to be drawn in each process anew, as dropout: of rank 0 `seed` itself."""
        return (seed + self.rank * _ONE_MORE_SEED) % 2**63

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same in each; every process has to call. The host waits for none.

        Args:
            values: on the device, of one shape in all.
        """
        if self.mesh is None:
            return values
        total = values.detach().clone()
        distributed.all_reduce(total)
        return total

    def maximum(self, values: Tensor) -> Tensor:
        """The largest over all processes, element by element, the same in each; as `sum`."""
        if self.mesh is None:
            return values
        largest = values.detach().clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return largest

    def as_in_main(self, value: T) -> T:
        """What rank 0 has of a value of the host, in each process; every process has to call."""
        if self.mesh is None:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.mesh is not None:
            self.sum(torch.zeros((), device=self.device)).item()

    def check_equal(self, what: str, value: Mapping[str, Any]) -> None:
        """Refuse values that are not the same in all processes; every process has to call.

        Raises:
            ValueError: in every process, naming the first key and the rank that differs from rank 0.
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
        # After an error nccl would wait for others, which may wait for this process: torchrun ends them when
        # it is gone. With gloo they are told.
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
