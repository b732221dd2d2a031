"""TrainerSpec: attributes inferred from a run, its batches and its errors."""

import copy
from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from stackwise.checks import check_trainer
from stackwise.config import StackWiseConfig
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun
from stackwise.training import ArchitectureTrainer
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, bare_step, loop

FAMILIES = ["step", "optimizer", "clipping", "accumulation", "schedule", "evaluation"]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def passed_checks(spec):
    """Return the names of the checks that pass. No check fails."""
    results = check_trainer(spec, checks=FAMILIES)
    assert not [str(result) for result in results if not result.ok]
    return {result.check for result in results if result.status == "passed"}


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def step_on_pairs(model, optimizer, batch):
    x, y = batch
    loss = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def make_pairs(batch_size, seq_len, generator):
    ids = torch.randint(GPT.vocab_size, (batch_size, seq_len + 1), generator=generator)
    return Pair(ids[:, :-1], ids[:, 1:])


# Subjects


def test_run_is_described():
    spec = TrainerSpec.of(Loop)
    assert (spec.name, spec.vocab_size) == ("Loop", GPT.vocab_size)
    assert spec.notes == (
        "vocabulary 61; found: step, scheduler, loss, accumulate, epoch, evaluate, save, load, position, fit"
    )
    assert TrainerSpec.of(loop).name == "Loop"
    declared = TrainerSpec.of(Loop, name="mine", batch_size=2, notes="as declared")
    assert (declared.name, declared.notes) == ("mine", "as declared")
    assert declared.batch()["input_ids"].shape == (2, 16)
    assert TrainerSpec.of(loop(), seq_len=7).batch()["labels"].shape == (4, 7)


def test_run_depends_only_on_the_seed():
    before = torch.get_rng_state()
    spec = TrainerSpec.of(Loop)
    run = spec.create()
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(run, TrainingRun)
    assert same(weights(run.model), weights(spec.create().model))
    assert not same(weights(run.model), weights(spec.create(seed=1).model))


def test_function_makes_the_same_step_in_a_spec():
    spec = TrainerSpec.from_function(bare_step, GPT, max_norm=None, seq_len=8)
    assert (spec.name, spec.seq_len) == ("bare_step", 8)
    assert spec.notes == "a function (model, optimizer, batch); vocabulary 61; found: step"
    run, twin = spec.create(), spec.create().model
    torch.manual_seed(0)
    loss = run.step(spec.batch())
    torch.manual_seed(0)
    assert loss == bare_step(twin, torch.optim.AdamW(twin.parameters(), lr=1e-3), spec.batch())
    assert same(weights(run.model), weights(twin))
    assert passed_checks(spec) >= {"parameters_change", "fresh_gradients"}


def test_function_on_pairs_passes_with_make_batch():
    spec = TrainerSpec.from_function(step_on_pairs, GPT, make_batch=make_pairs)
    assert passed_checks(spec) >= {"parameters_change", "fresh_gradients"}


def config(**training):
    model = {"vocab_size": 256, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64}
    return StackWiseConfig.from_dict(
        {
            "model": {**model, "architecture": {"n_stacks": 2, "blocks_per_stack": 1}},
            "training": {"max_steps": 20, "device": "cpu", "batch_size": 4, "seq_len": 16, **training},
        }
    )


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "bf16_weights"])
def test_architecture_trainer_passes(precision):
    spec = TrainerSpec.of(ArchitectureTrainer(config(precision=precision)))
    assert spec.max_norm == config().training.grad_clip
    assert spec.notes == f"precision {precision}"
    step = {"parameters_change", "fresh_gradients"}
    assert passed_checks(spec) >= step | {"clipped_norm", "learning_rate", "evaluation_exact"}


def test_architecture_trainer_makes_the_same_steps_in_a_spec():
    trainer = ArchitectureTrainer(config(precision="fp32", max_steps=4))
    run = TrainerSpec.of(lambda: trainer).create()
    rack = copy.deepcopy(run.model)
    batches = list(run.epoch(0))[:4]
    result = trainer.train_architecture(rack, batches)
    losses = [float(run.step(batch)) for batch in batches]
    assert [record.loss for record in result["records"]] == losses
    assert same(weights(run.model), weights(rack))


