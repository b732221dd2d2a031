"""Processes, ranks and workers that end, slow down or fail in the middle of a training."""

import gc
import json
import signal
import sys
import time

import pytest
import torch
from torch import distributed, nn

from stackwise.stability.faults import (
    DeadRank,
    NanInjection,
    OutOfMemory,
    ProcessSignal,
    SlowRank,
    UnreadableSample,
    UnreadableSampleError,
    WorkerDeath,
    broken,
    kill_child,
)
from tests.forked import HANG_SECONDS, end_of, start
from tests.stability.faults.conftest import Training, differing, hooks_of


def training(fault, folder, rank, world):
    """What a child does."""
    if world > 1:
        meeting = f"file://{folder}/meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with broken((model, optimizer), [fault], journal=folder / f"journal-{rank}"):
        for step in range(4):
            (folder / f"begun-{rank}").write_text(str(step))
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (folder / "saved").write_bytes(b"12345678")
            (folder / f"done-{rank}").write_text(str(step))
    print("ended", flush=True)


def started(tmp_path, fault, rank=0, world=1):
    return start(training, fault, tmp_path, rank, world, output=tmp_path / f"output-{rank}")


def told(child, tmp_path, rank=0):
    """Its exit code, and what it printed."""
    return end_of(child), (tmp_path / f"output-{rank}").read_text()


def journal(tmp_path, rank=0):
    path = tmp_path / f"journal-{rank}"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    "kind, moment, done",
    [
        ("SIGKILL", "forward", "1"),
        ("SIGKILL", "save", "1"),
        ("SIGTERM", "update", "1"),
    ],
)
def test_a_process_that_ends_itself(tmp_path, kind, moment, done):
    folder = tmp_path if moment == "save" else None
    # Behind a step come opening and writing of the file, and of the one that says that the step is done.
    fault = ProcessSignal(step=2, kind=kind, moment=moment, folder=folder, operation=1 if folder else 0)
    code, output = told(started(tmp_path, fault), tmp_path)
    assert code == -getattr(signal, kind), output
    assert output == ""
    assert journal(tmp_path) == [2]
    assert (tmp_path / "begun-0").read_text() == "2"
    assert (tmp_path / "done-0").read_text() == done
    # Opened, and not written.
    assert (tmp_path / "saved").stat().st_size == (0 if moment == "save" else 8)


def test_a_signal_that_is_handled(subjects):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        training = Training(subjects.tiny())
        with broken(
            training.model, [ProcessSignal(step=1), ProcessSignal(step=2, moment="update")]
        ) as injection:
            training.run(4)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (injection.fired, received) == ([1, 2], [1, 1])
    assert not hooks_of(training.model)


@pytest.mark.parametrize("kind, code", [("SIGKILL", -9), ("SIGTERM", -15)])
def test_a_child_that_is_killed(tmp_path, kind, code):
    flag = tmp_path / "flag"
    program = f"import time, pathlib; pathlib.Path({str(flag)!r}).touch(); time.sleep(600)"
    command = [sys.executable, "-c", program]
    assert kill_child(command, when=flag.exists, kind=kind) == code
    assert kill_child(command, after=0.0) == -9


def test_a_child_that_is_done_before():
    assert kill_child([sys.executable, "-c", "raise SystemExit(7)"], after=HANG_SECONDS) == 7
    assert kill_child([sys.executable, "-c", "raise SystemExit(7)"], when=lambda: False) == 7


