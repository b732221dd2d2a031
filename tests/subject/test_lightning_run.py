"""LightningRun: hooks, evaluation, checkpoints and data of a Lightning module, without a Trainer."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stackwise.checks import check_trainer
from stackwise.subject.lightning_run import LightningRun
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.gpt import GPT


class Module(nn.Module):
    """A healthy Lightning module that does not need Lightning."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.gpt, self.dropout = GPT(), nn.Dropout(dropout)

    def forward(self, input_ids, attention_mask=None):
        return self.gpt(input_ids).logits

    def training_step(self, batch, batch_idx):
        logits = self.dropout(self(batch["input_ids"]))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), prog_bar=True)

    def groups(self):
        named = dict(self.named_parameters())
        return [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        ]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.groups(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    def train_dataloader(self):
        return DataLoader(rows(), batch_size=4, shuffle=True)


class Returns(Module):
    def validation_step(self, batch):
        return {"accuracy": torch.tensor(1.0), "loss": self.training_step(batch, 0)}


def rows(n=18):
    ids = torch.randint(61, (n, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def batch_of(n=4, seed=0):
    ids = torch.randint(61, (n, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def run_of(kind=Module, seed=0):
    return TrainerSpec.of(kind).create(seed=seed)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def results_of(kind, *families, **declared):
    spec = TrainerSpec.of(kind, max_norm=1.0, **declared)
    return {result.check: result for result in check_trainer(spec, checks=families or None, suite="full")}


def failed(results):
    return {name for name, result in results.items() if not result.ok}


# Subjects


@pytest.mark.parametrize("subject", [Module, lambda: Module(), Module()], ids=["class", "function", "module"])
def test_module_is_a_subject(subject):
    spec = TrainerSpec.of(subject)
    assert spec.name in ("Module", "LightningRun") and "Lightning" in spec.notes
    spec.create().step(spec.batch())


def test_module_that_is_a_subject_is_copied():
    module = Module()
    before = weights(module)
    TrainerSpec.of(module).create().step(batch_of())
    assert same(weights(module), before) and not hasattr(module, "log")


def test_manual_optimization_is_refused():
    class Manual(Module):
        automatic_optimization = False

    with pytest.raises(TypeError, match="manual optimization"):
        TrainerSpec.of(Manual)


def configured(make):
    class Configured(Module):
        def configure_optimizers(self):
            return make(torch.optim.SGD(self.parameters(), lr=0.1))

    return run_of(Configured)


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize(
    ("make", "has_scheduler"),
    [
        (lambda optimizer: optimizer, False),
        (lambda optimizer: [optimizer], False),
        (lambda optimizer: [{"optimizer": optimizer}], False),
        (lambda optimizer: ([optimizer], [scheduler_of(optimizer)]), True),
        (lambda optimizer: ([optimizer], [{"scheduler": scheduler_of(optimizer)}]), True),
        (lambda optimizer: {"optimizer": optimizer, "lr_scheduler": scheduler_of(optimizer)}, True),
    ],
)
def test_optimizer_configuration_has_many_forms(make, has_scheduler):
    run = configured(make)
    run.step(batch_of())
    assert (run.scheduler is not None) == has_scheduler
    assert not has_scheduler or run.scheduler.last_epoch == 0  # the default interval is an epoch


@pytest.mark.parametrize(
    ("make", "seen"), [(lambda optimizer: [optimizer, optimizer], "2"), (lambda optimizer: None, "NoneType")]
)
def test_other_number_of_optimizers_is_refused(make, seen):
    with pytest.raises(TypeError, match=f"returned {seen}; wanted one optimizer"):
        configured(make)


# Updates


@pytest.mark.parametrize("returns", [lambda loss: loss, lambda loss: {"loss": loss}], ids=["loss", "dict"])
def test_update_is_that_of_a_plain_loop(returns):
    class Either(Module):
        def training_step(self, batch, batch_idx):
            return returns(super().training_step(batch, batch_idx))

    run, batches = run_of(Either), [batch_of(seed=seed) for seed in range(4)]
    model = Module()
    model.load_state_dict(run.model.state_dict())
    model.log = run.model.log
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    torch.manual_seed(1)
    losses = [float(run.accumulate(batches[start : start + 2])) for start in (0, 2)]
    torch.manual_seed(1)
    for number, start in enumerate((0, 2)):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1e-2 / (number + 1)
        optimizer.zero_grad()
        both = [model.training_step(batch, 0) for batch in batches[start : start + 2]]
        for loss in both:
            (loss / 2).backward()
        assert losses[number] == pytest.approx(float(sum(both).detach()) / 2)
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
    assert same(weights(run.model), weights(model))


def noting(*hooks):
    class Noting(Module):
        def __init__(self):
            super().__init__()
            self.calls = []

        def training_step(self, batch, batch_idx):
            self.calls.append(f"training_step {batch_idx}")
            return super().training_step(batch, batch_idx)

        def backward(self, loss):
            self.calls.append("backward")
            loss.backward()

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            self.calls.append("optimizer_zero_grad")
            optimizer.zero_grad()

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            self.calls.append("optimizer_step")
            optimizer.step(closure=optimizer_closure)

        def lr_scheduler_step(self, scheduler, metric):
            self.calls.append("lr_scheduler_step")
            scheduler.step()

    for hook in hooks:
        setattr(Noting, hook, lambda self, *_, hook=hook, **__: self.calls.append(hook))
    return Noting


def test_hooks_are_called_in_the_order_of_lightning():
    # As Lightning 2.6 calls them for accumulate_grad_batches=2.
    run = run_of(
        noting(
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "configure_gradient_clipping",
            "on_train_batch_end",
        )
    )
    run.accumulate([batch_of(), batch_of()])
    assert run.model.calls == [
        "on_train_batch_start",
        "training_step 0",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "on_train_batch_end",
        "on_train_batch_start",
        "optimizer_step",
        "training_step 1",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "lr_scheduler_step",
        "on_train_batch_end",
    ]


def test_modes_of_submodules_are_kept():
    run = run_of()
    run.model.dropout.eval()
    run.step(batch_of())
    run.evaluate([batch_of()])
    assert run.model.training and not run.model.dropout.training


def test_module_can_read_the_progress():
    class Warm(Module):
        def configure_optimizers(self):
            self.planned = self.trainer.estimated_stepping_batches
            return torch.optim.AdamW(self.groups(), lr=1.0)

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (self.trainer.global_step + 1)
            optimizer.step(closure=optimizer_closure)

    results = results_of(Warm, "schedule", learning_rate=lambda step: 1e-3 * (step + 1))
    assert results["learning_rate"].status == "passed" and not failed(results)


def test_unavailable_attribute_of_the_trainer_is_named():
    class Asks(Module):
        def configure_optimizers(self):
            return self.trainer.strategy

    with pytest.raises(AttributeError, match=r"trainer\.strategy: stackwise runs the module"):
        TrainerSpec.of(Asks)


@pytest.mark.parametrize("frequency", [1, 2])
def test_scheduler_is_stepped_at_its_frequency(frequency):
    class Rare(Module):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            made["lr_scheduler"]["frequency"] = frequency
            return made

    run = run_of(Rare)
    for _ in range(4):
        run.step(batch_of())
    assert run.scheduler.last_epoch == 4 // frequency


def test_scheduler_of_a_metric_is_not_stepped():
    class Plateau(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.groups(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "val_loss"}]

    run = run_of(Plateau)
    run.step(batch_of())
    assert run.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("limit", [1e-4, None])
def test_clipping_by_value_needs_a_limit(limit):
    class ByValue(Module):
        def configure_gradient_clipping(self, optimizer, **_):
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="value")

    run = run_of(ByValue)
    run.step(batch_of())
    largest = max(float(p.grad.abs().max()) for p in run.model.parameters())
    assert largest == pytest.approx(limit) if limit else largest > 1e-4


# Evaluation, checkpoints and data


def test_evaluation_is_the_mean_over_rows():
    run = run_of()
    batches = [batch_of(4), batch_of(2, seed=1)]
    run.model.eval()
    with torch.no_grad():
        first, second = (float(run.model.training_step(batch, 0)) for batch in batches)
    run.model.train()
    assert run.evaluate(batches) == pytest.approx((4 * first + 2 * second) / 6)


class LogsOnce(Module):
    def validation_step(self, batch, batch_idx):
        self.last = float(self.training_step(batch, batch_idx))

    def on_validation_epoch_end(self):
        self.log_dict({"val_loss": self.last, "val_accuracy": 0.0})


class LogsWithSize(Module):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", float(batch_idx), batch_size=1 + 2 * batch_idx)


@pytest.mark.parametrize("kind", [Returns, LogsOnce])
def test_evaluation_reads_the_returned_or_logged_loss(kind):
    assert run_of(kind).evaluate([batch_of()]) == pytest.approx(run_of().evaluate([batch_of()]))


def test_evaluation_weights_by_the_logged_batch_size():
    assert run_of(LogsWithSize).evaluate([batch_of(), batch_of()]) == pytest.approx(3 / 4)


def test_evaluation_without_a_loss_is_refused():
    class Neither(Module):
        def validation_step(self, batch, batch_idx):
            self.log("val_accuracy", 0.5)

    with pytest.raises(ValueError, match="validation_step: no loss was returned, nor logged"):
        run_of(Neither).evaluate([batch_of()])


def test_checkpoint_has_the_layout_of_lightning_and_resumes(tmp_path):
    class Keeps(Module):
        extra = 0

        def on_save_checkpoint(self, checkpoint):
            checkpoint["extra"] = self.extra

        def on_load_checkpoint(self, checkpoint):
            self.extra = checkpoint["extra"]

    run = run_of(Keeps)
    run.accumulate([batch_of(), batch_of()])
    run.model.extra = 7
    run.save(tmp_path)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    # The keys that Lightning 2.6 requires.
    assert saved.keys() >= {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "callbacks"}
    assert (saved["global_step"], saved["extra"]) == (1, 7)
    assert saved["state_dict"].keys() == run.model.state_dict().keys()
    assert [len(saved[name]) for name in ("optimizer_states", "lr_schedulers")] == [1, 1]
    run.step(batch_of(seed=2))
    other = run_of(Keeps, seed=1)
    other.load(tmp_path)  # including the random states of dropout
    assert other.model.extra == 7
    other.step(batch_of(seed=2))
    assert same(weights(run.model), weights(other.model))
    assert run.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


def test_epochs_are_those_of_the_dataloader():
    run, loader = run_of(), Module().train_dataloader()
    torch.manual_seed(0)
    wanted = [[batch["input_ids"] for batch in loader] for _ in range(2)]
    for number in range(2):
        torch.manual_seed(0)
        found = [batch["input_ids"] for batch in run.epoch(number)]
        assert same(found, wanted[number])


def inherited(self, batch, batch_idx):
    """Validation step of the library, which does nothing."""


inherited.__module__ = "lightning.pytorch.core.module"


@pytest.mark.parametrize("default", [None, inherited])
def test_members_without_a_hook_are_absent(default):
    class Bare(Module):
        validation_step = train_dataloader = default

    run = run_of(Bare)
    assert run.evaluate is None and run.epoch is None
    assert not hasattr(run, "checkpoint") and not hasattr(run, "position")


# Checks


def test_healthy_module_passes():
    results = results_of(Module, learning_rate=lambda step: 1e-2 / (step + 1))
    # `averages_batches` turns these into warnings.
    assert failed(results) <= {"accumulation_ragged", "evaluation_exact"}
    assert results["accumulation_ragged"].status != "passed"
    wanted = """parameters_change fresh_gradients clipped_norm weight_decay_groups learning_rate
        accumulated_gradient interrupted_run undisturbed_run damaged_checkpoint data_repeats epoch_order
        epoch_coverage"""
    assert {name for name, result in results.items() if result.status == "passed"} >= set(wanted.split())


class Misses(Module):
    def groups(self):
        return [{"params": list(self.parameters())[:-1]}]


class PerEpoch(Module):
    def configure_optimizers(self):
        made = super().configure_optimizers()
        return {**made, "lr_scheduler": made["lr_scheduler"]["scheduler"]}


class Forgets(Module):
    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {key: value for key, value in state.items() if "norm" not in key}


class StaysInTraining(Module):
    def on_validation_model_eval(self):
        pass


class ClipsEach(Module):
    def configure_gradient_clipping(self, *_, **__):
        for p in self.parameters():
            nn.utils.clip_grad_norm_([p], 1.0)


@pytest.mark.parametrize(
    ("kind", "families", "wanted"),
    [
        (Misses, ["optimizer", "step"], {"parameters_change", "fresh_gradients"}),
        (PerEpoch, ["schedule"], {"learning_rate"}),
        (Forgets, ["sequence"], {"interrupted_run"}),
        (StaysInTraining, ["evaluation"], {"evaluation_exact"}),
        (ClipsEach, ["clipping"], {"clipped_norm"}),
    ],
)
def test_module_with_a_bug_is_caught(kind, families, wanted):
    claims = {"learning_rate": lambda step: 1e-2 / (step + 1)} if "schedule" in families else {}
    assert failed(results_of(kind, *families, **claims)) == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n", [1, 2])
def test_run_has_the_weights_of_lightning(n, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Real(Module, lightning.LightningModule):
        train_dataloader = None

    torch.manual_seed(0)
    theirs = Real()
    run = LightningRun(copy.deepcopy(theirs))
    batches = list(DataLoader(rows(24), batch_size=4))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, limit_val_batches=0, accumulate_grad_batches=n, **options
    )
    torch.manual_seed(1)
    trainer.fit(theirs, DataLoader(rows(24), batch_size=4))
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()  # the seed that a loader draws when it begins
    for start in range(0, 6, n):
        run.accumulate(batches[start : start + n])
    assert same(weights(run.model), weights(theirs))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = LightningRun(Real())
    other.load(tmp_path)
    assert same(weights(other.model), weights(theirs))
