"""Non-finite gradients: what a step without an update leaves, and whether later steps train."""

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.checks.probe.run_state import different, state_of
from stackwise.checks.trainer.non_finite import _outcome
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.runs import (
    Skipping,
    fused,
    gradients_that_are_not_finite_become_zero,
    history_of_losses_contains_nan,
    schedule_follows_the_call_of_a_fused_optimizer,
    skipping,
)


def ask(subject, check="skipped_step", **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


class Guarded(Loop):
    """Makes no update with gradients that are not finite."""

    def is_finite(self):
        return all(p.grad.isfinite().all() for p in self.model.parameters() if p.grad is not None)

    def update(self):
        if self.is_finite():
            super().update()
        else:
            self.skip()

    def skip(self):
        self.zero_grad()


class ScheduleAdvances(Guarded):
    def skip(self):
        super().skip()
        self.scheduler.step()


class Scaled(Loop):
    """A loss scale, and a schedule that follows every step."""

    init_scale = 1024.0

    def update(self):
        self.scaler.unscale_(self.optimizer)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.zero_grad()


@pytest.mark.parametrize("check", ["skipped_step", "recovers_after_skip"])
@pytest.mark.parametrize("subject", [skipping, fused, lambda: loop_spec_of(Guarded)])
def test_sound(subject, check):
    result = ask(subject(), check)

    assert result.status == "passed", result


@pytest.mark.parametrize("check", ["skipped_step", "recovers_after_skip"])
def test_loop_without_a_protection_is_not_applicable(check):
    result = ask(loop(), check)

    assert result.status == "not applicable"
    assert result.meaning == "needs a run that skips updates with non-finite gradients"


@pytest.mark.parametrize("check", ["skipped_step", "recovers_after_skip"])
def test_step_that_raises_is_not_applicable(check):
    class Strict(Loop):
        def clip(self):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)

    assert ask(loop_spec_of(Strict), check).status == "not applicable"


def test_nan_replaced_by_zeros_fails():
    result = ask(gradients_that_are_not_finite_become_zero())

    assert result.status == "failed"
    assert "weight tensors" in result.meaning and "entries of the optimizer state" in result.meaning
    assert result.advice.startswith("Skip the whole update")


def test_zeros_move_the_weights_by_momentum():
    class Zeros(Loop):
        weight_decay = 0.0

        def create_optimizer(self):
            return torch.optim.SGD(self.groups(), lr=self.base_lr, momentum=0.9)

        def clip(self):
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_(0.0, 0.0, 0.0)
            super().clip()

    assert ask(loop_spec_of(Zeros)).status == "failed"


def test_schedule_that_advances_with_a_plain_optimizer_is_a_warning():
    result = ask(loop_spec_of(ScheduleAdvances))

    assert result.status == "warned"
    assert "entries of the schedule" in result.meaning and "weight tensors" not in result.meaning
    assert "the schedule counts steps instead of updates on purpose" in str(result)


def test_update_past_the_scaler_fails():
    class Past(Loop):
        init_scale = 2.0**10

        def update(self):
            self.scaler.unscale_(self.optimizer)
            self.optimizer.step()
            self.scaler.update()
            self.zero_grad()

    result = ask(loop_spec_of(Past))

    assert (result.status, result.value) == ("failed", 1.0)
    assert "scaler.step(optimizer)" in result.advice
    off = type("Off", (Past,), {"create_scaler": lambda self: torch.amp.GradScaler("cpu", enabled=False)})
    assert ask(loop_spec_of(off)).status == "not applicable"


def test_schedule_that_advances_with_a_scaler_is_a_warning():
    assert ask(loop_spec_of(Scaled)).status == "warned"


def test_schedule_that_advances_only_with_a_fused_optimizer_fails():
    result = ask(schedule_follows_the_call_of_a_fused_optimizer())

    assert result.status == "failed"
    assert "a fused optimizer is called also if it skips the update" in result.advice


