"""Guard contract: behaviour that every guarded training loop shares.

Each loop trains the same model on the same batches with AdamW and a learning-rate schedule. A batch whose
first token is BAD triggers a fault in the forward or the backward pass.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from stackwise.config import StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.stability.guard import Alarm, Guard, GuardError, GuardPolicy
from stackwise.training import ArchitectureTrainer

CONSTANT = {"kind": "constant", "warmup_steps": 2}  # a run that ends early has the same rates
BAD = 22  # token that only faulty batches contain
SETTINGS = {"snapshot_interval": 8, "patience": 3}
POLICY = GuardPolicy(**SETTINGS)
CONFIG = {
    "model": {
        "vocab_size": 23,
        "d_model": 16,
        "d_ff": 24,
        "n_heads": 2,
        "n_kv_heads": 1,
        "architecture": {"n_stacks": 1, "blocks_per_stack": 2},
    },
    "training": {"batch_size": 2, "seq_len": 8, "device": "cpu", "grad_clip": 1.0},
}
# What happens to the hidden states of a faulty row: factor of the output, factor of its gradient.
FAULTS = {"nan output": (math.nan, 1.0), "inf gradient": (1.0, math.inf), "loss spike": (1000.0, 1.0)}


@dataclass
class Outcome:
    """Result of a training.

    Attributes:
        weights: all parameters of the model.
        alarms: alarms of the guard.
        error: the GuardError that ended the training, if any.
    """

    weights: torch.Tensor
    alarms: list[Alarm] = field(default_factory=list)
    error: GuardError | None = None


class LanguageModel(nn.Module):
    """A small Rack that returns its loss. A fault is triggered by the first token of a row."""

    def __init__(self, fault):
        super().__init__()
        torch.manual_seed(0)
        self.rack = create_rack_from_config(StackWiseConfig.from_dict(CONFIG))
        add_fault(self.rack, *FAULTS[fault])

    def forward(self, input_ids, **_):
        logits = self.rack(input_ids[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())}

    def optimizer(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    @property
    def weights(self):
        return flat(self.rack)


def flat(rack):
    return torch.cat([weight.detach().flatten() for weight in rack.parameters()])


def add_fault(rack, forward, backward):
    faulty = []

    def remember(_module, inputs):
        faulty[:] = [(inputs[0][:, :1] == BAD)[..., None]]

    def multiply(_module, _inputs, output):
        [rows] = faulty
        if not rows.any():
            return output
        output.register_hook(lambda gradient: torch.where(rows, gradient * backward, gradient))
        return torch.where(rows, output * forward, output)

    rack.embedding.register_forward_pre_hook(remember)
    rack.final_norm.register_forward_hook(multiply)


def plain_loop(batches, guarded, fault):
    """A loop that uses `Guard` itself."""
    model = LanguageModel(fault).train()
    optimizer, scheduler = model.optimizer()
    torch.manual_seed(1)
    if not guarded:
        for batch in batches:
            model(batch)["loss"].backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return Outcome(model.weights)
    guard = Guard(model, optimizer, scheduler=scheduler, policy=POLICY, loss_of=lambda m, b: m(b)["loss"])
    error = None
    try:
        for batch in guard.batches(batches):
            loss = model(batch)["loss"]
            loss.backward()
            guard.step(loss)
    except GuardError as raised:
        error = raised
    return Outcome(model.weights, guard.alarms, error)


def own_trainer(batches, guarded, fault):
    """The trainer of Racks. It counts updates, so it stops after one update per healthy batch.

    If the last batch is faulty, the run has one update more, so that it reads the faulty batches.
    """
    n_updates = sum(not is_bad(batch) for batch in batches) + is_bad(batches[-1])
    changes = {"max_steps": n_updates, "schedule": CONSTANT, "guard": SETTINGS if guarded else None}
    config = StackWiseConfig.from_dict({**CONFIG, "training": CONFIG["training"] | changes})
    torch.manual_seed(0)
    rack = create_rack_from_config(config)
    add_fault(rack, *FAULTS[fault])
    trainer = ArchitectureTrainer(config, progress=False)
    try:
        result = trainer.train_architecture(rack, batches)
    except GuardError as error:
        return Outcome(flat(rack), error.alarms, error)
    return Outcome(flat(rack), result.get("alarms", []))


def transformers_trainer(batches, guarded, fault):
    """`transformers.Trainer` with the callback."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from stackwise.stability.adapters.transformers_callback import GuardCallback

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

    model = LanguageModel(fault)
    callback = GuardCallback(POLICY) if guarded else None
    arguments = transformers.TrainingArguments(
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        max_grad_norm=1.0,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row} for batch in batches for row in batch],
        callbacks=[callback] if guarded else [],
        optimizers=model.optimizer(),
    )
    torch.manual_seed(1)
    error = None
    try:
        trainer.train()
    except GuardError as raised:
        error = raised
    return Outcome(model.weights, callback.guard.alarms if guarded else [], error)


