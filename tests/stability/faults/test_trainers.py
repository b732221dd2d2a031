"""Trainers of others are broken as a hand-written loop is: as they are, and as a run of a TrainerSpec."""

import logging
import warnings

import pytest
import torch
from torch import nn

from stackwise.stability.faults import (
    BitFlip,
    CorruptSample,
    EmbeddingExplosion,
    GradientExplosion,
    HalfOverflow,
    LabelCorruption,
    LogitGrowth,
    LossSpike,
    NanInjection,
    OutOfMemory,
    broken,
)
from stackwise.subject.trainer_spec import TrainerSpec
from tests.stability.faults.conftest import differing, hooks_of, same

# Each place of a step that a fault can be in.
FAULTS = [
    NanInjection(step=2),
    NanInjection(step=0),
    NanInjection(step=2, target="loss", duration=2),
    NanInjection(step=2, target="gradient"),
    NanInjection(step=2, target="weight"),
    NanInjection(step=2, target="optimizer_state:*.exp_avg_sq"),
    GradientExplosion(step=3),
    LossSpike(step=3),
    LogitGrowth(step=2, duration=2),
    EmbeddingExplosion(step=2),
    BitFlip(step=2),
    HalfOverflow(step=2),
    CorruptSample(step=2),
    LabelCorruption(step=2, duration=2),
]
# An activation, a gradient, the optimizer's state, an attention and a batch.
SOME_FAULTS = [FAULTS[index] for index in (0, 3, 5, 8, 12)]
STEPS = 5
KINDS = ["function", "transformers_run", "transformers", "accumulating", "lightning_run", "lightning"]


def rows(n=40):
    ids = torch.randint(29, (n, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def next_loss(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def state(model):
    return sum(p.detach().double().sum() for p in model.parameters()).item()


def driven(spec, faults):
    """(loss, weights after it) of each step of a run."""
    run = spec.create(seed=0)
    seen = []
    with broken(run, faults) as injection:
        steps = ((float(run.step(spec.batch(seed=step))), state(run.model)) for step in range(STEPS))
        seen.extend(steps)
    assert not {"step", "accumulate"} & set(vars(run))
    return run.model, seen, injection


def of_function(subjects, _tmp_path, faults):
    def step(model, optimizer, batch):
        loss = next_loss(model(batch["input_ids"]), batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return driven(TrainerSpec.from_function(step, subjects.tiny), faults)


def transformers_trainer(tmp_path, **arguments):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    settings = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(**settings | arguments),
        train_dataset=rows(),
    )


def of_transformers_run(_subjects, tmp_path, faults):
    return driven(TrainerSpec.of(lambda: transformers_trainer(tmp_path)), faults)


def of_transformers(_subjects, tmp_path, faults, **arguments):
    trainer = transformers_trainer(tmp_path, logging_nan_inf_filter=False, **arguments)
    trainer.remove_callback(type(trainer.callback_handler.callbacks[-1]))
    seen = []
    log = trainer.log

    def keep(logs, *rest):
        if "loss" in logs:
            seen.append((logs["loss"], state(trainer.model)))
        log(logs, *rest)

    trainer.log = keep
    with broken(trainer, faults) as injection:
        trainer.train()
    assert not {"training_step", "compute_loss"} & set(vars(trainer))
    return trainer.model, seen, injection


def of_accumulating(subjects, tmp_path, faults):
    return of_transformers(subjects, tmp_path, faults, gradient_accumulation_steps=2)


def lightning_module(subjects, base):
    class Module(base):
        def __init__(self):
            super().__init__()
            self.lm, self.seen = subjects.tiny(), []

        def training_step(self, batch, batch_idx):
            return {"loss": next_loss(self.lm(batch["input_ids"]), batch)}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append((outputs["loss"].item(), state(self)))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    return Module()


def of_lightning_run(subjects, _tmp_path, faults):
    module = lightning_module(subjects, nn.Module)
    spec = TrainerSpec.of(lambda: lightning_module(subjects, nn.Module), vocab_size=29)
    assert "training_step" not in vars(module)
    model, seen, injection = driven(spec, faults)
    assert "training_step" not in vars(model)
    return model, seen, injection


def of_lightning(subjects, tmp_path, faults):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        module = lightning_module(subjects, lightning.LightningModule)
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            default_root_dir=tmp_path,
        )
        with broken(module, faults) as injection:
            trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4))
    assert "training_step" not in vars(module)
    return module, module.seen, injection


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def break_it(kind, subjects, tmp_path):
    return lambda *faults: globals()[f"of_{kind}"](subjects, tmp_path, faults)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_faults_in_every_trainer(break_it, kind, every):
    before = torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad
    _, clean, injection = break_it()
    assert (injection.fired, injection.step, len(clean)) == ([], STEPS, STEPS)
    for fault in FAULTS if every or kind == "function" else SOME_FAULTS:
        model, seen, injection = break_it(fault)
        assert injection.fired == [s for s in fault.steps if s < STEPS], fault
        assert injection.step == STEPS
        assert len(seen) == STEPS
        different = differing(clean, seen)
        # An Adam's steps are the same for gradients of any size, if all grow: seen or not, none comes before.
        assert not different or different[0] >= fault.step, fault
        if not isinstance(fault, GradientExplosion):
            assert different[0] == fault.step, fault
        assert not hooks_of(model), fault
    assert before == (torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad)


def test_what_the_trainer_reports_is_the_broken_loss(break_it):
    _, clean, _ = break_it()
    _, seen, _ = break_it(LossSpike(step=1, factor=4.0))
    assert seen[1][0] == pytest.approx(4 * clean[1][0], rel=1e-5)
    assert seen[0] == clean[0]


def test_an_error_of_a_fault_comes_out_and_leaves_nothing(break_it):
    before = torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad
    with pytest.raises(torch.OutOfMemoryError, match="out_of_memory"):
        break_it(OutOfMemory(step=1))
    assert before == (torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad)


def test_a_run_that_goes_on_after_an_error(subjects):
    def self_made(model, optimizer, batch):
        optimizer.zero_grad()
        loss = next_loss(model(batch["input_ids"]), batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    spec = TrainerSpec.from_function(self_made, subjects.tiny)
    run = spec.create(seed=0)
    outcomes = []
    with broken(
        run, [OutOfMemory(step=1, moment="backward"), NanInjection(step=2, target="loss")]
    ) as injection:
        for step in range(4):
            try:
                outcomes.append(float(run.step(spec.batch(seed=step))))
            except torch.OutOfMemoryError:
                outcomes.append("error")
    assert (injection.fired, injection.step) == ([1, 2], 4)
    assert outcomes[1] == "error"
    assert [step for step, loss in enumerate(outcomes) if loss != loss] == [2, 3]
    assert same(sorted(vars(run)), sorted(vars(spec.create(seed=0))))