@pytest.mark.parametrize("has_setting", [True, False])
def test_vocabulary_is_no_table_of_positions_or_token_types(has_setting):
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.kinds = (nn.Embedding(n, 8) for n in (40, 100, 2))
            if has_setting:
                self.vocab_size = 37

        def forward(self, input_ids, **_):
            places = self.places(torch.arange(input_ids.shape[1]))
            x = self.words(input_ids) + places + self.kinds(torch.zeros_like(input_ids))
            return x.square().mean()

    def step(model, optimizer, batch):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    spec = TrainerSpec.from_function(step, Placed, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert spec.vocab_size == (37 if has_setting else 40)


# Batches


def test_batches_of_every_kind_are_moved():
    ids = torch.zeros(2, 3)
    kinds = {
        "pair": Pair(ids, ids),
        "array": np.zeros(2),
        "packed": pack_padded_sequence(ids, [3, 2], batch_first=True),
        "nested": [({"x": ids}, "text", None)],
        "mapping": UserDict(x=ids),
    }
    batch = TrainerSpec(Loop, "loop", 61, make_batch=lambda b, t, generator: kinds).batch(device="meta")
    assert isinstance(batch["pair"], Pair) and batch["pair"].y.is_meta
    assert isinstance(batch["array"], np.ndarray)
    assert isinstance(batch["packed"], PackedSequence) and batch["packed"].data.is_meta
    assert batch["nested"][0][0]["x"].is_meta and batch["nested"][0][1:] == ("text", None)
    assert batch["mapping"]["x"].is_meta


# Errors


class NoEmbedding(Loop):
    def create_model(self):
        return nn.Linear(2, 2)

    def loss(self, batch):
        return self.model(batch).square().mean()

    def targets(self, batch):
        return len(batch)


class NoBatch(Loop):
    def step(self):
        pass


class NoStep:
    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters())


@pytest.mark.parametrize(
    ("subject", "declared", "error", "message"),
    [
        (lambda: 1, {}, TypeError, "trainer: got int; wanted a function"),
        (7, {}, TypeError, "trainer: got int; wanted a function"),
        (lambda: nn.Linear(1, 1), {}, TypeError, "trainer: got Linear; wanted a function"),
        (NoEmbedding, {}, TypeError, "declare vocab_size= or make_batch="),
        (NoBatch, {}, ValueError, r"TypeError: .*step\(\) takes 1 positional argument"),
        *((Loop, {name: 0}, ValueError, name) for name in ("batch_size", "total_steps", "seq_len")),
        (Loop, {"max_norm": -1.0}, ValueError, "max_norm"),
        (Loop, {"frozen": "emb"}, ValueError, "frozen: got 'emb'; allowed: a tuple of strings"),
        (Loop, {"never_waits": "no"}, ValueError, "never_waits: got 'no'; allowed: True, False or None"),
        (Loop, {"ignored_label": "x"}, ValueError, "ignored_label: got 'x'; allowed: an integer or None"),
        (Loop, {"decayed": 3}, ValueError, "decayed: got 3; allowed: a function"),
        (Loop, {"factory": 3}, ValueError, "factory: got 3; allowed: a string"),
        (
            Loop,
            {"batchsize": 3},
            TypeError,
            "batchsize: unknown field of TrainerSpec; did you mean batch_size=",
        ),
        (bare_step, {}, TypeError, "bare_step: missing a required argument: 'model'.*from_function"),
        (NoStep, {}, TypeError, r"trainer: got NoStep, which has no step\(batch\); wanted"),
        (NoStep(), {}, TypeError, r"trainer: got NoStep, which has no step\(batch\); wanted"),
        (Loop(), {}, TypeError, r"trainer: got a Loop that is built already; .*TrainerSpec.of\(Loop\)"),
    ],
)
def test_subject_that_cannot_train_is_refused(subject, declared, error, message):
    with pytest.raises(error, match=message):
        TrainerSpec.of(subject, **declared)


def test_model_without_an_embedding_needs_make_batch():
    def make_batch(batch_size, seq_len, generator):
        return torch.randn(batch_size, 2, generator=generator)

    assert TrainerSpec.of(NoEmbedding, make_batch=make_batch).batch().shape == (4, 2)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({}, r"too many values to unpack .* input_ids \(4, 16\).* make_batch="),
        ({"make_batch": lambda b, t, generator: 1}, "make_batch must return a batch that step"),
    ],
)
def test_batch_that_the_step_cannot_use_is_refused(declared, message):
    with pytest.raises(ValueError, match=message):
        TrainerSpec.from_function(step_on_pairs, GPT, **declared)
