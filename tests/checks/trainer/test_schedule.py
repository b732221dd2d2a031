"""Schedule: the learning rate of each update, and how many there are."""

import warnings

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.runs import TwoRates, Windows, one_rate_for_all_groups, two_rates, windows


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check], suite="full")
    return result


@pytest.mark.parametrize(
    "check", ["learning_rate", "scheduler_order", "scheduler_per_update", "planned_steps"]
)
def test_sound(check):
    result = ask(loop(), check)
    assert result.status == "passed" and result.value <= result.limit


def test_what_is_not_claimed_is_not_asked():
    spec = TrainerSpec.from_function(lambda model, optimizer, batch: None, GPT)
    for check, reason in [
        ("learning_rate", "needs learning_rate"),
        ("scheduler_per_update", "needs accumulate"),
        ("scheduler_order", "needs an update"),
        ("planned_steps", "needs total_steps"),
    ]:
        result = ask(spec, check)
        assert result.status == "not applicable" and reason in result.meaning


def test_a_schedule_that_is_one_step_ahead():
    class Ahead(Loop):
        @classmethod
        def factor(cls, step):
            return super().factor(step + 1)

    result = ask(loop_spec_of(Ahead, learning_rate=loop().learning_rate), "learning_rate")
    assert result.status == "failed"
    assert result.value == pytest.approx(0.25)
    result = ask(loop_spec_of(Ahead, learning_rate=lambda step: 1e-2), "learning_rate")
    assert result.status == "failed" and "In 12 compared updates" in result.meaning


def test_groups_with_learning_rates_of_their_own():
    class Tenth(Loop):
        def groups(self):
            first, second = super().groups()
            return [{**first, "lr": 0.1 * self.base_lr}, second]

    assert ask(loop_spec_of(Tenth), "learning_rate").status == "passed"

    class OneGroupAlone(Loop):
        def create_scheduler(self):
            factors = [self.factor, lambda step: 1.0]
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, factors)

    result = ask(loop_spec_of(OneGroupAlone), "learning_rate")
    assert result.status == "failed" and "group 1" in result.where

    class AllLower(Loop):
        def groups(self):
            return [{**group, "lr": 0.5 * self.base_lr} for group in super().groups()]

    assert ask(loop_spec_of(AllLower), "learning_rate").value == pytest.approx(0.5)


def test_scheduler_before_the_optimizer():
    class First(Loop):
        def clip(self):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scheduler.step()

        def update(self):
            self.clip()
            self.optimizer.step()
            self.zero_grad()

    result = ask(loop_spec_of(First, learning_rate=None), "scheduler_order")
    assert result.status == "failed" and "begins at 0.0025, but the first update used 0.005" in result.meaning


def test_a_learning_rate_set_by_hand_in_each_step_is_no_scheduler():
    def step(model, optimizer, batch):
        optimizer.param_groups[0]["lr"] = 1e-4
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert ask(TrainerSpec.from_function(step, GPT), "scheduler_order").status == "passed"


def test_a_warm_up_from_zero_is_told():
    class FromZero(Loop):
        @classmethod
        def factor(cls, step):
            return super().factor(step - 1) if step else 0.0

    result = ask(loop_spec_of(FromZero), "scheduler_order")
    assert result.status == "warned" and "learning rate is 0" in result.meaning
    spec = loop_spec_of(FromZero, learning_rate=lambda step: FromZero.base_lr * FromZero.factor(step))
    assert ask(spec, "learning_rate").status == "passed"


def test_a_scheduler_that_counts_micro_batches():
    class PerMicroBatch(Loop):
        def backward(self, loss):
            super().backward(loss)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scheduler.step()

        def update(self):
            self.clip()
            self.optimizer.step()
            self.zero_grad()

    result = ask(loop_spec_of(PerMicroBatch, learning_rate=None), "scheduler_per_update")
    assert result.status == "failed" and result.where.startswith("update ")


@pytest.mark.parametrize("made, status", [(16, "passed"), (15, "failed"), (17, "failed")])
def test_number_of_updates(made, status):
    class Fits(Loop):
        total_steps = made

    result = ask(loop_spec_of(Fits, total_steps=16), "planned_steps")
    assert (result.status, result.value, result.limit) == (status, made, 16)


