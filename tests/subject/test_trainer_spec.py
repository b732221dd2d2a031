"""TrainerSpec: what it understands, what it infers, and how each trainer is driven."""

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
from tests.zoo.loop import Loop, loop


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sound(spec, passing, averaged=()):
    """Nothing fails, but what is asked of a method that averages batches, as the run itself says."""
    results = check_trainer(
        spec, checks=["step", "optimizer", "clipping", "accumulation", "schedule", "evaluation"]
    )
    assert not [str(r) for r in results if not r.ok and r.check not in averaged]
    assert not [r.check for r in results if r.check in averaged and r.status == "passed"]
    passed = {r.check for r in results if r.status == "passed"}
    assert passed >= set(passing), [str(r) for r in results if r.check in passing]


def bare_step(model, optimizer, batch):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_run_of_ones_own():
    spec = TrainerSpec.of(Loop)
    assert (spec.name, spec.vocab_size) == ("Loop", GPT.vocab_size)
    assert spec.notes == (
        "vocabulary 61; found: step, scheduler, loss, accumulate, epoch, evaluate, save, load, position, fit"
    )
    run = spec.create()
    assert isinstance(run, TrainingRun)
    assert same(weights(run.model), weights(spec.create().model))
    assert not same(weights(run.model), weights(spec.create(seed=1).model))
    declared = TrainerSpec.of(Loop, name="mine", batch_size=2, notes="as declared")
    assert (declared.name, declared.batch()["input_ids"].shape[0]) == ("mine", 2)
    assert declared.notes == "as declared"
    assert TrainerSpec.of(loop).name == "Loop"
    assert TrainerSpec.of(loop(), seq_len=7).batch()["labels"].shape == (4, 7)


def test_a_bare_function():
    spec = TrainerSpec.from_function(bare_step, GPT, max_norm=None, seq_len=8)
    assert (spec.name, spec.seq_len) == ("bare_step", 8)
    assert spec.notes == "a function (model, optimizer, batch); vocabulary 61; found: step"
    run, twin = spec.create(), spec.create().model
    torch.manual_seed(0)
    loss = run.step(spec.batch())
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    torch.manual_seed(0)
    assert loss == bare_step(twin, optimizer, spec.batch())
    assert same(weights(run.model), weights(twin))
    sound(spec, ["parameters_change", "fresh_gradients", "optimizer_coverage"])


class Module(nn.Module):
    """The part of a LightningModule that is driven."""

    automatic_optimization = True

    def __init__(self):
        super().__init__()
        self.gpt = GPT()
        self.calls = []

    def log(self, *_, **__):
        raise RuntimeError("there is no trainer to log to")

    def training_step(self, batch, batch_idx):
        loss = self.gpt(**batch).loss
        self.log("loss", loss)
        self.calls.append(batch_idx)
        return {"loss": loss}

    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("subject", [Module, lambda: Module(), Module()], ids=["class", "function", "module"])
def test_a_lightning_module(subject):
    spec = TrainerSpec.of(subject, max_norm=1.0, learning_rate=lambda step: 0.1 / (step + 1))
    assert spec.name in ("Module", "LightningRun") and "Lightning" in spec.notes
    run = spec.create()
    run.step(spec.batch())
    run.step(spec.batch())
    assert run.model.calls == [0, 1]
    sound(
        spec,
        ["parameters_change", "fresh_gradients", "step_loss", "clipped_norm", "learning_rate"],
        averaged=["accumulation_ragged"],
    )


def test_what_a_lightning_module_may_configure():
    def configured(make):
        class Other(Module):
            def configure_optimizers(self):
                return make(torch.optim.SGD(self.parameters(), lr=0.1))

        return TrainerSpec.of(Other).create()

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    for make, scheduled in [
        (lambda optimizer: optimizer, False),
        (lambda optimizer: [optimizer], False),
        (lambda optimizer: ([optimizer], [scheduler(optimizer)]), True),
        (lambda optimizer: ([optimizer], [{"scheduler": scheduler(optimizer)}]), True),
        (lambda optimizer: {"optimizer": optimizer, "lr_scheduler": scheduler(optimizer)}, True),
        (lambda optimizer: [{"optimizer": optimizer}], False),
    ]:
        run = configured(make)
        run.step(TrainerSpec.of(Module).batch())
        assert (run.scheduler is not None) == scheduled
        if scheduled:  # by epoch, unless it says otherwise
            assert run.scheduler.last_epoch == 0
    with pytest.raises(TypeError, match="returned 2; wanted one optimizer"):
        configured(lambda optimizer: [optimizer, optimizer])
    with pytest.raises(TypeError, match="returned NoneType; wanted one optimizer"):
        configured(lambda optimizer: None)


