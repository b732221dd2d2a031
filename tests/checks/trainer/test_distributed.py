"""Two ranks: what sets them apart from one process is found, and sound ones are left alone."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.reports import forms
from bench.reports.loops import composer_2218_evaluates_padding_of_sampler as composer
from stackwise.checks import check_trainer
from stackwise.checks.check import select_checks
from stackwise.checks.probe import ranks as probe
from stackwise.checks.probe.another_process import Recipe
from stackwise.checks.probe.applicable import UnmeasuredError
from stackwise.checks.probe.ranks import Ranks, _part, _plain, assembled, dense, whole_batch
from stackwise.checks.trainer import distributed as checks
from stackwise.checks.trainer_subject import TrainerSubject
from tests.zoo.distributed import ranked
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.runs import Divided, Undivided, divided, ranks_divide_different_orders

FAMILY = [c.name for c in select_checks(suite="full", asks="trainer") if c.family == "distributed"]


def answers(spec):
    return {result.check: result for result in check_trainer(spec, checks=FAMILY)}


class CountingGPT(GPT):
    """With dropout, and with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *arguments, **keywords):
        self.seen += 1
        return super().forward(*arguments, **keywords)


class Counting(Loop):
    def create_model(self):
        return CountingGPT()


class Wrapped(Counting):
    """As torch does it."""

    def create_model(self):
        return DistributedDataParallel(super().create_model())

    def clip(self):
        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)


class Past(Wrapped):
    """The wrapper is there, and the loss is taken of what it wraps."""

    def loss(self, batch):
        return self.model.module(**batch).loss


def wrapped(build):
    return replace(loop_spec_of(Counting), distributed=build)


@pytest.mark.slow
def test_wrapper_of_torch():
    results = answers(wrapped(Wrapped))
    # Each rank divides by its own number of targets, evaluates its own batches, and reads the whole epoch.
    others = {
        "unequal_targets": "warned",
        "evaluation_equals_dense": "not applicable",
        "evaluation_set_equals_dense": "not applicable",
        "ranks_share_data": "not applicable",
    }
    assert {name: r.status for name, r in results.items()} == dict.fromkeys(FAMILY, "passed") | others
    assert results["gradients_equal_dense"].value < 1e-5


@pytest.mark.slow
def test_wrapper_of_torch_bypassed():
    results = answers(wrapped(Past))
    assert results["collectives_agree"].status == "passed", results
    assert results["replicas_agree"].status == results["gradients_equal_dense"].status == "failed", results
    assert "without its wrapper" in results["replicas_agree"].advice


class SkipsTogether(Wrapped):
    """No rank makes an update if the loss of one is not finite."""

    def accumulate(self, batches):
        loss = self.loss(batches[0]).detach()
        torch.distributed.all_reduce(loss)
        self.skips = not loss.isfinite()
        return super().accumulate(batches)

    def update(self):
        if self.skips:
            self.zero_grad()
        else:
            super().update()


class RaisesAtNan(Wrapped):
    def loss(self, batch):
        loss = super().loss(batch)
        if not loss.isfinite():
            raise ArithmeticError("the loss is NaN")
        return loss


@pytest.mark.slow
def test_ranks_that_skip_together_pass():
    result = answers(wrapped(SkipsTogether))["non_finite_rank"]

    assert (result.status, result.meaning) == ("passed", "The weights are the same on all ranks.")


@pytest.mark.slow
def test_rank_that_raises_at_nan_passes():
    result = answers(wrapped(RaisesAtNan))["non_finite_rank"]

    assert result.status == "passed"
    assert "the loss is NaN" in result.meaning


def raising():
    raise ArithmeticError("no number")


def test_a_rank_that_raises():
    results = answers(ranked(raising))
    assert results.pop("collectives_agree").status == "failed"
    assert {r.meaning for r in results.values()} == {"needs a run that passes collectives_agree"}


def test_what_it_needs():
    assert {r.meaning for r in answers(loop()).values()} == {"needs TrainerSpec.distributed"}
    local = ranked(type("Local", (Loop,), {}))
    assert Recipe.of(local, "distributed") is None
    assert all("can be pickled" in r.meaning for r in answers(local).values())


def test_parts_of_a_batch():
    batch = {"input_ids": torch.arange(8)[:, None], "more": [torch.arange(8)], "name": "x"}
    part = _part(batch, 1, 2)
    assert part["input_ids"].flatten().tolist() == part["more"][0].tolist() == [4, 5, 6, 7]
    assert part["name"] == "x"


