"""accelerate under the guard: one decision for all processes and for all batches of a step."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stackwise.stability.faults import GradientExplosion, NanInjection, broken
from stackwise.stability.guard import GuardError, GuardPolicy
from tests.forked import HANG_SECONDS

accelerate = pytest.importorskip("accelerate")

from stackwise.stability.adapters.accelerate_guard import AcceleratedGuard  # noqa: E402

POLICY = GuardPolicy(snapshot_interval=8, patience=3)
N = 41
SIZE = 32


class Square(nn.Module):
    def forward(self, x):
        return x * x


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def rows(broken_at=(), leave_out=(), count=N):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, SIZE, 4, generator=generator)
    labels = x.square().sum(-1, keepdim=True)
    for at in broken_at:
        x[at, 3, 2] = 1e25  # whose square overflows
    kept = [n for n in range(count) if n not in leave_out]
    return [row for n in kept for row in zip(x[n], labels[n], strict=True)]


class Run:
    def __init__(self, data, per_update=1, kind="adamw", shuffle=False):
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=per_update,
            dataloader_config=accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=shuffle),
        )
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), Square(), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1)
        )
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
            "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        }
        optimizer = kinds[kind](model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
        loader = DataLoader(data, batch_size=SIZE, shuffle=shuffle)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.seen = []

    @property
    def state(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict()["state"],
                "rate": self.scheduler.get_last_lr(),
            }
        )


def guarded(data, *, per_update=1, kind="adamw", epochs=1, faults=None, locate=True, **arguments):
    run = Run(data, per_update, kind)
    run.error = None
    run.guard = AcceleratedGuard(
        run.accelerator,
        run.model,
        run.optimizer,
        run.scheduler,
        max_grad_norm=1.0,
        policy=POLICY,
        loss_of=loss_of if locate else None,
        **arguments,
    )

    def train():
        for _ in range(epochs):
            for batch in run.guard.batches(run.loader):
                run.seen.append(run.guard.guard.steps)
                with run.accelerator.accumulate(run.model):
                    loss = loss_of(run.model, batch)
                    run.accelerator.backward(loss)
                    run.guard.step(loss)

    try:
        if faults is None:
            train()
        else:
            with broken((run.model, run.optimizer), faults) as injection:
                train()
            run.fired = injection.fired
    except GuardError as error:
        run.error = error
    return run


def plain(data, *, per_update=1, kind="adamw", epochs=1):
    run = Run(data, per_update, kind)
    for _ in range(epochs):
        for batch in run.loader:
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(loss_of(run.model, batch))
                if run.accelerator.sync_gradients:
                    run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
    return run


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("per_update", [1, 2])
@pytest.mark.parametrize("kind, lag", [("adamw", 0), ("fused", 0), ("fused", 2)])
def test_a_sound_training_is_not_touched(kind, lag, per_update):
    run = guarded(rows(), per_update=per_update, kind=kind, lag=lag, epochs=2)
    run.guard.settle()
    assert run.guard.guard.alarms == []
    assert same(run.state, plain(rows(), per_update=per_update, kind=kind, epochs=2).state)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("at", [(0,), (20,), (23, 24, 25, 28), (38, 39, 40)], ids=str)
def test_a_broken_batch_is_as_if_it_were_not_there(at, lag):
    run = guarded(rows(at), kind="fused", lag=lag)
    guard = run.guard.guard
    assert [alarm.step for alarm in guard.alarms] == list(at)
    assert {alarm.where for alarm in guard.alarms} == {"1 (forward)"}
    assert guard.quarantined == [(0, step) for step in at]
    assert run.scheduler.scheduler.last_epoch == N - len(at)
    assert same(run.state, plain(rows(leave_out=at), kind="fused").state)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(
    "at", [(0, 1), (20, 21), (2, 3, 4, 5, 6, 7), (34, 35, 36, 37, 38, 39), (40,)], ids=str
)
def test_accumulated_batches_go_together(at, lag):
    # 41 batches: the last step of an epoch has one. The rewind of (2, ..., 7) in epoch 1 goes back over it.
    run = guarded(rows(at), per_update=2, kind="fused", lag=lag, epochs=2)
    steps = sorted({n // 2 for n in at})
    assert [alarm.step for alarm in run.guard.guard.alarms] == [*steps, *(21 + step for step in steps)]
    assert same(run.state, plain(rows(leave_out=at), per_update=2, kind="fused", epochs=2).state)


@pytest.mark.parametrize("fault", [NanInjection(step=20), GradientExplosion(step=20, factor=100.0)], ids=str)
def test_a_fault_is_noticed_at_its_step_and_left_out(fault):
    run = guarded(rows(), faults=[fault], locate=False)
    assert run.fired == [20]
    [alarm] = run.guard.guard.alarms
    assert (alarm.step, alarm.action, alarm.batch) == (20, "skipped", ((0, 20),))
    assert same(run.state, plain(rows(leave_out=(20,))).state)


def test_a_lasting_fault_rewinds_once_and_ends_training():
    run = guarded(rows(), faults=[NanInjection(step=20, duration=30)], locate=False)
    assert isinstance(run.error, GuardError)
    actions = [alarm.action for alarm in run.error.alarms]
    assert actions[:3] == ["skipped", "skipped", "rewound"]
    assert actions.count("rewound") == 1
    assert actions[-1] == "raised"


def test_a_spike_of_the_loss_in_an_accumulated_step_comes_again(monkeypatch):
    def spiking(model, batch):
        return plain_loss(model, batch) + 1000.0 * batch[0][0].eq(0).all()

    plain_loss = loss_of
    monkeypatch.setattr(sys.modules[__name__], "loss_of", spiking)
    data = rows()
    data[21 * SIZE] = (torch.zeros(4), torch.zeros(1))
    run = guarded(data, per_update=4)
    alarms = [(a.step, a.kind, a.action, a.reproduced) for a in run.guard.guard.alarms]
    assert alarms == [(5, "loss spike", "skipped", True)]


@pytest.mark.parametrize("lag", [0, 2])
def test_the_optimizer_is_as_before(lag):
    optimizer = guarded(rows((40,)), kind="fused", lag=lag).optimizer.optimizer
    assert getattr(optimizer, "found_inf", None) is None
    assert getattr(optimizer, "grad_scale", None) is None


def test_what_is_saved_within_an_accumulation_goes_on_with_its_batches(tmp_path):
    def train(run, *, saves_at=None, **arguments):
        guard = AcceleratedGuard(
            run.accelerator, run.model, run.optimizer, run.scheduler, max_grad_norm=1.0, policy=POLICY
        )
        run.accelerator.register_for_checkpointing(guard)
        if "fast_forward" in arguments:
            run.accelerator.load_state(str(tmp_path))
        for number, batch in enumerate(guard.batches(run.loader, **arguments), start=1):
            with run.accelerator.accumulate(run.model):
                loss = loss_of(run.model, batch)
                run.accelerator.backward(loss)
                guard.step(loss)
            if number == saves_at:
                run.accelerator.save_state(str(tmp_path))
        return guard.guard

    whole = Run(rows((9,)), per_update=4)
    first = train(whole, saves_at=22)  # two of a step
    resumed = Run(rows((9,)), per_update=4)
    again = train(resumed, fast_forward=True)
    assert again.steps == first.steps == 11
    assert again.quarantined == first.quarantined == [(0, place) for place in range(8, 12)]
    states = resumed.state, whole.state
    for state in states:  # statistics are saved as they are, with the two
        state["model"] = {name: t for name, t in state["model"].items() if name.endswith(("weight", "bias"))}
    assert same(*states)


@pytest.mark.parametrize("at, within", [(60, True), (N, True), (N, False)])
def test_resumed_epoch_has_its_own_order(tmp_path, at, within):
    """A prepared loader counts epochs from 0 in each process, and its sampler shuffles by that."""

    def train(run, *, resumes_in=None):
        saves, first = resumes_in is None, resumes_in or 0
        guard = AcceleratedGuard(run.accelerator, run.model, run.optimizer, policy=POLICY)
        run.accelerator.register_for_checkpointing(guard)
        if not saves:
            run.accelerator.load_state(str(tmp_path))
        seen = []
        for epoch in range(first, 3):
            for batch in guard.batches(run.loader, fast_forward=not saves and epoch == first):
                seen.append(float(batch[0].sum()))
                with run.accelerator.accumulate(run.model):
                    loss = loss_of(run.model, batch)
                    run.accelerator.backward(loss)
                    guard.step(loss)
                if saves and within and len(seen) == at:
                    run.accelerator.save_state(str(tmp_path))
            if saves and not within and len(seen) == at:
                run.accelerator.save_state(str(tmp_path))
        return seen

    whole = Run(rows(), shuffle=True)
    seen = train(whole)
    assert seen[:N] != seen[N : 2 * N]
    resumed = Run(rows(), shuffle=True)
    assert train(resumed, resumes_in=0 if at == N and within else 1) == seen[at:]
    assert same(resumed.state, whole.state)


def test_a_short_step_that_is_to_be_made_again_is_as_short_after_a_resume(tmp_path):
    def train(run, *, saves=False, **arguments):
        guard = AcceleratedGuard(
            run.accelerator, run.model, run.optimizer, run.scheduler, policy=POLICY, loss_of=loss_of
        )
        run.accelerator.register_for_checkpointing(guard)
        if arguments:
            run.accelerator.load_state(str(tmp_path))
        for batch in guard.batches(run.loader, **arguments):
            # 41 batches: the last step of the epoch, 10, has one.
            breaks = saves and guard.guard.steps == 10 and not guard.guard.alarms
            with run.accelerator.accumulate(run.model):
                loss = loss_of(run.model, batch)
                run.accelerator.backward(loss)
                if breaks:
                    run.model[0].weight.grad[0, 0] = float("nan")
                guard.step(loss)
            if breaks:
                run.accelerator.save_state(str(tmp_path))
        return guard.guard

    whole = Run(rows(), per_update=4)
    first = train(whole, saves=True)
    assert [(alarm.step, alarm.action) for alarm in first.alarms] == [(10, "retried")]
    resumed = Run(rows(), per_update=4)
    again = train(resumed, fast_forward=True)
    assert again.steps == first.steps == 11
    assert same(resumed.state, whole.state)


def test_the_common_part_of_its_state_is_that_of_its_guard():
    """Beside the sizes of its steps."""
    guard = guarded(rows()).guard
    state = guard.state_dict()
    assert state["loader"]["generators"] is not None
    common = guard.common_state(state)
    assert common["loader"]["generators"] is None
    assert common.keys() == state.keys() and common["sizes"] == state["sizes"]


@pytest.mark.parametrize("saves_at", [21, 22, 24, 26])
@pytest.mark.parametrize("bad", [(20,), (19, 20, 21)], ids=["skipped", "rewound"])
def test_what_is_saved_while_an_alarm_is_under_way_has_answered_it(tmp_path, bad, saves_at):
    """accelerate takes weights and scheduler before the guard's state, whose answer may undo steps."""

    def train(run, *, stops_at=None, **arguments):
        guard = AcceleratedGuard(
            run.accelerator, run.model, run.optimizer, run.scheduler, policy=POLICY, lag=4
        )
        run.accelerator.register_for_checkpointing(guard)
        if arguments:
            run.accelerator.load_state(str(tmp_path))
        for number, batch in enumerate(guard.batches(run.loader, **arguments), start=1):
            with run.accelerator.accumulate(run.model):
                loss = loss_of(run.model, batch)
                run.accelerator.backward(loss)
                guard.step(loss)
            if number == stops_at:
                run.accelerator.save_state(str(tmp_path))
                break
        return run

    whole = train(Run(rows(bad), kind="fused"))
    train(Run(rows(bad), kind="fused"), stops_at=saves_at)
    resumed = train(Run(rows(bad), kind="fused"), fast_forward=True)
    assert same(resumed.state, whole.state)


