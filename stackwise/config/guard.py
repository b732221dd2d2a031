"""GuardConfig: what counts as a broken step of a training run, and what is done about it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from stackwise.config.section import Count, Section, Size

__all__ = ["GuardConfig"]

_Factor = Annotated[float, Field(gt=1.0)]


class GuardConfig(Section):
    """A guard over the training: its presence turns it on, and `null` leaves it out.

    A step whose loss or gradient is not finite, or far above those before it, is left out before its update,
    and its batches are not given again in this pass. After `patience` of them in a row training goes back to
    a copy in memory, `rewinds` times, and then ends with a diagnosis. A step that is left out is none of
    `max_steps`, and the schedule does not advance with it. Every unit of a local scope begins with an empty
    history. The keys are those of `stackwise.stability.guard.GuardPolicy`; see [guard.md](guard.md).

    `bundle_dir` gets a folder for each start of the run: what it takes to compute broken steps again.
    """

    deviations: float = Field(6.0, ge=0.0)
    factor: _Factor = 5.0
    suspect_factor: _Factor | None = 2.5
    proven_factor: _Factor = 30.0
    loss_factor: _Factor | None = 3.0
    logit_factor: _Factor | None = None
    logit_limit: Annotated[float, Field(gt=0.0)] | None = None
    recent: Size = 8
    minimum: Size = 4
    history: Size = 128
    spikes_clipped: Count = 0
    patience: Size = 5
    rewinds: Count = 1
    snapshot_interval: Size | None = 50
    snapshot_on_host: bool = True
    bundle_dir: str | None = None
    bundle_weights: bool = True
    max_bundles: Count = 8

    @field_validator("proven_factor")
    @classmethod
    def _what_is_proven_was_suspect(cls, proven: float, info: ValidationInfo) -> float:
        suspect = info.data.get("suspect_factor")
        if suspect is not None and proven < suspect:
            raise ValueError(f"must not be below suspect_factor={suspect}")
        return proven

    @field_validator("history")
    @classmethod
    def _history_is_long_enough(cls, history: int, info: ValidationInfo) -> int:
        for key in ("recent", "minimum"):
            if history < info.data.get(key, 0):
                raise ValueError(f"must not be below {key}={info.data[key]}")
        return history

    @field_validator("snapshot_interval")
    @classmethod
    def _alarms_fit_between_snapshots(cls, interval: int | None, info: ValidationInfo) -> int | None:
        patience = info.data.get("patience", 0)
        if interval is not None and interval <= patience:
            raise ValueError(f"must be above patience={patience}: a snapshot waits until alarms are over")
        return interval
