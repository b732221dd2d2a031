"""Bugs in sequences of operations, in one parameter beside others, and after a step without an update."""

from __future__ import annotations

import copy
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.checkpoint import Keeping, keeping
from tests.zoo.distributed import Alone, Replicas
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.mutant import mutant
from tests.zoo.optimizer import update_gradients


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


class Ema(Loop):
    """An exponential moving average of the weights.

    Attributes:
        decay: share of the average that an update keeps.
        every: number of steps for each update of the average.
        dtype: dtype of the average. None: that of the model.
    """

    decay, every, dtype = 0.9, 1, None

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        if self.dtype is not None:
            self.average.to(self.dtype)

    def update(self):
        super().update()
        if (self.number + 1) % self.every == 0:
            self.average_weights()

    @torch.no_grad()
    def average_weights(self):
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        for name, mean in self.averaged():
            mean.lerp_(weights[name].to(mean.dtype), 1 - self.decay)

    def averaged(self):
        return self.average.named_parameters()

    def state(self):
        return {**super().state(), "average": self.average.state_dict()}

    def restore(self, state):
        super().restore(state)
        self.average.load_state_dict(state["average"])


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
    """AdamW with a counter for each parameter."""

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
                p.mul_(1 - group["lr"] * group["weight_decay"])
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


def ema():
    return loop_spec_of(Ema)


def average_after_steps(spec: TrainerSpec) -> list:
    """Weights of the average after six steps."""
    run = spec.create()
    torch.manual_seed(0)
    for number in range(6):
        run.step(spec.batch(seed=number))
    return [p.double() for p in run.average.parameters()]


@mutant("average", twin=ema, family="average", source="classic", observable=average_after_steps)
def average_skips_layers():
    """The average contains the first layer as it was when the run began."""

    class Mutant(Ema):
        def averaged(self):
            return [(name, p) for name, p in super().averaged() if not name.startswith("layers.0.")]

    return loop_spec_of(Mutant)


@mutant("average", twin=ema, family="average", source="classic", observable=average_after_steps)
def average_of_tied_weights_moves_twice():
    """The embedding and the head are one tensor, and an update moves it once for each name."""

    class Mutant(Ema):
        def averaged(self):
            return self.average.named_parameters(remove_duplicate=False)

    return loop_spec_of(Mutant)


@mutant("average", twin=ema, family="average", source="classic", observable=average_after_steps)
def average_in_bfloat16():
    """The average is in bfloat16, and most of its updates are lost in rounding."""

    class Mutant(Ema):
        decay, dtype = 0.999, torch.bfloat16

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
            last = [each for each in group["params"] if each.grad is not None][-1]
            return self.state[p] if p is last else {"step": self.state[last].get("step", 0)}

    class Mutant(Own):
        kind = SharedCounter

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
        def create_optimizer(self):
            optimizer = super().create_optimizer()
            optimizer.register_step_post_hook(lambda *_: setattr(self, "called", True))
            return optimizer

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


