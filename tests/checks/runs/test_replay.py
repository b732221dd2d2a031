"""Replay: updates of one parameter, repeated by a new optimizer that holds only this parameter."""

import math

import pytest
import torch
from torch import nn

from stackwise.checks.runs.replay import options_without_effect, recorded, replayed
from stackwise.subject.trainer_adapter import JoinedRun
from tests.optimizer_kinds import Contained, CountsTheLast, Lookahead


class Run:
    """Run whose batch is the gradient of all parameters. None: no gradient of the last parameter."""

    def __init__(self, create_optimizer, n=2):
        self.model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(n)))
        for number, p in enumerate(self.model.parameters()):
            nn.init.constant_(p, number + 1.0)
        self.optimizer = create_optimizer(self.model.parameters())

    def step(self, batch):
        for p in self.model.parameters():
            p.grad = torch.full_like(p, batch)
        self.optimizer.step()


class Freezing(Run):
    """Run whose last parameter has no gradient in the second step."""

    number = 0

    def step(self, batch):
        *first, last = self.model.parameters()
        for p in first:
            p.grad = torch.full_like(p, batch)
        last.grad = None if self.number == 1 else torch.full_like(last, batch)
        self.number += 1
        self.optimizer.step()


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


def sgd(params, **options):
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})


def recordings_of(run, n_steps=5):
    with recorded(run) as recordings:
        for number in range(n_steps):
            run.step(1.0 + number)
    return recordings


def test_recording_contains_each_change():
    run = Run(sgd)
    before = run.model[0].weight.detach().clone()

    [recording] = recordings_of(run, 2)

    assert list(recording.changes) == ["0.weight", "1.weight"]
    first, second = recording.changes["0.weight"]
    assert torch.equal(first.before, before) and torch.equal(first.after, second.before)
    assert torch.equal(second.after, run.model[0].weight)
    assert [each.gradient[0, 0].item() for each in (first, second)] == [1.0, 2.0]
    assert (first.options["lr"], first.options["momentum"]) == (0.1, 0.9)


def test_recording_ends_with_its_context():
    run = Run(sgd)
    [recording] = recordings_of(run, 2)

    run.step(1.0)

    assert len(recording.changes["0.weight"]) == 2
    assert not run.optimizer._optimizer_step_pre_hooks and not run.optimizer._optimizer_step_post_hooks


def test_options_of_each_step_are_recorded():
    run = Run(sgd)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)

    with recorded(run) as [recording]:
        for _ in range(3):
            run.step(1.0)
            scheduler.step()

    assert [each.options["lr"] for each in recording.changes["0.weight"]] == [0.1, 0.05, 0.025]
    assert max(each.gap for each in replayed(recording)) < 1e-6


@pytest.mark.parametrize("create", [adam, sgd], ids=["adam", "sgd"])
@pytest.mark.parametrize("kind", [Run, Freezing])
def test_separate_updates_are_equal(kind, create):
    [recording] = recordings_of(kind(create))

    found = replayed(recording)

    assert [each.name for each in found] == ["0.weight", "1.weight"]
    assert all(each.gap < 1e-5 for each in found)


def test_counter_of_another_parameter_is_found():
    [recording] = recordings_of(Freezing(CountsTheLast))

    first, last = replayed(recording)

    assert first.gap == pytest.approx((1 - 0.9**2) / (1 - 0.9) - 1, rel=1e-3)
    assert first.update == 1
    assert first.length == pytest.approx(1 + first.gap, rel=1e-3)
    assert last.gap < 1e-5


def test_update_without_a_gradient_is_found():
    class Drifts(torch.optim.SGD):
        """Moves parameters without a gradient."""

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for p in group["params"][1:]:
                    p.add_(0.5)

    [recording] = recordings_of(Freezing(lambda params: Drifts(params, lr=0.1)))

    first, last = replayed(recording)

    assert first.gap == 0.0
    assert (last.gap, last.update, last.length) == (math.inf, 1, math.inf)


def test_change_within_rounding_is_equal():
    class Noisy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 + 2 * torch.finfo(p.dtype).eps)

    [recording] = recordings_of(Run(lambda params: Noisy(params, lr=1e-9)))

    assert all(each.gap == 0.0 for each in replayed(recording))


def test_only_inner_optimizers_of_a_wrapper_are_recorded():
    run = Run(lambda params: Lookahead(sgd(params)))
    assert [each.kind for each in recordings_of(run)] == ["SGD"]

    run = Run(lambda params: Contained(*(sgd([p]) for p in params)))
    recordings = recordings_of(run)
    assert sorted(list(each.changes) for each in recordings) == [["0.weight"], ["1.weight"]]
    assert all(each.gap < 1e-5 for recording in recordings for each in replayed(recording))


def test_several_optimizers_are_recorded_separately():
    run = Run(lambda params: [sgd([p]) for p in params])

    def step(batch):
        for p in run.model.parameters():
            p.grad = torch.full_like(p, batch)
        for optimizer in run.optimizer:
            optimizer.step()

    run.step = step

    assert sorted(list(each.changes) for each in recordings_of(JoinedRun(run))) == [
        ["0.weight"],
        ["1.weight"],
    ]


