"""Clipping: the norm that arrives, below and above the limit, and under a loss scale."""

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.optimizer import low_limit, scaled_loop


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("init_scale", [None, 2.0**10])
def test_sound(max_norm, init_scale):
    build = type("Clipping", (Loop,), {"max_norm": max_norm, "init_scale": init_scale})
    result = ask(loop_spec_of(build), "clipped_norm")
    assert (result.status, result.value) == ("passed", pytest.approx(max_norm, rel=1e-3))


def test_what_is_not_claimed_is_not_asked():
    assert "needs max_norm" in ask(loop_spec_of(Loop, max_norm=None), "clipped_norm").meaning
    assert "needs an enabled gradient scaler" in ask(loop(), "loss_scale").meaning
    disabled = type(
        "Off", (Loop,), {"create_scaler": lambda self: torch.amp.GradScaler("cpu", enabled=False)}
    )
    assert "needs an enabled gradient scaler" in ask(loop_spec_of(disabled), "loss_scale").meaning


def test_clipping_that_is_skipped():
    class Skipped(Loop):
        def clip(self):
            pass

    result = ask(loop_spec_of(Skipped), "clipped_norm")
    assert (result.status, result.value) == ("failed", pytest.approx(20.0, rel=1e-3))
    assert "skipped" in result.advice and result.where == "embedding.weight"


def test_parts_that_are_clipped_alone():
    class PerTensor(Loop):
        max_norm = 0.1

        def clip(self):
            for p in self.model.parameters():
                torch.nn.utils.clip_grad_norm_([p], self.max_norm)

    result = ask(loop_spec_of(PerTensor), "clipped_norm")
    assert result.status == "failed" and "clipped separately" in result.advice


def test_clipped_lower_than_claimed():
    result = ask(loop_spec_of(Loop, max_norm=2.0), "clipped_norm")
    assert (result.status, result.value) == ("warned", pytest.approx(1.0, rel=1e-3))


def test_normalising():
    class Normalising(Loop):
        max_norm = 2.0

        def clip(self):
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
            for p in self.model.parameters():
                p.grad.mul_(self.max_norm / norm)

    result = ask(loop_spec_of(Normalising), "clipped_norm")
    assert (result.status, result.value) == ("failed", pytest.approx(1.0, rel=1e-3))


def test_loss_scale():
    result = ask(scaled_loop(), "loss_scale")
    assert result.status == "passed" and result.value < 1e-5

    class ClippedScaled(Loop):
        init_scale, max_norm = 2.0**10, 0.1

        def update(self):
            self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.zero_grad()

    result = ask(loop_spec_of(ClippedScaled), "loss_scale")
    # Clipped to the limit and then unscaled: 64 times as small under a scale 64 times as large.
    assert (result.status, result.value) == ("failed", pytest.approx(63.0, rel=1e-3))
    assert "unscale_" in result.advice


def test_fused_optimizers_that_divide_by_their_own_factor():
    class Fused(Loop):
        """Clips by the factor that fused optimizers take."""

        def create_optimizer(self):
            optimizer = torch.optim.AdamW(self.groups(), lr=self.base_lr, fused=True)
            optimizer.grad_scale = optimizer.found_inf = None
            return optimizer

        def clip(self):
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
            self.optimizer.grad_scale = (norm / self.max_norm).clamp(min=1.0)
            self.optimizer.found_inf = torch.zeros(())

    for check in ("clipped_norm", "parameters_change"):
        assert ask(loop_spec_of(Fused), check).status == "passed"


def test_the_limit_of_the_twin_is_reached():
    assert ask(low_limit(), "clipped_norm").value == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("init_scale", [None, 2.0**10])
def test_a_window_that_is_clipped_as_a_whole(max_norm, init_scale):
    build = type("Clipping", (Loop,), {"max_norm": max_norm, "init_scale": init_scale})
    result = ask(loop_spec_of(build), "clipped_window")
    assert result.status == "passed" and result.value < 1e-5


def test_micro_batches_that_are_clipped_alone():
    class Inside(Loop):
        max_norm = 0.1

        def backward(self, loss):
            super().backward(loss)
            self.clip()

    assert ask(loop_spec_of(Inside), "clipped_norm").status == "passed"
    result = ask(loop_spec_of(Inside), "clipped_window")
    assert result.status == "failed" and result.value > 0.3
    assert "inside the loop over micro-batches" in result.advice


def test_a_window_that_is_not_clipped():
    class Single(Loop):
        max_norm = 0.1

        def accumulate(self, batches):
            self.several = len(batches) > 1
            return super().accumulate(batches)

        def clip(self):
            if not self.several:
                super().clip()

    result = ask(loop_spec_of(Single), "clipped_window")
    assert (result.status, result.value) == ("failed", pytest.approx(2.0, rel=1e-3))


def test_what_one_batch_shows_is_no_matter_of_windows():
    class PerTensor(Loop):
        max_norm = 0.1

        def clip(self):
            for p in self.model.parameters():
                torch.nn.utils.clip_grad_norm_([p], self.max_norm)

    assert "of one batch" in ask(loop_spec_of(PerTensor), "clipped_window").meaning
    assert "needs max_norm" in ask(loop_spec_of(Loop, max_norm=None), "clipped_window").meaning
    alone = type("Alone", (Loop,), {"accumulate": None, "step": lambda self, b: Loop.accumulate(self, [b])})
    assert "needs accumulate" in ask(loop_spec_of(alone), "clipped_window").meaning