class OwnMomentum(torch.optim.Optimizer):
    """SGD with momentum and decoupled weight decay."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": 0.0})

    def buffer(self, p):
        state = self.state[p]
        return state.setdefault("momentum", torch.zeros_like(p))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    momentum = self.buffer(p).mul_(group["momentum"]).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"])


class OwnSGD(Own):
    """With an SGD of its own."""

    kind = OwnMomentum


def own_momentum():
    return loop_spec_of(OwnSGD, decayed=None)


@mutant("replay", twin=own_momentum, family="replay", source="pytorch_optimizer#516", observable=paused)
def momentum_is_cleared_in_each_step():
    """Each step sets the momentum to zero before it uses it: the optimizer is plain SGD."""

    class Cleared(OwnMomentum):
        def buffer(self, p):
            return super().buffer(p).zero_()

    class Mutant(OwnSGD):
        kind = Cleared

    return loop_spec_of(Mutant, decayed=None)


class OwnLion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675), which decays the weights themselves."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum, (beta1, beta2) = (
                        self.state[p].setdefault("m", p.new_zeros(p.shape)),
                        group["betas"],
                    )
                    gradient = self.decayed(p, group)
                    p.sub_(momentum.lerp(gradient, 1 - beta1).sign(), alpha=group["lr"])
                    momentum.lerp_(gradient, 1 - beta2)

    def decayed(self, p, group):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        return p.grad


class WithLion(Loop):
    """Trains with a Lion of its own."""

    kind = OwnLion

    def create_optimizer(self):
        return self.kind(self.groups(), lr=self.base_lr)


def own_lion():
    return loop_spec_of(WithLion)


@mutant("replay", twin=own_lion, family="replay", source="bitsandbytes#1992", observable=paused)
def lion_decays_the_gradient():
    """The weight decay of Lion is added to the gradient, and passes through momentum and sign."""

    class Coupled(OwnLion):
        def decayed(self, p, group):
            return p.grad + group["weight_decay"] * p

    class Mutant(WithLion):
        kind = Coupled

    return loop_spec_of(Mutant)


class RecomputedGPT(GPT):
    """The activations of each MLP are computed again in the backward pass."""

    same_masks = True

    def mlp(self, layer, x):
        if not torch.is_grad_enabled():
            return self.dropped_mlp(layer, x)
        return checkpoint(self.dropped_mlp, layer, x, use_reentrant=False, preserve_rng_state=self.same_masks)

    def dropped_mlp(self, layer, x):
        return self.drop(super().mlp(layer, x))


class Recomputing(Loop):
    """With recomputation."""

    def create_model(self):
        return RecomputedGPT()


def recomputing():
    return loop_spec_of(Recomputing)


@mutant(
    "loss-derivative", twin=recomputing, family="loss", source="OLMo-core#828", observable=update_gradients
)
def recomputation_draws_other_dropout_masks():
    """The backward pass computes activations with other dropout masks than the forward pass."""

    class OtherMasks(RecomputedGPT):
        same_masks = False

    class Mutant(Recomputing):
        def create_model(self):
            return OtherMasks()

    return loop_spec_of(Mutant)


class Windows(Loop):
    """Updates of two micro-batches. The last window of an epoch has one."""

    n_rows, n_epochs, window = 20, 3, 2

    def fit(self):
        self.train_mode()
        for number in range(self.n_epochs):
            batches = list(self.epoch(number))
            for index, batch in enumerate(batches):
                (self.loss(batch) / self.window).backward()
                if (index + 1) % self.window == 0 or self.is_flushed(index, batches):
                    self.update()

    def is_flushed(self, index, batches):
        return index + 1 == len(batches)


def windows():
    return loop_spec_of(Windows, total_steps=None)


def window_sizes(spec: TrainerSpec) -> list:
    """Number of micro-batches of each update of a training."""
    run, sizes = spec.create(), [0]
    run.model.norm.weight.register_hook(lambda g: sizes.append(sizes.pop() + 1))
    run.optimizer.register_step_post_hook(lambda *_: sizes.append(0))
    torch.manual_seed(0)
    run.fit()
    return sizes


@mutant("windows", twin=windows, family="schedule", source="torchtune#2745", observable=window_sizes)
def window_crosses_the_end_of_an_epoch():
    """The gradients of the incomplete window of an epoch stay, and the next window adds to them."""

    class Mutant(Windows):
        def is_flushed(self, index, batches):
            return False

    return loop_spec_of(Mutant, total_steps=None)


def first_of_a_new_run(spec: TrainerSpec) -> bool:
    """True if a checkpoint with a low number stays in a folder with high numbers."""
    run = spec.create()
    with TemporaryDirectory() as folder:
        for step in range(500, 1000, 100):
            run.checkpoint(Path(folder), step)
        return spec.create().checkpoint(Path(folder), 100).exists()


@mutant("80", twin=keeping, family="checkpoint", source="cosmos-rl#232", observable=first_of_a_new_run)
def folder_of_an_earlier_run_removes_the_new_checkpoint():
    """Only the highest numbers are kept, so the first checkpoint of a new run is removed at once."""

    class Mutant(Keeping):
        def checkpoint(self, folder, step):
            path = folder / f"step-{step}"
            path.mkdir()
            self.save(path)
            for old in self.kept(folder)[: -self.keep_last]:
                shutil.rmtree(old)
            return path

    return loop_spec_of(Mutant)


def second_epoch(spec: TrainerSpec) -> list:
    """Ids of the batches that follow a resume in the second epoch."""
    run = spec.create()
    for batch in list(run.epoch(0)):
        run.step(batch)
    with TemporaryDirectory() as folder:
        run.save(folder)
        other = spec.create()
        other.load(folder)
    epoch, start = other.position()
    return [batch["input_ids"] for batch in list(other.epoch(epoch))[start:]]


@mutant("ckpt-epoch", twin=loop, family="sequence", source="ms-swift#10050", observable=second_epoch)
def resumed_epoch_has_the_order_of_the_first():
    """After a resume in the second epoch, its remaining batches have the order of the first epoch."""

    class Mutant(Loop):
        resumed = None

        def restore(self, state):
            super().restore(state)
            self.resumed = self.epoch_number

        def order(self, number):
            return super().order(0 if number == self.resumed else number)

    return loop_spec_of(Mutant)


class Divided(Replicas):
    """Each rank reads its part of an epoch and evaluates its part of a batch. Sums are over all ranks."""

    n_rows = 96

    def order(self, number):
        return super().order(self.seed_of(number))[self.ranks.rank :: 2]

    def seed_of(self, number):
        return number

    @torch.no_grad()
    def evaluate(self, batches):
        total = torch.zeros(2)
        for batch in batches:
            n = self.targets(batch)
            total += torch.tensor([self.loss(batch).item() * n, float(n)])
        self.all_reduce(total)
        return (total[0] / total[1]).item() * self.factor_of_the_loss

    factor_of_the_loss = 1


class Undivided(Alone):
    """The same in one process."""

    n_rows = Divided.n_rows


def divided(build=Divided):
    return replace(loop_spec_of(Undivided), name=build.__name__, distributed=build)


class EqualRanks:
    """Stands for one of two ranks with equal data, without processes."""

    drawing = nullcontext

    def __init__(self, rank):
        self.rank = rank

    def all_reduce(self, x):
        x.mul_(2)

    def broadcast(self, x):
        pass


def rows_of_ranks(spec: TrainerSpec) -> list:
    """Ids of the rows of an epoch, for both ranks."""
    runs = [spec.distributed(EqualRanks(rank)) for rank in (0, 1)]
    return [sorted(row.tolist() for batch in run.epoch(0) for row in batch["input_ids"]) for run in runs]


def loss_of_ranks(spec: TrainerSpec) -> float:
    torch.manual_seed(0)
    return spec.distributed(EqualRanks(0)).evaluate([spec.batch()])


class _SeedOfTheRank(Divided):
    def seed_of(self, number):
        return number + 10 * self.ranks.rank


@mutant("dist-data", twin=divided, family="distributed", source="LongLive#71", observable=rows_of_ranks)
def ranks_divide_different_orders():
    """Each rank draws its own order and takes its part of it: examples are read twice, others never."""
    return divided(_SeedOfTheRank)


class _TimesTheRanks(Divided):
    factor_of_the_loss = 2


@mutant(
    "dist-evaluation",
    twin=divided,
    family="distributed",
    source="transformers#35078",
    observable=loss_of_ranks,
)
def evaluation_is_multiplied_by_the_ranks():
    """The factor for averaged gradients is applied to the evaluation loss too."""
    return divided(_TimesTheRanks)