def test_with_a_lag_nothing_is_saved_within_an_accumulation():
    run = Run(rows(), per_update=4, kind="fused")
    guard = AcceleratedGuard(run.accelerator, run.model, run.optimizer, policy=POLICY, lag=2)
    for number, batch in enumerate(guard.batches(run.loader)):
        if number == 13:
            with pytest.raises(ValueError, match=r"settle: got 'outstanding steps and a pending batch'"):
                guard.state_dict()
        with run.accelerator.accumulate(run.model):
            loss = loss_of(run.model, batch)
            run.accelerator.backward(loss)
            guard.step(loss)
    assert guard.guard.steps == 11


def test_its_state_is_saved_with_that_of_accelerate(tmp_path):
    first = guarded(rows((20,)))
    first.accelerator.register_for_checkpointing(first.guard)
    first.accelerator.save_state(str(tmp_path))
    other = Run(rows())
    guard = AcceleratedGuard(other.accelerator, other.model, other.optimizer, other.scheduler, policy=POLICY)
    other.accelerator.register_for_checkpointing(guard)
    other.accelerator.load_state(str(tmp_path))
    assert repr(guard.guard.alarms) == repr(first.guard.guard.alarms)
    assert guard.guard.quarantined == [(0, 20)]
    assert guard.guard.steps == N