@pytest.fixture
def children_are_deaf():
    """A new process does not hear SIGTERM, as this one does not."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_child_for_which_nothing_happens(children_are_deaf):
    program = "import time; time.sleep(600)"
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="when\\(\\) never said yes"):
        kill_child([sys.executable, "-c", program], when=lambda: False, limit=0.2)
    assert time.monotonic() - start < 300, "the child is not waited for"
    with pytest.raises(TimeoutError, match="did not end it"):
        kill_child([sys.executable, "-c", program], kind="SIGTERM", limit=0.2)
    with pytest.raises(ValueError, match="kind: got 'SIGFPE'"):
        kill_child(["true"], kind="SIGFPE")


@pytest.mark.parametrize(
    "fault, codes",
    [
        (DeadRank(step=1, rank=1), (0, -9)),
        (DeadRank(step=1, rank=0, kind="exit"), (1, 0)),
    ],
)
def test_a_rank_that_dies(tmp_path, fault, codes):
    children = [started(tmp_path, fault, rank, 2) for rank in range(2)]
    found = [told(child, tmp_path, rank) for rank, child in enumerate(children)]
    # The model is not distributed: the other rank does not notice, and goes on.
    assert tuple(code for code, _ in found) == codes, found
    assert journal(tmp_path, fault.rank) == [1]
    assert journal(tmp_path, 1 - fault.rank) == []
    assert (tmp_path / f"done-{fault.rank}").read_text() == "0"
    assert (tmp_path / f"done-{1 - fault.rank}").read_text() == "3"


@pytest.fixture
def one_rank(tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_rank_that_is_slow(subjects, one_rank, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    training = Training(subjects.tiny())
    with broken(training.model, [SlowRank(step=1, duration=2, rank=0, seconds=7.5)]) as injection:
        training.run(4)
    assert (injection.fired, slept) == ([1, 2], [7.5, 7.5])


@pytest.mark.parametrize("kind", [SlowRank, DeadRank])
def test_ranks_that_are_not_there(subjects, one_rank, kind):
    refused = pytest.raises(ValueError, match=f"{kind.name}: rank: got 1; there are 1")
    with refused, broken(subjects.tiny(), [kind(step=0, rank=1)]):
        pass


@pytest.mark.parametrize("kind", [SlowRank, DeadRank])
def test_ranks_need_a_process_group(subjects, kind):
    refused = pytest.raises(ValueError, match=rf"{kind.name}: needs an initialised torch\.distributed")
    with refused, broken(subjects.tiny(), [kind(step=0)]):
        pass


# Memory.


@pytest.mark.parametrize("moment", ["forward", "backward"])
@pytest.mark.parametrize("target", [None, "layers.1.mlp"])
def test_out_of_memory_ends_its_step(subjects, moment, target):
    runs = []
    for faults in ([], [OutOfMemory(step=2, target=target, moment=moment)]):
        torch.manual_seed(0)
        training = Training(subjects.tiny(), torch.optim.SGD(subjects.tiny().parameters(), lr=0.0))
        losses = []
        with broken(training.model, faults) as injection:
            for batch in training.batches(5):
                training.model.zero_grad()
                try:
                    loss = training.loss(batch)
                    loss.backward()
                    losses.append(loss.item())
                    injection.end_step()
                except torch.OutOfMemoryError as error:
                    losses.append(str(error)[:18])
                    assert not hooks_of(training.model)
        runs.append(losses)
    clean, met = runs
    assert differing(clean, met) == [2]
    assert met[2] == "CUDA out of memory"
    assert (injection.fired, injection.step) == ([2], 5)


# Loaders.


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 29
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def fed(training, faults, n_workers):
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=4, num_workers=n_workers, multiprocessing_context="fork" if n_workers else None
    )
    with broken(training.model, faults) as injection:
        try:
            for batch in injection.batches(loader):
                training.loss(batch).backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        except (RuntimeError, UnreadableSampleError) as error:
            return injection, error
    return injection, None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_dies(subjects, seed, monkeypatch):
    # How long the loader waits, as it goes, for a worker that may never see the end.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    injection, error = fed(Training(subjects.tiny()), [WorkerDeath(step=1, seed=seed)], 2)
    assert "DataLoader worker" in str(error)
    assert injection.fired == [1]
    del error
    gc.collect()


def test_a_loader_without_workers(subjects):
    with pytest.raises(ValueError, match="worker_death: needs a DataLoader with num_workers >= 1"):
        fed(Training(subjects.tiny()), [WorkerDeath(step=1)], 0)


def test_a_sample_that_cannot_be_read(subjects):
    training = Training(subjects.tiny())
    injection, error = fed(training, [UnreadableSample(step=2, seed=11)], 0)
    assert isinstance(error, UnreadableSampleError)
    assert "sample 11 cannot be read" in str(error)
    assert (injection.fired, injection.step) == ([2], 2)


def test_a_loop_that_goes_on_gets_the_batch(subjects):
    training = Training(subjects.tiny())
    with broken(training.model, [UnreadableSample(step=1), NanInjection(step=2, target="loss")]) as injection:
        batches, errors = iter(training.batches(3)), 0
        while injection.step < 3:
            try:
                batch = next(injection.batches(batches))
            except UnreadableSampleError:
                errors += 1
                continue
            training.loss(batch).backward()
            training.optimizer.zero_grad()
    assert (errors, injection.fired) == (1, [1, 2])


def test_loaders_that_are_not_wrapped(subjects):
    training = Training(subjects.tiny())
    with (
        pytest.raises(ValueError, match=r"batches are reached through injection.batches\(loader\)"),
        broken(training.model, [WorkerDeath(step=1)]),
    ):
        training.run(3)


@pytest.mark.parametrize(
    "make, key",
    [
        (lambda: ProcessSignal(step=0, kind="SIGFPE"), "process_signal: kind"),
        (lambda: ProcessSignal(step=0, moment="now"), "process_signal: moment"),
        (lambda: ProcessSignal(step=0, moment="save"), "process_signal: folder"),
        (lambda: ProcessSignal(step=0, folder="a"), "process_signal: folder"),
        (lambda: ProcessSignal(step=0, operation=-1), "process_signal: operation"),
        (lambda: SlowRank(step=0, seconds=0.0), "slow_rank: seconds"),
        (lambda: SlowRank(step=0, rank=-1), "slow_rank: rank"),
        (lambda: DeadRank(step=0, kind="sleep"), "dead_rank: kind"),
        (lambda: WorkerDeath(step=0, seed=-1), "worker_death: seed"),
    ],
)
def test_arguments_that_are_refused(make, key):
    with pytest.raises(ValueError, match=rf"^{key}: got .*; allowed: "):
        make()
