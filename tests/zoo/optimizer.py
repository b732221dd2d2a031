"""Bugs of optimizers: what they hold, what they decay, what arrives in the weights, and clipping."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.mutant import mutant


def weights(spec: TrainerSpec, steps: int = 3) -> dict:
    """After some steps."""
    run = spec.create()
    torch.manual_seed(0)
    for number in range(steps):
        run.step(spec.batch(seed=number))
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def moved(spec: TrainerSpec) -> dict:
    """How many elements of each parameter some steps move."""
    start = {name: p.detach().clone() for name, p in spec.create().model.named_parameters()}
    return {name: int((p != start[name]).sum()) for name, p in weights(spec).items()}


def update_gradients(spec: TrainerSpec) -> dict:
    """What the optimizer is given in the first step."""
    run, seen = spec.create(), {}
    named = list(run.model.named_parameters())
    run.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in named if p.grad is not None})
    )
    torch.manual_seed(0)
    run.step(spec.batch())
    return seen


@mutant("T11", twin=loop, family="step", source="discuss.pytorch.org/t/84911", observable=moved)
def almost_all_frozen():
    """All but the norms are frozen by a pattern that matches too much."""

    class Mutant(Loop):
        def create_model(self):
            model = super().create_model()
            for name, p in model.named_parameters():
                p.requires_grad_("norm" in name)
            return model

    return loop_spec_of(Mutant)


@mutant("T12", twin=loop, family="step", source="stackoverflow.com/q/60335387", observable=weights)
def zero_grad_missing():
    """Gradients of earlier steps stay and add up."""

    class Mutant(Loop):
        def zero_grad(self):
            pass

    return loop_spec_of(Mutant)


@mutant("T12", twin=loop, family="step", source="classic", observable=weights)
def zero_grad_of_the_first_step_alone():
    """Gradients are cleared once, after the first step: from the third one on they add up."""

    class Mutant(Loop):
        def zero_grad(self):
            if self.number == 0:
                super().zero_grad()

    return loop_spec_of(Mutant)


@mutant("optimizer-twice", twin=loop, family="step", source="classic", observable=weights)
def optimizer_stepped_twice():
    """The optimizer is stepped a second time with the same gradient."""

    class Mutant(Loop):
        def clip(self):
            super().clip()
            self.optimizer.step()

    return loop_spec_of(Mutant)


@mutant("T12", twin=loop, family="step", source="classic", observable=weights)
def zero_grad_of_the_decayed_alone():
    """Only the first group of the optimizer is cleared."""

    class Mutant(Loop):
        def zero_grad(self):
            for p in self.optimizer.param_groups[0]["params"]:
                p.grad = None

    return loop_spec_of(Mutant)


def frozen_embedding():
    """The clean twin in which the embedding does not train."""
    return loop_spec_of(_FrozenEmbedding, frozen=("embedding",))


class _Untied(GPT):
    tied = False


class _FrozenEmbedding(Loop):
    def create_model(self):
        model = _Untied()
        model.embedding.requires_grad_(False)
        return model


@mutant("T05", twin=frozen_embedding, family="step", source="mmpretrain#702", observable=moved)
def frozen_in_eval_mode_alone():
    """The embedding is declared frozen, and train() makes it trainable again."""

    class Thawed(_Untied):
        def train(self, mode=True):
            self.embedding.requires_grad_(mode)
            return super().train(mode)

    class Mutant(_FrozenEmbedding):
        def create_model(self):
            return Thawed()

    return loop_spec_of(Mutant, frozen=("embedding",))


@mutant("66", twin=loop, family="step", source="accelerate#2665", observable=moved)
def head_replaced_after_the_optimizer():
    """The head is replaced after the optimizer is created, so the optimizer trains the old head."""

    class Mutant(Loop):
        def __init__(self):
            super().__init__()
            self.model.head = nn.Linear(GPT.width, GPT.vocab_size, bias=False)

    return loop_spec_of(Mutant)


@mutant("66", twin=loop, family="step", source="accelerate#3256", observable=moved)
def optimizer_of_another_copy():
    """The model is built again after the optimizer is created, as if a wrapper copied it."""

    class Mutant(Loop):
        def __init__(self):
            super().__init__()
            self.model = self.create_model()

    return loop_spec_of(Mutant)


@mutant("66", twin=loop, family="step", source="pytorch#149205", observable=moved)
def last_layer_left_out():
    """The parameters of the last layer are in no group."""

    class Mutant(Loop):
        def groups(self):
            last = {id(p) for p in self.model.layers[-1].parameters()}
            return [
                {**group, "params": [p for p in group["params"] if id(p) not in last]}
                for group in super().groups()
            ]

    return loop_spec_of(Mutant)


@mutant("70", twin=loop, family="optimizer", source="minGPT#23", observable=weights)
def norms_decay():
    """Weight decay reaches the norms, which are pulled to zero."""

    class Mutant(Loop):
        weight_decay = 1.0

        def decays(self, name, p):
            return True

    return loop_spec_of(Mutant)


@mutant("70", twin=loop, family="optimizer", source="bigscience#262", observable=weights)
def groups_share_a_dict():
    """One dict of settings is used for both groups: what is set last holds for all."""

    class Mutant(Loop):
        def groups(self):
            decayed, kept = (group["params"] for group in super().groups())
            with_decay = without_decay = {"weight_decay": self.weight_decay}
            without_decay["weight_decay"] = 0.0
            return [{"params": decayed, **with_decay}, {"params": kept, **without_decay}]

    return loop_spec_of(Mutant)


class Masters(torch.optim.AdamW):
    """AdamW over float32 copies of narrow weights."""

    narrow = (torch.bfloat16, torch.float16)

    def __init__(self, groups, **options):
        self.copies = {}
        groups = [{**group, "params": list(group["params"])} for group in groups]
        for group in groups:
            for p in group["params"]:
                if p.dtype in self.narrow:
                    self.copies[p] = p.detach().float()
        super().__init__(groups, **options)
        self.inner = torch.optim.AdamW(
            [{**group, "params": [self.copies.get(p, p) for p in group["params"]]} for group in groups],
            **options,
        )

    def state_dict(self):
        masters = [master.clone() for master in self.copies.values()]
        return {**super().state_dict(), "inner": self.inner.state_dict(), "masters": masters}

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.inner.load_state_dict(state_dict["inner"])
        with torch.no_grad():
            for master, saved in zip(self.copies.values(), state_dict["masters"], strict=True):
                master.copy_(saved)

    def step(self, closure=None):
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        for p, master in self.copies.items():
            master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        with torch.no_grad():
            for p, master in self.copies.items():
                p.copy_(master)


class _Narrow(Loop):
    base_lr = 1e-3

    def create_model(self):
        return super().create_model().bfloat16()

    def create_optimizer(self):
        return Masters(self.groups(), lr=self.base_lr, betas=(0.9, 0.95))


def narrow_loop():
    """The clean twin in bfloat16, with float32 masters."""
    return loop_spec_of(_Narrow)


def masters(spec: TrainerSpec) -> dict:
    """What sixteen steps do to the norms, in which small updates have to add up."""
    return {name: p for name, p in weights(spec, steps=16).items() if "norm" in name}


@mutant("67", twin=narrow_loop, family="optimizer", source="torchtune#2254", observable=masters)
def updates_rounded_away():
    """Weights are pure bfloat16: an update of a norm is smaller than the next number."""

    class Mutant(_Narrow):
        create_optimizer = Loop.create_optimizer

    return loop_spec_of(Mutant)


@mutant("69", twin=narrow_loop, family="optimizer", source="apex#1728", observable=masters)
def masters_of_float16_alone():
    """Masters are asked for, and kept of float16 weights only."""

    class Half(Masters):
        narrow = (torch.float16,)

    class Mutant(_Narrow):
        def create_optimizer(self):
            return Half(self.groups(), lr=self.base_lr, betas=(0.9, 0.95))

    return loop_spec_of(Mutant)


class _Strided(Loop):
    """Some weights are transposed views, as of layers made from another framework's."""

    def create_model(self):
        model = super().create_model()
        for layer in model.layers:
            p = layer["q"].weight
            p.data = p.data.t().contiguous().t()
        return model