def test_an_optimizer_that_calls_its_parents_step_makes_one_update():
    class Child(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Inherited(Loop):
        def create_optimizer(self):
            return Child(self.groups(), lr=self.base_lr)

    assert ask(loop_spec_of(Inherited), "planned_steps").value == 16
    assert ask(loop_spec_of(Inherited), "learning_rate").status == "passed"


@pytest.mark.parametrize(
    "create",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 8),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ConstantLR(o)], [3]
        ),
    ],
)
@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_how_often_the_scheduler_is_stepped(create, times):
    class Stepped(Loop):
        def create_scheduler(self):
            return create(self.optimizer)

        def update(self):
            self.clip()
            self.optimizer.step()
            for _ in range(times):
                self.scheduler.step()
            self.zero_grad()

    result = ask(loop_spec_of(Stepped, learning_rate=None), "scheduler_count")
    if times:
        assert (result.status, result.value) == ("passed" if times == 1 else "failed", times)
    else:
        assert result.status == "not applicable"


def test_a_scheduler_that_is_not_stepped_with_each_update():
    class Epochs(Loop):
        times = 1

        def update(self):
            self.clip()
            self.optimizer.step()
            if self.number % 3 == 2:
                for _ in range(self.times):
                    self.scheduler.step()
            self.zero_grad()

    result = ask(loop_spec_of(Epochs, learning_rate=None), "scheduler_count")
    assert (result.status, result.value) == ("passed", pytest.approx(1 / 3))
    often = type("Often", (Epochs,), {"times": 4})
    assert ask(loop_spec_of(often, learning_rate=None), "scheduler_count").status == "passed"


def test_what_counts_steps():
    assert "learning_rate applies" in ask(loop(), "scheduler_count").meaning

    class Wrapped(Loop):
        """As where a library steps the scheduler for you."""

        def create_scheduler(self):
            inner = super().create_scheduler()
            return type("Wrapper", (), {"scheduler": inner, "step": lambda self: inner.step()})()

    assert ask(loop_spec_of(Wrapped, learning_rate=None), "scheduler_count").status == "passed"

    class Own(Loop):
        def create_scheduler(self):
            return type("Own", (), {"step": lambda self: None})()

    assert "counts its steps" in ask(loop_spec_of(Own, learning_rate=None), "scheduler_count").meaning


def test_groups_keep_the_ratio_of_their_rates():
    result = ask(two_rates(), "group_rates")

    assert result.status == "passed" and result.value < 1e-6
    reason = "needs groups with different learning rates"
    assert ask(loop(), "group_rates").meaning == reason


def test_one_rate_for_groups_with_different_rates_fails():
    result = ask(one_rate_for_all_groups(), "group_rates")

    assert (result.status, result.value) == ("failed", pytest.approx(19))  # the ratio is 1, and was 1 / 20
    assert result.meaning.startswith("The groups were created with the rates 0.01, 0.0005.")


@pytest.mark.parametrize(
    ("minimum", "status"), [(0.0, "passed"), (1e-6, "passed"), (2e-3, "warned")], ids=["0", "small", "large"]
)
def test_common_minimum_of_the_rates(minimum, status):
    class Floored(TwoRates):
        """Each rate decays to the same minimum."""

        warmup_steps = 1

        def update(self):
            super().update()
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.factor(min(self.number + 1, 8)) + minimum

    assert ask(loop_spec_of(Floored, learning_rate=None), "group_rates").status == status


def test_groups_with_schedules_of_their_own_are_a_warning():
    class Own(TwoRates):
        def create_scheduler(self):
            factors = [self.factor, lambda step: 1.0]
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, factors)

    result = ask(loop_spec_of(Own, learning_rate=None), "group_rates")

    assert result.status == "warned"
    assert "each group has its own schedule" in str(result)


def test_group_with_rate_0_has_no_ratio():
    class Still(Loop):
        def create_optimizer(self):
            one, other = self.groups()
            return torch.optim.AdamW([one, other | {"lr": 0.0}], lr=self.base_lr)

    result = ask(loop_spec_of(Still, learning_rate=None), "group_rates")

    assert (result.status, result.meaning) == ("not applicable", "needs groups with different learning rates")


def test_rates_of_a_run_without_updates_are_not_compared():
    class Never(TwoRates):
        def update(self):
            self.zero_grad()

    result = ask(loop_spec_of(Never, learning_rate=None), "group_rates")

    assert result.status == "not applicable" and result.meaning.startswith("needs an update in 12 steps")


