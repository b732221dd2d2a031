"""Targets that are to be ignored: what is trained on instead is told, and what is no fault."""

import pytest
import torch
import torch.nn.functional as F

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.runs import (
    RecomputedGPT,
    counted,
    divided_by_the_targets_of_two_updates,
    recomputation_draws_other_dropout_masks,
    recomputing,
)
from tests.zoo.target import OwnLoss, ignored_targets_are_counted, ignored_targets_are_token_0, own_loss


def ask(subject, check="ignored_targets", **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


def stepping(loss, **declared):
    """A bare step that minimises loss(logits, batch)."""

    def step(model, optimizer, batch):
        value = loss(model(batch["input_ids"]).logits, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return TrainerSpec.from_function(step, GPT, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), **declared)


def of_labels(logits, batch):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("subject", [loop, own_loss, lambda: stepping(of_labels)])
def test_sound(subject):
    result = ask(subject)
    assert result.status == "passed", result
    assert result.value <= result.limit == 1e-5


def test_trained_on_as_a_token():
    result = ask(ignored_targets_are_token_0)
    assert result.status == "failed"
    assert "as token 0" in result.meaning

    def last(logits, batch):  # a negative index counts from the end
        targets = torch.where(batch["labels"] < 0, logits.shape[-1] - 1, batch["labels"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    result = ask(stepping(last))
    assert result.status == "failed"
    assert f"as token {TrainerSpec.of(stepping(last)).vocab_size - 1}" in result.meaning


def test_counted():
    result = ask(ignored_targets_are_counted)
    assert result.status == "failed"
    assert "without ignored targets" in result.meaning
    assert result.value == pytest.approx(0.5, abs=1e-3)


def test_a_part_that_is_not_of_targets():
    def penalised(logits, batch):
        return of_labels(logits, batch) + 100 * logits.square().mean()

    assert "depends on targets only" in ask(stepping(penalised)).meaning


def test_what_cannot_be_asked():
    def of_ids(logits, batch):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    result = ask(stepping(of_ids))
    assert result.status == "not applicable"
    assert "reads labels" in result.meaning

    def silent(model, optimizer, batch):
        of_labels(model(batch["input_ids"]).logits, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    spec = TrainerSpec.from_function(silent, GPT, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert "returns its loss" in ask(spec).meaning
    ids = lambda B, T, generator: {"input_ids": torch.randint(9, (B, T), generator=generator)}  # noqa: E731
    assert "batches with labels" in ask(stepping(of_ids, make_batch=ids)).meaning


def test_nothing_is_left_behind():
    spec = TrainerSpec.of(own_loss)
    state = torch.get_rng_state()
    ask(spec)
    assert torch.equal(state, torch.get_rng_state())
    assert isinstance(spec.create(), OwnLoss)


class Pairs(Loop):
    """Batches (ids, targets), where targets are ids one later and `ignored` is no target."""

    ignored = -1

    def loss(self, batch):
        ids, targets = batch
        logits = self.model(ids).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignored)

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class CountsIgnored(Pairs):
    def loss(self, batch):
        _, targets = batch
        return super().loss(batch) * (targets != self.ignored).float().mean()


def pairs(batch_size, seq_len, generator):
    ids = torch.randint(1, 61, (batch_size, seq_len + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@pytest.mark.parametrize(
    ("loop", "declared", "status"),
    [
        (Pairs, {"ignored_label": -1}, "passed"),
        (Pairs, {}, "not applicable"),
        (CountsIgnored, {"ignored_label": -1}, "failed"),
    ],
    ids=["declared", "not-declared", "counted"],
)
def test_targets_of_pairs_are_labels(loop, declared, status):
    spec = TrainerSpec.of(loop, make_batch=pairs, **declared)

    [result] = check_trainer(spec, checks=["ignored_targets"])

    assert result.status == status, result


def scaled_by(factor):
    """A loop whose loss is the mean over all targets times a factor."""

    class Scaled(Loop):
        def loss(self, batch):
            return super().loss(batch) * (factor(batch) if callable(factor) else factor)

    return loop_spec_of(Scaled)


@pytest.mark.parametrize(
    "subject", [loop, own_loss, counted, recomputing, lambda: stepping(of_labels), lambda: scaled_by(1.004)]
)
def test_mean_over_the_targets_passes(subject):
    result = ask(subject(), "loss_divisor")

    assert result.status == "passed", result


def test_number_in_the_batch_that_is_no_count_of_its_targets_fails():
    result = ask(divided_by_the_targets_of_two_updates(), "loss_divisor")

    assert (result.status, result.where) == ("failed", "batch['targets_of_two_updates']")
    assert result.meaning == "The loss is divided by 120, and the batch has 60 targets."
    assert result.value == pytest.approx(0.5)


def test_other_multiple_of_the_mean_may_be_intended():
    result = ask(scaled_by(0.25), "loss_divisor")

    assert result.meaning == "needs a loss that is divided by a number in the batch"


def test_loss_with_another_part_is_not_compared():
    result = ask(scaled_by(lambda batch: 1 + batch["input_ids"].float().mean()), "loss_divisor")

    assert result.status == "not applicable" and "a multiple of the mean" in result.meaning


def test_divisor_needs_logits_and_labels():
    def make_pairs(batch_size, seq_len, generator):
        return torch.randn(batch_size, 3, generator=generator), torch.ones(batch_size, 1)

    def step(model, optimizer, batch):
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    spec = TrainerSpec.from_function(step, lambda: torch.nn.Linear(3, 1), make_batch=make_pairs)

    result = ask(spec, "loss_divisor")

    assert result.status == "not applicable" and "model that gives logits" in result.meaning


@pytest.mark.parametrize("subject", [loop, own_loss, counted, recomputing])
def test_gradient_is_the_derivative(subject):
    result = ask(subject(), "loss_derivative")

    assert result.status == "passed" and result.value <= result.limit, result


def test_other_dropout_masks_in_the_backward_pass_fail():
    result = ask(recomputation_draws_other_dropout_masks(), "loss_derivative")

    assert result.status == "failed" and "finite differences" in result.where
    assert "preserve_rng_state" in result.advice


def test_recomputation_without_dropout_needs_no_masks():
    class NoDropout(RecomputedGPT):
        same_masks, dropout = False, 0.0

    class Quiet(Loop):
        def create_model(self):
            return NoDropout()

    assert ask(loop_spec_of(Quiet), "loss_derivative").status == "passed"


def test_loss_with_a_part_that_is_detached_on_purpose_is_not_judged():
    class Detached(Loop):
        def loss(self, batch):
            loss = super().loss(batch)
            return loss * loss.detach()

    assert ask(loop_spec_of(Detached), "loss_derivative").status == "not applicable"


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (lambda loss: loss.detach(), "without step functions"),
        (lambda loss: loss + (loss.round() - loss).detach(), "without step functions"),
        (lambda loss: loss.float(), "passed"),
        (lambda loss: 1 / 0, "needs a loss in float64: ZeroDivisionError"),
    ],
    ids=["no-gradient", "straight-through", "float32", "raises"],
)
def test_losses_without_a_derivative(factor, reason):
    class Changed(Loop):
        def loss(self, batch):
            loss = super().loss(batch)
            return factor(loss) if loss.dtype == torch.float64 else loss

    result = ask(loop_spec_of(Changed), "loss_derivative")

    assert reason in f"{result.status}: {result.meaning}"


def test_derivative_needs_a_loss():
    assert ask(stepping(of_labels), "loss_derivative").meaning == "needs loss(batch)"
