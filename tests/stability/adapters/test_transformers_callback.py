"""A transformers Trainer under the guard: noticed at its step, then as if the batch had not been there."""

import copy
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stackwise.stability.faults import DiskFull, GradientExplosion, LossSpike, NanInjection, broken
from stackwise.stability.guard import GuardError, GuardPolicy
from tests.forked import HANG_SECONDS
from tests.optimizer_kinds import Lookahead

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from stackwise.stability.adapters.transformers_callback import GuardCallback  # noqa: E402

POLICY = GuardPolicy(snapshot_interval=8, patience=3)
N = 40


class Square(nn.Module):
    def forward(self, x):
        return x * x


class Regression(nn.Module):
    """With statistics and random choices, both of which are to be put back."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.square = Square()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, labels):
        output = self.down(self.dropout(torch.tanh(self.norm(self.square(self.up(x))))))
        return {"loss": (output - labels).square().mean(), "output": output}


def rows(count=N, size=32, broken_at=()):
    """The rows of `count` batches, those of some broken for good."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, size, 4, generator=generator)
    labels = x.square().sum(-1, keepdim=True)
    for at in broken_at:
        x[at, 3, 2] = 1e25  # whose square overflows
    return [
        [{"x": a, "labels": b} for a, b in zip(*batch, strict=True)] for batch in zip(x, labels, strict=True)
    ]


def flat(batches, leave_out=()):
    return [row for number, batch in enumerate(batches) if number not in leave_out for row in batch]


class InOrder(transformers.Trainer):
    """Its data in their order, so that a batch can be taken out of them."""

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def schedule(step):
    return min(1.0, (step + 1) / 5) / (1 + step / 50)


def trainer_of(
    folder, data, callbacks=(), *, dropout=0.0, optimizer="adamw", seed=0, eval_data=None, **arguments
):
    torch.manual_seed(seed)
    model = Regression(dropout)
    kinds = {
        "adamw": partial(torch.optim.AdamW, lr=1e-2),
        "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
        "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        "lookahead": lambda p: Lookahead(torch.optim.AdamW(p, lr=1e-2)),
    }
    scheduler = None
    if optimizer is not None:
        optimizer = kinds[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    settings = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 32,
        "max_grad_norm": 1.0,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 5,
        **arguments,
    }
    return InOrder(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, seed=seed, **settings),
        train_dataset=data,
        eval_dataset=eval_data,
        callbacks=list(callbacks),
        optimizers=(optimizer, scheduler),
    )


