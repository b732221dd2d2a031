"""SharedRack: Rack that several processes train, replicated (DDP) or sharded (FSDP2).

Gradients are averaged over the processes. Each process divides its loss by the number of targets of all
processes, and multiplies it by the number of processes. The result is the gradient of the global batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stackwise.config import TrainingConfig
from stackwise.data.batches import Batches
from stackwise.model.quantization import plain_tensors
from stackwise.model.rack import Rack
from stackwise.support.arguments import check_choice, require
from stackwise.training.objective import Objective
from stackwise.training.phase_model import PhaseModel
from stackwise.training.processes import Processes

__all__ = ["SharedRack", "check_rows", "gradient_sync", "is_sharded", "reshard"]

# Dtype in which FSDP2 gathers weights. Its shards are float32, and it reduces gradients in float32.
_GATHERED = {"fp32": None, "bf16": torch.bfloat16}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# torch 2.13 renamed "broadcast_buffers".
_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"


class SharedRack:
    """Rack that the processes of a run train together.

    With "fsdp" a sharded copy is trained. The original Rack stays on its device with its weights until
    `gather`. Otherwise the Rack itself is trained.

    Args:
        rack: equal in all processes.
        processes: processes of the run.
        settings: `training` section of a configuration.
        objective: training objective.

    Attributes:
        whole: the original Rack.
        rack: the Rack that is trained: `whole`, or its sharded copy.

    Raises:
        ValueError: a setting that "fsdp" does not support (the message gives the reason), or weights or
            settings that differ between processes.
    """

    def __init__(
        self, rack: Rack, processes: Processes, settings: TrainingConfig, objective: Objective
    ) -> None:
        self.processes, self.settings, self.whole = processes, settings, rack
        strategy = settings.distributed.strategy
        grouped = "'none' for a process alone, else 'ddp' or 'fsdp', and the processes of that configuration"
        require(
            (strategy == "none") == (processes.mesh is None),
            "training.distributed.strategy",
            strategy,
            grouped,
        )
        if processes.mesh is not None:
            processes.check_equal("training", settings.to_dict())
            processes.check_equal("model", _checksums(rack))
        self.rack = rack
        self._root: PhaseModel | None = None
        if strategy == "fsdp":
            _check_fsdp(settings, rack)
            self.rack, self._root = self._in_parts(objective)

    def wrap(self, model: PhaseModel) -> nn.Module:
        """Return the module that computes the loss of `model` and synchronises its gradients.

        Args:
            model: model of `self.rack`, after its optimizer was created.
        """
        if self._root is not None:
            pairs = zip(model.parameters(), self._root.parameters(), strict=True)
            assert all(ours is parts for ours, parts in pairs), "all of it trains"
            return self._root
        if self.processes.mesh is None:
            return model
        # Weights and buffers are equal, and buffers do not change: only gradients have to be communicated.
        options: dict[str, Any] = {_SYNC_BUFFERS: False, "init_sync": False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(model, **options)

    @torch.no_grad()
    def gather(self) -> Rack:
        """Return the original Rack with the current weights. Collective: every process has to call it."""
        if self.rack is not self.whole:
            for weight, part in zip(self.whole.parameters(), self.rack.parameters(), strict=True):
                weight.copy_(part.full_tensor())  # type: ignore[attr-defined]
            for target, buffer in zip(self.whole.buffers(), self.rack.buffers(), strict=True):
                target.copy_(buffer)
        return self.whole

    def _in_parts(self, objective: Objective) -> tuple[Rack, PhaseModel]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import distribute_tensor

        whole, mesh, device = self.whole, self.processes.mesh, self.processes.device
        assert mesh is not None
        twin = _without_memory(whole)
        root, blocks = PhaseModel(twin, objective), twin.get_blocks()
        # All modules share one policy, and it must not round the float32 count of tokens to bfloat16.
        narrow = _GATHERED[self.settings.precision]
        reduce = None if narrow is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=reduce, cast_forward_inputs=False)
        for i, block in enumerate(blocks):
            # The backward pass uses the last Block first.
            reshard = self.settings.distributed.reshard_after_forward and i < len(blocks) - 1
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module, following in zip([root, *blocks], blocks, strict=False):
            module.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        root.to_empty(device=device)
        with torch.no_grad():
            for part, source in zip(twin.parameters(), whole.parameters(), strict=True):
                full = source.detach().to(device)
                mine = distribute_tensor(full, mesh, part.placements, src_data_rank=None)  # type: ignore[attr-defined]
                part.to_local().copy_(mine.to_local())  # type: ignore[attr-defined]
            for target, buffer in zip(twin.buffers(), whole.buffers(), strict=True):
                target.copy_(buffer)
        return twin, root


@contextmanager
def gradient_sync(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Synchronise gradients over all processes at the end of a backward pass in this context, if `wanted`.

    Args:
        model: returned by `SharedRack.wrap`.
        wanted: False for all micro-batches of a step except the last: gradients are only accumulated.
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(wanted)  # type: ignore[operator]
        yield
    elif isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
    else:
        yield


def is_sharded(model: nn.Module) -> bool:
    """Return True if each process has a shard of it: FSDP2, whose policy also sets the compute dtype."""
    return hasattr(model, "set_requires_gradient_sync")


def reshard(model: nn.Module) -> None:
    """Free gathered weights that a forward pass without a backward pass has not freed."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def check_rows(dataloader: object, processes: Processes) -> None:
    """Raise if batches of `create_data` belong to another process. Other loaders cannot be checked.

    Raises:
        ValueError: names the rank that the batches belong to.
    """
    batches = getattr(dataloader, "dataset", getattr(dataloader, "loader", dataloader))
    if processes.world_size > 1 and isinstance(batches, Batches):
        seen, wanted = (batches.rank, batches.world_size), (processes.rank, processes.world_size)
        told = "rank {} of {}: create_data(config, processes.rank, processes.world_size)".format(*wanted)
        require(seen == wanted, "dataloader", "rank {} of {}".format(*seen), told)