def test_assembled():
    whole = torch.arange(12.0).view(4, 3)
    assert torch.equal(assembled([whole, whole + 1], whole.shape), whole)
    assert torch.equal(assembled([whole[:1], whole[1:]], whole.shape), whole)
    assert torch.equal(assembled([whole[:, :2], whole[:, 2:]], whole.shape), whole)
    assert assembled([whole[:1], whole[:1]], whole.shape) is None


def test_names_without_wrappers():
    assert _plain("module._orig_mod.layers.0.weight") == "layers.0.weight"


class SharedTargets(Divided):
    """Each rank divides the sum of its losses by the mean number of targets of the ranks."""

    def loss(self, batch):
        loss = super().loss(batch)
        if not self.model.training:
            return loss
        total = torch.tensor(float(self.targets(batch)))
        self.all_reduce(total)
        return loss * (self.targets(batch) / (total / 2))


@pytest.mark.slow
def test_targets_of_all_ranks_have_the_same_weight():
    results = answers(divided(SharedTargets))

    others = {"evaluation_set_equals_dense": "not applicable"}
    assert {name: r.status for name, r in results.items()} == dict.fromkeys(FAMILY, "passed") | others


@pytest.mark.slow
def test_mean_of_each_rank_is_a_warning():
    results = answers(divided())

    assert results["unequal_targets"].status == "warned", results
    assert "all ranks always have the same number of targets" in str(results["unequal_targets"])
    for name in ("evaluation_equals_dense", "ranks_share_data", "gradients_equal_dense"):
        assert results[name].status == "passed", results


@pytest.mark.slow
def test_data_of_ranks_that_overlap_fail():
    result = answers(ranks_divide_different_orders())["ranks_share_data"]

    assert result.status == "failed" and result.limit == 8
    assert f"{result.value:.0f} twice and {result.value:.0f} not at all" in result.meaning


# The checks on ranks that are given, without processes


def given(monkeypatch, subject=None, **changes):
    """Let both ranks have the record of one process, with some changes for each rank."""
    subject = subject or TrainerSubject(loop_spec_of(Undivided), torch.device("cpu"), 0)

    def run_ranks(_, *, unequal=False, spoiled=False, has_set=False):
        record = dense(subject, unequal=unequal, has_set=has_set)
        records = [
            replace(record, **{name: values[rank] for name, values in changes.items()}) for rank in (0, 1)
        ]
        return Ranks(records, {}, [["end"], ["end"]], True)

    monkeypatch.setattr(checks, "run_ranks", run_ranks)
    return subject


ROWS = [(number,) for number in range(96)]


@pytest.mark.parametrize(
    ("evaluations", "status"),
    [("same", "passed"), ("twice", "failed"), ("different", "not applicable"), ("none", "not applicable")],
)
def test_evaluation_of_ranks(monkeypatch, evaluations, status):
    loss = dense(TrainerSubject(loop_spec_of(Undivided), torch.device("cpu"), 0)).evaluation
    values = {"same": [loss] * 2, "twice": [2 * loss] * 2, "different": [loss, 2 * loss], "none": [None] * 2}
    subject = given(monkeypatch, evaluation=values[evaluations])

    result = checks.evaluation_equals_dense(subject)

    assert result.status == status
    if status == "failed":
        assert result.value == pytest.approx(1.0)
        assert result.meaning == f"The loss is {2 * loss:.6g} on two ranks, and {loss:.6g} in one process."


class EvaluatesItsSet(Undivided):
    """evaluate() without batches reads an evaluation set."""

    def evaluate(self, batches=None):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(61, (5, 8), generator=generator)
        return super().evaluate([{"input_ids": ids, "labels": ids}] if batches is None else batches)