def strided_loop():
    """The clean twin with transposed weights."""
    return loop_spec_of(_Strided)


class ContiguousKernels(torch.optim.AdamW):
    """A kernel that takes contiguous memory: of any other it makes a copy, and updates that."""

    def step(self, closure=None):
        kept = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not p.is_contiguous():
                    kept[p] = p.detach().clone()
        super().step()
        with torch.no_grad():
            for p, value in kept.items():
                p.copy_(value)
                self.state[p]["exp_avg"].zero_()
                self.state[p]["exp_avg_sq"].zero_()


@mutant(
    "72",
    twin=strided_loop,
    family=("optimizer", "step"),
    source="elanapearl.github.io 2025, pytorch MPS addcmul_",
    observable=moved,
)
def update_lost_in_a_copy():
    """In-place operations of the optimizer do nothing to tensors that are not contiguous."""

    class Mutant(_Strided):
        def create_optimizer(self):
            return ContiguousKernels(self.groups(), lr=self.base_lr, betas=(0.9, 0.95))

    return loop_spec_of(Mutant)


@mutant(
    "72", twin=loop, family="optimizer", source="pytorch MPS addcmul_", observable=lambda spec: _strides(spec)
)
def update_lost_where_strided():
    """The same kernels where all weights are contiguous: only the layout tells."""

    class Mutant(Loop):
        def create_optimizer(self):
            return ContiguousKernels(self.groups(), lr=self.base_lr, betas=(0.9, 0.95))

    return loop_spec_of(Mutant)