def test_schedule_that_advances_with_a_fused_optimizer_on_purpose_warns():
    class Fused(Scaled):
        def create_optimizer(self):
            return torch.optim.AdamW(self.groups(), lr=self.base_lr, fused=True)

    assert ask(loop_spec_of(Fused)).status == "warned"


def test_rate_that_follows_the_number_of_the_step_needs_no_scheduler():
    class ByNumber(Guarded):
        def create_scheduler(self):
            return None

        def update(self):
            for group in self.optimizer.param_groups:
                group["lr"] = self.base_lr * self.factor(self.number)
            if self.is_finite():
                self.clip()
                self.optimizer.step()
            self.zero_grad()

    assert ask(loop_spec_of(ByNumber)).status == "passed"


def test_buffers_may_change():
    class Counting(Guarded):
        def create_model(self):
            model = super().create_model()
            model.register_buffer("seen", torch.zeros(()))
            return model

        def loss(self, batch):
            self.model.seen += 1
            return super().loss(batch)

    assert ask(loop_spec_of(Counting)).status == "passed"


def test_history_that_contains_nan_fails():
    result = ask(history_of_losses_contains_nan(), "recovers_after_skip")

    assert result.status == "failed"
    assert result.where == "the 10 steps after step 13"  # the history decides after six steps
    assert ask(history_of_losses_contains_nan()).status == "passed"


def test_run_that_never_trains_again_fails():
    class Stops(Guarded):
        stopped = False

        def update(self):
            if not self.stopped:
                super().update()

        def skip(self):
            super().skip()
            self.stopped = True

    result = ask(loop_spec_of(Stops), "recovers_after_skip")

    assert (result.status, result.where) == ("failed", "the 10 steps after step 2")


def test_run_that_makes_no_later_update_is_not_compared():
    class Ends(Guarded):
        """Makes two updates."""

        def update(self):
            if self.number < 2:
                super().update()
            else:
                self.zero_grad()

    assert ask(loop_spec_of(Ends), "recovers_after_skip").status == "not applicable"


def test_average_that_takes_in_nan_is_not_protected():
    class Averages(Guarded):
        def __init__(self):
            super().__init__()
            self.average = [p.detach().clone() for p in self.model.parameters()]

        def skip(self):
            for mean, p in zip(self.average, self.model.parameters(), strict=True):
                mean.add_(p.grad)
            super().skip()

    assert ask(loop_spec_of(Averages)).status == "not applicable"


def test_guard_that_responds_is_not_applicable():
    class Alarmed(Guarded):
        def __init__(self):
            super().__init__()
            self.alarms = []

        def skip(self):
            super().skip()
            self.alarms.append(self.number)

    for check in ("skipped_step", "recovers_after_skip"):
        assert ask(loop_spec_of(Alarmed), check).status == "not applicable"


def test_gradients_of_one_step_are_nan():
    seen = []

    class Recording(Skipping):
        def remember(self, loss, finite):
            super().remember(loss, finite)
            seen.append(finite)

    subject = TrainerSubject(loop_spec_of(Recording), torch.device("cpu"), 0)
    outcome = _outcome(subject, 2)

    assert seen == [True, True, False, *[True] * 10]
    assert outcome.names and not outcome.restores
    assert all(name.startswith("position()") for name in different(outcome.before, outcome.after))


def test_nothing_is_left_behind():
    spec, state = skipping(), torch.get_rng_state()
    reference = state_of(spec.create())

    ask(spec)

    assert torch.equal(state, torch.get_rng_state())
    assert not different(reference, state_of(spec.create()))


def test_average_that_moves_in_a_skipped_step_is_a_warning():
    class Moves(Skipping):
        def remember(self, loss, finite):
            super().remember(loss, finite)
            with torch.no_grad():
                for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)

    result = ask(loop_spec_of(Moves))

    assert result.status == "warned"
    assert "tensors of an average" in result.meaning
