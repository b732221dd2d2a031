"""Step: what one call changes, and what it leaves for the next."""

import math

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
    for check in ("parameters_change", "fresh_gradients", "single_update", "step_loss"):
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

    result = ask(loop_spec_of(Again), "single_update")
    assert (result.status, result.value, result.limit) == ("failed", 2, 1)
    assert "the same gradient as the one before" in result.meaning

    def twice(model, optimizer, batch):
        bare_step(model, optimizer, batch)
        return bare_step(model, optimizer, batch)

    result = ask(TrainerSpec.from_function(twice, GPT), "single_update")
    assert (result.status, result.value) == ("warned", 2)
    assert "a gradient of its own" in result.meaning

    never = TrainerSpec.from_function(lambda model, optimizer, batch: 0.0, GPT)
    assert "needs an update" in ask(never, "single_update").meaning


class _Attention(nn.Module):
    """Dropout in attention and in a recurrent layer of torch, which call no F.dropout from outside."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(GPT.vocab_size, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.LSTM(16, 16, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(16, GPT.vocab_size)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.recurrent(x)[0])


class Dropping(Loop):
    def create_model(self):
        return _Attention()

    def loss(self, batch):
        logits = self.model(batch["input_ids"])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def test_the_loss_of_a_step_does_not_depend_on_the_random_state():
    for seed in range(4):
        torch.manual_seed(seed)
        result = ask(loop_spec_of(Dropping), "step_loss")
        assert result.status == "passed" and result.value < 1e-6, (seed, result)


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


def test_the_loss_after_the_step():
    class After(Loop):
        def accumulate(self, batches):
            super().accumulate(batches)
            return self.loss(batches[0]).item()

    result = ask(loop_spec_of(After), "step_loss")
    assert result.status == "failed" and "the loss after the update" in result.meaning


def test_a_scaled_loss_is_unusual():
    class Half(Loop):
        def accumulate(self, batches):
            return super().accumulate(batches) / 2

    result = ask(loop_spec_of(Half), "step_loss")
    assert (result.status, result.value) == ("warned", pytest.approx(0.5))


@pytest.mark.parametrize("returned", [None, "text", torch.zeros(3), True])
def test_a_step_that_returns_no_loss(returned):
    class Silent(Loop):
        def accumulate(self, batches):
            super().accumulate(batches)
            return returned

    assert ask(loop_spec_of(Silent), "step_loss").status == "not applicable"


def test_a_loss_in_a_dict():
    class Dict(Loop):
        def accumulate(self, batches):
            return {"loss": torch.tensor(super().accumulate(batches))}

    assert ask(loop_spec_of(Dict), "step_loss").status == "passed"


def test_what_is_done_about_a_gradient_that_is_not_finite():
    result = ask(loop(), "non_finite_gradient")
    assert result.status == "not applicable" and "100 % of the weights" in result.meaning

    class Careful(Loop):
        def update(self):
            if math.isfinite(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])):
                super().update()

    assert "skipped" in ask(loop_spec_of(Careful), "non_finite_gradient").meaning

    class Strict(Loop):
        def clip(self):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)

    strict = ask(loop_spec_of(Strict), "non_finite_gradient")
    assert strict.status == "passed"
    assert strict.meaning.startswith("The step raises RuntimeError: The total norm of order 2.0")


def test_a_step_that_raises_whatever_the_gradient_is_an_error():
    class Short(Loop):
        def step(self, batch):
            if self.number == 1:
                raise ValueError("no more batches")
            return super().step(batch)

    result = ask(loop_spec_of(Short), "non_finite_gradient")
    assert (result.status, result.meaning) == ("error", "ValueError: no more batches")


def test_a_step_that_refuses_hooks_cannot_be_asked_about_its_gradient():
    class Hookless(Loop):
        def step(self, batch):
            if any(p._backward_hooks for p in self.model.parameters()):
                raise RuntimeError("hooks are not supported")
            return super().step(batch)

    result = ask(loop_spec_of(Hookless), "non_finite_gradient")
    assert result.status == "not applicable"
    assert result.meaning.endswith("RuntimeError: hooks are not supported")


def test_memory_that_is_too_small_is_no_answer_to_a_gradient():
    class Full(Loop):
        def update(self):
            if not all(p.grad.isfinite().all() for p in self.model.parameters() if p.grad is not None):
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().update()

    result = ask(loop_spec_of(Full), "non_finite_gradient")
    assert (result.status, result.meaning) == ("error", "OutOfMemoryError: CUDA out of memory")


def test_an_overflow_that_a_scaler_is_to_leave_out():
    class Scaled(Loop):
        init_scale = 2.0**10

        def update(self):
            self.scaler.unscale_(self.optimizer)
            self.clip()
            self.apply()
            self.scaler.update()
            self.zero_grad()

        def apply(self):
            self.scaler.step(self.optimizer)

    class Past(Scaled):
        def apply(self):
            self.optimizer.step()

    assert "skipped" in ask(loop_spec_of(Scaled), "non_finite_gradient").meaning
    result = ask(loop_spec_of(Past), "non_finite_gradient")
    assert (result.status, result.value) == ("failed", 1.0)
    assert "scaler.step(optimizer)" in result.advice
    off = type("Off", (Past,), {"create_scaler": lambda self: torch.amp.GradScaler("cpu", enabled=False)})
    assert ask(loop_spec_of(off), "non_finite_gradient").status == "not applicable"


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


def test_cyclic_freezing_changes_no_frozen_parameter():
    assert ask(loop_spec_of(Cyclic), "parameters_change").status == "passed"


def test_step_that_only_accumulates_does_not_show_that_nan_is_skipped():
    class Counts(Loop):
        """Makes an update in every second step."""

        n_calls = 0

        def update(self):
            self.n_calls += 1
            if self.n_calls % 2:
                super().update()

    result = ask(loop_spec_of(Counts), "non_finite_gradient")

    assert (result.status, result.meaning) == ("not applicable", "needs an update in the second step")


def test_group_that_trains_later_is_no_failure():
    class Later(Loop):
        """The learning rate of the second group is 0 in the first steps."""

        def create_scheduler(self):
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda n: 1.0, lambda n: float(n > 5)])

    assert ask(loop_spec_of(Later, learning_rate=None), "parameters_change").status == "passed"


@pytest.mark.parametrize("act, status", [(torch.Tensor.detach, "warned"), (float, "passed")])
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