def _strides(spec):
    run = spec.create()
    p = run.model.layers[0]["q"].weight
    p.data = p.data.t().contiguous().t()
    before = p.detach().clone()
    run.step(spec.batch())
    return bool(torch.equal(before, p))


class _LowLimit(Loop):
    max_norm = 0.1


def low_limit():
    """The clean twin whose gradients are clipped."""
    return loop_spec_of(_LowLimit)


@mutant("73", twin=low_limit, family="clipping", source="AReaL#335", observable=update_gradients)
def parameters_consumed_before_clipping():
    """parameters() is a generator, used up when the optimizer was made: clipping gets nothing."""

    class Mutant(_LowLimit):
        def __init__(self):
            super().__init__()
            self.parameters = self.model.parameters()
            assert list(self.parameters)

        def clip(self):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)

    return loop_spec_of(Mutant)


@mutant("73", twin=low_limit, family="clipping", source="classic", observable=update_gradients)
def each_group_clipped_alone():
    """Each group of the optimizer is clipped to the whole limit."""

    class Mutant(_LowLimit):
        def clip(self):
            for group in self.optimizer.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], self.max_norm)

    return loop_spec_of(Mutant)


@mutant("73", twin=low_limit, family="clipping", source="classic", observable=update_gradients)
def each_tensor_clipped_alone():
    """Each tensor is clipped to the whole limit, which bends the gradient and exceeds it."""

    class Mutant(_LowLimit):
        def clip(self):
            for p in self.model.parameters():
                torch.nn.utils.clip_grad_norm_([p], self.max_norm)

    return loop_spec_of(Mutant)


def window_gradients(spec: TrainerSpec) -> dict:
    """What the optimizer is given of three micro-batches."""
    run, seen = spec.create(), {}
    named = list(run.model.named_parameters())
    run.optimizer.register_step_pre_hook(lambda *_: seen.update({name: p.grad.clone() for name, p in named}))
    torch.manual_seed(0)
    run.accumulate([spec.batch(seed=number) for number in range(3)])
    return seen


@mutant("73", twin=low_limit, family="clipping", source="classic", observable=window_gradients)
def each_micro_batch_clipped():
    """What has been accumulated is clipped after each micro-batch, and at the end."""

    class Mutant(_LowLimit):
        def backward(self, loss):
            super().backward(loss)
            self.clip()

    return loop_spec_of(Mutant)


class _HighLimit(Loop):
    max_norm = 100.0


def high_limit():
    """The clean twin whose gradients are seldom clipped."""
    return loop_spec_of(_HighLimit)


@mutant("73", twin=high_limit, family="clipping", source="classic", observable=update_gradients)
def gradient_normalised():
    """Every gradient is stretched to the limit: the factor is not held below 1."""

    class Mutant(_HighLimit):
        def clip(self):
            gradients = [p.grad for p in self.model.parameters()]
            factor = self.max_norm / torch.nn.utils.get_total_norm(gradients)
            for g in gradients:
                g.mul_(factor)

    return loop_spec_of(Mutant)


class _Scaled(_LowLimit):
    init_scale = 2.0**10


def scaled_loop():
    """The clean twin with a gradient scaler."""
    return loop_spec_of(_Scaled)


@mutant("74", twin=scaled_loop, family="clipping", source="Lightning#9330", observable=update_gradients)
def clipped_before_it_is_unscaled():
    """Clipping comes before unscale_: gradients are a thousand times too small then."""

    class Mutant(_Scaled):
        def update(self):
            self.clip()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.zero_grad()

    return loop_spec_of(Mutant)


def weights_after_overflow(spec: TrainerSpec) -> int:
    """How many are not finite after a second step whose gradient is not."""
    run = spec.create()
    torch.manual_seed(0)
    run.step(spec.batch())
    first = next(run.model.parameters())
    first.register_hook(lambda gradient: gradient * torch.inf)
    run.step(spec.batch())
    return sum(int((~p.isfinite()).sum()) for p in run.model.parameters())


@mutant("74", twin=scaled_loop, family="non_finite", source="classic", observable=weights_after_overflow)
def optimizer_stepped_past_the_scaler():
    """optimizer.step() replaces scaler.step(optimizer): updates with overflowed gradients are not skipped."""

    class Mutant(_Scaled):
        def update(self):
            self.scaler.unscale_(self.optimizer)
            self.clip()
            self.optimizer.step()
            self.scaler.update()
            self.scheduler.step()
            self.zero_grad()

    return loop_spec_of(Mutant)
