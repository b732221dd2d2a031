"""GuardPolicy: settings of a guard, in Python and in a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from stackwise.config.section import Count, Keys, Problems, Section, Size

__all__ = ["GuardPolicy"]

_Factor = Annotated[float, Field(gt=1.0)]


class GuardPolicy(Section):
    """Settings of a Guard: limits of training steps, and responses.

    The guard skips the update of a step whose loss or gradient is not finite or is much larger than before.
    It does not use the batches of this step again in this epoch. After `patience` consecutive skipped steps,
    training rewinds to a snapshot in memory, at most `rewinds` times, and then ends with a diagnosis. A
    skipped step does not count for `max_steps` or the schedule. Each unit of layer-wise training starts with
    an empty history.

    The baseline of a number is its median over the last `recent` healthy steps. A number is a spike if its
    logarithm exceeds that of the baseline by more than `deviations` MAD and by more than the logarithm of the
    factor below. MAD is the median absolute deviation of the changes from step to step.
    [guard.md](guard.md) has the exact rules.
    """

    model_config = ConfigDict(frozen=True)

    clip: float | None = Field(None, gt=0.0)
    """Gradient norm to which the guard clips, in Python only; in a configuration, set training.grad_clip."""
    deviations: float = Field(6.0, ge=0.0)
    """A rise of up to this number of MAD (median absolute deviations) is never a spike."""
    factor: _Factor = 5.0
    """Without recomputation: a norm up to this multiple of the baseline is never a spike."""
    suspect_factor: _Factor | None = 2.5
    """A norm above this multiple of the baseline is recomputed; null: never."""
    proven_factor: _Factor = 30.0
    """If recomputation gives the same norm: accept up to this multiple of the largest norm of the run."""
    loss_factor: _Factor | None = 3.0
    """A loss up to this multiple of the baseline is never a spike; null: no limit."""
    logit_factor: _Factor | None = 5.0
    """A watched attention logit up to this multiple of the baseline is never a spike; null: no limit."""
    logit_limit: float | None = Field(None, gt=0.0)
    """Largest attention logit that passes; null: no limit."""
    recent: Size = 8
    """The baseline is the median of this number of healthy steps."""
    minimum: Size = 4
    """No limits apply before this number of healthy steps."""
    history: Size = 128
    """Number of healthy steps for the deviation; at least recent and minimum."""
    spikes_clipped: Count = 0
    """Number of consecutive spikes that the guard clips to the baseline instead of skipping."""
    patience: Size = 5
    """Number of consecutive skipped steps before a rewind, or the end."""
    rewinds: Count = 1
    """Maximum number of rewinds; snapshot_interval healthy steps since the last alarm reset the count."""
    snapshot_interval: Size | None = 50
    """Steps between snapshots. A rewind loses at most this many. Must exceed patience; null: no snapshots."""
    snapshot_on_host: bool = True
    """Store the snapshot in host memory."""
    bundle_weights: bool = True
    """Store the weights in each bundle (the saved files of a broken step)."""
    max_bundles: Count = 8
    """Largest number of bundles of a run. A resumed run continues the count."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        match key:
            case "proven_factor" if (given.suspect_factor or 0) > given.proven_factor:
                yield key, f"must not be below suspect_factor={given.suspect_factor}"
            case "history":
                for shorter in ("recent", "minimum"):
                    if given.history < given.get(shorter, 0):
                        yield key, f"must not be below {shorter}={given[shorter]}"
            case "snapshot_interval" if given.snapshot_interval is not None:
                if given.snapshot_interval <= given.patience:
                    yield (
                        key,
                        f"must exceed patience={given.patience}, because no snapshot is taken during alarms",
                    )
