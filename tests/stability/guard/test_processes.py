"""Several processes decide as one."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from stackwise.stability.guard import Alarm, Guard
from stackwise.stability.guard.replay_loader import DrawnBatch
from stackwise.stability.recomputation import is_recomputation
from stackwise.support.random_state import random_states
from tests.forked import HANG_SECONDS, end_of, start

RANKS = """
import math, sys
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from stackwise.stability.guard import Guard, GuardPolicy

def main(rank, place, lag):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    loss_of = lambda m, batch: (m(batch) - 1).square().mean() * (1e4 if batch.abs().max() > 50 else 1)
    policy = GuardPolicy(snapshot_interval=8, patience=3)
    guard = Guard(model, optimizer, policy=policy, lag=lag, loss_of=loss_of)
    generator = torch.Generator().manual_seed(rank)
    data = [torch.randn(32, 4, generator=generator) for _ in range(40)]
    # Only one process has it: a batch that is not finite, later three whose gradients are far too large.
    if rank == 1:
        data[20][3, 3] = math.nan
    if rank == 0:
        for step in (25, 26, 27):
            data[step] *= 100
    given, fired = [], []
    for batch in guard.batches(data):
        step = guard.steps
        loss = loss_of(model, batch)
        loss.backward()
        given.append(step)
        if step == 35 and step not in fired:  # behind the backward pass, and so small that it would pass
            for p in model.parameters():
                p.grad.mul_(4)
            fired.append(step)
        if step == 32 and rank == 1 and step not in fired:  # what this process is told of its loss
            loss = loss.detach() * 100
            fired.append(step)
        guard.step(loss)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    distributed.all_gather(both, weights)
    assert torch.equal(*both)
    found = [(a.step, a.kind, a.action) for a in guard.alarms]
    everyone = [None, None]
    distributed.all_gather_object(everyone, (found, given))
    assert everyone[0] == everyone[1], everyone
    assert found == [(20, "non-finite loss", "skipped"), (25, "gradient spike", "skipped"),
                     (26, "gradient spike", "skipped"), (27, "gradient spike", "rewound"),
                     (32, "loss spike", "retried"), (35, "gradient spike", "retried")], found
    assert guard.alarms[4].value > guard.alarms[4].limit  # also where it was sound
    # The same with the batches left out, in this process alone.
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    other = torch.optim.SGD(alone.parameters(), lr=0.05, fused=True)
    all_data = []
    for r in range(2):
        generator = torch.Generator().manual_seed(r)
        all_data.append([torch.randn(32, 4, generator=generator) for _ in range(40)])
    for step, pair in enumerate(zip(*all_data)):
        if step not in (20, 25, 26, 27):
            (sum(loss_of(alone, batch) for batch in pair) / 2).backward()
            other.step()
            other.zero_grad()
    for a, b in zip(alone.parameters(), inner.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    # Without averages of its own a step computed again would be that of one process.
    raw = Guard(inner, optimizer, policy=policy, loss_of=loss_of)
    for step, batch in enumerate(raw.batches(data[28:])):
        loss_of(inner, batch).backward()
        for p in inner.parameters():
            distributed.all_reduce(p.grad)
            p.grad.div_(2)
            if raw.steps == 8 and raw.skipped == 0:
                p.grad.mul_(4)
        raw.step(loss_of(inner.eval(), batch))
        inner.train()
    assert [(a.step, a.action) for a in raw.alarms] == [(8, "retried")], raw.alarms
    distributed.destroy_process_group()

if __name__ == "__main__":
    import torch.multiprocessing as mp
    for lag in (0, 2):
        mp.spawn(main, (f"{sys.argv[1]}-{lag}", lag), nprocs=2)
    print("both agree")
"""


@pytest.mark.parametrize(
    "kind, limit, mine, other",
    [
        ("logit growth", 50.0, 11.0, 1e4),
        ("loss spike", 3.0, 1.0, 4.0),
        ("non-finite loss", None, 1.0, math.inf),
    ],
)
def test_an_alarm_tells_of_the_process_that_broke(monkeypatch, kind, limit, mine, other):
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = ("weight", None, False, other, limit)
    for order in (list, reversed):
        of_all = lambda own, order=order: list(order([own, theirs]))  # noqa: E731
        monkeypatch.setattr(guard._examination, "_of_all", of_all)
        alarm = guard._examination.located([], Alarm(3, kind, mine, limit, "weight"), {}, math.inf)
        assert (alarm.value, alarm.limit) == (other, limit)


def test_of_a_step_that_fails_no_other_process_is_asked(monkeypatch):
    def failing(model, batch):
        raise torch.OutOfMemoryError("no more")

    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of=failing)
    monkeypatch.setattr(guard._examination, "_group", object())
    monkeypatch.setattr(distributed, "get_world_size", lambda _: 2)
    given = DrawnBatch(3, 3, torch.ones(2), random_states())
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        guard._examination.located([given], Alarm(3, "non-finite loss", math.nan, None, "0"), {}, math.inf)


def fails_in_one(rank, place):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 1))

    def loss_of(model, batch):
        if rank == 0 and is_recomputation():
            raise torch.OutOfMemoryError("no more")
        return model(batch).square().mean()

    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of=loss_of)
    for batch in guard.batches([torch.ones(2, 4), torch.full((2, 4), math.nan)]):
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss)


@pytest.mark.slow
def test_what_one_of_two_processes_cannot_compute_again_ends_training(tmp_path):
    """The other is in the collective of its backward pass by then, where nothing can be asked of it."""
    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    ranks = [start(fails_in_one, rank, tmp_path / "store", output=outputs[rank]) for rank in range(2)]
    codes = [end_of(process) for process in ranks]
    assert codes == [1, 1], [path.read_text() for path in outputs]
    assert "OutOfMemoryError: no more" in outputs[0].read_text()


@pytest.mark.slow
def test_two_processes_decide_as_one(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, textwrap.shorten(done.stderr[-3000:], 3000)
    assert "both agree" in done.stdout
