"""Memory planner: memory and FLOPs of a training run, measured before training.

The trainer's own code runs the steps on tensors with a shape and a dtype but without
memory (PyTorch's FakeTensorMode). The bytes that these tensors would need are added up.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from stackwise.config import StackWiseConfig, TrainingConfig
from stackwise.model.backend import using
from stackwise.model.block import Block
from stackwise.model.build import create_rack_from_config
from stackwise.model.layout import Layout
from stackwise.model.rack import Rack
from stackwise.stability.guard.snapshot import Snapshot
from stackwise.support.arguments import check_sizes, require
from stackwise.support.tensor_tree import tensors_of
from stackwise.training.guard import RackPart
from stackwise.training.master import MasterAdamW
from stackwise.training.memory_plan import MemoryPlan, PhasePlan
from stackwise.training.objective import Objective
from stackwise.training.phase_model import PhaseModel, only_training
from stackwise.training.precision import autocast, frozen_precision
from stackwise.training.recompute import recomputing
from stackwise.training.scope import Phase, plan_phases
from stackwise.training.step import MicroBatch, TrainStep
from stackwise.training.storage_meter import StepFacts, StorageMeter, uncollected, watch
from stackwise.training.targets import Targets, next_token_targets

__all__ = ["plan_memory"]


def plan_memory(config: StackWiseConfig, *, n_batches: int | None = None, device: str = "cuda") -> MemoryPlan:
    """Return the memory and FLOPs of a training run of `config`, without its hardware or memory.

    Only tensors are counted. Not included:

    - rounding and caching by allocators (pinned memory is rounded up to a power of two), workspaces inside
      an operation, the CUDA context, the interpreter and its libraries, file headers, records of steps
    - the construction of the Rack before training
    - copies of weights and optimizer state in host memory for asynchronous checkpoints
    - the buckets of `ddp`, which store gradients throughout a step
    - memory that a guard needs to recompute a step, and the batches that it stores

    A guard's snapshot is counted with moments, which it has from the second snapshot on. A matrix product has
    two FLOPs per multiplication. Attention includes all pairs, also those that a causal mask hides. With
    `compile` the uncompiled operations are measured; the compiler saves less.

    Args:
        config: `model`, `training` and `data.pack_documents` are read; no data is read.
        n_batches: number of batches in an epoch of the data; None: the data does not restart within a phase.
        device: "cuda" or "cpu"; replaces `training.device`.

    Raises:
        ValueError: a configuration that cannot be trained, or one that cannot be planned:
            `precision: float8`, `recompute.kind: budget` or `distributed.strategy: fsdp`.
    """
    config.validate()
    if n_batches is not None:
        check_sizes(n_batches=n_batches)
    require(device in ("cpu", "cuda"), "device", device, "cpu, cuda")
    settings = config.training.model_copy(update={"compile": False})
    _check(config.training, device)
    kernels = device if device == "cpu" or torch.cuda.is_available() else "cpu"
    # `sliced` attention for windows was measured for the CPU, and is not used on CUDA.
    attention = using("sdpa") if kernels != device else nullcontext()
    with FakeTensorMode(), attention:
        with torch.device(kernels):
            rack = create_rack_from_config(config)
        return _Planner(config, settings, rack, n_batches, device, kernels).plan()


class _Planner:
    """Planner of a Rack without memory, and its measurements."""

    def __init__(
        self,
        config: StackWiseConfig,
        settings: TrainingConfig,
        rack: Rack,
        n_batches: int | None,
        device: str,
        kernels: str,
    ) -> None:
        self.settings, self.rack, self.device, self.kernels = settings, rack, device, kernels
        self.objective = _WithoutMemory(settings.objective, config.model.vocab_size)
        self.objective.check(rack)
        self.blocks = rack.get_blocks()
        self.kinds = [json.dumps(block.config.to_dict()) for block in self.blocks]
        self.sizes = [sum(t.nbytes for t in block.state_dict().values()) for block in self.blocks]
        self.targets = _targets(config, self.objective, kernels, device)
        self.batches_per_step = settings.accumulation_steps
        self.n_batches = n_batches
        self.prefix = _KeptOutputs()
        self.steps: dict[object, tuple[PhasePlan, int]] = {}
        self.forwards: dict[str, _Forward] = {}

    def plan(self) -> MemoryPlan:
        stacks = self.rack.blocks_per_stack
        phases = plan_phases(stacks, self.settings)
        planned = tuple(self._phase(phase) for phase in phases)
        tokens = self.settings.batch_size * self.settings.seq_len
        return MemoryPlan(
            device=self.device,
            kernels=self.kernels,
            tokens_per_step=tokens * self.batches_per_step,
            prefix_bytes_per_token=max((f.output for f in self.forwards.values()), default=0) // tokens,
            host_start=sum(self.sizes) if self.settings.scope.offload == "cpu" else 0,
            phases=planned,
        )

    def _phase(self, phase: Phase) -> PhasePlan:
        forwards = [self._forward(i) for i in phase.path[: phase.n_prefix]]
        # Phases that share an optimizer have its state of the complete Rack, and differ in the untrained
        # part.
        key = phase if phase.is_continued else self._signature(phase)
        if key not in self.steps:
            self.steps[key] = self._step(phase, forwards[-1] if forwards else None)
        measured, held = self.steps[key]
        step = replace(
            measured,
            name=phase.unit.name,
            steps=phase.steps,
            n_prefix=phase.n_prefix,
            **self._unused_blocks(phase),
            **self._prefix_cost(phase, forwards),
        )
        resident = step.weights + step.masters + step.optimizer + step.batch + step.snapshot
        # The prefix of a later batch is computed while the results of earlier batches are in memory.
        before = held + step.in_flight + max((forward.peak for forward in forwards), default=0)
        output = forwards[-1].output if forwards else 0
        return replace(step, batch=step.batch + output, peak=resident + max(step.peak, before))

    def _unused_blocks(self, phase: Phase) -> dict[str, Any]:
        """Return the fields of `PhasePlan` for the Blocks that a step does not use."""
        away = set(range(len(self.blocks))) - set(phase.path[phase.n_prefix :])
        elsewhere = sum(self.sizes[i] for i in away)
        offload = self.settings.scope.offload
        if offload == "none":
            narrow = phase.is_continued and self.settings.precision == "bf16_weights"
            return {"idle": sum(_narrow(self.blocks[i]) for i in away) if narrow else elsewhere}
        prefix = [self.sizes[i] for i in phase.path[: phase.n_prefix]]
        in_flight = max((sum(prefix[n : n + 2]) for n in range(len(prefix))), default=0)
        blocks = {"host_blocks": elsewhere} if offload == "cpu" else {"disk_blocks": sum(self.sizes)}
        return {"in_flight": in_flight, **blocks}

    def _prefix_cost(self, phase: Phase, forwards: list[_Forward]) -> dict[str, Any]:
        """Return the fields of `PhasePlan` for the cached outputs and the FLOPs of a prefix."""
        scope, output = self.settings.scope, forwards[-1].output if forwards else 0
        flops, visits = [each.flops for each in forwards], phase.steps * self.batches_per_step
        room = scope.cache_bytes // output if output else 0
        count, computed = self.prefix.advance(phase.n_prefix, visits, self.n_batches, room)
        return {
            "disk_prefix" if scope.cache_dir else "host_prefix": count * output,
            "flops_prefix": sum(flops) * self.batches_per_step,
            "flops_prefix_kept": sum(n * sum(flops[start:]) for start, n in computed) / phase.steps,
        }

    def _signature(self, phase: Phase) -> object:
        """Return a key of everything that the bytes and FLOPs of a step depend on."""
        path = tuple((self.kinds[i], i in phase.trained) for i in phase.path[phase.n_prefix :])
        return phase.n_prefix > 0, path, phase.trains_head, phase.trains_embedding

    def _forward(self, i: int) -> _Forward:
        """Return the measurements of one Block of a prefix. Equal Blocks are computed once."""
        kind = self.kinds[i]
        if kind not in self.forwards:
            settings, meter = self.settings, StorageMeter()
            block = self.blocks[i].eval()
            precision = frozen_precision(settings.precision)
            # A tied head has the dtype of the trained weights.
            tied = self.rack.tie_embeddings and settings.precision == "bf16_weights"
            narrow = _narrowed(self.rack.embedding) if tied else nullcontext()
            with torch.no_grad(), narrow, autocast(precision, torch.device(self.kernels)), meter:
                x_BTC = self.rack.embed(self.targets.input_ids)
                layout = Layout(x_BTC, self.targets.attention_mask, self.targets.document_ids)
                x_BTC = block(x_BTC, layout=layout)
            self.forwards[kind] = _Forward(x_BTC.nbytes, meter.peak, meter.flops, x_BTC.dtype)
        return self.forwards[kind]

    def _step(self, phase: Phase, before: _Forward | None) -> tuple[PhasePlan, int]:
        """Return the plan of one step, and the memory in use at the start of a later prefix.

        In the plan, `peak` excludes memory that is in use before the step, and `batch` excludes the prefix
        output. The second value is the maximum of the bytes that the step holds when the prefix of a batch
        begins.
        """
        settings, rack = self.settings, self.rack
        micro = min(2, self.batches_per_step)  # every further micro-batch is like the second
        rack.train()
        with only_training(rack, phase), ExitStack() as cleanup:
            model = PhaseModel(rack, self.objective, phase)
            step = TrainStep(model, settings, rack, rack if phase.is_continued else model)
            if hasattr(step.optimizer, "finish"):
                cleanup.callback(step.optimizer.finish)
            self._first_update(step, model)
            held = [0]

            def hidden() -> Tensor:
                assert before is not None, "there is a prefix"
                held.append(meter.held)
                shape = (*self.targets.input_ids.shape, rack.d_model)
                return torch.empty(shape, dtype=before.dtype, device=self.kernels)

            batch = MicroBatch(self.targets, None if before is None else hidden)
            of_batch = tensors_of(self.targets)
            seen = StepFacts()
            cleanup.enter_context(recomputing(rack, settings.recompute, layers=list(model.blocks)))
            cleanup.enter_context(uncollected())
            with StorageMeter() as meter:
                watch(model, step, meter, seen)
                step([batch] * micro, 0.0)
            optimizer = cast("torch.optim.Optimizer", step.optimizer)
            masters = optimizer.masters() if isinstance(optimizer, MasterAdamW) else []
            moments = [t for each in optimizer.state.values() for key, t in each.items() if key != "master"]
            snapshot, host_snapshot = self._snapshot(model, optimizer)
            ends = _unique((rack.embedding, rack.final_norm, rack.lm_head))
            fresh = _unique((rack.final_norm, rack.lm_head)) if settings.scope.head == "per_unit" else []
            of_path = {i: _bytes_of(_unique([self.blocks[i]])) for i in phase.path[phase.n_prefix :]}
            plan = PhasePlan(
                name=phase.unit.name,
                steps=phase.steps,
                n_prefix=phase.n_prefix,
                ends=_bytes_of(ends) + sum(p.numel() * 4 for p in fresh),
                trained=sum(size for i, size in of_path.items() if i in phase.trained),
                frozen=sum(size for i, size in of_path.items() if i not in phase.trained),
                masters=sum(wide.nbytes for _, wide in masters),
                gradients=seen.gradients,
                optimizer=_bytes_of(moments),
                batch=self.batches_per_step * _bytes_of(of_batch),
                activations=seen.activations,
                loss=seen.loss,
                snapshot=snapshot,
                peak=meter.peak,
                host_snapshot=host_snapshot,
                flops_forward=seen.flops_forward * self.batches_per_step // micro,
                flops_backward=(seen.flops - seen.flops_forward) * self.batches_per_step // micro,
                flops_optimizer=meter.flops - seen.flops,
            )
            return plan, max(held)

    def _first_update(self, step: TrainStep, model: nn.Module) -> None:
        """Create the state of the optimizer, which exists before every step except the first."""
        for p in model.parameters():
            p.grad = torch.empty_like(p) if p.requires_grad else None
        step.optimizer.step()
        step.optimizer.zero_grad()

    def _snapshot(self, model: PhaseModel, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Return the bytes of a guard's snapshot on the device and on the host."""
        guard = self.settings.guard
        if guard is None or guard.snapshot_interval is None:
            return 0, 0
        optimized = (p for group in optimizer.param_groups for p in group["params"])
        snapshot = Snapshot(RackPart(self.rack, model.modules(), optimized), optimizer, on_host=False)
        snapshot.take()
        on_host = guard.snapshot_on_host and self.device != "cpu"
        return (0, snapshot.nbytes) if on_host else (snapshot.nbytes, 0)