def lightning_trainer(batches, guarded, fault):
    """`lightning.Trainer` with the callback."""
    lightning = pytest.importorskip("lightning.pytorch")
    from stackwise.stability.adapters.lightning_callback import GuardCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = LanguageModel(fault)

        def training_step(self, batch, _):
            return self.model(batch)["loss"]

        def configure_optimizers(self):
            optimizer, scheduler = self.model.optimizer()
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    module = Module()
    callback = GuardCallback(POLICY) if guarded else None
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[callback] if guarded else [],
    )
    error = None
    torch.manual_seed(1)
    try:
        trainer.fit(module, DataLoader(batches, batch_size=None))
    except GuardError as raised:
        error = raised
    return Outcome(module.model.weights, callback.guard.alarms if guarded else [], error)


def accelerate_loop(batches, guarded, fault):
    """A loop of accelerate with `AcceleratedGuard`."""
    accelerate = pytest.importorskip("accelerate")
    from stackwise.stability.adapters.accelerate_guard import AcceleratedGuard

    accelerator = accelerate.Accelerator(cpu=True)
    model = LanguageModel(fault).train()
    rows = [row for batch in batches for row in batch]
    prepared, optimizer, scheduler, loader = accelerator.prepare(
        model, *model.optimizer(), DataLoader(rows, batch_size=2)
    )
    torch.manual_seed(1)
    if not guarded:
        for batch in loader:
            accelerator.backward(prepared(batch)["loss"])
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return Outcome(model.weights)
    guard = AcceleratedGuard(
        accelerator,
        prepared,
        optimizer,
        scheduler,
        max_grad_norm=1.0,
        policy=POLICY,
        loss_of=lambda m, b: m(b)["loss"],
    )
    error = None
    try:
        for batch in guard.batches(loader):
            loss = prepared(batch)["loss"]
            accelerator.backward(loss)
            guard.step(loss)
    except GuardError as raised:
        error = raised
    return Outcome(model.weights, guard.guard.alarms, error)


LOOPS = [
    plain_loop,
    own_trainer,
    transformers_trainer,
    pytest.param(lightning_trainer, marks=pytest.mark.filterwarnings("ignore")),  # many of its own
    accelerate_loop,
]


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=LOOPS, ids=lambda loop: loop.__name__)
def loop(request):
    return request.param


def is_bad(batch):
    return bool((batch[:, 0] == BAD).any())


def make_batches(count, bad=()):
    generator = torch.Generator().manual_seed(3)
    batches = list(torch.randint(BAD, (count, 2, 9), generator=generator))
    for place in bad:
        batches[place][0, 0] = BAD
    return batches


def healthy(batches):
    return [batch for batch in batches if not is_bad(batch)]


def test_a_healthy_run_is_unchanged(loop):
    batches = make_batches(12)
    guarded, plain = (loop(batches, guarded, "nan output") for guarded in (True, False))
    assert guarded.alarms == [] and guarded.error is None
    assert torch.equal(guarded.weights, plain.weights)


@pytest.mark.parametrize("bad", [(0,), (6,), (6, 7), (10,)], ids=str)
@pytest.mark.parametrize("fault", ["nan output", "inf gradient"])
def test_a_run_with_non_finite_steps_equals_one_without_their_batches(loop, fault, bad):
    batches = make_batches(12, bad)
    guarded, plain = loop(batches, True, fault), loop(healthy(batches), False, fault)
    assert {alarm.kind for alarm in guarded.alarms} == {
        "non-finite loss" if fault == "nan output" else "non-finite gradient"
    }
    assert [alarm.batch for alarm in guarded.alarms] == [((0, place),) for place in bad]
    assert torch.equal(guarded.weights, plain.weights)


def test_a_run_with_a_loss_spike_equals_one_without_its_batch(loop):
    batches = make_batches(12, bad=[8])
    guarded, plain = loop(batches, True, "loss spike"), loop(healthy(batches), False, "loss spike")
    [alarm] = guarded.alarms
    assert alarm.step == 8 and alarm.is_finite_spike
    assert torch.equal(guarded.weights, plain.weights)


def test_an_alarm_names_the_step_the_action_and_the_module(loop):
    [alarm] = loop(make_batches(12, bad=[6]), True, "nan output").alarms
    assert (alarm.step, alarm.action) == (6, "skipped")
    assert "final_norm" in alarm.where


def test_an_alarm_is_logged(loop, caplog):
    [alarm] = loop(make_batches(12, bad=[6]), True, "nan output").alarms
    [message] = [record.getMessage() for record in caplog.records if record.name == "stackwise.guard"]
    assert message == f"guard: {alarm}"


def test_a_fault_that_lasts_ends_the_run(loop):
    batches = make_batches(24, bad=range(6, 24))
    outcome = loop(batches, True, "nan output")
    assert "non-finite loss" in str(outcome.error)
    assert min(alarm.step for alarm in outcome.alarms) == 6
    assert torch.equal(outcome.weights, loop(batches[:6], False, "nan output").weights)
