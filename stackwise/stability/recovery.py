"""Recovery: whether a broken training had its alarm at once, and comes back to its clean twin in time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stackwise.stability.run import StabilityRun, run_of_trainer, stability_run
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec
from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["Recovery", "check_recovery", "recovery_run"]

_SHOWN = 4
# Where a broken gradient was clipped, to up to three times its ordinary length, runs have been seen to end at
# up to 0.8 and 0.5. Where one of a thousand times its length was not, at hundreds and more with SGD, and with
# Adam, which keeps its square, at 0.5 to 1.3 of the late way.
_LARGEST_DRIFT, _LARGEST_LATE_DRIFT = 1.0, 0.5


@dataclass(frozen=True)
class Recovery:
    """A run under faults beside its clean twin: the same seeds, the same batches, no fault.

    Attributes:
        run: the broken one.
        twin: the clean one.
        within: steps after the last broken one, after which the losses have to agree.
        loss_tolerance: how far the loss of a step may be from the twin's loss of the same batch, in nats.
        drift: of a run that tells of no alarms, and whose weights show a broken step: how far the ways of its
            weights and the twin's are apart since the first broken step, in lengths of the twin's. None:
            each broken update was left out or taken back, or alarms tell what was done.
        late_drift: the same since `within` steps after the last broken one.
    """

    run: StabilityRun
    twin: StabilityRun
    within: int
    loss_tolerance: float
    drift: float | None = None
    late_drift: float | None = None

    @cached_property
    def gaps(self) -> dict[int, float]:
        """Of each step behind the last broken one: |loss - the twin's|; infinite where one is not finite."""
        last = self._last
        ours, theirs = ({r.step: r.loss for r in run.records} for run in (self.run, self.twin))
        gaps = {}
        for step in range(last + 1, self.run.steps):
            gap = abs(ours.get(step, math.nan) - theirs.get(step, math.nan))
            gaps[step] = gap if math.isfinite(gap) else math.inf
        return gaps

    @property
    def step(self) -> int | None:
        """The first step from which on the losses agree; None: at the end they do not."""
        back = None
        for step in sorted(self.gaps, reverse=True):
            if self.gaps[step] > self.loss_tolerance:
                break
            back = step
        return back

    @property
    def after(self) -> int | None:
        """How many steps behind the last broken one that is; None: never."""
        return None if self.step is None else self.step - self._last

    @property
    def problems(self) -> list[str]:
        """Why the run has not recovered, a sentence each; []: it has."""
        found = []
        if self.twin.verdict != "stable":
            found.append(f"without a fault: {_of_twin(self.twin)}")
        if self.run.stopped:
            found.append(f"training ended at step {self.run.stopped_at}: {self.run.stopped}")
        if self.run.watched:
            found += self._of_alarms()
        found += self._of_updates()
        if not self.run.finite:
            found.append("at the end weights or buffers are not finite")
        if not self.run.stopped and (late := self._of_losses()):
            found.append(late)
        return found

    @property
    def ok(self) -> bool:
        """Whether it has."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """In a word: "caught", or "recovered" of a run that tells of no alarms; else what is wrong."""
        if self.ok:
            return "caught" if self.run.watched else "recovered"
        wrong = self.run.verdict
        return wrong if wrong in ("missed", "false alarm") and self.run.watched else "not recovered"

    @property
    def _last(self) -> int:
        """The last broken step; -1: training ended before there was one."""
        return max(self.run.fired, default=-1)

    def _of_alarms(self) -> list[str]:
        found = []
        alarms = {alarm.step: alarm for alarm in self.run.alarms}
        left_out = {record.step for record in self.run.records if record.skipped}
        raising = {step for fault in self.run.faults if fault.raises for step in fault.steps}
        for step in sorted(set(self.run.fired) - raising):
            if step not in alarms:
                later = next((s for s in sorted(alarms) if s > step), None)
                found.append(f"step {step} is broken: no alarm" + _first_at(later))
            elif step not in left_out and alarms[step].action != "clipped":
                found.append(f"step {step} is broken: its update was made in spite of an alarm")
        false = self.run.false_alarms
        found += [f"an alarm where nothing is broken: {alarm}" for alarm in false[:_SHOWN]]
        if len(false) > _SHOWN:
            found.append(f"and {len(false) - _SHOWN} more such alarms")
        return found

    def _of_updates(self) -> list[str]:
        """Sound steps that were left out, and broken ones that were not."""
        if not self.run.finite:  # nothing is an update any more
            return []
        found = []
        made, of_twin = ({r.step for r in run.records if not r.skipped} for run in (self.run, self.twin))
        told = {alarm.step for alarm in self.run.false_alarms}
        still_broken = {step for step in self.run.damaged if step <= self._last + self.within}
        excused = made | told | still_broken | set(self.run.fired)
        lost = sorted(({record.step for record in self.run.records} & of_twin) - excused)
        if lost:
            more = f", and of {len(lost) - 1} more steps" if len(lost) > 1 else ""
            left_out = f"step {lost[0]} is not broken: its update was left out{more}"
            found.append(f"{left_out}; the clean twin made it")
        for since, drift, allowed in (
            (min(self.run.fired, default=0), self.drift, _LARGEST_DRIFT),
            (self._last + self.within, self.late_drift, _LARGEST_LATE_DRIFT),
        ):
            if drift is not None and drift > allowed:
                found.append(
                    f"a broken step has moved the training: from step {since} on its weights are off the "
                    f"clean twin's way by {drift:.3g} times its length; allowed {allowed:g}"
                )
        return found

    def _of_losses(self) -> str:
        if self.after is not None and self.after <= self.within:
            return ""
        due = self._last + self.within
        step = next(s for s in sorted(self.gaps) if s >= due and self.gaps[s] > self.loss_tolerance)
        ours, theirs = ({r.step: r.loss for r in run.records} for run in (self.run, self.twin))
        when = (
            f"it agrees from step {self.step} on"
            if self.step is not None
            else "it never agrees until the end"
        )
        return (
            f"loss of step {step}: {ours.get(step, math.nan):.4g}, of the clean twin "
            f"{theirs.get(step, math.nan):.4g}; allowed {self.within} steps after the fault: "
            f"{self.loss_tolerance:g} apart; {when}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **self.run.to_dict(),
            "verdict": self.verdict,
            "recovery": {
                "within": self.within,
                "loss_tolerance": self.loss_tolerance,
                "step": self.step,
                "after": self.after,
                "largest_gap": max(self.gaps.values(), default=math.nan),
                "drift": self.drift,
                "late_drift": self.late_drift,
                "last_gap": self.gaps.get(self.run.steps - 1, math.nan),
                "problems": self.problems,
                "twin": [record.loss for record in self.twin.records],
            },
        }

    def __str__(self) -> str:
        faults = ", ".join(str(fault) for fault in self.run.faults)
        head = f"{self.run.model} under {faults}, {self.run.steps} steps of length {self.run.seq_len}"
        if self.ok:
            plural = "" if self.after == 1 else "s"
            since = max(gap for step, gap in self.gaps.items() if step >= (self.step or 0))
            return (
                f"{head}: recovered {self.after} step{plural} after the fault, then at most "
                f"{since:.3g} nats from the clean twin"
            )
        return "\n".join([f"{head}: not recovered", *(f"  {problem}" for problem in self.problems)])


def recovery_run(
    subject: ModelSpec | TrainerSpec, *, within: int, loss_tolerance: float, **arguments: Any
) -> Recovery:
    """Train under faults, and once more without, and hold the two against each other.

    It has recovered where: each broken step had an alarm and its update was left out; there was no other
    alarm; no sound step was left out that the twin made; weights are finite at the end; and from `within`
    steps after the last broken one on, to the end, each step's loss is within `loss_tolerance` of the twin's.
    A model is trained under a `Guard`. Of a training step that tells of no alarms (see `stability_run`) none
    are asked: a broken update has to be left out, or taken back within as many steps, or to leave the weights
    on the twin's way: no further off than if they had stood still since the first broken step, and from
    `within` steps after the last one on at most half as far.

    Args:
        subject: the model, or the training step.
        within: steps, at least 1.
        loss_tolerance: in nats, above 0.
        **arguments: of `stability_run`; `faults` are needed.

    Raises:
        ValueError: no faults, no step left to look at, or what `stability_run` refuses.
    """
    check_recovery(within=within, loss_tolerance=loss_tolerance)
    faults = tuple(arguments.pop("faults", ()))
    require(bool(faults), "recovers: faults", "none", "at least one")
    steps = arguments.get("steps", 16)
    check_sizes(steps=steps)
    last = max(fault.steps.stop for fault in faults) - 1
    most = steps - 1 - last
    require(
        within <= most,
        "recovers: within",
        within,
        f"at most {most}: the last broken step is {last}, and the run has {steps} steps"
        if most > 0
        else f"none: the last broken step is {last}, and the run has {steps} steps; wanted more steps",
    )
    if not isinstance(subject, TrainerSpec):
        run = stability_run(subject, faults=faults, **arguments)
        return Recovery(run, stability_run(subject, **arguments), within, loss_tolerance)
    marks = first, late = min(fault.step for fault in faults), last + within
    run, path = run_of_trainer(subject, faults=faults, marks=marks, **arguments)
    twin, clean = run_of_trainer(subject, marks=marks, **arguments)
    shown = not all(path.leaves_no_trace(step, within) for step in run.fired)
    if not shown or run.watched or run.stopped:
        return Recovery(run, twin, within, loss_tolerance)
    drifts = path.drift(clean, first), path.drift(clean, late)
    return Recovery(run, twin, within, loss_tolerance, *drifts)


def check_recovery(*, within: int, loss_tolerance: float) -> None:
    """Refuse what `recovery_run` cannot take.

    Raises:
        ValueError: naming it, the value and what is allowed.
    """
    check_sizes(**{"recovers: within": within})
    check_number("recovers: loss_tolerance", loss_tolerance, "a finite number > 0", lambda nats: nats > 0)


def _of_twin(twin: StabilityRun) -> str:
    if twin.alarms:
        return f"an alarm all the same: {twin.alarms[0]}"
    return "weights or losses are not finite"


def _first_at(step: int | None) -> str:
    return "" if step is None else f"; the first after it is at step {step}"