class _KeptOutputs:
    """Number of cached prefix outputs and their depth, by the rules of `PrefixOutputs`."""

    def __init__(self) -> None:
        self.depth = 0

    def advance(
        self, n_prefix: int, visits: int, n_batches: int | None, room: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Advance by one phase.

        Args:
            n_prefix: number of prefix Blocks of the phase.
            visits: number of batches of the phase.
            n_batches: number of batches in an epoch of the data; None: the data does not end.
            room: maximum number of cached outputs.

        Returns:
            (number of cached outputs at the end, list of (index of the first computed Block, number of
            batches)).
        """
        if not n_prefix:
            self.depth = 0
            return 0, []
        different = visits if n_batches is None else min(visits, n_batches)
        kept = min(different, room)
        # The first batches are cached, and the data restarts after its last batch.
        rounds, more = divmod(visits, different)
        start = self.depth if self.depth <= n_prefix else 0
        self.depth = n_prefix if kept else 0
        return kept, [(start, kept), (0, visits - kept * rounds - min(kept, more))]


class _WithoutMemory(Objective):
    """Objective without the check of the head's weight, which is a fake tensor and so a subclass."""

    @staticmethod
    def head_weight(head: nn.Module) -> Tensor:
        return head.get_parameter("weight")


@dataclass(frozen=True)
class _Forward:
    """Frozen Block: bytes of its output, its peak memory, and its FLOPs for one batch."""

    output: int
    peak: int
    flops: int
    dtype: torch.dtype


def _targets(config: StackWiseConfig, objective: Objective, kernels: str, device: str) -> Targets:
    """Return the model's view of a batch of `create_data`."""
    settings, kind = config.training, config.training.objective.kind
    shape = (settings.batch_size, objective.row_length(settings.seq_len))
    ids_BT = torch.zeros(shape, dtype=torch.int64, device=kernels)
    if kind == "next_token":
        rows = {"input_ids": ids_BT, **({"document_ids": ids_BT} if config.data.pack_documents else {})}
        targets = next_token_targets(rows)
        # On the CPU, slices of rows share memory. After a transfer they are separate tensors.
        moved: Targets = targets if device == "cpu" else tree_map_only(Tensor, torch.clone, targets)
        return moved
    return Targets(
        ids_BT,
        ids_BT.clone(),
        torch.zeros((), device=kernels),
        weights=torch.zeros(shape, device=kernels) if kind == "mask_diffusion" else None,
        document_ids=ids_BT.clone() if config.data.pack_documents else None,
    )


def _check(settings: TrainingConfig, device: str) -> None:
    scope = settings.scope
    own_place = device != "cpu" or scope.offload != "cpu"
    require(own_place, "training.scope.offload", scope.offload, "none or disk, as this device is the CPU")
    for key, value, refused, unplanned in (
        ("training.precision", settings.precision, "float8", "float8 kernels keep"),
        ("training.recompute.kind", settings.recompute.kind, "budget", "the compiler chooses"),
        ("training.distributed.strategy", settings.distributed.strategy, "fsdp", "FSDP gathers"),
    ):
        require(value != refused, key, value, f"another, as what {unplanned} is not planned")


@contextmanager
def _narrowed(module: nn.Module) -> Iterator[None]:
    wide = [(p, p.data) for p in module.parameters()]
    for p, data in wide:
        p.data = data.bfloat16()
    try:
        yield
    finally:
        for p, data in wide:
            p.data = data


def _unique(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return their parameters and buffers; tied ones once."""
    return list({id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}.values())


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _narrow(block: Block) -> int:
    return 2 * sum(p.numel() for p in block.parameters()) + sum(b.nbytes for b in block.buffers())