def test_parameter_outside_the_model_has_no_name():
    run = Run(lambda params: sgd([*params, nn.Parameter(torch.ones(2))]))

    [recording] = recordings_of(run)

    assert list(recording.changes)[-1] == "parameter 3 outside the model"


def test_step_of_a_parent_class_is_part_of_the_update():
    class Child(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    [recording] = recordings_of(Run(lambda params: Child(params, lr=0.1)), 3)

    assert len(recording.changes["0.weight"]) == 3
    assert all(each.gap == 0.0 for each in replayed(recording))


def test_gradients_of_a_closure_are_recorded():
    run = Run(sgd)

    def step(batch):
        def closure():
            for p in run.model.parameters():
                p.grad = torch.full_like(p, batch)
            return 0.0

        run.optimizer.zero_grad()
        run.optimizer.step(closure)

    run.step = step

    [recording] = recordings_of(run, 2)

    assert [each.gradient[0, 0].item() for each in recording.changes["0.weight"]] == [1.0, 2.0]
    assert all(each.gap < 1e-6 for each in replayed(recording))


def test_scale_of_a_fused_optimizer_is_divided():
    run = Run(lambda params: torch.optim.AdamW(params, lr=0.1, fused=True))

    def step(batch):
        for p in run.model.parameters():
            p.grad = torch.full_like(p, 8.0 * batch)
        run.optimizer.grad_scale, run.optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(batch == 2))
        run.optimizer.step()
        del run.optimizer.grad_scale, run.optimizer.found_inf

    run.step = step

    [recording] = recordings_of(run, 3)

    first, skipped, third = recording.changes["0.weight"]
    assert first.gradient[0, 0].item() == 1.0 and third.gradient[0, 0].item() == 3.0
    assert skipped.gradient is None and torch.equal(skipped.before, skipped.after)
    assert all(each.gap < 1e-4 for each in replayed(recording))


@pytest.mark.parametrize(
    ("create", "ignored"),
    [
        (sgd, []),
        (lambda params: sgd(params, weight_decay=0.1), []),
        (lambda params: sgd(params, momentum=0.0), []),
        (lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-4), []),
        (lambda params: torch.optim.RMSprop(params, momentum=0.5), []),
        (lambda params: _Ignoring(params, momentum=0.9), ["momentum"]),
        (lambda params: _Ignoring(params, betas=(0.9, 0.99), weight_decay=0.1), ["betas", "weight_decay"]),
        (lambda params: _Ignoring(params, momentum=0.0, weight_decay=0.0, betas=(0.0, 0.9)), []),
    ],
    ids=["momentum", "decay", "no-momentum", "small-decay", "rmsprop", "ignored", "two-ignored", "zero"],
)
def test_options_without_effect(create, ignored):
    [recording] = recordings_of(Run(create))

    assert options_without_effect(recording) == ignored


class _Ignoring(torch.optim.Optimizer):
    """Gradient descent that reads no option except the learning rate."""

    def __init__(self, params, **options):
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize(("n_steps", "ignored"), [(2, []), (3, ["momentum"])])
def test_options_need_three_updates(n_steps, ignored):
    [recording] = recordings_of(Run(lambda params: _Ignoring(params, momentum=0.9)), n_steps)

    assert options_without_effect(recording) == ignored


class _OwnAttributes(torch.optim.Optimizer):
    """Reads its options from attributes, and counts in one of them for all parameters if `shares`."""

    shares = False

    def __init__(self, params, lr=0.1, eps=1e-8):
        super().__init__(params, {"lr": lr})
        self.eps, self.counts = eps, [0, 0]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    place = 0 if self.shares else place
                    self.counts[place] += 1
                    p.sub_(p.grad / (p.grad.abs() + self.eps), alpha=group["lr"] / self.counts[place])


@pytest.mark.parametrize("shares", [False, True])
def test_optimizer_with_its_own_attributes_is_replayed(shares):
    kind = type("Own", (_OwnAttributes,), {"shares": shares})

    found = replayed(recordings_of(Run(kind))[0])

    assert (max(each.gap for each in found) > 0.1) == shares


def test_optimizer_with_tensors_in_attributes_is_not_replayed():
    class Buffered(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.buffer = torch.zeros(3, 3)

    [recording] = recordings_of(Run(Buffered))

    with pytest.raises(ValueError, match="tensors in the attribute buffer"):
        replayed(recording)


def test_update_that_is_not_finite_is_found():
    class Divides(torch.optim.SGD):
        """Divides the second update by 0."""

        n_steps = 0

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            self.n_steps += 1
            if self.n_steps == 2:
                self.param_groups[0]["params"][0].mul_(math.nan)

    [recording] = recordings_of(Run(lambda params: Divides(params, lr=0.1), n=1), 2)

    [found] = replayed(recording)

    assert (found.gap, found.update) == (math.inf, 1)