def state_of(trainer):
    return copy.deepcopy(
        {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": {k: v for k, v in trainer.lr_scheduler.state_dict().items() if k != "lr_lambdas"},
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


def plain(folder, leave_out=(), **arguments):
    trainer = trainer_of(folder, flat(rows(), leave_out), **arguments)
    trainer.train()
    return trainer


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


@pytest.mark.parametrize("per_update", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd"])
def test_a_sound_training_is_not_touched(tmp_path, optimizer, per_update):
    arguments = {"optimizer": optimizer, "dropout": 0.2, "gradient_accumulation_steps": per_update}
    callback = GuardCallback(POLICY)
    trainer = trainer_of(tmp_path, flat(rows()), [callback], **arguments)
    trainer.train()
    twin = plain(tmp_path, **arguments)
    assert callback.guard.alarms == []
    assert callback.guard.steps == trainer.state.global_step == N // per_update
    assert same(state_of(trainer), state_of(twin))
    logs = [
        [{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k} for entry in log]
        for log in (trainer.state.log_history, twin.state.log_history)
    ]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("at", [(0,), (20,), (20, 21, 22, 23), (39,)], ids=str)
def test_a_broken_batch_is_as_if_it_were_not_there(tmp_path, at, lag):
    callback = GuardCallback(POLICY, lag=lag)
    trainer = trainer_of(tmp_path, flat(rows(broken_at=at)), [callback], optimizer="fused")
    trainer.train()
    guard = callback.guard
    assert [alarm.step for alarm in guard.alarms] == list(at)
    assert {alarm.kind for alarm in guard.alarms} == {"non-finite loss"}
    assert guard.quarantined == [(0, step) for step in at]
    assert guard.alarms[0].reproduced is True
    assert guard.alarms[0].where == "square (forward)"
    assert trainer.state.global_step == N
    assert trainer.lr_scheduler.last_epoch == N - len(at)
    assert same(state_of(trainer), state_of(plain(tmp_path, at, optimizer="fused")))


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
    arguments = {"gradient_accumulation_steps": per_update}
    trainer = trainer_of(tmp_path, flat(rows()), [callback], **arguments)
    with broken(trainer, [fault]) as injection:
        trainer.train()
    assert injection.fired == [at]
    [alarm] = callback.guard.alarms
    assert (alarm.step, alarm.action) == (at, "skipped")
    left_out = tuple(range(at * per_update, (at + 1) * per_update))
    assert alarm.batch == tuple((0, place) for place in left_out)
    assert same(state_of(trainer), state_of(plain(tmp_path, left_out, **arguments)))
    [logged] = [entry for entry in trainer.state.log_history if "guard_alarm" in entry]
    assert logged["guard_alarm_step"] == at
    assert logged["guard_alarms"] == logged["guard_skipped"] == 1
    json.dumps(trainer.state.log_history)


@pytest.mark.parametrize("whole", [False, True], ids=["mean", "own loss"])
def test_a_spike_of_the_loss_in_an_accumulated_step_comes_again(tmp_path, whole):
    """Also where a function of one's own gives the part that a batch has in its step."""

    def spiking(outputs, labels, num_items_in_batch=None):
        loss = (outputs["output"] - labels).square().mean() / 4
        return loss + 250.0 * labels[0].eq(0).all()

    data = rows()
    data[21][0] = {"x": torch.zeros(4), "labels": torch.zeros(1)}
    callback = GuardCallback(POLICY)
    trainer = trainer_of(tmp_path, flat(data), [callback], gradient_accumulation_steps=4)
    forward = trainer.model.forward
    if whole:
        trainer.compute_loss_func = spiking
        trainer.model.forward = lambda x: forward(x, 0.0)
    else:

        def spikes(x, labels):
            outputs = forward(x, labels)
            return {**outputs, "loss": outputs["loss"] + 1000.0 * labels[0].eq(0).all()}

        trainer.model.forward = spikes
    trainer.train()
    alarms = [(a.step, a.kind, a.action, a.reproduced) for a in callback.guard.alarms]
    assert alarms == [(5, "loss spike", "skipped", True)]


@pytest.mark.parametrize("lag", [0, 2])
def test_the_optimizer_is_as_before(tmp_path, lag):
    callback = GuardCallback(POLICY, lag=lag)
    trainer = trainer_of(tmp_path, flat(rows(broken_at=(39,))), [callback], optimizer="fused")
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert getattr(optimizer, "found_inf", None) is None
    assert getattr(optimizer, "grad_scale", None) is None


def test_its_own_optimizer_and_schedule(tmp_path):
    arguments = {"optimizer": None, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 30}
    callback = GuardCallback(POLICY)
    trainer = trainer_of(tmp_path, flat(rows(broken_at=(0, 20, 21, 22))), [callback], **arguments)
    trainer.train()
    assert [alarm.step for alarm in callback.guard.alarms] == [0, 20, 21, 22]
    twin = plain(tmp_path, (0, 20, 21, 22), **arguments)
    assert same(state_of(trainer), state_of(twin))
    # It goes on without a guard.
    trainer.remove_callback(callback)
    assert vars(trainer.optimizer).keys() == vars(twin.optimizer).keys()


def test_a_fault_that_does_not_come_again_costs_nothing(tmp_path):
    callback = GuardCallback(POLICY)
    trainer = trainer_of(tmp_path, flat(rows()), [callback])
    with broken(trainer, [NanInjection(step=20)]):
        trainer.train()
    [alarm] = callback.guard.alarms
    assert (alarm.step, alarm.action, alarm.reproduced) == (20, "retried", False)
    assert same(state_of(trainer), state_of(plain(tmp_path)))


@pytest.mark.parametrize("per_update", [1, 2])
def test_a_lasting_fault_rewinds_once_and_ends_training(tmp_path, per_update):
    at = 20 // per_update
    callback = GuardCallback(POLICY, locate=False)
    arguments = {"gradient_accumulation_steps": per_update}
    trainer = trainer_of(tmp_path, flat(rows()), [callback], **arguments)
    with pytest.raises(GuardError), broken(trainer, [NanInjection(step=at, duration=30)]):
        trainer.train()
    actions = [alarm.action for alarm in callback.guard.alarms]
    assert actions.count("rewound") == 1
    assert actions[-1] == "raised"
    assert actions[:3] == ["skipped", "skipped", "rewound"]
    logged = [entry["guard_alarm"] for entry in trainer.state.log_history if "guard_alarm" in entry]
    assert logged == [str(alarm) for alarm in callback.guard.alarms]
    # The optimizer is the trainer's own again.
    assert "step" not in vars(trainer.optimizer)


def test_a_rewind_makes_the_steps_again(tmp_path):
    at = (23, 24, 25, 28)
    callback = GuardCallback(POLICY)
    trainer = trainer_of(tmp_path, flat(rows(broken_at=at)), [callback])
    made = []
    step = trainer.training_step

    def training_step(model, inputs, *args, **kwargs):
        made.append(callback.guard.steps)
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = training_step
    trainer.train()
    assert [alarm.action for alarm in callback.guard.alarms] == ["skipped", "skipped", "rewound", "skipped"]
    falls = [(a, b) for a, b in itertools.pairwise(made) if b < a]
    [(last, first)] = falls
    assert last == 25
    assert 1 < last + 1 - first <= POLICY.snapshot_interval
    assert trainer.state.global_step == N
    assert same(state_of(trainer), state_of(plain(tmp_path, at)))


@pytest.mark.parametrize("per_update", [1, 2])
@pytest.mark.parametrize(
    "at, written",  # not among alarms
    [
        (9, 10),
        (13, 13),
        *(pytest.param(*steps, marks=pytest.mark.slow) for steps in ((5, 5), (8, 10), (11, 12), (22, 23))),
    ],
)
def test_a_training_that_is_resumed_ends_the_same(tmp_path, at, written, per_update):
    bad = range(7 * per_update, 11 * per_update)
    data = flat(rows(13 * per_update, broken_at=bad))
    arguments = {"gradient_accumulation_steps": per_update, "dropout": 0.2}
    arguments |= {"save_strategy": "steps", "save_steps": at, "num_train_epochs": 2}
    first = GuardCallback(POLICY)
    whole = trainer_of(tmp_path / "whole", data, [first], **arguments)
    whole.train()
    again = GuardCallback(POLICY)
    resumed = trainer_of(tmp_path / "other", data, [again], seed=5, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{written}"))
    assert [(a.step, a.action) for a in again.guard.alarms] == [
        (a.step, a.action) for a in first.guard.alarms
    ]
    assert len(again.guard.alarms) == 8
    assert again.guard.quarantined == first.guard.quarantined
    assert same(state_of(resumed), state_of(whole))


def saved_in(folder):
    return sorted(int(each.name.partition("-")[2]) for each in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "value, expected",
    [
        # A huge weight breaks each step. A non-finite one is found before the checkpoint, and undone at once.
        (1e30, ([(12, "skipped"), (13, "skipped"), (14, "rewound")], [15, 26, 39, 40])),
        (math.nan, ([(12, "skipped"), (12, "rewound")], [13, 26, 39, 40])),
    ],
)
def test_nothing_is_saved_among_alarms(tmp_path, value, expected):
    """Of weights that break, which the alarms at each step tell, until they are taken back."""

    class Spoils(transformers.TrainerCallback):
        done = False

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 12 and not self.done:
                self.done = True
                with torch.no_grad():
                    model.up.weight[0, 0] = value

    callback = GuardCallback(POLICY)
    arguments = {"save_strategy": "steps", "save_steps": 13}
    trainer_of(tmp_path, flat(rows()), [callback, Spoils()], **arguments).train()
    actions = [(alarm.step, alarm.action) for alarm in callback.guard.alarms]
    assert (actions, saved_in(tmp_path)) == expected
    for folder in tmp_path.glob("checkpoint-*"):
        assert all(tensor.abs().max() < 1e6 for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_an_evaluation_that_finds_the_best_is_put_off_with_its_checkpoint(tmp_path, strategy):
    arguments = {"eval_strategy": "steps", "eval_steps": 13, "load_best_model_at_end": True}
    arguments |= {"save_strategy": strategy, "save_steps": 13, "max_steps": 20}
    data = flat(rows(broken_at=(12,)))
    trainer = trainer_of(tmp_path, data, [GuardCallback(POLICY)], eval_data=flat(rows(2)), **arguments)
    trainer.train()
    assert [each["step"] for each in trainer.state.log_history if "eval_loss" in each] == [14, 20]
    assert trainer.state.best_global_step in saved_in(tmp_path)
    assert 13 not in saved_in(tmp_path)


def test_a_training_that_ends_among_alarms_says_that_it_was_not_saved(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 20}
    trainer = trainer_of(tmp_path, flat(rows(broken_at=(39,))), [GuardCallback(POLICY)], **arguments)
    with pytest.warns(
        RuntimeWarning, match="step 40: no checkpoint, as training ended with an unresolved alarm"
    ):
        trainer.train()
    assert saved_in(tmp_path) == [20]


@pytest.mark.parametrize("asked, written", [(20, 20), (21, 22), (22, 22)])
def test_a_callback_behind_may_ask_for_a_checkpoint(tmp_path, asked, written):
    """Where the host does not know yet of an alarm: it is answered before weights are saved."""

    class Asks(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == asked

    callback = GuardCallback(POLICY, lag=2)
    trainer = trainer_of(tmp_path, flat(rows(broken_at=(20,))), [callback, Asks()], optimizer="fused")
    trainer.train()
    assert [alarm.step for alarm in callback.guard.alarms] == [20]
    assert saved_in(tmp_path) == [written]
    assert (tmp_path / f"checkpoint-{written}" / "guard_0.safetensors").exists()
    assert same(state_of(trainer), state_of(plain(tmp_path, (20,), optimizer="fused")))


def test_a_trial_of_a_search_has_its_state_beside_its_checkpoint(tmp_path):
    optuna = pytest.importorskip("optuna")
    arguments = {"save_strategy": "steps", "save_steps": 20}
    trainer = trainer_of(tmp_path, flat(rows()), [GuardCallback(POLICY)], **arguments)
    trainer.hp_search_backend = transformers.trainer_utils.HPSearchBackend.OPTUNA
    trainer.hp_space, trainer.hp_name = lambda trial: {}, None
    trainer.train(trial=optuna.trial.FixedTrial({}, number=3))
    assert (tmp_path / "run-3" / "checkpoint-20" / "guard_0.safetensors").exists()
    assert saved_in(tmp_path) == []


def test_a_process_that_was_not_there_goes_on_from_the_first_ones_history(tmp_path, monkeypatch):
    arguments = {"save_strategy": "steps", "save_steps": 20}
    data = flat(rows(broken_at=(9, 10, 11)))
    first = GuardCallback(POLICY)
    trainer_of(tmp_path, data, [first], **arguments).train()
    other = GuardCallback(POLICY)
    resumed = trainer_of(tmp_path, data, [other], max_steps=21)
    monkeypatch.setattr(transformers.TrainingArguments, "process_index", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert repr(other.guard.alarms) == repr(first.guard.alarms)
    assert other.guard.quarantined == first.guard.quarantined != []


def test_a_checkpoint_without_a_guard_says_so(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 20}
    trainer_of(tmp_path, flat(rows()), **arguments).train()
    trainer = trainer_of(tmp_path, flat(rows()), [GuardCallback(POLICY)], **arguments)
    with pytest.warns(RuntimeWarning, match="no state of a guard"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    (tmp_path / "checkpoint-20" / "guard_0.safetensors").write_bytes(b"no such thing")
    trainer = trainer_of(tmp_path, flat(rows()), [GuardCallback(POLICY)], **arguments)
    with pytest.raises(ValueError, match=r"guard_0.safetensors: no state of a guard"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))


def test_a_state_that_cannot_be_written_stops_nothing(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 20}
    trainer = trainer_of(tmp_path, flat(rows()), [GuardCallback(POLICY)], **arguments)
    full = DiskFull(step=0, folder=tmp_path, target="*guard_*").around_saves(lambda: None)
    with full, pytest.warns(RuntimeWarning, match=r"checkpoint-\d0: no state of the guard: .*No space left"):
        trainer.train()
    assert trainer.state.global_step == N
    assert not list(tmp_path.glob("checkpoint-*/*guard_*"))


def test_it_may_be_attached_later_and_train_twice(tmp_path):
    trainer = trainer_of(tmp_path, flat(rows(broken_at=(20,))))
    callback = GuardCallback(POLICY).attach(trainer)
    for _ in range(2):
        trainer.train()
        assert [alarm.step for alarm in callback.guard.alarms] == [20]
    assert callback.attach(trainer) is callback
    with pytest.raises(ValueError, match="trainer: got 'another one'"):
        callback.attach(trainer_of(tmp_path, flat(rows())))
    late = trainer_of(tmp_path, flat(rows()))
    late.add_callback(GuardCallback(POLICY))
    with pytest.raises(ValueError, match=r"trainer: got None; allowed: .*attach\(trainer\) before train"):
        late.train()


def test_two_clips_are_refused():
    with pytest.raises(ValueError, match=r"clip: got 1.0; allowed: None: TrainingArguments.max_grad_norm"):
        GuardCallback(GuardPolicy(clip=1.0))


def test_evaluation_between_steps_changes_nothing(tmp_path):
    at = (20, 21, 22)
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
    models = []
    for data, callbacks in ((flat(rows(broken_at=at)), [GuardCallback(POLICY)]), (flat(rows(), at), [])):
        trainer = trainer_of(tmp_path, data, callbacks, eval_data=flat(rows(2)), **arguments)
        trainer.train()
        models.append(state_of(trainer))
    assert same(*models)


RANKS = """
import sys
import torch
from torch import distributed
import tests.stability.adapters.test_transformers_callback as own

def check(folder, per_update, bad):
    # Batches of the second process are the odd ones: only they are broken.
    data = own.flat(own.rows(80, broken_at=[2 * n + 1 for n in bad]))
    callback = own.GuardCallback(own.POLICY)
    arguments = {"gradient_accumulation_steps": per_update, "ddp_backend": "gloo", "optimizer": "fused"}
    trainer = own.trainer_of(folder, data, [callback], **arguments)
    assert trainer.accelerator.num_processes == 2
    trainer.train()
    alarms = [(a.step, a.kind, a.action, a.where) for a in callback.guard.alarms]
    everyone = [None, None]
    distributed.all_gather_object(everyone, alarms)
    assert everyone[0] == everyone[1], everyone
    steps = sorted({n // per_update for n in bad})
    assert [a[0] for a in alarms] == steps, alarms
    assert {a[3] for a in alarms} == {"square (forward)"}, alarms
    assert (alarms[-1][2] == "rewound") == (len(steps) == 3), alarms
    gone = [m for s in steps for m in range(2 * per_update * s, 2 * per_update * (s + 1))]
    twin = own.trainer_of(folder, own.flat(own.rows(80), gone), **arguments)
    twin.train()
    assert own.same(own.state_of(trainer), own.state_of(twin))

if __name__ == "__main__":
    torch.set_num_threads(1)
    check(sys.argv[1], 1, [10])
    check(sys.argv[1], 1, [23, 24, 25])
    check(sys.argv[1], 2, [22, 24, 26])
    distributed.destroy_process_group()
    print("both agree")
"""


@pytest.mark.slow
def test_two_processes_decide_as_one(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("both agree") == 2


class Attentive(Regression):
    """Rows attend to each other."""

    def forward(self, x, labels):
        q = self.up(x)[None]
        output = self.down(nn.functional.scaled_dot_product_attention(q, q, q / (1 + q.norm())))[0]
        return {"loss": (output - labels).square().mean(), "output": output}


def attentive_trainer(folder, data, callback, **arguments):
    torch.manual_seed(0)
    model = Attentive()
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 32, "save_strategy": "no"}
    settings |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, **arguments}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return InOrder(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=data,
        callbacks=[callback],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)),
    )


QUIET = {"loss_factor": None, "suspect_factor": None, "factor": 1e9, "proven_factor": 1e9}


@pytest.mark.parametrize("per_update, lag", [(1, 0), (2, 0)])
def test_a_limit_of_logits_is_held(tmp_path, per_update, lag):
    data = rows(12)
    for row in data[4]:
        row["x"] *= 100.0
    callback = GuardCallback(GuardPolicy(logit_limit=1000.0, **QUIET), lag=lag)
    trainer = attentive_trainer(tmp_path, flat(data), callback, gradient_accumulation_steps=per_update)
    trainer.train()
    # Nor is what was seen when that step was computed again the next one's.
    assert [(a.step, a.kind, a.where != "") for a in callback.guard.alarms] == [
        (4 // per_update, "logit growth", True)
    ]
    assert callback.guard.alarms[0].value > 1000
    assert all(0 < r.logit < 1000 for r in callback.guard.records() if not r.skipped)
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks


def test_a_limit_of_logits_without_attention_is_told_of(tmp_path):
    callback = GuardCallback(GuardPolicy(logit_limit=1000.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(tmp_path, flat(rows(6)), [callback]).train()
    said = [str(each.message) for each in caught]
    assert sum("logit_limit: got 1000.0, and no attention logit in 4 steps" in text for text in said) == 1
    plain = GuardCallback()
    trainer_of(tmp_path, flat(rows(6)), [plain]).train()
    assert all(record.logit != record.logit for record in plain.guard.records())


def test_a_schedule_that_follows_what_is_measured_is_the_trainers(tmp_path):
    callback = GuardCallback()
    data = flat(rows(4))
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
    trainer = trainer_of(tmp_path, data, [callback], eval_data=data[:32], **evaluates)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)
    trainer.train()
    assert trainer.lr_scheduler.last_epoch > 0
    assert callback.guard.alarms == []


def test_an_optimizer_around_another_one_is_rewound_as_a_whole(tmp_path):
    def train(broken_at, leave_out, callbacks):
        trainer = trainer_of(
            tmp_path, flat(rows(broken_at=broken_at), leave_out), callbacks, optimizer="lookahead"
        )
        trainer.train()
        return trainer

    at = (23, 24, 25, 28)
    callback = GuardCallback(POLICY)
    trainer, twin = train(at, (), [callback]), train((), at, [])
    assert [alarm.action for alarm in callback.guard.alarms] == ["skipped", "skipped", "rewound", "skipped"]
    assert same(state_of(trainer), state_of(twin))
    outer, wanted = trainer.optimizer.optimizer, twin.optimizer.optimizer
    assert same(list(outer.optimizer.state.values()), list(wanted.optimizer.state.values()))


@pytest.mark.parametrize("lag", [0, 2])
def test_statistics_that_overflow_are_restored_and_their_batch_is_skipped(tmp_path, lag):
    data = rows()
    data[20][3]["x"][2] = 1e10  # the variance of its square overflows, the loss is finite
    callback = GuardCallback(POLICY, lag=lag)
    trainer = trainer_of(tmp_path, flat(data), [callback], optimizer="fused")
    trainer.train()
    [alarm] = callback.guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (20, "non-finite buffer", "skipped")
    assert same(state_of(trainer), state_of(plain(tmp_path, (20,), optimizer="fused")))


@pytest.mark.parametrize("lag", [0, 2])
def test_optimizer_state_that_the_last_step_breaks_is_rewound(tmp_path, lag):
    fault = NanInjection(step=N - 1, target="optimizer_state:*.exp_avg_sq", kind="inf")
    callback = GuardCallback(GuardPolicy(snapshot_interval=30), lag=lag)
    trainer = trainer_of(tmp_path, flat(rows()), [callback], optimizer="fused")
    with broken(trainer, [fault]):
        trainer.train()
    [alarm] = callback.guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (N - 1, "non-finite optimizer state", "rewound")
    assert same(state_of(trainer), state_of(plain(tmp_path, optimizer="fused")))
