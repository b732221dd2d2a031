"""Lightning under the guard: noticed at its step, and then as if the batch had not been there."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stackwise.stability.faults import GradientExplosion, LossSpike, NanInjection, broken
from stackwise.stability.guard import GuardError, GuardPolicy

lightning = pytest.importorskip("lightning.pytorch")

from stackwise.stability.adapters.lightning_callback import GuardCallback  # noqa: E402

POLICY = GuardPolicy(snapshot_interval=8, patience=3)
N = 40
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of many kinds


class Square(nn.Module):
    def forward(self, x):
        return x * x


class Regression(lightning.LightningModule):
    """With statistics and random choices, both of which are to be put back."""

    def __init__(self, dropout=0.0, interval="step", kind="adamw"):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.square, self.dropout = Square(), nn.Dropout(dropout)
        self.interval, self.kind = interval, kind
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        x, labels = batch
        output = self.down(self.dropout(torch.tanh(self.norm(self.square(self.up(x))))))
        loss = (output - labels).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        kinds = {
            "adamw": lambda: torch.optim.AdamW(self.parameters(), lr=1e-2),
            "fused": lambda: torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True),
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9),
        }
        optimizer = kinds[self.kind]()
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 5) / (1 + step / 50)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def batches(count=N, broken_at=(), leave_out=()):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 32, 4, generator=generator)
    labels = x.square().sum(-1, keepdim=True)
    for at in broken_at:
        x[at, 3, 2] = 1e25  # whose square overflows
    return [(x[n], labels[n]) for n in range(count) if n not in leave_out]


def loader_of(data):
    return DataLoader(data, batch_size=None, shuffle=False)


def fit(
    folder, data, callbacks=(), *, seed=0, ckpt_path=None, faults=None, epochs=1, module=None, **arguments
):
    own = {key: arguments.pop(key) for key in ("dropout", "interval", "kind") if key in arguments}
    torch.manual_seed(seed)
    module = module or Regression(**own)
    trainer = lightning.Trainer(
        **{
            "max_epochs": epochs,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "gradient_clip_val": 1.0,
            **arguments,
        },
        callbacks=list(callbacks),
    )
    torch.manual_seed(100 + seed)
    if faults is None:
        trainer.fit(module, loader_of(data), ckpt_path=ckpt_path)
    else:
        with broken(module, faults) as injection:
            trainer.fit(module, loader_of(data))
        trainer.fired = injection.fired
    return trainer


def state_of(trainer):
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    return copy.deepcopy(
        {
            "model": trainer.lightning_module.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"},
        }
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("per_update", [1, 2])
@pytest.mark.parametrize("kind", ["adamw", "fused", "sgd"])
def test_a_sound_training_is_not_touched(tmp_path, kind, per_update):
    arguments = {"kind": kind, "dropout": 0.2, "accumulate_grad_batches": per_update}
    callback = GuardCallback(POLICY)
    trainer = fit(tmp_path, batches(), [callback], **arguments)
    twin = fit(tmp_path, batches(), **arguments)
    assert callback.guard.alarms == []
    assert callback.guard.steps == trainer.global_step == N // per_update
    assert same(state_of(trainer), state_of(twin))
    assert same(dict(trainer.callback_metrics), dict(twin.callback_metrics))


@pytest.mark.parametrize("at", [(0,), (20,), (23, 24, 25, 28), (39,)], ids=str)
def test_a_broken_batch_is_as_if_it_were_not_there(tmp_path, at):
    callback = GuardCallback(POLICY)
    trainer = fit(tmp_path, batches(broken_at=at), [callback])
    guard = callback.guard
    assert [alarm.step for alarm in guard.alarms] == list(at)
    assert {alarm.kind for alarm in guard.alarms} == {"non-finite loss"}
    assert {alarm.where for alarm in guard.alarms} == {"square (forward)"}
    assert guard.quarantined == [(0, step) for step in at]
    assert trainer.global_step == N
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == N - len(at)
    assert same(state_of(trainer), state_of(fit(tmp_path, batches(leave_out=at))))


@pytest.mark.parametrize("container", [dict, list])
def test_a_batch_that_training_step_takes_apart_is_computed_again(tmp_path, container):
    class Taking(Regression):
        def training_step(self, batch, batch_idx):
            labels = batch.pop(1 if container is list else "labels")
            return super().training_step((batch[0 if container is list else "x"], labels), batch_idx)

    def run(data, *callbacks):
        torch.manual_seed(0)
        held = [[x, labels] if container is list else {"x": x, "labels": labels} for x, labels in data]
        return fit(tmp_path, held, callbacks, module=Taking())

    callback, at = GuardCallback(POLICY), (23, 24, 25)
    trainer = run(batches(broken_at=at), callback)
    assert [alarm.action for alarm in callback.guard.alarms] == ["skipped", "skipped", "rewound"]
    assert {alarm.where for alarm in callback.guard.alarms} == {"square (forward)"}
    assert same(state_of(trainer), state_of(run(batches(leave_out=at))))


def test_a_rewind_makes_the_steps_again(tmp_path):
    at = (23, 24, 25)
    callback = GuardCallback(POLICY, locate=False)
    trainer = fit(tmp_path, batches(broken_at=at), [callback])
    assert [alarm.action for alarm in callback.guard.alarms] == ["skipped", "skipped", "rewound"]
    seen = trainer.lightning_module.seen
    [(last, first)] = [(a, b) for a, b in itertools.pairwise(seen) if b < a]
    assert last == 25
    assert 1 < last + 1 - first <= POLICY.snapshot_interval


@pytest.mark.parametrize(
    "fault",
    [NanInjection(step=20), GradientExplosion(step=20, factor=100.0), LossSpike(step=20, factor=100.0)],
    ids=str,
)
@pytest.mark.parametrize("per_update", [1, 2])
def test_a_fault_is_noticed_at_its_step_and_left_out(tmp_path, fault, per_update):
    at = 20 // per_update
    fault = type(fault)(**{**vars(fault), "step": at})
    callback = GuardCallback(POLICY, locate=False)  # does not come again: it would be made again
    arguments = {"accumulate_grad_batches": per_update}
    trainer = fit(tmp_path, batches(), [callback], faults=[fault], **arguments)
    assert trainer.fired == [at]
    [alarm] = callback.guard.alarms
    assert (alarm.step, alarm.action) == (at, "skipped")
    left_out = tuple(range(at * per_update, (at + 1) * per_update))
    assert alarm.batch == tuple((0, place) for place in left_out)
    assert same(state_of(trainer), state_of(fit(tmp_path, batches(leave_out=left_out), **arguments)))


def test_a_fault_that_does_not_come_again_costs_nothing(tmp_path):
    callback = GuardCallback(POLICY)
    trainer = fit(tmp_path, batches(), [callback], faults=[NanInjection(step=20)])
    [alarm] = callback.guard.alarms
    assert (alarm.step, alarm.action, alarm.reproduced) == (20, "retried", False)
    assert same(state_of(trainer), state_of(fit(tmp_path, batches())))


@pytest.mark.parametrize("per_update", [1, 2])
def test_a_lasting_fault_rewinds_once_and_ends_training(tmp_path, per_update):
    at = 20 // per_update
    callback = GuardCallback(POLICY, locate=False)
    with pytest.raises(GuardError):
        fit(
            tmp_path,
            batches(),
            [callback],
            faults=[NanInjection(step=at, duration=30)],
            accumulate_grad_batches=per_update,
        )
    actions = [alarm.action for alarm in callback.guard.alarms]
    assert actions[:3] == ["skipped", "skipped", "rewound"]
    assert actions.count("rewound") == 1
    assert actions[-1] == "raised"


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_go_on_over_the_end_of_an_epoch(tmp_path, interval):
    at = (9, 10, 11)  # the last of an epoch of twelve: a rewind at its end
    callback = GuardCallback(POLICY)
    trainer = fit(tmp_path, batches(12, at), [callback], epochs=3, interval=interval)
    assert [alarm.action for alarm in callback.guard.alarms][:3] == ["skipped", "skipped", "rewound"]
    twin = fit(tmp_path, batches(12, leave_out=at), epochs=3, interval=interval)
    assert same(state_of(trainer), state_of(twin))
    assert {config.interval for config in trainer.lr_scheduler_configs} == {interval}


def test_a_training_that_is_resumed_ends_the_same(tmp_path):
    at = (9, 10, 11)
    saving = lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    arguments = {"epochs": 3, "enable_checkpointing": True}
    first = GuardCallback(POLICY)
    whole = fit(tmp_path, batches(12, at), [first, saving], **arguments)
    again = GuardCallback(POLICY)
    resumed = fit(
        tmp_path, batches(12, at), [again], seed=5, epochs=3, ckpt_path=str(tmp_path / "epoch=0.ckpt")
    )
    assert [(a.step, a.action) for a in again.guard.alarms] == [
        (a.step, a.action) for a in first.guard.alarms
    ]
    assert again.guard.quarantined == first.guard.quarantined
    assert same(state_of(resumed), state_of(whole))


def test_checkpoint_within_an_accumulation_holds_the_last_full_step(tmp_path):
    class Validated(Regression):
        def validation_step(self, batch, batch_idx):
            pass

    def run(callback, data, ckpt_path=None):
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            accumulate_grad_batches=4,
            val_check_interval=10,
            callbacks=[
                callback,
                lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}"),
            ],
        )
        trainer.fit(Validated(), loader_of(data), loader_of(data[:2]), ckpt_path=ckpt_path)

    first = GuardCallback(POLICY)
    run(first, batches(broken_at=(5,)))
    [alarm] = first.guard.alarms
    assert first.guard.quarantined == [(0, place) for place in range(4, 8)]
    saved = torch.load(tmp_path / "step=7.ckpt", weights_only=False)["callbacks"]["GuardCallback"]
    assert saved["loader"]["next_step"] == 7  # behind 30 batches, two of them in hand
    assert saved["loader"]["again"] == []
    again = GuardCallback(POLICY)
    run(again, batches(), str(tmp_path / "step=7.ckpt"))
    assert repr(again.guard.alarms) == repr([alarm])
    assert again.guard.quarantined == first.guard.quarantined
    assert again.guard.steps == first.guard.steps == N // 4


class PassedOver(Regression):
    """`training_step` returns None for some batches, with which Lightning goes on to the next."""

    def __init__(self, without=()):
        super().__init__()
        self.without = without

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.without else loss


PASSED_OVER = [(1, (12,)), (1, (3, 11, 12)), (2, (14, 15)), (2, (12,)), (2, (13,))]


def fit_without(folder, data, callbacks, per_update, without):
    torch.manual_seed(0)
    module = PassedOver(without)
    return fit(folder, data, callbacks, module=module, accumulate_grad_batches=per_update)


@pytest.mark.parametrize("per_update, without", PASSED_OVER)
def test_a_batch_without_a_loss_is_a_step_without_an_update(tmp_path, per_update, without):
    callback = GuardCallback(POLICY)
    trainer = fit_without(tmp_path, batches(), [callback], per_update, without)
    assert callback.guard.alarms == []
    assert callback.guard.steps == trainer.global_step == N // per_update
    assert same(state_of(trainer), state_of(fit_without(tmp_path, batches(), [], per_update, without)))


@pytest.mark.parametrize("per_update, without", PASSED_OVER)
def test_a_rewind_goes_over_a_batch_without_a_loss(tmp_path, per_update, without):
    callback = GuardCallback(POLICY)
    steps = (13, 14, 15) if per_update == 1 else (8, 9, 10)
    at = tuple(step * per_update for step in steps)
    gone = tuple(range(at[0], at[-1] + per_update))
    trainer = fit_without(tmp_path, batches(broken_at=at), [callback], per_update, without)
    actions = [(alarm.step, alarm.action) for alarm in callback.guard.alarms]
    assert actions == list(zip(steps, ("skipped", "skipped", "rewound"), strict=True))
    assert {alarm.where for alarm in callback.guard.alarms} == {"square (forward)"}
    assert callback.guard.quarantined == [(0, place) for place in gone]
    twin = fit_without(tmp_path, batches(leave_out=gone), [], per_update, without)
    assert same(state_of(trainer), state_of(twin))


def test_what_is_compared_with_a_batch_without_a_loss_is_computed_again(tmp_path):
    class Spiking(PassedOver):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if loss is None else loss + 1000.0 * batch[0][0].eq(0).all()

    for per_update, without in ((1, (20,)), (2, (20,))):
        data = batches()
        data[21] = tuple(torch.cat([torch.zeros_like(part[:1]), part[1:]]) for part in data[21])
        callback, module = GuardCallback(POLICY), Spiking(without)
        fit(tmp_path, data, [callback], module=module, accumulate_grad_batches=per_update)
        alarms = [(a.step, a.kind, a.action, a.reproduced) for a in callback.guard.alarms]
        assert alarms == [(21 // per_update, "loss spike", "skipped", True)]


def test_a_batch_at_which_the_module_ends_the_epoch_is_part_of_no_step(tmp_path):
    class Ending(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 20 else None

    callback = GuardCallback(POLICY)
    trainer = fit(tmp_path, batches(broken_at=(0,)), [callback], module=Ending(), epochs=2)
    found = [(alarm.step, alarm.batch) for alarm in callback.guard.alarms]
    assert found == [(0, ((0, 0),)), (20, ((1, 0),))]
    assert callback.guard.steps == trainer.global_step == 40


def saving(folder, every):
    return lightning.callbacks.ModelCheckpoint(
        folder, save_top_k=-1, filename="{step}", every_n_train_steps=every
    )


def saved_in(folder):
    return sorted(int(each.stem.partition("=")[2]) for each in folder.glob("step=*.ckpt"))


class Spoiled(Regression):
    """Of weights that break, which the alarms at each step tell, until they are taken back."""

    done = False

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 12 and not self.done:
            self.done = True
            with torch.no_grad():
                self.up.weight[0, 0] = float("nan")


WATCHED = {"_save_topk_checkpoint", "_save_last_checkpoint", "on_exception", "on_train_batch_end"}


def test_nothing_is_saved_among_alarms(tmp_path):
    callback, saves = GuardCallback(POLICY), saving(tmp_path, 13)
    fit(tmp_path, batches(), [saves, callback], module=Spoiled(), enable_checkpointing=True)
    actions = [(alarm.step, alarm.action) for alarm in callback.guard.alarms]
    assert actions == [(12, "skipped"), (13, "skipped"), (14, "rewound")]
    assert saved_in(tmp_path) == [15, 26, 39]
    for place in tmp_path.glob("step=*.ckpt"):
        weights = torch.load(place, weights_only=False)["state_dict"]
        assert all(tensor.isfinite().all() for tensor in weights.values())
    assert not vars(saves).keys() & WATCHED


@pytest.mark.parametrize("among", [True, False])
def test_where_an_exception_ends_the_training(tmp_path, among):
    """A checkpoint that is to be written then is not, among alarms."""
    module = Spoiled() if among else Stopped()
    policy = GuardPolicy(**POLICY.to_dict() | {"rewinds": 0})
    saves = lightning.callbacks.ModelCheckpoint(
        tmp_path, save_on_exception=True, save_last=True, every_n_train_steps=1000
    )
    told = pytest.warns(RuntimeWarning, match="no checkpoint, as training") if among else nullcontext()
    with told, pytest.raises(GuardError if among else ZeroDivisionError):
        fit(tmp_path, batches(), [saves, GuardCallback(policy)], module=module, enable_checkpointing=True)
    assert bool(list(tmp_path.glob("*.ckpt"))) == (not among)
    assert not vars(saves).keys() & WATCHED


class Stopped(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 12:
            raise ZeroDivisionError


def test_what_is_chosen_by_a_metric_is_left_out_among_alarms(tmp_path):
    class Measured(Spoiled):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("seen", loss.detach())
            return loss

    best = lightning.callbacks.ModelCheckpoint(
        tmp_path, monitor="seen", save_top_k=-1, filename="{step}", every_n_train_steps=13, save_last=True
    )
    fit(tmp_path, batches(), [best, GuardCallback(POLICY)], module=Measured(), enable_checkpointing=True)
    assert saved_in(tmp_path) == [26, 39]
    assert (tmp_path / "last.ckpt").exists()


def test_a_training_that_ends_among_alarms_says_that_it_was_not_saved(tmp_path):
    callbacks = [GuardCallback(POLICY), saving(tmp_path, 20)]
    with pytest.warns(
        RuntimeWarning, match="step 40: no checkpoint, as training ended with an unresolved alarm"
    ):
        fit(tmp_path, batches(broken_at=(39,)), callbacks, enable_checkpointing=True)
    assert saved_in(tmp_path) == [20]


def test_the_last_one_of_a_training_that_ends_among_alarms_is_told_of(tmp_path):
    """Lightning asks for it at the very end."""
    last = lightning.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1000)
    with pytest.warns(
        RuntimeWarning, match="step 40: no checkpoint, as training ended with an unresolved alarm"
    ):
        fit(tmp_path, batches(broken_at=(39,)), [GuardCallback(POLICY), last], enable_checkpointing=True)
    assert not list(tmp_path.glob("*.ckpt"))
    assert not vars(last).keys() & WATCHED


def test_delayed_checkpoint_updates_last_and_includes_later_callbacks(tmp_path):
    class Counted(lightning.Callback):
        count, last = 0, None

        def on_train_batch_end(self, *args):
            self.count += 1
            if self.count == 45:
                self.last = torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"]

        def state_dict(self):
            return {"count": self.count}

    each = lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}", save_last=True)
    callbacks = [GuardCallback(POLICY), counted := Counted(), each]
    fit(tmp_path, batches(broken_at=(39,)), callbacks, enable_checkpointing=True, epochs=2)
    saved = torch.load(tmp_path / "step=41.ckpt", weights_only=False)
    assert [state["count"] for state in saved["callbacks"].values() if "count" in state] == [41]
    assert counted.last == 41


def test_a_spike_of_the_loss_in_an_accumulated_step_comes_again(tmp_path):
    class Spiking(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 1000.0 * batch[0][0].eq(0).all()

    data = batches()
    data[21] = tuple(torch.cat([torch.zeros_like(part[:1]), part[1:]]) for part in data[21])
    callback = GuardCallback(POLICY)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        accumulate_grad_batches=4,
        callbacks=[callback],
    )
    torch.manual_seed(0)
    trainer.fit(Spiking(), loader_of(data))
    alarms = [(a.step, a.kind, a.action, a.reproduced) for a in callback.guard.alarms]
    assert alarms == [(5, "loss spike", "skipped", True)]


def test_the_optimizer_is_as_before(tmp_path):
    arguments = {"kind": "fused", "gradient_clip_val": None}
    [optimizer] = fit(tmp_path, batches(broken_at=(39,)), [GuardCallback(POLICY)], **arguments).optimizers
    assert getattr(optimizer, "found_inf", None) is None
    assert getattr(optimizer, "grad_scale", None) is None


def test_alarms_are_logged(tmp_path):
    logger = lightning.loggers.CSVLogger(tmp_path)
    fit(tmp_path, batches(broken_at=(20, 30)), [GuardCallback(POLICY)], logger=logger)
    logger.save()
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("guard_alarm_step")
    assert [line.split(",")[column] for line in lines[1:] if line.split(",")[column]] == ["20", "30"]


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"clip: got 1.0; allowed: None: gradient_clip_val"):
        GuardCallback(GuardPolicy(clip=1.0))

    class Manual(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
        callbacks=[GuardCallback(POLICY)],
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match="automatic_optimization: got False"):
        trainer.fit(Manual(), loader_of(batches(2)))


class Attentive(Regression):
    """Rows attend to each other."""

    def training_step(self, batch, batch_idx):
        q = self.up(batch[0])[None]
        output = self.down(nn.functional.scaled_dot_product_attention(q, q, q / (1 + q.norm())))[0]
        return (output - batch[1]).square().mean()


QUIET = {"loss_factor": None, "suspect_factor": None, "factor": 1e9, "proven_factor": 1e9}


@pytest.mark.parametrize("per_update", [1, 2])
def test_a_limit_of_logits_is_held(tmp_path, per_update):
    data = batches(12)
    data[4][0].mul_(100.0)
    callback = GuardCallback(GuardPolicy(logit_limit=1000.0, **QUIET))
    module = Attentive()
    fit(tmp_path, data, [callback], module=module, accumulate_grad_batches=per_update)
    # Nor is what was seen when that step was computed again the next one's.
    assert [(a.step, a.kind, a.where != "") for a in callback.guard.alarms] == [
        (4 // per_update, "logit growth", True)
    ]
    assert callback.guard.alarms[0].value > 1000
    assert all(0 < r.logit < 1000 for r in callback.guard.records() if not r.skipped)
    assert "training_step" not in vars(module)


def test_a_module_is_left_as_it_was_where_training_ends(tmp_path):
    policy = GuardPolicy(logit_limit=1e-9, patience=1, rewinds=0, **QUIET)
    module = Attentive()
    with pytest.raises(GuardError, match="logit growth"):
        fit(tmp_path, batches(6), [GuardCallback(policy)], module=module)
    assert "training_step" not in vars(module)


def test_a_limit_of_logits_without_attention_is_told_of(tmp_path):
    with pytest.warns(RuntimeWarning, match="logit_limit: got 1000.0, and no attention logit in 4 steps"):
        fit(tmp_path, batches(6), [GuardCallback(GuardPolicy(logit_limit=1000.0))])


def test_statistics_that_overflow_are_restored_and_their_batch_is_skipped(tmp_path):
    data = batches()
    data[20][0][3, 2] = 1e10  # the variance of its square overflows, the loss is finite
    callback = GuardCallback(POLICY)
    trainer = fit(tmp_path, data, [callback])
    [alarm] = callback.guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (20, "non-finite buffer", "skipped")
    assert same(state_of(trainer), state_of(fit(tmp_path, batches(leave_out=(20,)))))


@pytest.mark.parametrize("ends", [{}, {"max_steps": 25}], ids=["epoch", "steps"])
def test_optimizer_state_that_the_last_step_breaks_is_rewound(tmp_path, ends):
    last = ends.get("max_steps", N) - 1
    fault = NanInjection(step=last, target="optimizer_state:*.exp_avg_sq", kind="inf")
    callback = GuardCallback(POLICY)
    trainer = fit(tmp_path, batches(), [callback], faults=[fault], **ends)
    [alarm] = callback.guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (last, "non-finite optimizer state", "rewound")
    assert same(state_of(trainer), state_of(fit(tmp_path, batches(), **ends)))
