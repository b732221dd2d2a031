"""`python -m bench.recovery`: what a broken step costs, with our guard and with what others do about it.

A byte model of two Blocks learns the documentation of CPython for 700 steps; at step 500, or 20, something
breaks. A fault of steps is one of the machine: it lasts as many executed steps, whatever their batches,
and multiplies gradients behind the backward pass. A fault of batches comes whenever they are computed, in
the forward pass or in the gradient of the logits. Each run has a twin with the same batches in which
nothing breaks, and a run of ours also one from which the batches in quarantine are missing: to that it has
to be equal bit for bit. Every run is a process of its own with one thread. What is done is kept in the
result file and not done again with `--resume`; `--judge` holds it to the bars anew, and makes no run.

The rules of others are written down here from what they publish: ZClip (Kumar et al. 2025, arXiv:2504.02507,
and github.com/bluorion-com/ZClip, defaults of its code), the skip-step rule of OLMo-core (OLMo et al. 2025,
arXiv:2501.00656, and github.com/allenai/OLMo-core, `SkipStepOptimizer`), and the latter as changed since,
without numbers that are not finite in its history.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

from bench.claim import Bar, Claim
from bench.isolated import all_isolated
from stackwise import StackWiseConfig, create_rack_from_config
from stackwise.data import create_data
from stackwise.stability.guard import Guard, GuardError, GuardPolicy
from stackwise.stability.telemetry import global_norm, gradient_norms

SHAPE = {"n_stacks": 2, "blocks_per_stack": 1, "d_model": 48, "d_ff": 128, "n_heads": 3, "vocab_size": 256}
BATCH_SIZE, SEQ_LEN = 16, 64
OPTIMIZERS = ("adamw", "sgd")
OURS, NOTHING = "guard", "nothing"
ARMS = (OURS, NOTHING, "clip 1.0", "ZClip", "OLMo skip-step", "OLMo skip-step, finite history")
SECOND = 60  # steps from a first fault to a second one


class Broken(NamedTuple):
    """A fault from a step on.

    Attributes:
        duration: steps, or batches; 0: all from the first on.
        value: factor of the gradient, or what one element of an activation becomes.
        batches: whether it comes with batches, and not with steps.
        second: whether one step has ten times its gradient `SECOND` later.
    """

    duration: int
    value: float
    batches: bool = False
    second: bool = False


FAULTS = {
    "x10": Broken(1, 10.0),
    "x10 ten steps": Broken(10, 10.0),
    "x10 all steps": Broken(0, 10.0),
    "x1000": Broken(1, 1000.0),
    "x1000 ten batches": Broken(10, 1000.0, batches=True),
    "nan": Broken(1, math.nan, batches=True),
    "inf": Broken(1, math.inf, batches=True),
    "nan, later x10": Broken(1, math.nan, batches=True, second=True),
}
CONTROLS = ("clean", "rate restart", "batch size change", "3x regime shift")
DROPPED = 4  # twins of each seed without one clean batch
AFTER = 50  # steps from the fault to the first validation
NEAR = 0.02  # nat, from the twin


def shared(quick: bool) -> dict[str, Any]:
    if quick:
        return {"steps": 112, "at": (50,), "seeds": (0,)}
    return {"steps": 700, "at": (500, 20), "seeds": (0, 1, 2, 3, 4)}


class _Arm:
    """What is done between backward and update: whether the update is made, and whether that is an alarm."""

    def __init__(self) -> None:
        self.alarmed = False

    def __call__(self, parameters: list[Any], loss: float, norm: float) -> bool:
        raise NotImplementedError


class _Nothing(_Arm):
    def __call__(self, parameters, loss, norm):  # noqa: ARG002
        return True


class _Clip(_Arm):
    def __call__(self, parameters, loss, norm):  # noqa: ARG002
        _scale(parameters, min(1.0, 1.0 / (norm + 1e-6)))
        return True


class _ZClip(_Arm):
    """Moving mean and variance of the norm; a z-score above 2.5 is clipped to mean + 2.5 std * 2.5 / z."""

    def __init__(
        self, alpha: float = 0.97, threshold: float = 2.5, warmup: int = 25, most: float = 1.0
    ) -> None:
        super().__init__()
        self.alpha, self.threshold, self.warmup, self.most = alpha, threshold, warmup, most
        self.first: list[float] = []
        self.mean = self.variance = 0.0

    def __call__(self, parameters, loss, norm):  # noqa: ARG002
        self.alarmed = False
        if len(self.first) < self.warmup:
            self.first.append(norm)
            if len(self.first) == self.warmup:
                self.mean = mean(self.first)
                self.variance = mean((n - self.mean) ** 2 for n in self.first)
            _clip(parameters, norm, self.most)
            return True
        deviation = math.sqrt(self.variance) if self.variance >= 0 else math.nan
        z = (norm - self.mean) / (deviation + 1e-6)
        self.alarmed = z > self.threshold
        kept = self.mean + self.threshold * deviation * self.threshold / z if self.alarmed else norm
        _clip(parameters, norm, min(kept, self.most))
        self.mean = self.alpha * self.mean + (1 - self.alpha) * kept
        self.variance = self.alpha * self.variance + (1 - self.alpha) * (kept - self.mean) ** 2
        return True


class _SkipStep(_Arm):
    """Left out: loss or norm more than six deviations above the mean of the last 128, from the 64th on."""

    def __init__(self, *, finite: bool = False, length: int = 128, sigma: float = 6.0) -> None:
        super().__init__()
        self.finite, self.length, self.sigma = finite, length, sigma
        self.losses: list[float] = []
        self.norms: list[float] = []

    def __call__(self, parameters, loss, norm):
        _scale(parameters, min(1.0, 1.0 / (norm + 1e-6)))
        for history, value in ((self.losses, loss), (self.norms, norm)):
            history.append(value)
            del history[: -self.length - 1]
        enough = len(self.losses) >= self.length // 2
        self.alarmed = enough and not (self._within(self.losses) and self._within(self.norms))
        return not self.alarmed

    def _within(self, values: list[float]) -> bool:
        *before, last = values
        if self.finite:
            before = [value for value in before if math.isfinite(value)]
            if len(before) < 2 or not math.isfinite(last):
                return False
        center = sum(before) / len(before)
        deviation = math.sqrt(sum((value - center) ** 2 for value in before) / (len(before) - 1))
        return last - center <= self.sigma * deviation


def arm_of(name: str) -> _Arm:
    return {
        NOTHING: _Nothing,
        "clip 1.0": _Clip,
        "ZClip": _ZClip,
        "OLMo skip-step": _SkipStep,
        "OLMo skip-step, finite history": partial(_SkipStep, finite=True),
    }[name]()


def _clip(parameters: list[Any], norm: float, limit: float) -> None:
    if norm > limit:
        _scale(parameters, limit / (norm + 1e-6))


def _scale(parameters: list[Any], factor: float) -> None:
    if factor != 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)


class Training:
    """One model, its data and its fault, for a loop with or without a guard."""

    def __init__(self, optimizer: str, fault: str, at: int, seed: int, steps: int) -> None:
        torch.set_num_threads(1)
        self.fault, self.at, self.steps = fault, at, steps
        sizes = {k: v for k, v in SHAPE.items() if k not in ("n_stacks", "blocks_per_stack")}
        config = StackWiseConfig.from_dict(
            {
                "model": {
                    **sizes,
                    "n_kv_heads": SHAPE["n_heads"],
                    "attention_type": "mha",
                    "architecture": {
                        "n_stacks": SHAPE["n_stacks"],
                        "blocks_per_stack": SHAPE["blocks_per_stack"],
                    },
                },
                "training": {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "seed": seed, "device": "cpu"},
                "data": {"validation_fraction": 0.1},
            }
        )
        torch.manual_seed(seed)
        self.model = create_rack_from_config(config)
        data, held_out = create_data(config)
        self.data = [_ids(data, i) for i in range(steps)]
        if fault == "batch size change":
            self.data[at:] = [ids[: len(ids) // 2] for ids in self.data[at:]]
        self.held_out = [_ids(held_out, i) for i in range(min(8, len(held_out)))]
        self.optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
            if optimizer == "adamw"
            else torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        )
        restart = at if fault == "rate restart" else steps
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(_rate, restart, steps))
        names = [n for n, m in self.model.named_modules() if n and not list(m.children()) and _called(n)]
        self.place = random.Random(f"{seed} {at}").choice(names)
        self.losses: dict[int, float] = {}
        self.fired: list[int] = []  # step of each execution that was broken
        self._numbers = {id(ids): number for number, ids in enumerate(self.data)}
        self._number: int | None = None  # of the batch that is computed
        broken = FAULTS.get(fault, Broken(0, 1.0))
        if broken.batches and not math.isfinite(broken.value):
            self.model.get_submodule(self.place).register_forward_hook(self._spoil_element)

    def _comes_with(self, number: int | None) -> bool:
        """Whether the fault is in this batch."""
        broken = FAULTS.get(self.fault)
        if broken is None or not broken.batches or number is None:
            return False
        return self.at <= number < self.at + broken.duration

    def _spoil_element(self, _module: Any, _args: Any, output: Any) -> Any:
        if self._comes_with(self._number):
            output = output.clone()
            output.view(-1)[7] = FAULTS[self.fault].value
        return output

    def loss_of(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        self._number = self._numbers.get(id(ids))
        logits = model(ids[:, :-1])
        logits = getattr(logits, "logits", logits)
        factor = 1.0
        if self.fault == "3x regime shift" and self._number is not None and self._number >= self.at:
            factor = 3.0
        if self._comes_with(self._number) and math.isfinite(FAULTS[self.fault].value):
            factor = FAULTS[self.fault].value
        if logits.requires_grad and factor != 1.0:
            logits.register_hook(lambda gradient: gradient * factor)
        return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def after_backward(self, step: int) -> None:
        """What breaks with a step. Called once for each one that is executed, also again."""
        broken = FAULTS.get(self.fault)
        if broken is None:
            return
        factor = 1.0
        if broken.batches:
            if self._comes_with(step):
                self.fired.append(step)
            if broken.second and step == self.at + SECOND and step not in self.fired:
                factor = 10.0
        elif (self.fired or step == self.at) and not 0 < broken.duration <= len(self.fired):
            factor = broken.value
        if factor != 1.0:
            _scale(list(self.model.parameters()), factor)
            self.fired.append(step)

    def validate(self, step: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.losses[step] = mean(self.loss_of(self.model, ids).item() for ids in self.held_out)
        self.model.train()

    def digest(self) -> str:
        """Of parameters, buffers, the optimizer's state and the scheduler."""
        whole = hashlib.sha256()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for p in self.model.parameters():
            tensors += [v for _, v in sorted(self.optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
        for tensor in tensors:
            whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        whole.update(repr((self.scheduler.last_epoch, self.optimizer.param_groups[0]["lr"])).encode())
        return whole.hexdigest()


def _ids(data: Any, i: int) -> Any:
    per_epoch = len(data)
    batch = data.batch(i // per_epoch, i % per_epoch)
    return batch["input_ids"]


def _called(name: str) -> bool:
    return any(part in name for part in ("norm", "attention", "feedforward")) and "rotary" not in name


def _rate(restart: int, steps: int, step: int) -> float:
    """A warm-up, then down to a third by the restart, then up again."""
    since, length = (step - restart, steps - restart) if step >= restart else (step, restart)
    warm = min(1.0, (step + 1) / 10)
    return warm * (1 - 2 / 3 * since / max(1, length))


def run(arm: str, optimizer: str, fault: str, at: int, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """One run in this process."""
    training = Training(optimizer, fault, at, seed, steps)
    made = train_guarded(training) if arm == OURS else train_unguarded(training, arm_of(arm))
    names = {
        "arm": arm,
        "optimizer": optimizer,
        "fault": fault,
        "at": at,
        "seed": seed,
        "place": training.place,
    }
    yield {**names, **made, "digest": training.digest(), "losses": training.losses}


class Twin(NamedTuple):
    """A clean run without some batches, or without its end: one of ours has to be equal to it."""

    optimizer: str
    at: int
    seed: int
    left_out: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, run: dict[str, Any], steps: int) -> Twin:
        end = run["alarms"][-1] if run["stopped"] else steps
        return cls(run["optimizer"], run["at"], run["seed"], tuple(run["quarantined"]), end)

    def __str__(self) -> str:
        without = " ".join(map(str, self.left_out))
        return f"twin without [{without}] until {self.end}; {self.optimizer}; {self.at}; {self.seed}"

    def run(self, steps: int) -> Iterator[dict[str, Any]]:
        """In this process."""
        training = Training(self.optimizer, "clean", self.at, self.seed, steps)
        train_unguarded(training, _Nothing(), set(self.left_out), self.end)
        names = {"arm": "twin", "optimizer": self.optimizer, "fault": "clean", "at": self.at}
        yield {**names, "seed": self.seed, "digest": training.digest(), "losses": training.losses}


def drop(
    optimizer: str, seed: int, steps: int, places: tuple[int, ...], number: int
) -> Iterator[dict[str, Any]]:
    """A clean run without one batch: how far the losses are from those of its twin by that."""
    for at in places:
        training = Training(optimizer, "clean", at, seed, steps)
        dropped = random.Random(f"{seed} {number} {at}").randrange(at, at + AFTER)
        train_unguarded(training, _Nothing(), {dropped})
        names = {"arm": "drop", "optimizer": optimizer, "fault": "clean", "at": at, "seed": seed}
        yield {**names, "losses": training.losses}


def train_unguarded(
    training: Training, arm: _Arm | None = None, leave_out: set[int] | None = None, end: int | None = None
) -> dict[str, Any]:
    """Train without a guard.

    Args:
        training: model, data and fault.
        arm: decides if an update is made; None: every update is made.
        leave_out: numbers of batches that are skipped.
        end: number of batches; None: all.
    """
    arm = arm or _Nothing()
    alarms, skipped = [], 0
    parameters = list(training.model.parameters())
    for step, ids in enumerate(training.data[:end]):
        if step not in (leave_out or ()):
            loss = training.loss_of(training.model, ids)
            loss.backward()
            training.after_backward(step)
            norm = global_norm(gradient_norms(parameters)).item()
            takes = arm(parameters, loss.item(), norm)
            skipped += not takes
            if arm.alarmed:
                alarms.append(step)
            if takes:
                training.optimizer.step()
                training.scheduler.step()
            training.optimizer.zero_grad()
        if step == training.at + AFTER:
            training.validate(step)
    training.validate(training.steps)
    return {"alarms": alarms, "skipped": skipped, "fired": training.fired}


def train_guarded(training: Training, *, recomputes: bool = True) -> dict[str, Any]:
    """Train with a guard of the default policy.

    Args:
        training: model, data and fault.
        recomputes: pass `loss_of` to the guard.
    """
    guard = Guard(
        training.model,
        training.optimizer,
        scheduler=training.scheduler,
        policy=GuardPolicy(),
        loss_of=training.loss_of if recomputes else None,
    )
    given: list[int] = []
    furthest = fall = 0
    stopped = ""
    try:
        for ids in guard.batches(training.data):
            step = guard.steps
            given.append(step)
            fall, furthest = max(fall, furthest - step), max(furthest, step)
            loss = training.loss_of(training.model, ids)
            loss.backward()
            training.after_backward(step)
            guard.step(loss)
            if step == training.at + AFTER:
                training.validate(step)
    except GuardError as error:
        stopped = str(error)
    training.validate(training.steps)
    quarantined = [index for _, index in guard.quarantined]  # type: ignore[misc]
    taken = guard.scheduler.last_epoch  # type: ignore[union-attr]
    end = guard.alarms[-1].step if stopped else training.steps
    return {
        "alarms": [alarm.step for alarm in guard.alarms],
        "actions": [alarm.action for alarm in guard.alarms],
        "kinds": [alarm.kind for alarm in guard.alarms],
        "where": guard.alarms[0].where if guard.alarms else "",
        "stopped": stopped,
        "skipped": guard.skipped,
        "cleared": guard.cleared,
        "quarantined": quarantined,
        "complete": taken == end - sum(q < end for q in quarantined)
        and set(given) == set(range(furthest + 1)),
        "fall": fall,
        "fired": training.fired,
    }


Jobs = dict[str, Callable[[], Iterator[Any]]]


def runs_of(plan: dict[str, Any], arms: tuple[str, ...]) -> Jobs:
    """Every fault and control, under each of `arms`."""
    jobs: Jobs = {}
    for job in itertools.product(plan["seeds"], OPTIMIZERS, plan["at"], (*CONTROLS, *FAULTS), arms):
        seed, optimizer, at, fault, arm = job
        name = f"{arm}; {optimizer}; {fault}; {at}; {seed}"
        jobs[name] = partial(run, arm, optimizer, fault, at, seed, plan["steps"])
    return jobs


def drops_of(plan: dict[str, Any]) -> Jobs:
    """Clean runs, each without one batch."""
    return {
        f"drop {number}; {optimizer}; {seed}": partial(
            drop, optimizer, seed, plan["steps"], plan["at"], number
        )
        for seed, optimizer, number in itertools.product(plan["seeds"], OPTIMIZERS, range(DROPPED))
    }


def twins_of(plan: dict[str, Any], runs: dict[str, Any]) -> Jobs:
    """Those that runs of ours are held against; several have the same."""
    ours = [r for several in runs.values() for r in several if r["arm"] == OURS and r["fault"] in FAULTS]
    twins = {Twin.of(r, plan["steps"]) for r in ours}
    return {str(twin): partial(twin.run, plan["steps"]) for twin in sorted(twins)}


class Found:
    """The runs, and what they say."""

    def __init__(self, runs: dict[str, Any], steps: int) -> None:
        self.runs, self.steps = runs, steps
        self._spreads: dict[tuple[str, int], float] = {}
        self.all = [each for several in runs.values() for each in several]

    def is_bitwise(self, run: dict[str, Any]) -> bool:
        """Whether weights, optimizer and scheduler are those of its twin."""
        [twin] = self.runs[str(Twin.of(run, self.steps))]
        return bool(twin["digest"] == run["digest"])

    def of(self, **wanted: Any) -> list[dict[str, Any]]:
        return [r for r in self.all if all(r[key] == value for key, value in wanted.items())]

    def distance(self, run: dict[str, Any]) -> float | None:
        """The largest distance of its losses from those of its twin; infinite where one is not finite."""
        twins = self.of(arm=NOTHING, fault="clean", **{key: run[key] for key in ("optimizer", "at", "seed")})
        if not twins:
            return None
        [twin] = twins
        gaps = [
            abs(run["losses"][step] - loss) for step, loss in twin["losses"].items() if step in run["losses"]
        ]
        return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=math.inf)

    def spread(self, optimizer: str, at: int) -> float:
        """The largest that dropping one clean batch did."""
        if (optimizer, at) not in self._spreads:
            found = [self.distance(r) for r in self.of(arm="drop", optimizer=optimizer, at=at)]
            self._spreads[optimizer, at] = max((each for each in found if each is not None), default=math.nan)
        return self._spreads[optimizer, at]

    def is_near(self, run: dict[str, Any]) -> bool | None:
        """Whether its losses are those of its twin; None: it has none."""
        gap = self.distance(run)
        return None if gap is None else gap <= NEAR

    def is_accepted(self, run: dict[str, Any]) -> bool:
        """Whether a broken run passes for recovered: its first alarm is at the step, and it is near."""
        return run["alarms"][:1] == [run["at"]] and self.is_near(run) is True

    def negative_controls(self) -> list[dict[str, Any]]:
        """Broken runs with which nothing is done: they must not be accepted.

        They have no alarm, and so they are not. How many of them are far from their twins as well is told by
        `beside`: by chance one may come back.
        """
        unguarded = partial(self.of, arm=NOTHING)
        return [
            *unguarded(optimizer="sgd", fault="x10"),
            *unguarded(fault="x1000"),
            *unguarded(fault="nan"),
        ]


def culprit(run: dict[str, Any]) -> tuple[str, ...]:
    """Return how the place that the guard should name may begin."""
    broken = FAULTS[run["fault"]]
    if not math.isfinite(broken.value):
        return (f"{run['place']} (forward)",)
    if broken.batches:  # the gradient of the logits is the loss function's
        return ("the loss",)
    return ("all modules (gradients x",)  # a factor of all gradients is in every module


def share(found: list[bool]) -> float | None:
    return mean(map(float, found)) if found else None


def bars(found: Found) -> list[Bar]:
    ours = [r for r in found.of(arm=OURS) if r["fault"] in FAULTS]
    lasting = [r for r in ours if r["fault"] == "x10 all steps"]
    single = [r for r in ours if FAULTS[r["fault"]].duration == 1]
    # Ten batches that are no good are ten updates less, whatever is done: the table has what that costs.
    survived = [(r, found.distance(r)) for r in ours if r not in lasting and len(r["quarantined"]) <= 1]
    gaps = [(r, gap) for r, gap in survived if gap is not None]
    relative = [gap / (3 * found.spread(r["optimizer"], r["at"])) for r, gap in gaps]
    controls = [r for r in found.of(arm=OURS) if r["fault"] in CONTROLS]
    rewinds = [
        bool(r["stopped"]) and r["actions"].count("rewound") == 1 and r["actions"][-1] == "raised"
        for r in lasting
    ]
    return [
        Bar("first alarm at the step", share([r["alarms"][:1] == [r["at"]] for r in ours]), 1.0),
        Bar(
            "alarms at the broken steps only",
            share([r["alarms"] == r["fired"] for r in ours]),
            1.0,
        ),
        Bar(
            "module named",
            share([r["where"].startswith(culprit(r)) for r in ours]),
            1.0,
        ),
        Bar("alarms in the controls", float(sum(len(r["alarms"]) for r in controls)), 0.0, at_most=True),
        Bar("bitwise equal", share([found.is_bitwise(r) for r in ours]), 1.0),
        Bar("no clean batch lost or repeated", share([r["complete"] for r in ours]), 1.0),
        Bar(
            "steps that a rewind costs", float(max((r["fall"] for r in ours), default=0)), 50.0, at_most=True
        ),
        *(
            Bar(
                f"largest distance from the twin, nat, step {at}",
                max((gap for r, gap in gaps if r["at"] == at), default=None),
                NEAR,
                at_most=True,
                full_size=True,
            )
            for at in sorted({r["at"] for r in ours})
        ),
        Bar(
            "the same / 3x dropping one batch",
            max(relative, default=None),
            1.0,
            at_most=True,
            full_size=True,
        ),
        Bar(
            "steps that one NaN costs",
            max((float(r["skipped"]) for r in single if r["fault"] == "nan"), default=None),
            1.0,
            at_most=True,
        ),
        Bar("lasting fault: one rewind, diagnosis", share(rewinds), 1.0),
        Bar(
            "negative controls fail",
            share([not found.is_accepted(r) for r in found.negative_controls()]),
            1.0,
            full_size=True,
        ),
    ]


def beside(found: Found) -> dict[str, Any]:
    """Figures that are no bars: the share of negative controls that would fail by their losses alone."""
    far = [found.is_near(r) is False for r in found.negative_controls()]
    return {"negative controls far from the twin": share(far)}


def table(found: Found) -> Table:
    """For each fault and what was done: the distance from the twin, and false and true alarms."""
    shown = Table("fault", "optimizer", *ARMS)
    for fault in (*CONTROLS, *FAULTS):
        for optimizer in OPTIMIZERS:
            cells = []
            for arm in ARMS:
                several = found.of(arm=arm, optimizer=optimizer, fault=fault)
                gaps = [gap for r in several if (gap := found.distance(r)) is not None]
                true = sum(r["at"] in r["alarms"] for r in several) if fault in FAULTS else 0
                false = sum(len(set(r["alarms"]) - set(r["fired"])) for r in several)
                stopped = sum(bool(r.get("stopped")) for r in several)
                gap = "stopped" if stopped else f"{max(gaps):.3f}" if gaps else "-"
                cells.append(f"{gap}, {true}/{len(several)}, {false}" if several else "-")
            shown.add_row(fault, optimizer, *cells)
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, 112 steps: proves nothing")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the result file has")
    parser.add_argument("--judge", action="store_true", help="judge the runs of the file anew, and make none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    plan = shared(options.quick)
    claim = Claim("recovery", options.quick)
    if options.resume or options.judge:
        claim.resume()
    if options.judge:
        found = Found(claim.figures["runs"], plan["steps"])
        return claim.judge_again(bars(found), beside(found))
    runs: dict[str, Any] = claim.figures.get("runs", {})
    # What the bars are made of comes first; with what others do about it the table is whole.
    held = (OURS, NOTHING)
    stages: list[Callable[[], Jobs]] = [
        lambda: {**runs_of(plan, held), **drops_of(plan)},
        lambda: twins_of(plan, runs),
        lambda: runs_of(plan, tuple(arm for arm in ARMS if arm not in held)),
    ]
    for number, jobs in enumerate(stages):
        if number == len(stages) - 1:
            claim.bars = bars(Found(runs, plan["steps"]))
            claim.write()
        missing = {name: job for name, job in jobs().items() if name not in runs}
        for name, ended in all_isolated(missing, jobs=options.jobs, seconds=3600):
            if ended.error is not None:
                raise RuntimeError(f"{name}: {ended.error}")
            runs[name] = [_plain_values(each) for each in ended.values]
            claim.figures = {
                "shape": SHAPE,
                "batch_size": BATCH_SIZE,
                "seq_len": SEQ_LEN,
                **plan,
                "runs": runs,
            }
            claim.write()
            print(name, flush=True)
    found = Found(runs, plan["steps"])
    claim.bars = bars(found)
    claim.figures |= beside(found)
    Console(width=150).print(
        table(found), "distance from the twin in nat, runs with an alarm at the step, false alarms"
    )
    return claim.conclude()


def _plain_values(run: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: names are text."""
    return {**run, "losses": {str(step): loss for step, loss in run["losses"].items()}}


if __name__ == "__main__":
    sys.exit(main())
