"""Accumulation: micro-batches against the batch that is all of them."""

import pytest
import torch
from torch import nn

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of

CHECKS = ("accumulated_gradient", "accumulation_ragged")


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


class Weighted(Loop):
    """By `weigh(targets, all targets, number of micro-batches)`."""

    weigh = staticmethod(lambda own, total, n: own / max(total, 1))

    def weight(self, batch, batches, total):
        return self.weigh(self.targets(batch), total, len(batches))


@pytest.mark.parametrize("check", CHECKS)
def test_sound(check):
    result = ask(loop(), check)
    assert result.status == "passed" and result.value < 1e-12 < result.limit


@pytest.mark.parametrize("check", CHECKS)
def test_needs_accumulation(check):
    spec = TrainerSpec.from_function(lambda model, optimizer, batch: None, GPT)
    assert ask(spec, check).meaning == "needs accumulate(batches)"


@pytest.mark.parametrize(
    "weigh, failing",
    [
        (lambda own, total, n: 1 / n, {"accumulation_ragged"}),
        (lambda own, total, n: 1.0, set(CHECKS)),
        (lambda own, total, n: own / max(total, 1) * n / 4, set(CHECKS)),
        (lambda own, total, n: own / max(total, 1) * n / 3, set(CHECKS)),
        (lambda own, total, n: own / max(total, 64), set()),
    ],
    ids=["mean of means", "sum of means", "fixed window", "window of three", "a floor under all"],
)
def test_weights(weigh, failing):
    build = type("Mutant", (Weighted,), {"weigh": staticmethod(weigh)})
    results = check_trainer(loop_spec_of(build), checks=["accumulation"])
    assert {r.check for r in results if r.status == "failed"} >= failing
    for result in results:
        if result.check not in failing and failing:
            assert result.status == "passed", result


def test_clipping_does_not_hide_the_size():
    build = type("Sum", (Weighted,), {"weigh": staticmethod(lambda own, total, n: 1.0), "max_norm": 1e-2})
    result = ask(loop_spec_of(build), "accumulated_gradient")
    assert result.status == "failed" and "is 3 times that" in result.meaning
    assert result.value == pytest.approx(2.0)


def test_an_update_for_each_micro_batch():
    class Each(Loop):
        def accumulate(self, batches):
            return sum(super(Each, self).accumulate([batch]) for batch in batches)

    result = ask(loop_spec_of(Each), "accumulated_gradient")
    assert (result.status, result.value, result.limit) == ("failed", 3, 1)


def test_a_loss_that_does_not_add_up_is_no_failure():
    class BatchStatistics(GPT):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(self.width)

        def embed(self, input_ids):
            return self.batch_norm(super().embed(input_ids).transpose(1, 2)).transpose(1, 2)

    class Statistics(Loop):
        def create_model(self):
            return BatchStatistics()

    for check in CHECKS:
        assert ask(loop_spec_of(Statistics), check).status == "warned"


def test_batches_without_labels():
    class Plain(Loop):
        def targets(self, batch):
            return batch[:, 1:].numel()

        def loss(self, batch):
            return self.model(batch, labels=batch).loss

    spec = loop_spec_of(Plain, make_batch=lambda b, t, g: torch.randint(61, (b, t), generator=g))
    assert ask(spec, "accumulated_gradient").status == "passed"
    assert "needs batches with labels" in ask(spec, "accumulation_ragged").meaning


def test_narrow_runs_are_judged_by_their_own_rounding():
    class Autocast(Loop):
        def loss(self, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().loss(batch)

    for check in CHECKS:
        assert ask(loop_spec_of(Autocast), check).status == "passed"

    class MeanOfMeans(Autocast):
        def weight(self, batch, batches, total):
            return 1 / len(batches)

    assert ask(loop_spec_of(MeanOfMeans), "accumulation_ragged").status == "failed"


@pytest.mark.parametrize("check", CHECKS)
def test_a_loss_that_hardly_adds_up_excuses_as_much_and_no_more(check):
    class Routed(GPT):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = output.loss + 0.01 * output.logits.mean(dim=(0, 1)).square().sum()
            return output

    class Sound(Loop):
        def create_model(self):
            return Routed()

    class Averaging(Sound):
        def weight(self, batch, batches, total):
            return 1.0

    result = ask(loop_spec_of(Sound), check)
    assert result.status == "warned" and result.value < 0.05, result
    assert ask(loop_spec_of(Averaging), check).status == "failed"


class Splits(Loop):
    """Splits the batch of a step into micro-batches of one row, at most four."""

    clears_each = False

    def step(self, batch):
        parts = zip(*(batch[key].chunk(4) for key in batch), strict=True)
        return self.accumulate([dict(zip(batch, part, strict=True)) for part in parts])

    def loss(self, batch):
        if self.clears_each:
            self.zero_grad()
        return super().loss(batch)


class ClearsEach(Splits):
    clears_each = True


class ReadsNothing(Loop):
    """Trains on its own rows."""

    def step(self, batch):
        return super().step({key: torch.ones_like(value) for key, value in batch.items()})


class Subset(Loop):
    """Trains on half of the rows, which it draws."""

    def step(self, batch):
        chosen = torch.randperm(self.batch_size)[: self.batch_size // 2]
        return super().step({key: value[chosen] for key, value in batch.items()})


class Hardest(Loop):
    """Trains on the two rows of the largest loss."""

    def step(self, batch):
        rows = [{key: value[[i]] for key, value in batch.items()} for i in range(self.batch_size)]
        with torch.no_grad():
            chosen = torch.stack([self.loss(row) for row in rows]).topk(2).indices
        return super().step({key: value[chosen] for key, value in batch.items()})


class DropsLast(Loop):
    """Drops the rest of a batch that does not fill a micro-batch of three rows."""

    def step(self, batch):
        return super().step({key: value[:3] for key, value in batch.items()})


@pytest.mark.parametrize(
    ("kind", "status", "where"),
    [
        (Subset, "passed", ""),
        (Hardest, "passed", ""),
        (DropsLast, "warned", "rows 3 of 4"),
        (Splits, "passed", ""),
        (ClearsEach, "failed", "rows 0, 2 of 4"),
        (ReadsNothing, "not applicable", ""),
    ],
)
def test_row_effects(kind, status, where):
    result = ask(loop_spec_of(kind), "row_effects")
    assert (result.status, result.where) == (status, where)


def test_a_step_that_depends_on_the_order_of_rows_is_no_reference():
    for check in CHECKS:
        assert "order of the rows" in ask(loop_spec_of(ClearsEach), check).meaning
