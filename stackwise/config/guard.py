"""GuardPolicy: settings of a guard, in Python and in a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from stackwise.config.section import Count, Keys, Problems, Section, Size

__all__ = ["GuardPolicy"]

_Factor = Annotated[float, Field(gt=1.0)]


class GuardPolicy(Section):
    """Limits of a guard over training steps, and its responses.

    A step whose loss or gradient is not finite, or much larger than before, is skipped before its update, and
    its batches are not used in this epoch any more. After `patience` consecutive skipped steps, training
    rewinds to a snapshot in memory, at most `rewinds` times, and then ends with a diagnosis. A skipped step
    does not count for `max_steps` or the schedule. Each unit of layer-wise training starts with an empty
    history. [guard.md](guard.md) has the exact rules.
    """

    model_config = ConfigDict(frozen=True)

    clip: float | None = Field(None, gt=0.0)
    """Largest global gradient norm of an update, in Python; a configuration sets training.grad_clip."""
    deviations: float = Field(6.0, ge=0.0)
    """Limit of a spike, as a multiple of the median absolute deviation (MAD) of step-to-step changes."""
    factor: _Factor = 5.0
    """Largest rise of the gradient norm that passes if the step is not recomputed."""
    suspect_factor: _Factor | None = 2.5
    """Rise of the gradient norm above which the step is recomputed; null: never."""
    proven_factor: _Factor = 30.0
    """Multiple of the run's largest norm that passes if the recomputation gives the same norm."""
    loss_factor: _Factor | None = 3.0
    """Largest rise of the loss that is no spike; null: any finite loss passes."""
    logit_factor: _Factor | None = 5.0
    """Largest rise of the attention logit, if it is watched, that is no spike; null: any."""
    logit_limit: float | None = Field(None, gt=0.0)
    """Largest attention logit that passes; null: any."""
    recent: Size = 8
    """Number of healthy steps for the baseline."""
    minimum: Size = 4
    """Healthy steps before the first possible spike."""
    history: Size = 128
    """Number of healthy steps for the deviation; at least recent and minimum."""
    spikes_clipped: Count = 0
    """Number of consecutive gradient spikes that are clipped to the level and used."""
    patience: Size = 5
    """Number of consecutive skipped steps before a rewind, or the end."""
    rewinds: Count = 1
    """Largest number of rewinds without snapshot_interval healthy steps between them."""
    snapshot_interval: Size | None = 50
    """Steps between snapshots, which a rewind may lose; above patience; null: no snapshots."""
    snapshot_on_host: bool = True
    """Store the snapshot in host memory."""
    bundle_weights: bool = True
    """Store the weights in a bundle."""
    max_bundles: Count = 8
    """Largest number of bundles per start of the run."""

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
                        f"must be above patience={given.patience}: a snapshot waits until alarms are over",
                    )
