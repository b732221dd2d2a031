"""Recovery: compares a training under faults with its fault-free twin: alarms, skipped steps and losses."""

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
# Observed drift and late drift: up to 0.8 and 0.5 if the bad gradient was clipped, to at most three times its
# usual length. If a gradient of a thousand times its length was not clipped: hundreds and more with SGD, and
# a late drift of 0.5 to 1.3 with Adam, which stores the squared gradient.
_LARGEST_DRIFT, _LARGEST_LATE_DRIFT = 1.0, 0.5


@dataclass(frozen=True)
class Recovery:
    """Run under faults and its clean twin: the same seeds and batches without a fault.

    Attributes:
        run: run under faults.
        twin: run without faults.
        within: number of steps after the last faulty one, after which the losses must agree.
        loss_tolerance: largest difference to the twin's loss of the same batch, in nats.
        drift: distance between the weight changes of run and twin since the first faulty step, relative to
            the twin's change. It is measured if the run reports no alarms and a faulty step changed its
            weights. None: each faulty update was skipped or undone, the run reports alarms, or it stopped
            early.
        late_drift: the same distance since `within` steps after the last faulty step.
    """

    run: StabilityRun
    twin: StabilityRun
    within: int
    loss_tolerance: float
    drift: float | None = None
    late_drift: float | None = None

    @cached_property
    def gaps(self) -> dict[int, float]:
        """Loss difference to the twin for each step after the last faulty one; infinite if not finite."""
        last = self._last
        ours, theirs = ({r.step: r.loss for r in run.records} for run in (self.run, self.twin))
        gaps = {}
        for step in range(last + 1, self.run.steps):
            gap = abs(ours.get(step, math.nan) - theirs.get(step, math.nan))
            gaps[step] = gap if math.isfinite(gap) else math.inf
        return gaps

    @property
    def step(self) -> int | None:
        """First step from which the losses agree until the end; None: they do not agree at the end."""
        back = None
        for step in sorted(self.gaps, reverse=True):
            if self.gaps[step] > self.loss_tolerance:
                break
            back = step
        return back

    @property
    def after(self) -> int | None:
        """Number of steps from the last faulty one to `step`; None: never."""
        return None if self.step is None else self.step - self._last

    @property
    def problems(self) -> list[str]:
        """Reasons why the run has not recovered, one sentence each; []: it has recovered."""
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
        """True if the run has recovered."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """Result in a word: "caught", "recovered" for a run that reports no alarms, or the problem."""
        if self.ok:
            return "caught" if self.run.watched else "recovered"
        wrong = self.run.verdict
        return wrong if wrong in ("missed", "false alarm") and self.run.watched else "not recovered"

    @property
    def _last(self) -> int:
        """Last faulty step; -1: training stopped before the first one."""
        return max(self.run.fired, default=-1)

    def _of_alarms(self) -> list[str]:
        found = []
        alarms = {alarm.step: alarm for alarm in self.run.alarms}
        skipped = {record.step for record in self.run.records if record.skipped}
        raising = {step for fault in self.run.faults if fault.raises for step in fault.steps}
        for step in sorted(set(self.run.fired) - raising):
            if step not in alarms:
                later = next((s for s in sorted(alarms) if s > step), None)
                found.append(f"step {step} is broken: no alarm" + _first_at(later))
            elif step not in skipped and alarms[step].action != "clipped":
                found.append(f"step {step} is broken: its update was made in spite of an alarm")
        false = self.run.false_alarms
        found += [f"an alarm where nothing is broken: {alarm}" for alarm in false[:_SHOWN]]
        if len(false) > _SHOWN:
            found.append(f"and {len(false) - _SHOWN} more such alarms")
        return found

    def _of_updates(self) -> list[str]:
        """Return problems of healthy steps that were skipped, and of faulty ones that were not."""
        if not self.run.finite:  # no step is an update any more
            return []
        found = []
        made, of_twin = ({r.step for r in run.records if not r.skipped} for run in (self.run, self.twin))
        told = {alarm.step for alarm in self.run.false_alarms}
        still_broken = {step for step in self.run.damaged if step <= self._last + self.within}
        excused = made | told | still_broken | set(self.run.fired)
        lost = sorted(({record.step for record in self.run.records} & of_twin) - excused)
        if lost:
            more = f", and of {len(lost) - 1} more steps" if len(lost) > 1 else ""
            text = f"step {lost[0]} is not broken: its update was skipped{more}"
            found.append(f"{text}; the clean twin made it")
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
        """Return plain values, for JSON."""
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
    """Train under faults, and once more without them, and compare both runs.

    A model is trained under a `Guard`. The run has recovered if all of these are true:

    - Each faulty step had an alarm, and its update was skipped or clipped.
    - There was no other alarm.
    - No healthy step was skipped that the twin took.
    - Weights and buffers are finite at the end.
    - From `within` steps after the last faulty one to the end, each loss is within `loss_tolerance` of the
      twin's.

    A training step that reports no alarms (see `stability_run`) needs none. Each of its faulty updates must
    be skipped, or undone within `within` steps. Otherwise the weights must stay near the twin's: since the
    first faulty step, the distance is at most the length of the twin's change, as if the weights had not
    moved. From `within` steps after the last faulty one, it is at most half of that length.

    Args:
        subject: model, or training step.
        within: number of steps, at least 1.
        loss_tolerance: difference in nats, above 0.
        **arguments: arguments of `stability_run`; `faults` are required.

    Raises:
        ValueError: no faults, no step after them, or an argument that `stability_run` refuses.
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
    """Refuse invalid arguments of `recovery_run`.

    Raises:
        ValueError: an invalid argument; the message names it, its value and the allowed values.
    """
    check_sizes(**{"recovers: within": within})
    check_number("recovers: loss_tolerance", loss_tolerance, "a finite number > 0", lambda nats: nats > 0)


def _of_twin(twin: StabilityRun) -> str:
    if twin.alarms:
        return f"an alarm all the same: {twin.alarms[0]}"
    return "weights or losses are not finite"


def _first_at(step: int | None) -> str:
    return "" if step is None else f"; the first after it is at step {step}"