def _check_fsdp(settings: TrainingConfig, rack: Rack) -> None:
    key, ddp = "training.training_architecture", "with training.distributed.strategy='fsdp'"
    architecture = settings.training_architecture
    rackwise = f"'rackwise' {ddp}: a unit that trains alone is small enough for each process, so take 'ddp'"
    require(architecture == "rackwise", key, architecture, rackwise)
    growth = f"false {ddp}: what the parts belong to is settled when training begins"
    require(not settings.scope.growth, "training.scope.growth", settings.scope.growth, growth)
    if settings.precision == "bf16_weights":
        raise ValueError(
            f"training.precision: got 'bf16_weights'; allowed: 'bf16' {ddp}, which computes with bfloat16 "
            "weights and keeps float32 ones in parts"
        )
    check_choice(f"training.precision {ddp}", settings.precision, _GATHERED)
    require(
        not settings.compile, "training.compile", True, f"false {ddp}: gathering parts the compiled graph"
    )
    for name, w in rack.state_dict(keep_vars=True).items():
        plain = f"'ddp', since {name} is of {type(w).__name__}, which is not taken apart"
        require(not hasattr(w, "__tensor_flatten__"), "training.distributed.strategy", "fsdp", plain)


def _without_memory(rack: Rack) -> Rack:
    """Return a deep copy with parameters and buffers on the meta device. Tied weights stay tied."""
    empty: dict[int, object] = {}
    for p in rack.parameters():
        empty[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for buffer in rack.buffers():
        empty[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(rack, empty)


def _checksums(rack: Rack) -> dict[str, tuple[object, ...]]:
    """Return, for each weight: "trains" or "frozen", shape, dtype, and the sum of its bits as integers."""
    return {
        name: (
            "trains" if w.requires_grad else "frozen",
            tuple(w.shape),
            str(w.dtype),
            sum(_checksum(part) for part in plain_tensors(w.detach())),
        )
        for name, w in rack.state_dict(keep_vars=True).items()
    }


def _checksum(tensor: Tensor) -> int:
    return int(tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))
