"""Step: what one call changes, and what it leaves for the next."""

import pytest
import torch
from torch import nn

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, bare_step, loop, loop_spec_of


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


def test_sound():
    for check in ("parameters_change", "fresh_gradients"):
        result = ask(loop(), check)
        assert result.status == "passed" and result.value <= result.limit, result


def test_gradients_of_two_batches_add_up():
    class Leaky(Loop):
        max_norm = 1e9

        def zero_grad(self):
            pass

    result = ask(loop_spec_of(Leaky), "fresh_gradients")
    assert result.status == "failed" and result.where in dict(GPT().named_parameters())
    # The same by hand: the first batch's gradient, over the second's.
    run, spec = Leaky(), loop_spec_of(Leaky)
    run = spec.create()
    run.model.dropout = 0.0
    first, second = spec.batch(), spec.batch(seed=7919)
    run.step(first)
    stale = [p.grad.clone() for p in run.model.parameters()]
    run.loss(second).backward()
    fresh = [p.grad - s for p, s in zip(run.model.parameters(), stale, strict=True)]
    exact = torch.cat([s.flatten() for s in stale]).norm() / torch.cat([f.flatten() for f in fresh]).norm()
    assert result.value == pytest.approx(exact.item(), rel=0.2)  # dropout differs


def test_gradients_cleared_after_the_first_step_alone():
    class Once(Loop):
        def zero_grad(self):
            if self.number == 0:
                super().zero_grad()

    result = ask(loop_spec_of(Once), "fresh_gradients")
    assert result.status == "failed" and "gradient of step 3" in result.meaning


def test_stale_gradients_of_idle_optimizers_are_ignored():
    """TD3 updates the actor in every second step, and clears its gradients only then."""

    class Delayed:
        def __init__(self):
            self.model, self.number = GPT(), 0
            names = dict(self.model.named_parameters())
            actor = [p for name, p in names.items() if "layers.0" in name]
            critic = [p for name, p in names.items() if "layers.0" not in name]
            self.optimizer = [torch.optim.SGD(each, lr=0.1) for each in (critic, actor)]

        def step(self, batch):
            chosen = self.optimizer[: 1 + (self.number + 1) % 2]
            self.number += 1
            for optimizer in chosen:
                optimizer.zero_grad()
            loss = self.model(**batch).loss
            loss.backward()
            for optimizer in chosen:
                optimizer.step()
            return loss.item()

    result = ask(Delayed, "fresh_gradients")
    assert result.status == "passed", result


def test_updates_of_a_step():
    class Again(Loop):
        def clip(self):
            super().clip()
            self.optimizer.step()

    result = ask(loop_spec_of(Again), "fresh_gradients")
    assert (result.status, result.value, result.limit) == ("failed", 1, 0)
    assert "repeats the previous gradient" in result.meaning


def test_a_step_that_clears_first():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    assert ask(TrainerSpec.from_function(step, GPT), "fresh_gradients").status == "passed"


def test_a_step_with_a_closure():
    def step(model, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            return loss

        return optimizer.step(closure)

    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    spec = TrainerSpec.from_function(step, GPT, lbfgs)
    assert ask(spec, "fresh_gradients").status == "passed"
    assert ask(spec, "parameters_change").status == "passed"


def test_frozen_parameters():
    class Frozen(Loop):
        def create_model(self):
            model = GPT()
            model.layers[0].requires_grad_(False)
            return model

    assert ask(loop_spec_of(Frozen, frozen=("layers.0",)), "parameters_change").status == "passed"
    assert ask(loop_spec_of(Frozen, frozen=None), "parameters_change").status == "passed"
    result = ask(loop_spec_of(Frozen), "parameters_change")
    assert (result.status, result.value) == ("failed", 9)
    assert result.where.startswith("layers.0.") and "not declared frozen" in result.meaning
    # Declared frozen, and trained all the same.
    result = ask(loop_spec_of(Loop, frozen=("layers.1.q",)), "parameters_change")
    assert (result.status, result.where) == ("failed", "layers.1.q.weight")
    assert "Frozen parameters that changed" in result.meaning


def test_a_teacher_that_follows_the_model_is_not_frozen():
    class Student(GPT):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def step(model, optimizer, batch):
        loss = bare_step(model, optimizer, batch)
        with torch.no_grad():
            model.teacher.weight.mul_(0.9)
        return loss

    assert ask(TrainerSpec.from_function(step, Student), "parameters_change").status == "passed"


def test_parameters_without_a_gradient_are_told():
    class Idle(GPT):
        def __init__(self):
            super().__init__()
            self.pooler = nn.Linear(4, 4)

    result = ask(TrainerSpec.from_function(bare_step, Idle), "parameters_change")
    assert result.status == "passed" and "Trainable parameters without a gradient: 2" in result.meaning


def test_learning_rate_zero_changes_nothing():
    spec = TrainerSpec.from_function(
        bare_step, GPT, lambda model: torch.optim.SGD(model.parameters(), lr=0.0)
    )
    result = ask(spec, "parameters_change")
    assert result.status == "warned" and "learning rate" in result.meaning


def test_a_step_that_never_updates():
    spec = TrainerSpec.from_function(lambda model, optimizer, batch: 0.0, GPT)
    for check in ("parameters_change", "fresh_gradients"):
        result = ask(spec, check)
        assert result.status == "not applicable" and "needs an update" in result.meaning


class Cyclic(Loop):
    """In each step, another layer trains."""

    def accumulate(self, batches):
        for index, layer in enumerate(self.model.layers):
            layer.requires_grad_(index == self.number % 2)
        return super().accumulate(batches)


class Missing(Loop):
    """The optimizer lacks one weight."""

    narrow = False

    def create_model(self):
        return GPT().bfloat16() if self.narrow else GPT()

    def groups(self):
        out = self.model.layers[1]["out"].weight
        return [{**g, "params": [p for p in g["params"] if p is not out]} for g in super().groups()]


@pytest.mark.parametrize("narrow", [False, True])
def test_parameter_that_the_optimizer_lacks_is_named(narrow):
    spec = loop_spec_of(type("Variant", (Missing,), {"narrow": narrow}), max_norm=None)

    result = ask(spec, "parameters_change")

    assert (result.status, result.value, result.where) == ("failed", 1, "layers.1.out.weight")
    assert result.meaning.endswith("Of these, 1 are not in the optimizer.")


def test_cyclic_freezing_changes_no_frozen_parameter():
    assert ask(loop_spec_of(Cyclic), "parameters_change").status == "passed"


def test_group_that_trains_later_is_no_failure():
    class Later(Loop):
        """The learning rate of the second group is 0 in the first steps."""

        def create_scheduler(self):
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda n: 1.0, lambda n: float(n > 5)])

    assert ask(loop_spec_of(Later, learning_rate=None), "parameters_change").status == "passed"


@pytest.mark.parametrize("act, status", [(torch.Tensor.detach, "warned"), (torch.Tensor.item, "passed")])
def test_losses_that_steps_append_to_a_log(act, status):
    class Logging(Loop):
        def __init__(self):
            super().__init__()
            self.log = []

        def loss(self, batch):
            loss = super().loss(batch)
            self.log.append(act(loss))
            return loss

    assert ask(loop_spec_of(Logging), "step_memory").status == status


def test_memory_of_a_schedule_that_is_over_is_not_measured():
    class Short(Loop):
        def update(self):
            if self.number == 8:
                raise ValueError("the schedule has 8 steps")
            super().update()

    assert ask(loop_spec_of(Short), "step_memory").status == "not applicable"
