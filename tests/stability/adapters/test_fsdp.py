"""Guard with parameters in shards (FSDP2): global norms, one decision, and what is put back is the shard."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import HANG_SECONDS

RANKS = '''
import copy, math, sys
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from stackwise.stability.guard import Guard, GuardError, GuardPolicy

N, POLICY = 40, dict(snapshot_interval=8, patience=3)
KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}

class Square(nn.Module):
    def forward(self, x):
        return x * x

def batches(rank, broken_at=()):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(N, 32, 4, generator=generator)
    labels = x.square().sum(-1, keepdim=True)
    if rank == 1:  # the other process sees nothing of it
        for at in broken_at:
            x[at, 3, 2] = 1e25
    return list(zip(x, labels))

def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def inner():
    torch.manual_seed(0)
    # Eight by five, and one: shards are not even, and one process has none of the last bias.
    return nn.Sequential(nn.Linear(4, 5), Square(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

def made(kind):
    model = inner()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer = KINDS[kind](model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))

def whole(model, optimizer, scheduler):
    state = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            state[number, key] = value.clone() if torch.is_tensor(value) else value
    return state | {"rate": torch.tensor(scheduler.get_last_lr())}

def guarded(kind, lag, rank, at=(), fault=None, policy=POLICY):
    run = made(kind)
    again = loss_of if fault is None else None
    guard = Guard(run[0], run[1], scheduler=run[2], policy=GuardPolicy(**policy), loss_of=again, lag=lag)
    seen = []
    for batch in guard.batches(batches(rank, at)):
        seen.append(guard.steps)
        loss = loss_of(run[0], batch)
        loss.backward()
        if fault is not None:
            fault(run[0], guard.steps)
        guard.step(loss)
    return guard, whole(*run), seen

def plain(kind, rank, leave_out=()):
    run = made(kind)
    for number, batch in enumerate(batches(rank)):
        if number not in leave_out:
            loss_of(run[0], batch).backward()
            run[1].step()
            run[2].step()
            run[1].zero_grad()
    return whole(*run)

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

def agreed(value):
    everyone = [None, None]
    distributed.all_gather_object(everyone, value)
    assert everyone[0] == everyone[1], everyone

def element(*steps):
    """NaN in one element of one gradient, which is in the shard of one process alone."""
    def fault(model, step):
        if step in steps and distributed.get_rank() == 0:
            model[2].weight.grad.to_local().view(-1)[7] = math.nan
    return fault

def main(rank, place):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    for kind, lag in (("adamw", 0), ("fused", 2), ("sgd", 0)):
        guard, state, seen = guarded(kind, lag, rank)
        assert guard.alarms == [] and same(state, plain(kind, rank))
        # Norms are those of the whole gradient, which one process has in a plain run of both batches.
        alone, records = inner(), guard.records()
        (sum(loss_of(alone, batches(r)[0]) for r in range(2)) / 2).backward()
        for name, p in alone.named_parameters():
            norm = records[0].parameter_norms[name]
            torch.testing.assert_close(norm, float(p.grad.norm()), rtol=1e-4, atol=1e-6)
        for at in ((20,), (22, 23, 24)):
            guard, state, seen = guarded(kind, lag, rank, at)
            found = [(a.step, a.kind, a.action, a.where, a.reproduced) for a in guard.alarms]
            agreed((found, seen))
            assert [a[0] for a in found] == list(at), found
            assert {a[1:2] + a[3:] for a in found} == {("non-finite loss", "1 (forward)", True)}, found
            assert (found[-1][2] == "rewound") == (len(at) == 3)
            assert same(state, plain(kind, rank, at)), (kind, at)
        guard, state, seen = guarded(kind, lag, rank, fault=element(20))
        found = [(a.step, a.kind, a.where) for a in guard.alarms]
        agreed(found)
        assert found == [(20, "non-finite gradient", "2.weight")], found
        assert same(state, plain(kind, rank, (20,))), kind
    try:
        guarded("adamw", 0, rank, fault=element(*range(20, 40)))
    except GuardError as error:
        agreed([(a.step, a.action) for a in error.alarms])
    else:
        raise AssertionError("not raised")
    clipped, state, _ = guarded("adamw", 0, rank, policy=POLICY | {"clip": 0.5})
    fused, other, _ = guarded("fused", 2, rank, policy=POLICY | {"clip": 0.5})
    assert max(record.divisor for record in clipped.records()) > 1
    for key in state:
        torch.testing.assert_close(state[key], other[key], rtol=1e-3, atol=1e-4)
    distributed.destroy_process_group()

if __name__ == "__main__":
    import torch.multiprocessing as mp
    mp.spawn(main, (sys.argv[1],), nprocs=2)
    print("both agree")
'''


@pytest.mark.slow
def test_two_processes_with_shards(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "both agree" in done.stdout
