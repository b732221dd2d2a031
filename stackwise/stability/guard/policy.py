"""GuardPolicy: what counts as broken, and what is done about it, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["GuardPolicy"]


@dataclass(frozen=True)
class GuardPolicy:
    """In the order of escalation: clip, leave out, rewind, raise.

    A step whose loss or gradient is not finite is always broken. A finite step is broken if its gradient
    norm, its loss or its largest attention logit is a spike. docs/reference/guard.md has the whole rule.

    Attributes:
        clip: global gradient norm of every update, at most; None: it is not clipped.
        deviations: of a spike, in MADs of the change from step to step.
        factor: largest rise of the gradient norm above the recent level that is no spike, if the step is not
            recomputed.
        suspect_factor: a rise of the norm above the recent level that makes the guard recompute the step, if
            it can (`loss_of` and `batches`). If the recomputed norm is less than half as large, the batch did
            not cause the rise. None: no step is recomputed on suspicion. Unused with `spikes_clipped`.
        proven_factor: multiple of the largest norm of the run that is never a spike if a recomputation has
            the same norm again.
        loss_factor: a rise of the loss above the recent level that is never a spike; None: any finite loss
            passes.
        logit_factor: the same of the largest attention logit, where it is given; None: it is no signal.
            One that grows from step to step may not exceed the median of the whole history by more than
            the cube of it.
        logit_limit: the largest attention logit that passes; None: any.
        recent: sound steps that give the level.
        history: sound steps that give the scatter.
        minimum: sound steps before there can be a spike.
        spikes_clipped: spikes of the gradient in a row that are taken, with the gradient clipped to the
            level of the sound steps before; those that follow are left out.
        patience: number of consecutive alarms with a skipped update. The last of them rewinds. If no rewind
            is left, the next alarm raises, except for a finite spike that its batch may cause.
        rewinds: how often training may go back without `snapshot_interval` sound steps in a row between.
        snapshot_interval: the most steps that a rewind may cost; None: no snapshot is taken.
        snapshot_on_host: keep the snapshot in host memory, pinned where the model is on CUDA; else beside
            the model.
        bundle_weights: write the weights into a diagnostic bundle, so that it can be replayed by itself.
        max_bundles: how many bundles a run may write.

    Raises:
        ValueError: a number out of range.
    """

    clip: float | None = None
    deviations: float = 6.0
    factor: float = 5.0
    suspect_factor: float | None = 2.5
    proven_factor: float = 30.0
    loss_factor: float | None = 3.0
    logit_factor: float | None = 5.0
    logit_limit: float | None = None
    recent: int = 8
    history: int = 128
    minimum: int = 4
    spikes_clipped: int = 0
    patience: int = 5
    rewinds: int = 1
    snapshot_interval: int | None = 50
    snapshot_on_host: bool = True
    bundle_weights: bool = True
    max_bundles: int = 8

    def __post_init__(self) -> None:
        for key in ("clip", "logit_limit"):
            value = getattr(self, key)
            if value is not None:
                check_number(key, value, "a number above 0, or None", lambda v: v > 0)
        check_number("deviations", self.deviations, "a number >= 0", lambda v: v >= 0)
        check_number("factor", self.factor, "a number above 1", lambda v: v > 1)
        for key in ("suspect_factor", "loss_factor", "logit_factor"):
            value = getattr(self, key)
            if value is not None:
                check_number(key, value, "a number above 1, or None", lambda v: v > 1)
        least = self.suspect_factor or 1.0
        check_number(
            "proven_factor",
            self.proven_factor,
            f"a number above 1, at least suspect_factor ({least:g})",
            lambda v: v > 1 and v >= least,
        )
        check_sizes(recent=self.recent, patience=self.patience)
        check_number("minimum", self.minimum, "an integer >= 1", lambda m: m >= 1 and m == int(m))
        check_sizes(max(self.recent, self.minimum), history=self.history)
        check_sizes(0, rewinds=self.rewinds, spikes_clipped=self.spikes_clipped, max_bundles=self.max_bundles)
        if self.snapshot_interval is not None:
            # A snapshot may be due while alarms are borne, and waits until they are over.
            check_sizes(self.patience + 1, snapshot_interval=self.snapshot_interval)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a configuration file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GuardPolicy:
        """What `to_dict` gave, or a part of it.

        Raises:
            ValueError: a key that there is not, or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(values.keys() - set(known))
        require(not unknown, "policy", unknown, ", ".join(known))
        return cls(**values)
