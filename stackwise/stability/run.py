"""StabilityRun: a short training run of any model, with faults, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stackwise.argument import check_sizes, require
from stackwise.seed import seeded
from stackwise.spec import ModelSpec
from stackwise.stability.faults import Acted, Anatomy, Fault
from stackwise.stability.faults.fault import states_of
from stackwise.stability.guard import Alarm, SpikeDetector
from stackwise.stability.locate import first_nonfinite_module, nonfinite_gradients
from stackwise.stability.telemetry import StepRecord, global_norm, gradient_norms

__all__ = ["StabilityRun", "Verdict", "stability_run"]

Verdict = Literal["stable", "unstable", "caught", "missed", "false alarm", "not recovered"]


@dataclass(frozen=True)
class StabilityRun:
    """What happened.

    Attributes:
        model: the spec's name.
        seq_len: length of the sequences.
        records: one per step, skipped ones included.
        alarms: in order.
        faults: what was injected.
        fired: the steps at which a fault did act.
        finite: whether every parameter and buffer is finite at the end, buffers of -inf aside, since
            masks are made of it.
    """

    model: str
    seq_len: int
    records: Sequence[StepRecord]
    alarms: Sequence[Alarm]
    faults: Sequence[Fault]
    fired: Sequence[int]
    finite: bool

    @property
    def alarm_steps(self) -> list[int]:
        """The steps that raised an alarm."""
        return [alarm.step for alarm in self.alarms]

    @property
    def missed(self) -> list[int]:
        """Broken steps that raised no alarm."""
        return sorted(set(self.fired) - set(self.alarm_steps))

    @property
    def false_alarms(self) -> list[Alarm]:
        """Alarms at steps that no fault broke."""
        return [alarm for alarm in self.alarms if alarm.step not in self.fired]

    @property
    def recovered(self) -> bool:
        """Whether parameters, buffers and last loss are finite, and the last step was taken."""
        last = self.records[-1]
        return self.finite and math.isfinite(last.loss) and not last.skipped

    @property
    def verdict(self) -> Verdict:
        """The run in a word. Good are "stable", without faults, and "caught", with them."""
        if not self.fired:
            return "stable" if self.recovered and not self.alarms else "unstable"
        if self.missed:
            return "missed"
        if self.false_alarms:
            return "false alarm"
        return "caught" if self.recovered else "not recovered"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.model,
            "seq_len": self.seq_len,
            "faults": [str(fault) for fault in self.faults],
            "fired": list(self.fired),
            "verdict": self.verdict,
            "alarms": [alarm.to_dict() | {"text": str(alarm)} for alarm in self.alarms],
            "records": [record.to_dict() for record in self.records],
        }


def stability_run(
    spec: ModelSpec,
    *,
    steps: int = 16,
    faults: Iterable[Fault] = (),
    batch_size: int = 8,
    seq_len: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    detector: SpikeDetector | None = None,
) -> StabilityRun:
    """Train a fresh model for a few steps while breaking it, and skip the steps that are broken.

    A skipped step leaves no trace: neither in parameters and optimizer, nor in buffers. What a fault writes
    into them before the step goes with it.

    Loss and gradient norm are judged before each update: a non-finite one always raises an alarm,
    a norm that is far above its history as well. The culprit is named by running the forward pass
    again under hooks, with the same fault. This is a test harness: it waits for the device at each
    step.

    Args:
        spec: the model.
        steps: length of the run.
        faults: what to break, and when.
        batch_size: rows of a batch; each step has another batch. With very few rows the norms of sound
            steps scatter by more than a fault's factor.
        seq_len: positions; None: the spec's own.
        device: where to run.
        seed: of weights, batches and dropout.
        detector: judges the norms.

    Raises:
        ValueError: a fault beyond the run, or too early to be judged, or with no target, or of something
            that this run has not, such as workers and checkpoints; a length that the model does not take.
    """
    detector = detector or SpikeDetector()
    seq_len = spec.seq_len if seq_len is None else seq_len
    check_sizes(steps=steps, batch_size=batch_size)
    least = 2 if spec.inputs == "tokens" and spec.causal and spec.loss is None else 1
    check_sizes(least, seq_len=seq_len)
    device = torch.device(device)
    faults = _resolved(faults, spec, steps, batch_size, seq_len, device, seed)
    model = spec.create(device, seed).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    require(bool(trainable), "model", spec.name, "a model with a parameter that trains")
    optimizer = spec.optimizer(trainable)
    records: list[StepRecord] = []
    alarms: list[Alarm] = []
    fired: list[int] = []

    with torch.enable_grad():
        for step in range(steps):
            inputs = spec.batch(batch_size, seq_len, device=device, seed=seed + 1 + step)
            active = [fault.at(step) for fault in faults if step in fault.steps]
            attempt = _Attempt(spec, model, inputs, active, seed + 1 + step)
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            kept = _state(model, optimizer) if any(fault.damages for fault in active) else {}

            for fault in active:
                if fault.told_by_history and detector.limit() is None:
                    raise ValueError(
                        f"{fault.name}: step: got {fault.step}; allowed: one that at least "
                        f"{detector.minimum} sound steps come before, since a norm is judged by theirs"
                    )
                fault.before_step(model, optimizer, attempt.noting(fault))
            optimizer.zero_grad()
            loss = attempt.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            for fault in active:
                fault.on_gradients(model, attempt.noting(fault))
                if fault not in attempt.acted:
                    raise ValueError(f"{fault}: it did not act at step {step}: its target was not reached")
            if active:
                fired.append(step)

            norm = float(global_norm(gradient_norms(trainable)))
            alarm = _judge(step, loss.item(), norm, detector)
            if alarm is None:
                optimizer.step()
                detector.accept(norm)
            else:
                alarms.append(replace(alarm, where=_locate(alarm, model, attempt)))
                _restore(model, buffers)
                _put_back(model, optimizer, kept)
            lr = float(optimizer.param_groups[0]["lr"])
            records.append(StepRecord(step, loss.item(), norm, lr, alarm is not None))

    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    buffers_real = (torch.view_as_real(b) if b.is_complex() else b for b in model.buffers())
    finite &= not any(bool((b.isnan() | b.isposinf()).any()) for b in buffers_real)
    return StabilityRun(spec.name, seq_len, records, alarms, faults, fired, finite)


@dataclass(frozen=True)
class _Attempt:
    """One forward pass under the faults of its step; the same each time it is asked for."""

    spec: ModelSpec
    model: nn.Module
    inputs: Tensor
    faults: Sequence[Fault]
    seed: int
    acted: set[Fault] = field(default_factory=set)

    def noting(self, fault: Fault) -> Acted:
        return lambda: self.acted.add(fault)

    def loss(self) -> Tensor:
        inputs = self.inputs.clone()
        with ExitStack() as stack:
            for fault in self.faults:
                inputs = fault.on_batch(inputs, self.noting(fault))
                stack.enter_context(fault.around_forward(self.model, self.noting(fault)))
            stack.enter_context(seeded(self.seed, inputs.device))
            loss = self.spec.loss_of(self.model, inputs)
        for fault in self.faults:
            loss = fault.on_loss(loss, self.noting(fault))
        return loss


def _resolved(
    faults: Iterable[Fault],
    spec: ModelSpec,
    steps: int,
    batch_size: int,
    seq_len: int,
    device: torch.device,
    seed: int,
) -> tuple[Fault, ...]:
    """The faults with their targets spelled out, as a step of a throwaway model shows them."""
    faults = tuple(faults)
    for fault in faults:
        if fault.steps.stop > steps:
            raise ValueError(
                f"{fault.name}: its last step is {fault.steps.stop - 1}; the run has {steps} steps"
            )
        if fault.breaks or fault.raises:
            what = f"no {fault.breaks} of its own" if fault.breaks else "nothing that catches its error"
            raise ValueError(f"{fault.name}: stability_run has {what}; wanted stackwise.stability.broken")
    if not faults:
        return ()
    twin = spec.create(device, seed).train()
    inputs = spec.batch(batch_size, seq_len, device=device, seed=seed)
    optimizer = None
    if any(fault.damages for fault in faults):  # what it keeps is seen after an update
        optimizer = spec.optimizer([p for p in twin.parameters() if p.requires_grad])
    with torch.enable_grad(), seeded(seed, device):
        anatomy = Anatomy.of(
            twin,
            lambda: spec.loss_of(twin, inputs).backward(),  # type: ignore[no-untyped-call]
            optimizer,
        )
    resolved = tuple(fault.resolve(anatomy) for fault in faults)
    for fault in resolved:
        fault.on_batch(inputs, lambda: None)
    return resolved


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of what a fault may write into."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights | {name: state.clone() for name, state in states_of(model, optimizer).items()}


@torch.no_grad()
def _put_back(model: nn.Module, optimizer: torch.optim.Optimizer, kept: Mapping[str, Tensor]) -> None:
    if kept:
        for name, value in (dict(model.named_parameters()) | states_of(model, optimizer)).items():
            value.copy_(kept[name])


@torch.no_grad()
def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


def _judge(step: int, loss: float, norm: float, detector: SpikeDetector) -> Alarm | None:
    if not math.isfinite(loss):
        return Alarm(step, "non-finite loss", loss)
    if not math.isfinite(norm):
        return Alarm(step, "non-finite gradient", norm)
    limit = detector.limit()
    if limit is not None and norm > limit:
        return Alarm(step, "gradient spike", norm, limit)
    return None


def _locate(alarm: Alarm, model: nn.Module, attempt: _Attempt) -> str:
    match alarm.kind:
        case "non-finite loss":
            with torch.no_grad():
                return first_nonfinite_module(model, attempt.loss) or "the loss"
        case "non-finite gradient":
            names = nonfinite_gradients(model)
            return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        case _:  # a spike: `_judge` gives no other
            norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
            return max(norms, key=lambda name: norms[name])
