"""Replay: updates of one parameter that depend on another, and options that an optimizer ignores."""

import threading

import pytest
import torch
from torch import nn

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.optimizer_kinds import Contained, CountsTheLast, Lookahead, SlowWeights
from tests.zoo.loop import loop
from tests.zoo.runs import counter_of_the_last_parameter, momentum_is_cleared_in_each_step, own_momentum

# LBFGS has one state for all parameters, and SparseAdam needs sparse gradients.
KINDS = [
    each
    for name, each in sorted(vars(torch.optim).items())
    if isinstance(each, type) and name not in ("Optimizer", "LBFGS", "SparseAdam")
]
CHECKS = ["separate_updates", "option_effects"]


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


class Tiny(nn.Module):
    """Embedding and two linear layers, with biases if `bias`."""

    def __init__(self, bias=True):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden, self.head = nn.Linear(8, 8, bias=bias), nn.Linear(8, 11, bias=bias)

    def forward(self, ids):
        return self.head(self.hidden(self.embedding(ids)).tanh())


def loss_of(model, batch):
    logits = model(batch["input_ids"][:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def training_of(create_optimizer, model=Tiny, step=step):
    return TrainerSpec.from_function(step, model, lambda m: create_optimizer(m.parameters()))


def without_bias():
    return Tiny(bias=False)


def clipped_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.item()


def closure_step(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_optimizers_of_torch_pass(kind, check):
    model = without_bias if kind.__name__ == "Muon" else Tiny

    assert ask(training_of(kind, model), check).status == "passed"


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "create",
    [
        lambda params: torch.optim.AdamW(params, foreach=True),
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.AdamW(params, amsgrad=True, maximize=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
        lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
        lambda params: torch.optim.AdamW([{"params": [p], "lr": 1e-3} for p in params]),
        lambda params: Lookahead(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        lambda params: SlowWeights(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        lambda params: Contained(*(torch.optim.AdamW([p]) for p in params)),
        lambda params: [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in params],
    ],
    ids=[
        "adamw-foreach",
        "adamw-fused",
        "adamw-amsgrad",
        "sgd-nesterov",
        "sgd-foreach",
        "rmsprop-centered",
        "group-for-each",
        "lookahead",
        "slow-weights",
        "contained",
        "list",
    ],
)
def test_other_forms_pass(create, check):
    def step_all(model, optimizer, batch):
        loss = loss_of(model, batch)
        loss.backward()
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
            each.zero_grad()
        return loss.item()

    assert ask(training_of(create, step=step_all), check).status == "passed"


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("step", [clipped_step, closure_step])
def test_other_steps_pass(step, check):
    spec = training_of(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), step=step)

    assert ask(spec, check).status == "passed"


@pytest.mark.parametrize("check", CHECKS)
def test_loop_with_groups_and_schedule_passes(check):
    assert ask(loop(), check).status == "passed"


def test_bfloat16_passes():
    spec = training_of(torch.optim.AdamW, lambda: Tiny().bfloat16())

    assert ask(spec, "separate_updates").status == "passed"


def test_counter_of_another_parameter_fails():
    result = ask(counter_of_the_last_parameter(), "separate_updates")

    assert result.status == "failed"
    assert "than SharedCounter makes if it contains only this parameter" in result.meaning


def test_counter_that_is_wrong_after_frozen_steps_fails():
    result = ask(training_of(CountsTheLast), "separate_updates")

    assert result.status == "failed"
    # The last parameter of the group has its own counter. It is frozen in steps 2 and 3.
    assert result.meaning.startswith("4 of 5 parameters") and "update 3" in result.where


class CommonFactor(torch.optim.Optimizer):
    """Updates are divided by the norm of all gradients together, the first one only if `only_first`."""

    only_first = False

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained])
        factor = 1.0 if self.only_first and self.param_groups[0]["count"] else 1 / norm
        self.param_groups[0]["count"] += 1
        for p in trained:
            p.sub_(p.grad * factor, alpha=self.param_groups[0]["lr"])


class FirstFactor(CommonFactor):
    only_first = True


@pytest.mark.parametrize(
    "kind",
    [
        FirstFactor,
        CommonFactor,
    ],
)
def test_common_factor_of_all_updates_is_a_warning(kind):
    result = ask(training_of(kind), "separate_updates")

    assert result.status == "warned"
    assert f"{kind.__name__} couples the parameters or draws random numbers" in str(result)


def test_option_that_is_ignored_fails():
    result = ask(momentum_is_cleared_in_each_step(), "option_effects")

    assert (result.status, result.where) == ("failed", "Cleared: momentum")
    assert ask(own_momentum(), "option_effects").status == "passed"


def test_weight_decay_that_is_ignored_fails():
    class NoDecay(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            decays = [group["weight_decay"] for group in self.param_groups]
            for group in self.param_groups:
                group["weight_decay"] = 0.0
            super().step(closure)
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    result = ask(training_of(NoDecay), "option_effects")

    assert (result.status, result.where) == ("failed", "NoDecay: weight_decay")


class NeedsBoth(torch.optim.Optimizer):
    """Refuses to step one parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if len(trained) < 2:
            raise RuntimeError("needs two parameters")
        for p in trained:
            p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("check", CHECKS)
def test_optimizer_that_needs_several_parameters_is_not_replayed(check):
    result = ask(training_of(NeedsBoth), check)

    assert result.status == "not applicable"
    assert result.meaning == "needs NeedsBoth to run with one parameter: RuntimeError: needs two parameters"


def test_step_that_refuses_frozen_parameters_is_not_replayed():
    def strict(model, optimizer, batch):
        if not all(p.requires_grad for p in model.parameters()):
            raise ValueError("all must train")
        return step(model, optimizer, batch)

    result = ask(training_of(torch.optim.AdamW, step=strict), "separate_updates")

    assert result.status == "not applicable"
    assert result.meaning == "needs a step with frozen parameters: ValueError: all must train"


def test_step_that_raises_otherwise_is_an_error():
    class Failing(nn.Module):
        n_steps = 0

        def __init__(self):
            super().__init__()
            self.inner = Tiny()

        def forward(self, ids):
            self.n_steps += 1
            if self.n_steps == 5:
                raise ValueError("no more batches")
            return self.inner(ids)

    result = ask(training_of(torch.optim.AdamW, Failing), "separate_updates")

    assert (result.status, result.meaning) == ("error", "ValueError: no more batches")


def test_run_without_an_update_is_not_replayed():
    spec = training_of(torch.optim.AdamW, step=lambda model, optimizer, batch: 0.0)

    assert ask(spec, "separate_updates").meaning == "needs a torch optimizer whose step() is called"


@pytest.mark.parametrize("check", CHECKS)
def test_frozen_parameters_train_again_afterwards(check):
    spec = training_of(torch.optim.AdamW)
    runs = []
    build = spec.build
    object.__setattr__(spec, "build", lambda: runs.append(build()) or runs[-1])

    ask(spec, check)

    assert all(p.requires_grad for run in runs for p in run.model.parameters())


def test_update_that_is_not_finite_fails():
    class Overflows(torch.optim.SGD):
        """Divides by a bias correction that counts from 0."""

        count = 0

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad / (1 - torch.tensor(0.9) ** self.count), alpha=1e-3)
            self.count += 1

    result = ask(training_of(lambda params: Overflows(params, lr=0.1)), "separate_updates")

    assert result.status == "failed"
    assert result.meaning == "Overflows makes an update that is not finite from a finite gradient."


def test_counters_that_advance_pass():
    assert ask(loop(), "step_counters").status == "passed"
    assert ask(training_of(torch.optim.SGD), "step_counters").status == "not applicable"


def test_counter_that_does_not_advance_fails():
    class NeverCounts(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["step"].zero_()

    result = ask(training_of(NeverCounts), "step_counters")

    assert result.status == "failed"
    assert "is 0 after the first step and after 3 steps" in result.meaning


def test_clipping_inside_the_optimizer_is_a_warning():
    class Clips(torch.optim.AdamW):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
            super().step(closure)

    assert ask(training_of(Clips), "separate_updates").status == "warned"


def test_options_that_cannot_be_copied():
    class Locked(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1, momentum=0.9)
            self.parts = {"lock": threading.Lock()}

    for check in CHECKS:
        assert ask(training_of(Locked), check).status == "passed"


class Lion(torch.optim.Optimizer):
    """Update by the sign of an interpolation of momentum and gradient (arXiv:2302.06675)."""

    decoupled = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, (beta1, beta2), decay = self.state[p], group["betas"], group["weight_decay"]
                momentum = state.setdefault("exp_avg", torch.zeros_like(p))
                gradient = p.grad if self.decoupled else p.grad + decay * p
                p.mul_(1 - group["lr"] * decay if self.decoupled else 1.0)
                p.sub_(group["lr"] * momentum.lerp(gradient, 1 - beta1).sign())
                momentum.lerp_(gradient, 1 - beta2)


class CoupledLion(Lion):
    decoupled = False


class AfterUpdate(Lion):
    """AdamW, by its name, that decays the weight after the update."""

    def step(self, closure=None):
        groups = self.param_groups
        decays = [group["weight_decay"] for group in groups]
        for group in groups:
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
            for p in group["params"]:
                p.data.mul_(1 - group["lr"] * decay)


class MaskedDecay(AfterUpdate):
    """Lion that decays weights only where the decay and the gradient have the same sign."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - group["lr"] * group["weight_decay"] * (p.grad * p > 0))
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        Lion.step(self)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay


class RandomLion(Lion):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(1e-4 * torch.randn_like(p))


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (AfterUpdate, "passed"),
        (MaskedDecay, "passed"),
        (RandomLion, "passed"),
        (Lion, "passed"),
        (CoupledLion, "failed"),
        (torch.optim.AdamW, "passed"),
        (torch.optim.Adam, "not applicable"),
        (torch.optim.SGD, "not applicable"),
    ],
)
def test_decoupled_decay(kind, status):
    spec = training_of(lambda parameters: kind(parameters, lr=1e-2, weight_decay=0.1))
    assert ask(spec, "decoupled_decay").status == status


class OnCopies(torch.optim.Optimizer):
    """AdamW on copies of the parameters. The copy of a parameter without a gradient keeps its last one."""

    clears = False

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.copies = {p: nn.Parameter(p.detach().clone()) for p in self.param_groups[0]["params"]}
        self.inner = torch.optim.AdamW(self.copies.values(), lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for p, copy in self.copies.items():
            if p.grad is not None or self.clears:
                copy.grad = p.grad
        self.inner.step()
        for p, copy in self.copies.items():
            p.copy_(copy)


class OnClearedCopies(OnCopies):
    clears = True


def test_an_update_without_a_gradient():
    result = ask(training_of(lambda parameters: OnCopies(parameters, lr=1e-2)), "separate_updates")
    assert (result.status, result.where) == ("failed", "head.bias")
    assert "optimizer.step() changes them although they have no gradient" in result.meaning
    sound = training_of(lambda parameters: OnClearedCopies(parameters, lr=1e-2))
    assert ask(sound, "separate_updates").status == "passed"


def test_frozen_parameters_that_the_loop_changes_are_a_warning():
    def moves_the_bias(model, optimizer, batch):
        loss = step(model, optimizer, batch)
        with torch.no_grad():
            model.head.bias.add_(0.01)
        return loss

    result = ask(training_of(torch.optim.AdamW, step=moves_the_bias), "separate_updates")
    assert (result.status, result.where) == ("warned", "head.bias")


def test_frozen_parameters_that_the_step_trains_again_are_a_warning():
    def trains_all(model, optimizer, batch):
        model.requires_grad_(True)
        return step(model, optimizer, batch)

    assert ask(training_of(torch.optim.AdamW, step=trains_all), "separate_updates").status == "warned"


class TakesMissingAsZero(torch.optim.Optimizer):
    """Momentum, in which a missing gradient is zero, as in an optimizer with one flat buffer."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
            buffer.mul_(0.9).add_(torch.zeros_like(p) if p.grad is None else p.grad)
            p.sub_(buffer, alpha=self.param_groups[0]["lr"])


def test_missing_gradients_that_count_as_zero_are_a_warning():
    assert ask(training_of(TakesMissingAsZero), "separate_updates").status == "warned"


class OnTheSphere(torch.optim.AdamW):
    """Projects the rows of each matrix to length 1 in each step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.div_(p.norm(dim=-1, keepdim=True))


def test_projection_of_frozen_parameters_is_no_finding():
    spec = training_of(lambda params: OnTheSphere(params, lr=0.01, weight_decay=0.0), without_bias)
    assert ask(spec, "separate_updates").status == "passed"
