"""Bugs in sequences of operations, in one parameter beside others, and after a step without an update."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch
from torch import nn

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop_spec_of
from tests.zoo.mutant import mutant


class Averaged(Loop):
    """An exponential moving average of the weights, with a warm-up of its decay, is evaluated."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.n_averaged = 0

    def update(self):
        super().update()
        self.n_averaged += 1
        share = 1 / (1 + min(self.n_averaged, 100))
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, share)

    def evaluate(self, batches):
        model, self.model = self.model, self.average
        try:
            return super().evaluate(batches)
        finally:
            self.model = model

    def state(self):
        return {**super().state(), "average": self.average.state_dict(), "n_averaged": self.n_averaged}

    def restore(self, state):
        super().restore(state)
        self.average.load_state_dict(state["average"])
        self.n_averaged = state["n_averaged"]


class Skipping(Averaged):
    """A step with a gradient that is not finite changes nothing; neither does one of an unusual loss."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def is_usual(self, loss):
        if len(self.losses) < 6:
            return True
        past = torch.tensor(self.losses[-32:])
        return bool((loss - past.mean()).abs() <= 8 * past.std() + 0.1)

    def accumulate(self, batches):
        self.train_mode()
        total = sum(self.targets(batch) for batch in batches)
        loss = sum(self.loss(batch) * self.weight(batch, batches, total) for batch in batches)
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        finite = all(bool(g.isfinite().all()) for g in gradients)
        if finite and self.is_usual(loss.detach()):
            self.update()
        self.remember(loss.item(), finite)
        self.zero_grad()
        self.advance()
        return loss.item()

    def remember(self, loss, finite):
        if finite:
            self.losses.append(loss)


class OwnAdam(torch.optim.Optimizer):
    """Adam with a counter for each parameter."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    def counter(self, p, group):
        return self.state[p]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                counter = self.counter(p, group)
                counter["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad**2, 0.05)
                m = state["m"] / (1 - 0.9 ** counter["step"])
                v = state["v"] / (1 - 0.95 ** counter["step"])
                p.add_(m / (v.sqrt() + 1e-8), alpha=-group["lr"])


class Own(Loop):
    """With an optimizer of its own."""

    kind = OwnAdam

    def create_optimizer(self):
        return self.kind(self.groups(), lr=self.base_lr)


class TwoRates(Loop):
    """Norms and embeddings have another learning rate than matrices."""

    def create_optimizer(self):
        matrices, others = self.groups()
        return torch.optim.AdamW([matrices, others | {"lr": self.base_lr / 20}], lr=self.base_lr)


class Counted(Loop):
    """A batch says how many targets it has."""

    def loss(self, batch):
        logits, labels = self.model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / self.count(batch)

    def count(self, batch):
        return self.targets(batch)


def averaged():
    return loop_spec_of(Averaged)


def skipping():
    return loop_spec_of(Skipping)


def own_optimizer():
    return loop_spec_of(Own, decayed=None)


def two_rates():
    return loop_spec_of(TwoRates, learning_rate=None)


def counted(build=Counted):
    def make_batch(batch_size, seq_len, generator):
        ids = torch.randint(GPT.vocab_size, (2 * batch_size, seq_len), generator=generator)
        window = {"input_ids": ids[:batch_size], "labels": ids[:batch_size].clone()}
        return {**window, "targets_of_two_updates": torch.tensor(len(ids) * (seq_len - 1))}

    return replace(loop_spec_of(build), make_batch=make_batch)


def resumed(spec: TrainerSpec) -> float:
    """Of a run that was saved and loaded after two steps, and made two more."""
    run = spec.create()
    torch.manual_seed(0)
    for number in range(2):
        run.step(spec.batch(seed=number))
    with TemporaryDirectory() as folder:
        run.save(folder)
        other = spec.create()
        other.load(folder)
    for number in range(2, 4):
        other.step(spec.batch(seed=number))
    return other.evaluate([spec.batch(seed=9)])


def later_rows(spec: TrainerSpec) -> list:
    """First ids of the batches of the epoch that follows a resume."""
    run = spec.create()
    for batch in list(run.epoch(0))[:2]:
        run.step(batch)
    with TemporaryDirectory() as folder:
        run.save(folder)
        other = spec.create()
        other.load(folder)
    epoch, start = other.position()
    for batch in list(other.epoch(epoch))[start:]:
        other.step(batch)
    epoch, start = other.position()
    return [batch["input_ids"][0, 0].item() for batch in list(other.epoch(epoch))[start:]]


def after_nan(spec: TrainerSpec) -> list:
    """Weights and moments after a step whose gradients are NaN, and after two further steps."""
    run, seen = spec.create(), []
    torch.manual_seed(0)
    for number in range(9):
        hooks = [p.register_hook(lambda g: g * math.nan) for p in run.model.parameters() if number == 6]
        run.step(spec.batch(seed=number))
        for hook in hooks:
            hook.remove()
        if number in (6, 8):
            seen.append([p.detach().clone() for p in run.model.parameters()])
            seen.append([group["lr"] for group in run.optimizer.param_groups])
    return seen


def paused(spec: TrainerSpec) -> list:
    """Weights after five steps, in two of which the last layer is frozen."""
    run = spec.create()
    torch.manual_seed(0)
    for number in range(5):
        run.model.layers[-1].requires_grad_(number not in (1, 2))
        run.step(spec.batch(seed=number))
    return [p.detach().clone() for p in run.model.parameters()]


def all_rates(spec: TrainerSpec) -> list:
    run, seen = spec.create(), []
    torch.manual_seed(0)
    for number in range(4):
        run.step(spec.batch(seed=number))
        seen.append([group["lr"] for group in run.optimizer.param_groups])
    return seen


def first_loss(spec: TrainerSpec) -> float:
    torch.manual_seed(0)
    return spec.create().loss(spec.batch()).item()


@mutant("sequence", twin=averaged, family="sequence", source="lightly-train#892", observable=resumed)
def warm_up_of_the_average_restarts():
    """The number of averaged updates is not saved: after a resume, the average follows the weights again."""

    class Mutant(Averaged):
        def restore(self, state):
            super().restore(state)
            self.n_averaged = 0

    return loop_spec_of(Mutant)


@mutant("sequence", twin=averaged, family="sequence", source="classic", observable=resumed)
def average_starts_from_the_loaded_weights():
    """The average is not saved, and starts again from the weights of the checkpoint."""

    class Mutant(Averaged):
        def restore(self, state):
            super().restore(state)
            self.average.load_state_dict(self.model.state_dict())

    return loop_spec_of(Mutant)


@mutant("sequence", twin=averaged, family="sequence", source="open-instruct#681", observable=later_rows)
def used_batches_are_skipped_in_every_epoch():
    """After a resume within an epoch, later epochs begin at the same place."""

    class Mutant(Averaged):
        skipped = 0

        def restore(self, state):
            super().restore(state)
            self.skipped = self.batch_number

        def advance(self):
            super().advance()
            if self.batch_number == 0:
                self.batch_number = self.skipped

    return loop_spec_of(Mutant)


@mutant("replay", twin=own_optimizer, family="replay", source="DeepSpeed#8471", observable=paused)
def counter_of_the_last_parameter():
    """The bias correction of all parameters uses the counter of the last one in the group."""

    class SharedCounter(OwnAdam):
        def counter(self, p, group):
            last = group["params"][-1]
            return self.state[last] if self.state[last] else self.state[p]

    class Mutant(Own):
        kind = SharedCounter

    return loop_spec_of(Mutant, decayed=None)


@mutant("replay", twin=own_optimizer, family="replay", source="classic", observable=paused)
def counter_of_all_parameters_together():
    """One counter is advanced by each parameter, so that moments are never corrected."""

    class GlobalCounter(OwnAdam):
        def counter(self, p, group):
            return self.__dict__.setdefault("total", {"step": 0})

    class Mutant(Own):
        kind = GlobalCounter

    return loop_spec_of(Mutant, decayed=None)


@mutant("non-finite", twin=skipping, family="non_finite", source="flaxchat#6", observable=after_nan)
def gradients_that_are_not_finite_become_zero():
    """The update is made with zeros: momentum and weight decay move the weights, and counters advance."""

    class Mutant(Skipping):
        def accumulate(self, batches):
            self.train_mode()
            total = sum(self.targets(batch) for batch in batches)
            loss = sum(self.loss(batch) * self.weight(batch, batches, total) for batch in batches)
            loss.backward()
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_(0.0, 0.0, 0.0)
            self.update()
            self.advance()
            return loss.item()

    return loop_spec_of(Mutant)


@mutant("non-finite", twin=skipping, family="non_finite", source="OLMo-core#424", observable=after_nan)
def history_of_losses_contains_nan():
    """After one step that is not finite, each comparison with the history is false, and no update is made."""

    class Mutant(Skipping):
        def remember(self, loss, finite):
            self.losses.append(loss if finite else math.nan)

    return loop_spec_of(Mutant)


class Fused(Loop):
    """A fused AdamW and a loss scale. The schedule follows the scale."""

    init_scale = 1024.0

    def create_optimizer(self):
        return torch.optim.AdamW(self.groups(), lr=self.base_lr, betas=(0.9, 0.95), fused=True)

    def update(self):
        self.scaler.unscale_(self.optimizer)
        self.clip()
        before = self.scaler.get_scale()
        self.called = False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.was_updated(before):
            self.scheduler.step()
        self.zero_grad()

    def was_updated(self, before):
        return self.scaler.get_scale() >= before


def fused():
    return loop_spec_of(Fused)


@mutant("non-finite", twin=fused, family="non_finite", source="accelerate#4242", observable=after_nan)
def schedule_follows_the_call_of_a_fused_optimizer():
    """A scaler calls a fused optimizer also if it skips the update, and the schedule advances."""

    class Mutant(Fused):
        def create_scaler(self):
            step = self.optimizer.step

            def noted(*args, **kwargs):
                self.called = True
                return step(*args, **kwargs)

            self.optimizer.step = noted
            return super().create_scaler()

        def was_updated(self, before):
            return self.called

    return loop_spec_of(Mutant)


@mutant("76", twin=two_rates, family="schedule", source="DeepSpeed#7713", observable=all_rates)
def one_rate_for_all_groups():
    """The schedule writes one value into groups that were created with different rates."""

    class Mutant(TwoRates):
        def update(self):
            super().update()
            for group in self.optimizer.param_groups:
                group["lr"] = self.base_lr * self.factor(self.number + 1)

    return loop_spec_of(Mutant, learning_rate=None)


@mutant("loss-divisor", twin=counted, family="loss", source="trl#6024", observable=first_loss)
def divided_by_the_targets_of_two_updates():
    """The loss of an update is divided by the number of targets of the two updates that share a batch."""

    class Mutant(Counted):
        def count(self, batch):
            return batch["targets_of_two_updates"]

    return counted(Mutant)
