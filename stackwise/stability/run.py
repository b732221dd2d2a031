"""StabilityRun: a short training run of any model or training step with faults, and its result."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stackwise.stability.broken_steps import BrokenSteps
from stackwise.stability.faults import Fault, Injection, TargetNotReachedError, broken
from stackwise.stability.guard import Alarm, Guard, GuardError, GuardPolicy
from stackwise.stability.telemetry import StepRecord
from stackwise.stability.weight_path import WeightPath
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun
from stackwise.support.arguments import check_sizes, require
from stackwise.support.random_state import keep_random_states, seeded

__all__ = ["StabilityRun", "Verdict", "stability_run"]

Verdict = Literal["stable", "unstable", "caught", "recovered", "missed", "false alarm", "not recovered"]

_ROWS = 8


@dataclass(frozen=True)
class StabilityRun:
    """Losses, alarms and verdict of a short training with injected faults.

    Attributes:
        model: name of the spec.
        seq_len: length of the sequences.
        records: one record per executed step, in order, including skipped and repeated steps.
        alarms: alarms in order.
        faults: injected faults.
        fired: steps at which a fault acted.
        finite: True if every parameter and buffer is finite at the end. In buffers, -inf is allowed, because
            masks contain it.
        steps: planned number of steps.
        watched: True if the run reports alarms. A user-defined training step need not.
        stopped: error that stopped the run early; "": no error.
        stopped_at: step of this error; None: no error.
    """

    model: str
    seq_len: int
    records: Sequence[StepRecord]
    alarms: Sequence[Alarm]
    faults: Sequence[Fault]
    fired: Sequence[int]
    finite: bool
    steps: int = 0
    watched: bool = True
    stopped: str = ""
    stopped_at: int | None = None

    @property
    def alarm_steps(self) -> list[int]:
        """Steps with an alarm."""
        return [alarm.step for alarm in self.alarms]

    @property
    def missed(self) -> list[int]:
        """Faulty steps without an alarm."""
        return sorted(set(self.fired) - set(self.alarm_steps))

    @property
    def false_alarms(self) -> list[Alarm]:
        """Alarms at steps without a fault, except for steps in `damaged`."""
        damaged = self.damaged
        return [alarm for alarm in self.alarms if alarm.step not in self.fired and alarm.step not in damaged]

    @property
    def recovered(self) -> bool:
        """True if parameters, buffers and the last loss are finite, and the last step was not skipped."""
        if self.stopped or not self.records:
            return False
        last = self.records[-1]
        return self.finite and math.isfinite(last.loss) and not last.skipped

    @property
    def verdict(self) -> Verdict:
        """Result in one word.

        Good results are "stable" without faults, and with faults "caught", or "recovered" for a run that
        reports no alarms.
        """
        if not self.fired:
            return "stable" if self.recovered and not self.alarms else "unstable"
        if not self.watched:
            return "recovered" if self.recovered else "not recovered"
        if self.missed:
            return "missed"
        if self.false_alarms:
            return "false alarm"
        return "caught" if self.recovered else "not recovered"

    @property
    def damaged(self) -> set[int]:
        """Steps with a fault in weights or optimizer state, and the consecutive skipped steps after each."""
        starts = {step for fault in self.faults if fault.damages for step in fault.steps}
        damaged: set[int] = set()
        holds = False
        for record in self.records:
            holds = record.step in starts or (holds and record.skipped)
            if holds:
                damaged.add(record.step)
        return damaged

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "model": self.model,
            "seq_len": self.seq_len,
            "faults": [str(fault) for fault in self.faults],
            "fired": list(self.fired),
            "verdict": self.verdict,
            "stopped": self.stopped,
            "alarms": [alarm.to_dict() | {"text": str(alarm)} for alarm in self.alarms],
            "records": [record.to_dict() for record in self.records],
        }


def stability_run(
    subject: Any,
    *,
    steps: int = 16,
    faults: Iterable[Fault] = (),
    batch_size: int | None = None,
    seq_len: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    policy: GuardPolicy | None = None,
) -> StabilityRun:
    """Train a new model for a few steps with injected faults, and report losses and alarms.

    A model is trained under a `Guard`, which judges each step before its update. A bad step is skipped
    without a trace. If a fault has written to weights or optimizer state, a rewind undoes it. The step is
    recomputed under hooks, with the same fault, to name the bad module. This is a test harness: the host
    waits for the device at each step.

    A training step (a TrainerSpec) runs unchanged, without a guard, so the result shows if it recovers by
    itself. Its alarms are in its attribute `alarms`, a list of `Alarm`, or in its `guard`. Without either, it
    reports no alarms. An error that it raises after a fault stops the run.

    A fault in gradients, weights or optimizer state acts once at each of its steps, like a failure of the
    machine: a recomputation of the step is healthy. A fault in the batch, the forward pass or the loss
    belongs to the batch, and acts in every computation of it.

    Args:
        subject: a ModelSpec or an argument of `ModelSpec.of`; or a TrainerSpec.
        steps: number of steps.
        faults: faults to inject.
        batch_size: rows of a batch; each step has another batch. None: 8, or the training step's own size.
            With very few rows, the norms of healthy steps scatter by more than the factor of a fault.
        seq_len: number of positions; None: the spec's.
        device: device of the model; a training step chooses its own.
        seed: seed of weights, batches and dropout.
        policy: policy of the guard; None: `GuardPolicy()`, the default of a training. It must be None for a
            training step.

    Raises:
        ValueError: a fault after the end of the run, too early to be judged, without a target, or of a part
            that this run lacks, such as workers and checkpoints; a length that the model does not accept; a
            training step with a policy, or one that returns no loss.
        TypeError: alarms of a training step that are no `Alarm`.
    """
    if isinstance(subject, TrainerSpec):
        return run_of_trainer(
            subject,
            steps=steps,
            faults=faults,
            batch_size=batch_size,
            seq_len=seq_len,
            device=device,
            seed=seed,
            policy=policy,
        )[0]
    subject = ModelSpec.of(subject)
    check_sizes(steps=steps)
    faults = tuple(faults)
    _require_place(faults, steps, of_trainer=False)
    rows = _ROWS if batch_size is None else batch_size
    length = subject.seq_len if seq_len is None else seq_len
    check_sizes(batch_size=rows)
    check_sizes(shortest_length(subject), seq_len=length)
    with keep_random_states():
        return _run_of_model(
            subject, steps, faults, rows, length, torch.device(device), seed, policy or GuardPolicy()
        )


def shortest_length(spec: ModelSpec) -> int:
    """Return the smallest number of positions that has a loss."""
    return 2 if spec.inputs == "tokens" and spec.causal and spec.loss is None else 1


def _run_of_model(
    spec: ModelSpec,
    steps: int,
    faults: Sequence[Fault],
    batch_size: int,
    seq_len: int,
    device: torch.device,
    seed: int,
    policy: GuardPolicy,
) -> StabilityRun:
    broken_steps = BrokenSteps(spec, faults, batch_size=batch_size, seq_len=seq_len, device=device, seed=seed)
    model = spec.create(device, seed).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    require(bool(trainable), "model", spec.name, "a model with a parameter that trains")
    optimizer = spec.optimizer(trainable)
    guard = Guard(model, optimizer, policy=policy, loss_of=broken_steps.loss_of, lag=0)
    records: list[StepRecord] = []
    stopped, step = "", -1
    try:
        with torch.enable_grad():
            for inputs in guard.batches(broken_steps.batches(steps)):
                step = broken_steps.step_of(inputs)
                active = broken_steps.begin(step)
                _require_history(active, records, policy.minimum)
                broken_steps.before_step(step, active, model, optimizer)
                loss = broken_steps.loss_of(model, inputs)
                loss.backward()  # type: ignore[no-untyped-call]
                broken_steps.after_backward(step, active, model)
                lr, told = float(optimizer.param_groups[0]["lr"]), len(guard.alarms)
                try:
                    guard.step(loss)
                finally:
                    # A suspicious step without an alarm is replayed unchanged: no record.
                    records += [
                        StepRecord(step, seen.loss, seen.total_norm, lr, seen.skipped)
                        for seen in guard.records()
                        if seen.kind is None or len(guard.alarms) > told
                    ]
    except GuardError as error:
        stopped = f"{type(error).__name__}: {error}"
    return StabilityRun(
        spec.name,
        seq_len,
        records,
        guard.alarms,
        broken_steps.faults,
        broken_steps.fired,
        _finite(model),
        steps,
        stopped=stopped,
        stopped_at=step if stopped else None,
    )


def run_of_trainer(
    spec: TrainerSpec,
    *,
    steps: int = 16,
    faults: Iterable[Fault] = (),
    batch_size: int | None = None,
    seq_len: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    policy: GuardPolicy | None = None,
    marks: Sequence[int] = (),
) -> tuple[StabilityRun, WeightPath]:
    """Run a training step like `stability_run`.

    Return the result and the path of the weights, for drifts from the steps `marks`.
    """
    check_sizes(steps=steps)
    faults = tuple(faults)
    _require_place(faults, steps, of_trainer=True)
    require(policy is None, "policy", policy, "None: a training step is not guarded by this run")
    run = spec.create(device, seed)
    where = next((p.device for p in run.model.parameters()), torch.device("cpu"))
    path = WeightPath(run, marks)
    records: list[StepRecord] = []
    starts: list[tuple[int, int]] = []
    stopped = ""
    injection: Injection | None = None
    try:
        with torch.enable_grad(), broken(run, faults) as injection:
            for step in range(steps):
                starts.append((injection.step, step))
                batch = spec.batch(batch_size, seq_len, device=where, seed=seed + 1 + step)
                damages = any(fault.damages and injection.step in fault.steps for fault in faults)
                lr = _rate(run)
                with path.step(damages=damages), seeded(seed + 1 + step, where):
                    loss = _number(spec.name, run.step(batch))
                norm = getattr(run, "grad_norm", None)
                norm = math.nan if norm is None else float(norm)
                records.append(StepRecord(step, loss, norm, lr, not path.updated))
    except TargetNotReachedError:
        raise
    except Exception as error:
        if injection is None or not injection.fired:
            raise
        stopped = f"{type(error).__name__}: {error}"
    path.finish()
    alarms = _alarms_of(run, spec.name)
    fired = _steps_of(injection, starts)
    result = StabilityRun(
        spec.name,
        spec.seq_len if seq_len is None else seq_len,
        records,
        alarms or [],
        faults,
        fired,
        _finite(run.model),
        steps,
        watched=alarms is not None,
        stopped=stopped,
        stopped_at=starts[-1][1] if stopped else None,
    )
    return result, path


def _require_place(faults: Sequence[Fault], steps: int, of_trainer: bool) -> None:
    for fault in faults:
        if fault.steps.stop > steps:
            raise ValueError(
                f"{fault.name}: its last step is {fault.steps.stop - 1}; the run has {steps} steps"
            )
        if fault.breaks or (fault.raises and not of_trainer):
            what = f"no {fault.breaks} of its own" if fault.breaks else "nothing that catches its error"
            raise ValueError(f"{fault.name}: stability_run has {what}; wanted stackwise.stability.broken")


def _require_history(faults: Sequence[Fault], records: Sequence[StepRecord], minimum: int) -> None:
    sound = sum(not record.skipped for record in records)
    for fault in faults:
        if fault.told_by_history and sound < minimum:
            raise ValueError(
                f"{fault.name}: step: got {fault.step}; allowed: one that at least "
                f"{minimum} sound steps come before, since a norm is judged by theirs"
            )


def _steps_of(injection: Injection | None, starts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the steps of batches at which a fault acted. The injection counts every attempt of a step."""
    if injection is None:
        return []
    attempts = [attempt for attempt, _ in starts]
    return sorted({starts[bisect_right(attempts, fired) - 1][1] for fired in injection.fired})