def test_what_is_refused():
    run = Run(rows())
    with pytest.raises(
        ValueError, match=r"optimizer: got 'AdamW'; allowed: a result of accelerator.prepare\(\)"
    ):
        AcceleratedGuard(run.accelerator, run.model, run.optimizer.optimizer)
    with pytest.raises(ValueError, match=r"clip: got 1.0; allowed: None: max_grad_norm clips"):
        AcceleratedGuard(run.accelerator, run.model, run.optimizer, policy=GuardPolicy(clip=1.0))
    with pytest.raises(ValueError, match="max_grad_norm: got 0"):
        AcceleratedGuard(run.accelerator, run.model, run.optimizer, max_grad_norm=0)


RANKS = '''
import sys
import torch
from torch import distributed
import tests.stability.adapters.test_accelerate_guard as own

def check(per_update, lag, bad):
    """Batches of the second process are the odd ones: only they are broken."""
    of_one = [own.rows(count=80)[n * own.SIZE:(n + 1) * own.SIZE] for n in range(80)]
    marred = own.rows([2 * n + 1 for n in bad], count=80)
    run = own.guarded(marred, per_update=per_update, kind="fused", lag=lag)
    assert run.accelerator.num_processes == 2
    alarms = [(a.step, a.kind, a.action, a.where) for a in run.guard.guard.alarms]
    everyone = [None, None]
    distributed.all_gather_object(everyone, (alarms, run.seen))
    assert everyone[0] == everyone[1], everyone
    assert [a[0] for a in alarms] == sorted({n // per_update for n in bad}), alarms
    assert {a[1] for a in alarms} == {"non-finite loss"}, alarms
    assert {a[3] for a in alarms} == {"1 (forward)"}, alarms
    gone = {m for n in bad for k in range(per_update) for m in (2 * (n // per_update * per_update + k),
                                                               2 * (n // per_update * per_update + k) + 1)}
    kept = [row for n in range(80) if n not in gone for row in of_one[n]]
    twin = own.plain(kept, per_update=per_update, kind="fused")
    assert own.same(run.state, twin.state)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for lag in (0, 2):
        check(1, lag, [10])
        check(1, lag, [20, 21, 22])
        check(2, lag, [20, 22, 24])
    distributed.destroy_process_group()
    print("both agree")
'''


