"""Scope: parts of a Rack that train together, and the phases of a training run.

Blocks are counted from 0 through all Stacks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from stackwise.config import TrainingConfig
from stackwise.support.arguments import require

__all__ = ["Phase", "Unit", "plan_phases", "units_of"]


@dataclass(frozen=True)
class Unit:
    """Neighbouring Blocks that train together.

    Attributes:
        blocks: indices of the Blocks.
        stack: index of the Stack that contains them; None: all Stacks.
        block: index of the Block in its Stack; None: several Blocks.
    """

    blocks: range
    stack: int | None = None
    block: int | None = None

    @property
    def name(self) -> str:
        """Name of the unit in messages."""
        if self.stack is None:
            return "rack"
        return f"stack {self.stack}" + ("" if self.block is None else f" block {self.block}")


@dataclass(frozen=True)
class Phase:
    """Part of a training run, with its own optimizer and schedule unless it `continues` another phase.

    Attributes:
        unit: unit that this phase trains.
        path: indices of the Blocks that are computed, in order; all other Blocks are skipped.
        trained: indices of the Blocks that train.
        steps: number of steps.
        trains_head: True if final norm and head train. A tied head trains together with the embedding.
        first_step: number of data steps before this phase.
        enters: Blocks that are set to the identity before the first step.
        fresh_head: True if final norm and head are reset to their initial weights.
        continues: True if the phase continues the optimizer and schedule of the previous phase.
        is_continued: True if the next phase continues the optimizer and schedule of this one.
        schedule_steps: length of the schedule, over all phases that share it.
        is_last: True if this is the last phase of the run.
    """

    unit: Unit
    path: tuple[int, ...]
    trained: frozenset[int]
    steps: int
    trains_head: bool = True
    first_step: int = 0
    enters: tuple[int, ...] = ()
    fresh_head: bool = False
    continues: bool = False
    is_continued: bool = False
    schedule_steps: int = 0
    is_last: bool = False

    @property
    def schedule_start(self) -> int:
        """Position of the first step in its schedule."""
        return self.first_step if self.continues else 0

    @property
    def trains_embedding(self) -> bool:
        """True if the embedding trains, which it does with the first Block."""
        return 0 in self.trained

    @property
    def n_prefix(self) -> int:
        """Number of Blocks before the first trained one, which are computed without gradients."""
        return next(i for i, block in enumerate(self.path) if block in self.trained)


def units_of(blocks_per_stack: list[int], architecture: str) -> list[Unit]:
    """Return the units of `rackwise`, `stackwise` or `blockwise` training, from the first to the last."""
    ends = list(accumulate(blocks_per_stack))
    if architecture == "rackwise":
        return [Unit(range(ends[-1]))]
    stacks = [range(end - n, end) for n, end in zip(blocks_per_stack, ends, strict=True)]
    if architecture == "stackwise":
        return [Unit(blocks, stack) for stack, blocks in enumerate(stacks)]
    return [
        Unit(range(index, index + 1), stack, block)
        for stack, blocks in enumerate(stacks)
        for block, index in enumerate(blocks)
    ]


def plan_phases(blocks_per_stack: list[int], settings: TrainingConfig) -> list[Phase]:
    """Return the phases of a run, in their order.

    From left to right, each unit trains on the output of the frozen units before it, directly followed by
    final norm and head; later units are skipped. From right to left, a unit trains through the frozen units
    after it, on the output of the units before it, which are not trained yet. `ScopeConfig` describes the
    other choices.

    Args:
        blocks_per_stack: number of Blocks of each Stack.
        settings: `training_architecture`, `scope` and `max_steps` are read.

    Raises:
        ValueError: a suffix that overlaps the first unit, fewer steps than Stacks for a growing Rack, or
            from right to left a separate head for each of several units.
    """
    if settings.training_architecture != "rackwise":
        return _unit_by_unit(blocks_per_stack, settings)
    if settings.scope.growth:
        return _growing(blocks_per_stack, settings.max_steps)
    return [_joint(sum(blocks_per_stack), settings.max_steps)]


def _unit_by_unit(blocks_per_stack: list[int], settings: TrainingConfig) -> list[Phase]:
    everything = tuple(range(sum(blocks_per_stack)))
    scope, steps = settings.scope, settings.max_steps - settings.scope.polish_steps
    units = units_of(blocks_per_stack, settings.training_architecture)
    room = len(everything) - len(units[0].blocks)
    allowed = f"0 to {room}, so as to leave a unit"
    require(scope.suffix <= room, "training.scope.suffix", scope.suffix, allowed)
    backwards = scope.order == "right_to_left"
    # The configuration does not reject this, because it may be that of a checkpoint.
    once = "'shared' with order='right_to_left': the head trains with the first unit alone"
    one_head = scope.head == "shared" or len(units) == 1
    require(not backwards or one_head, "training.scope.head", scope.head, once)
    suffix_start = len(everything) - scope.suffix
    phases: list[Phase] = []
    for index in reversed(range(len(units))) if backwards else range(len(units)):
        blocks = units[index].blocks
        trained = range(units[max(0, index - scope.overlap)].blocks.start, blocks.stop)
        suffix = () if backwards else everything[max(blocks.stop, suffix_start) :]
        entering = range(blocks.start, min(blocks.stop, suffix_start)) if scope.growth and index else ()
        phases.append(
            Phase(
                unit=units[index],
                path=everything if backwards else (*range(blocks.stop), *suffix),
                trained=frozenset((*trained, *suffix)),
                steps=steps,
                schedule_steps=steps,
                trains_head=not backwards or index == len(units) - 1,
                enters=tuple(entering),
                fresh_head=scope.head == "per_unit" and bool(phases),
            )
        )
    if scope.polish_steps:
        phases.append(_joint(len(everything), scope.polish_steps, steps))
    return [*phases[:-1], replace(phases[-1], is_last=True)]


def _joint(n_blocks: int, steps: int, first_step: int = 0) -> Phase:
    return Phase(
        unit=Unit(range(n_blocks)),
        path=tuple(range(n_blocks)),
        trained=frozenset(range(n_blocks)),
        steps=steps,
        first_step=first_step,
        schedule_steps=steps,
        is_last=True,
    )


def _growing(blocks_per_stack: list[int], max_steps: int) -> list[Phase]:
    n_stacks = len(blocks_per_stack)
    allowed = f"at least {n_stacks}, one for each Stack"
    require(max_steps >= n_stacks, "training.max_steps", max_steps, allowed)
    begins = [max_steps * stack // n_stacks for stack in range(n_stacks + 1)]
    return [
        Phase(
            unit=unit,
            path=tuple(range(unit.blocks.stop)),
            trained=frozenset(range(unit.blocks.stop)),
            steps=begins[stack + 1] - begins[stack],
            first_step=begins[stack],
            # All at once, so that a checkpoint in between computes only trained Blocks.
            enters=() if stack else tuple(range(unit.blocks.stop, sum(blocks_per_stack))),
            continues=stack > 0,
            is_continued=stack < n_stacks - 1,
            schedule_steps=max_steps,
            is_last=stack == n_stacks - 1,
        )
        for stack, unit in enumerate(units_of(blocks_per_stack, "stackwise"))
    ]