def test_a_lightning_module_that_optimizes_by_hand():
    class Manual(Module):
        automatic_optimization = False

    with pytest.raises(TypeError, match="manual optimization"):
        TrainerSpec.of(Manual)


def config(**training):
    model = {"vocab_size": 256, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64}
    return StackWiseConfig.from_dict(
        {
            "model": {**model, "architecture": {"n_stacks": 2, "blocks_per_stack": 1}},
            "training": {"max_steps": 20, "device": "cpu", "batch_size": 4, "seq_len": 16, **training},
        }
    )


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "bf16_weights"])
def test_our_own_trainer(precision):
    spec = TrainerSpec.of(ArchitectureTrainer(config(precision=precision)))
    assert spec.max_norm == config().training.grad_clip
    assert spec.notes == f"precision {precision}"
    sound(
        spec,
        [
            "parameters_change",
            "fresh_gradients",
            "step_loss",
            "clipped_norm",
            "learning_rate",
            "evaluation_exact",
        ],
    )


def test_our_own_trainer_is_driven_as_it_drives_itself():
    settings = config(precision="fp32", max_steps=4)
    trainer = ArchitectureTrainer(settings)
    run = TrainerSpec.of(lambda: trainer).create()
    rack = copy.deepcopy(run.model)
    batches = list(run.epoch(0))[:4]
    result = trainer.train_architecture(rack, batches)
    losses = [float(run.step(batch)) for batch in batches]
    assert [record.loss for record in result["records"]] == losses
    assert same(weights(run.model), weights(rack))


@pytest.fixture
def trainer_factory(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    def factory(dataset=None, **arguments):
        arguments = {"max_steps": 20, "learning_rate": 1e-3, "report_to": [], **arguments}
        llama = LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        return Trainer(
            model=LlamaForCausalLM(llama),
            args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments),
            train_dataset=dataset,
        )

    return factory


def test_a_transformers_trainer(trainer_factory):
    spec = TrainerSpec.of(lambda: trainer_factory(), name="llama")
    assert (spec.name, spec.vocab_size, spec.max_norm) == ("llama", 61, 1.0)
    sound(
        spec,
        [
            "parameters_change",
            "fresh_gradients",
            "clipped_norm",
            "accumulated_gradient",
            "accumulation_ragged",
            "accumulation_window",
            "scheduler_order",
            "scheduler_per_update",
            "weight_decay_groups",
            "evaluation_restores",
            "evaluation_repeats",
        ],
        averaged=["evaluation_batches", "evaluation_exact"],
    )