@pytest.mark.parametrize("subject", [loop, windows])
def test_windows_are_equal(subject):
    result = ask(subject(), "equal_windows")

    assert (result.status, result.value) == ("passed", result.limit)


def test_window_that_crosses_epochs_fails():
    class Crossing(Windows):
        def is_flushed(self, index, batches):
            return False

    result = ask(loop_spec_of(Crossing, total_steps=None), "equal_windows")

    assert (result.status, result.value, result.limit) == ("failed", 3, 2)
    assert result.where == "update 2"  # the first one of the second epoch


def test_windows_that_grow_are_no_failure():
    class Growing(Loop):
        def fit(self):
            batches = list(self.epoch(0))
            for size in (1, 1, 1, 2, 3):
                self.accumulate(batches[:size])

    result = ask(loop_spec_of(Growing), "equal_windows")

    assert result.status == "passed" and "grows during the training" in result.meaning


def test_long_training_is_ended():
    made = []

    class Long(Loop):
        total_steps = 10**6

        def fit(self):
            for number in range(self.total_steps):
                made.append(number)
                self.optimizer.zero_grad()
                self.model.norm.weight.sum().backward()
                self.optimizer.step()

        def create_model(self):
            model = super().create_model()
            return model.requires_grad_(False).norm.requires_grad_(True) and model

    result = ask(loop_spec_of(Long), "equal_windows")

    assert result.status == "passed" and len(made) == 300


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"fit": None}, "needs a run with fit()"),
        ({"fit": lambda self: None}, "needs updates with a gradient of the first parameter"),
    ],
)
def test_windows_of_a_run_without_a_training_are_not_compared(attributes, reason):
    spec = loop_spec_of(type("Without", (Loop,), attributes))

    result = ask(spec, "equal_windows")

    assert (result.status, result.meaning) == ("not applicable", reason)


class SeveralSchedulers(Loop):
    """Two optimizers, each with a scheduler. The second scheduler is stepped `times` in each step."""

    times = 1

    def create_optimizer(self):
        return [torch.optim.AdamW([group], lr=self.base_lr) for group in self.groups()]

    def create_scheduler(self):
        return [torch.optim.lr_scheduler.LambdaLR(each, self.factor) for each in self.optimizer]

    def update(self):
        self.clip()
        for number, (optimizer, scheduler) in enumerate(zip(self.optimizer, self.scheduler, strict=True)):
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(self.times if number else 1):
                scheduler.step()

    def state(self):
        parts = (self.model, *self.optimizer, *self.scheduler)
        return {"parts": [part.state_dict() for part in parts], "random": self.random_state()}

    def restore(self, state):
        for part, saved in zip((self.model, *self.optimizer, *self.scheduler), state["parts"], strict=True):
            part.load_state_dict(saved)
        self.restore_random_state(state["random"])

    epoch = position = None


@pytest.mark.parametrize(
    "check", ["scheduler_order", "checkpoint_round_trip", "resume", "interrupted_run", "undisturbed_run"]
)
def test_several_schedulers(check):
    spec = loop_spec_of(SeveralSchedulers, learning_rate=None)

    assert ask(spec, check).status == "passed"


@pytest.mark.parametrize(("times", "status"), [(0, "warned"), (1, "passed"), (2, "failed")])
def test_calls_of_several_schedulers_are_counted(times, status):
    kind = type("Several", (SeveralSchedulers,), {"times": times})

    result = ask(loop_spec_of(kind, learning_rate=None), "scheduler_count")

    assert result.status == status
    assert times or result.where == "scheduler.1"


def test_state_of_each_scheduler_is_compared():
    class SavesOne(SeveralSchedulers):
        def restore(self, state):
            second = self.scheduler[1].state_dict()
            super().restore(state | {"parts": [*state["parts"][:-1], second]})

    result = ask(loop_spec_of(SavesOne, learning_rate=None), "checkpoint_round_trip")

    assert result.status == "failed"
    assert "scheduler.1.last_epoch" in result.where


@pytest.mark.parametrize("advances", [False, True])
def test_a_skipped_step_may_advance_the_schedule_or_not(advances):
    class Skips(Loop):
        """Makes no update in the fourth step."""

        def update(self):
            if self.number == 3:
                if advances:
                    with warnings.catch_warnings(action="ignore"):
                        self.scheduler.step()
                self.zero_grad()
            else:
                super().update()

    assert ask(loop_spec_of(Skips), "learning_rate").status == "passed"