@pytest.mark.slow
def test_two_processes_decide_as_one(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    root = str(Path(__file__).parents[3])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": root, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("both agree") == 2


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_scheduler_that_follows_what_is_measured_is_refused(wrapped):
    run = Run(rows(count=1))
    follows = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer.optimizer)
    scheduler = run.accelerator.prepare(follows) if wrapped else follows
    with pytest.raises(ValueError, match="scheduler: got 'ReduceLROnPlateau'; allowed: one whose step"):
        AcceleratedGuard(run.accelerator, run.model, run.optimizer, scheduler)


@pytest.mark.parametrize("at", [4, 5])
def test_a_step_has_the_largest_logit_of_its_batches(at):
    """NaN is no number: a batch may have none."""
    run = Run(rows(count=10), 2)
    guard = AcceleratedGuard(run.accelerator, run.model, run.optimizer, policy=GuardPolicy(logit_limit=50.0))
    for place, batch in enumerate(guard.batches(run.loader)):
        with run.accelerator.accumulate(run.model):
            loss = loss_of(run.model, batch)
            run.accelerator.backward(loss)
            others = 1.0 if place // 2 != 2 else float("nan")
            logit = 60.0 if place == at else others
            guard.step(loss, logit=None if place == 0 else torch.tensor(logit))
    assert [(a.step, a.kind, a.value) for a in guard.guard.alarms] == [(2, "logit growth", 60.0)]
    seen = [record.logit for record in guard.guard.records()]
    assert seen == [1.0, 1.0, 60.0, 1.0, 1.0]


@pytest.mark.parametrize("lag", [0, 2])
def test_statistics_that_overflow_are_restored_and_their_batch_is_skipped(lag):
    data = rows()
    data[20 * SIZE][0][2] = 1e10  # the variance of its square overflows, the loss is finite
    run = guarded(data, kind="fused", lag=lag)
    [alarm] = run.guard.guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (20, "non-finite buffer", "skipped")
    assert same(run.state, plain(rows(leave_out=(20,)), kind="fused").state)


@pytest.mark.parametrize("lag", [0, 2])
def test_optimizer_state_that_the_last_step_breaks_is_rewound(lag):
    fault = NanInjection(step=N - 1, target="optimizer_state:*.exp_avg_sq", kind="inf")
    run = guarded(rows(), kind="fused", lag=lag, faults=[fault])
    [alarm] = run.guard.guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (N - 1, "non-finite optimizer state", "rewound")
    assert same(run.state, plain(rows(), kind="fused").state)