@pytest.mark.parametrize(
    ("factor", "repeated", "status"),
    [(1, [0], "passed"), (1.1, [0], "failed"), (1.1, [], "warned"), (1.1, ["other"], "warned")],
    ids=["healthy", "repeated", "weights", "other-examples"],
)
def test_evaluation_set_of_ranks(monkeypatch, factor, repeated, status):
    spec = replace(loop_spec_of(EvaluatesItsSet), distributed=EvaluatesItsSet)
    base = TrainerSubject(spec, torch.device("cpu"), 0)
    whole = dense(base, has_set=True)
    rows = [("other",) if index == "other" else whole.evaluated[index] for index in repeated]
    changes = {
        "evaluation_set": [factor * whole.evaluation_set] * 2,
        "evaluated": [whole.evaluated[:3], whole.evaluated[3:] + rows],
    }
    subject = given(monkeypatch, base, **changes)

    result = checks.evaluation_set_equals_dense(subject)

    assert (result.status, len(whole.evaluated)) == (status, 5)
    assert ("evaluate 1 of 5 examples again" in result.meaning) == (status == "failed")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "status"), [("buggy", "failed"), ("healthy", "passed")])
def test_evaluation_set_of_a_sampler_that_repeats_examples(form, status):
    subject = forms(composer)[f"{form}_declared"]()
    [result] = check_trainer(subject, checks=["evaluation_set_equals_dense"])
    assert result.status == status, result


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (ROWS[::2], ROWS[1::2], "passed"),
        (ROWS[::2], ROWS[1::2] + ROWS[:8], "passed"),
        (ROWS[:44], ROWS[44:88], "passed"),
        (ROWS[:48], ROWS[39:87], "failed"),
        (ROWS[:40], ROWS[40:80], "failed"),
        (ROWS, ROWS, "not applicable"),
        (ROWS[:48], [(-1,)] * 48, "not applicable"),
        (ROWS[:48], None, "not applicable"),
    ],
    ids=["parts", "repeated", "dropped", "overlap", "left-out", "all", "other-examples", "no-epoch"],
)
def test_data_of_ranks(monkeypatch, first, second, status):
    subject = given(monkeypatch, rows=[first, second])
    whole = replace(dense(subject), rows=ROWS)
    monkeypatch.setattr(checks, "dense", lambda _: whole)

    assert checks.ranks_share_data(subject).status == status


def test_few_targets_of_one_rank():
    subject = TrainerSubject(loop(), torch.device("cpu"), 0)

    equal, unequal = (whole_batch(subject, 0, each)["labels"] for each in (False, True))

    assert len(equal) == len(unequal) == 8
    assert torch.equal(equal[:4], unequal[:4])
    assert (unequal[4:] != -100).sum(dim=1).tolist() == [3, 3, 3, 3]


def test_unequal_targets_need_labels():
    spec = replace(ranked(Undivided), ignored_label=None)

    with pytest.raises(UnmeasuredError, match="needs batches with labels, and ignored_label"):
        probe.run_ranks(TrainerSubject(spec, torch.device("cpu"), 0), unequal=True)


def test_unequal_targets_of_equal_gradients(monkeypatch):
    subject = given(monkeypatch)
    assert checks.unequal_targets(subject).status == "passed"

    def halved(_, *, unequal=False, has_set=False):
        record = dense(subject, unequal=unequal)
        gradients = {name: g / (1 + unequal) for name, g in record.gradients.items()}
        return Ranks([replace(record, gradients=gradients)] * 2, {}, [["end"]] * 2, True)

    monkeypatch.setattr(checks, "run_ranks", halved)
    result = checks.unequal_targets(subject)
    assert result.status == "warned" and result.value > 0.1


def test_norm_of_one_rank_that_differs_fails(monkeypatch):
    subject = given(monkeypatch)
    wanted = dense(subject).norm
    subject = given(monkeypatch, norm=[wanted, 2 * wanted])

    result = checks.gradients_equal_dense(subject)

    assert (result.status, result.where) == ("failed", "rank 1")
    assert result.value == pytest.approx(1.0)


def test_unequal_targets_of_other_gradients_are_not_compared(monkeypatch):
    zeros = {name: torch.zeros_like(p) for name, p in loop().create().model.named_parameters()}
    subject = given(monkeypatch, gradients=[zeros, zeros])

    result = checks.unequal_targets(subject)

    assert result.meaning == "needs a run that passes gradients_equal_dense"


class NoSync(Wrapped):
    """Reduces the gradients of the first micro-batch only."""

    def accumulate(self, batches):
        for place, batch in enumerate(batches):
            with self.model.no_sync() if place > 0 else nullcontext():
                self.backward(self.loss(batch) / len(batches))
        self.update()
        return 0.0


@pytest.mark.slow
def test_micro_batches_without_a_reduction_fail():
    result = answers(wrapped(NoSync))["replicas_agree"]

    assert result.status == "failed"
    assert result.where.endswith("after an update from two micro-batches")