def _finite(model: nn.Module) -> bool:
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    buffers_real = (torch.view_as_real(b) if b.is_complex() else b for b in model.buffers())
    return finite and not any(bool((b.isnan() | b.isposinf()).any()) for b in buffers_real)


def _rate(run: TrainingRun) -> float:
    groups = getattr(run.optimizer, "param_groups", None)
    return float(groups[0]["lr"]) if groups else math.nan


def _number(name: str, loss: Any) -> float:
    if isinstance(loss, Tensor):
        require(loss.numel() == 1, f"{name}: step(batch)", tuple(loss.shape), "the loss, one number")
        return float(loss.detach())
    sound = isinstance(loss, int | float) and not isinstance(loss, bool)
    require(sound, f"{name}: step(batch) returned", loss, "the loss, a number or a scalar tensor")
    return float(loss)


def _alarms_of(run: TrainingRun, name: str) -> list[Alarm] | None:
    """Return the alarms of the run, or of its guard; None: it reports no alarms."""
    for owner in (run, getattr(run, "guard", None)):
        alarms = getattr(owner, "alarms", None)
        if alarms is None or callable(alarms):
            continue
        wrong = next((type(alarm).__name__ for alarm in alarms if not isinstance(alarm, Alarm)), None)
        if wrong is not None:
            raise TypeError(f"{name}: alarms: got a {wrong}; wanted stackwise.stability.Alarm")
        return list(alarms)
    return None