def test_a_transformers_trainer_is_driven_as_it_drives_itself(trainer_factory):
    spec = TrainerSpec.of(lambda: trainer_factory())
    ids = torch.randint(61, (8, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    run = spec.create()
    trainer = trainer_factory(rows, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    run.trainer.args.max_steps = 2
    trainer.model.load_state_dict(run.model.state_dict())
    trainer.train()
    reference = TrainerSpec.of(lambda: trainer_factory(max_steps=2)).create()
    reference.model.load_state_dict(run.model.state_dict())
    micro = [
        {"input_ids": ids[start : start + 2], "labels": ids[start : start + 2]} for start in range(0, 8, 2)
    ]
    reference.accumulate(micro[:2])
    reference.accumulate(micro[2:])
    for ours, theirs in zip(weights(reference.model), weights(trainer.model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_transformers_trainer_goes_on_from_what_it_saved(trainer_factory, tmp_path):
    spec = TrainerSpec.of(lambda: trainer_factory())
    run = spec.create()
    run.step(spec.batch())
    run.save(tmp_path / "saved")
    run.step(spec.batch(seed=1))
    other = spec.create(seed=1)
    other.load(tmp_path / "saved")
    other.step(spec.batch(seed=1))
    assert same(weights(run.model), weights(other.model))


@pytest.mark.parametrize(
    "subject, seen", [(lambda: 1, "int"), (7, "int"), (lambda: nn.Linear(1, 1), "Linear")]
)
def test_what_is_no_trainer(subject, seen):
    with pytest.raises(TypeError, match=f"trainer: got {seen}; wanted a function"):
        TrainerSpec.of(subject)


def test_refusals():
    for name, value in [("batch_size", 0), ("max_norm", -1.0), ("total_steps", 0), ("seq_len", 0)]:
        with pytest.raises(ValueError, match=name):
            TrainerSpec.of(Loop, **{name: value})

    class NoEmbedding(Loop):
        def create_model(self):
            return nn.Linear(2, 2)

        def loss(self, batch):
            return self.model(batch).square().mean()

        def targets(self, batch):
            return len(batch)

    with pytest.raises(TypeError, match="declare vocab_size= or make_batch="):
        TrainerSpec.of(NoEmbedding)
    spec = TrainerSpec.of(
        NoEmbedding, make_batch=lambda b, t, generator: torch.randn(b, 2, generator=generator)
    )
    assert spec.batch().shape == (4, 2)


def test_a_step_that_takes_other_batches_says_so_once():
    def pairs(model, optimizer, batch):
        x, y = batch
        loss = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(ValueError, match=r"too many values to unpack .* input_ids \(4, 16\).* make_batch="):
        TrainerSpec.from_function(pairs, GPT)

    def make_batch(batch_size, seq_len, generator):
        ids = torch.randint(GPT.vocab_size, (batch_size, seq_len + 1), generator=generator)
        return Pair(ids[:, :-1], ids[:, 1:])

    spec = TrainerSpec.from_function(pairs, GPT, make_batch=make_batch)
    sound(spec, ["parameters_change", "fresh_gradients", "single_update"])
    with pytest.raises(ValueError, match="it got what make_batch made; wanted batches"):
        TrainerSpec.from_function(pairs, GPT, make_batch=lambda b, t, generator: 1)

    class NoBatch(Loop):
        def step(self):
            pass

    with pytest.raises(ValueError, match=r"TypeError: .*step\(\) takes 1 positional argument"):
        TrainerSpec.of(NoBatch)


def test_trying_a_step_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    TrainerSpec.of(Loop)
    assert torch.equal(torch.get_rng_state(), before)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_batches_of_every_kind_are_moved():
    ids = torch.zeros(2, 3)
    packed = pack_padded_sequence(ids, [3, 2], batch_first=True)
    kinds = {
        "pair": Pair(ids, ids),
        "array": np.zeros(2),
        "packed": packed,
        "nested": [({"x": ids}, "text", None)],
        "user's": UserDict(x=ids),
    }
    spec = TrainerSpec(Loop, "loop", 61, make_batch=lambda b, t, generator: kinds)
    batch = spec.batch(device="meta")
    assert isinstance(batch["pair"], Pair) and batch["pair"].y.is_meta
    assert isinstance(batch["array"], np.ndarray)
    assert isinstance(batch["packed"], PackedSequence) and batch["packed"].data.is_meta
    assert batch["nested"][0][0]["x"].is_meta and batch["nested"][0][1:] == ("text", None)
    assert batch["user's"]["x"].is_meta


def test_a_trainer_that_is_built_already(trainer_factory):
    with pytest.raises(TypeError, match=r"got a Trainer that is built already; .* lambda: Trainer\(\.\.\.\)"):
        TrainerSpec.of(trainer_factory())


@pytest.mark.parametrize("said", [True, False])
def test_positions_and_token_types_are_no_vocabulary(said):
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.kinds = (nn.Embedding(n, 8) for n in (40, 100, 2))
            if said:
                self.vocab_size = 37

        def forward(self, ids):
            kinds = self.kinds(torch.zeros_like(ids))
            return (self.words(ids) + self.places(torch.arange(ids.shape[1])) + kinds) @ self.words.weight.t()

    def step(model, optimizer, batch):
        loss = model(batch["input_ids"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    spec = TrainerSpec.from_function(step, Placed, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert spec.vocab_size == (37 if said else 40)
