"""Targets that are to be ignored: what is trained on instead is told, and what is no fault."""

import pytest
import torch
import torch.nn.functional as F

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop
from tests.zoo.target import OwnLoss, ignored_targets_are_counted, ignored_targets_are_token_0, own_loss


def ask(subject, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=["ignored_targets"])
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

    assert ask(stepping(penalised)).status == "warned"


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
