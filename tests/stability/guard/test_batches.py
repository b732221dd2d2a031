"""Batches: several of a step, of an epoch, with ids of their own."""

import io
import json
import math
import random
import weakref
from contextlib import nullcontext
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from stackwise.stability.guard import Guard, GuardPolicy
from stackwise.stability.guard.replay_loader import ReplayLoader
from stackwise.support.dataloader import generator_states
from stackwise.support.random_state import keep_random_states
from stackwise.training.storage_meter import uncollected
from tests.stability.guard.guarded_run import (
    OPTIMIZERS,
    POLICY,
    N,
    Outcome,
    Small,
    element,
    guarded,
    loss_of,
    made,
    make_data,
    plain,
    same,
    times,
)


def test_a_step_of_several_batches():
    torch.manual_seed(0)
    model, twin = Small(), Small()
    twin.load_state_dict(model.state_dict())
    guard = Guard(model, OPTIMIZERS["sgd"](model.parameters()), policy=POLICY)
    other = OPTIMIZERS["sgd"](twin.parameters())
    data, seen = make_data(), []
    for place, batch in enumerate(guard.batches(data)):
        loss = loss_of(model, batch) / 2
        loss.backward()
        seen.append(guard.steps)
        if place == 51:
            model.head.bias.grad[0] = math.inf
        if place % 2:
            guard.step(loss)
    for place, batch in enumerate(data):
        if place not in (50, 51):
            (loss_of(twin, batch) / 2).backward()
            if place % 2:
                other.step()
                other.zero_grad()
    assert seen == [place // 2 for place in range(N)]
    assert guard.quarantined == [(0, 50), (0, 51)]
    assert guard.alarms[0].step == 25
    assert same(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("factor", [4, 10])
def test_a_step_of_several_batches_is_computed_again_whole(factor):
    torch.manual_seed(0)
    model = Small()
    part = lambda model, batch: loss_of(model, batch) / 4  # noqa: E731
    guard = Guard(model, OPTIMIZERS["adamw"](model.parameters()), policy=POLICY, loss_of=part)
    total = 0.0
    for place, batch in enumerate(guard.batches(make_data())):
        loss = part(model, batch)
        loss.backward()
        total += loss.detach()
        if place % 4 == 3:
            if guard.steps == 15 and not guard.skipped:
                times(factor, 15)(Outcome(model, guard.optimizer, None), 15)
            guard.step(total)
            total = 0.0
    assert [(a.step, a.kind, a.action) for a in guard.alarms] == [(15, "gradient spike", "retried")]
    assert guard.quarantined == []


def test_recomputed_loss_is_that_of_all_micro_batches():
    torch.manual_seed(0)
    model, data = Small(), make_data()
    wrong = {id(batch) for batch in data[60:64]}
    part = lambda model, batch: loss_of(model, batch) * (4 if id(batch) in wrong else 1) / 4  # noqa: E731
    guard = Guard(model, OPTIMIZERS["adamw"](model.parameters()), policy=POLICY, loss_of=part)
    total = 0.0
    for place, batch in enumerate(guard.batches(data)):
        loss = part(model, batch)
        loss.backward()
        total += loss.detach()
        if place % 4 == 3:
            guard.step(total)
            total = 0.0
    assert (guard.alarms, guard.cleared) == ([], 1)


@pytest.mark.parametrize("lag", [0, 3])
def test_the_optimizer_is_left_as_it_was(lag):
    run = guarded("fused adamw", policy=GuardPolicy(clip=1e-3), lag=lag)
    assert (run.optimizer.found_inf, run.optimizer.grad_scale) == (None, None)
    run = guarded("fused adamw", element(math.nan, *range(60, N)), lag=lag)
    assert run.error is not None
    assert (run.optimizer.found_inf, run.optimizer.grad_scale) == (None, None)


def test_rates_that_change_between_epochs_are_not_undone_by_a_rewind():
    torch.manual_seed(0)
    model, data = Small(), make_data(count=20)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    guard, rates = Guard(model, optimizer, policy=POLICY), {}
    for epoch in range(3):
        for batch in guard.batches(data):
            rates.setdefault(epoch, set()).add(optimizer.param_groups[0]["lr"])
            loss = loss_of(model, batch)
            loss.backward()
            if epoch == 1 and guard.steps in range(22, 27):
                model.head.bias.grad[0] = math.nan
            guard.step(loss)
        scheduler.step()
    assert [alarm.action for alarm in guard.alarms][-1] == "rewound"
    assert [max(rates[epoch]) for epoch in range(3)] == pytest.approx([0.3, 0.03, 0.003])
    assert all(len(seen) == 1 for seen in rates.values())


@pytest.mark.parametrize("lag", [1, 4])
def test_clipped_spikes_are_counted_once(lag):
    policy = GuardPolicy(spikes_clipped=1)
    at_once, late = (
        guarded("fused sgd", times(10, 60, 61, 64, 65), policy=policy, lag=each) for each in (0, lag)
    )
    assert repr(late.guard.alarms) == repr(at_once.guard.alarms)
    assert same(late.state, at_once.state)


@pytest.mark.parametrize("lag", [0, 4])
def test_nothing_is_lost_where_it_ends(lag):
    data = make_data()
    run = guarded("fused adamw", element(math.nan, *range(60, N)), data=data, lag=lag)
    assert run.error is not None
    again = made("fused adamw", 0)
    guard = Guard(again.model, again.optimizer, policy=POLICY)
    guard.load_state_dict(run.guard.state_dict())
    given = []
    for batch in guard.batches(data, fast_forward=True):
        given.append(guard.steps)
        loss = loss_of(again.model, batch)
        loss.backward()
        guard.step(loss)
    assert given == list(range(run.error.alarm.step + 1, N))


def test_ids_of_batches_are_of_one_process():
    model = Small()
    with pytest.raises(ValueError, match=r"batch_id: .* allowed: None in several processes"):
        Guard(model, OPTIMIZERS["sgd"](model.parameters()), batch_id=id, group=object())


def test_a_batch_with_an_id_of_its_own_stays_away():
    def fault(run, step):
        if step == 60:
            run.model.head.bias.grad[0] = math.nan

    run = guarded(
        "adamw",
        fault,
        batch_id=lambda batch: int(batch[0][:8].sum()) * 1000 + int(batch[1][:9].sum()),
        epochs=2,
    )
    data = make_data()
    assert len(run.seen) == 2 * N - 1
    assert same(run.state, plain("adamw", data=data + data, leave_out=[60, 60 + N]).state)


def test_one_step_for_each_batch():
    torch.manual_seed(0)
    model = Small()
    guard = Guard(model, OPTIMIZERS["sgd"](model.parameters()))
    batches = guard.batches(make_data())
    batch = next(batches)
    loss = loss_of(model, batch)
    loss.backward()
    with pytest.raises(ValueError, match="state_dict: got 'a pending batch'"):
        guard.state_dict()
    guard.step(loss)
    loss = loss_of(model, batch)
    loss.backward()
    with pytest.raises(ValueError, match="step: got 1; allowed: one for each batch"):
        guard.step(loss)


def test_a_loop_that_was_left_is_followed_by_a_new_epoch():
    feed = ReplayLoader()

    def left(fast_forward=False, at=2):
        for place, batch in enumerate(feed.batches("abcd", fast_forward=fast_forward, ending=lambda: None)):
            feed.take_pending()
            if place == at:
                return batch
        return None

    assert left() == "c"
    state = feed.state_dict()
    assert (state["epoch"], state["index"]) == (0, 3)
    given = []
    for batch in feed.batches("abcd", ending=lambda: None):
        given += [each.id for each in feed.take_pending()]
        if batch == "b":
            break
    assert given == [(1, 0), (1, 1)]
    state = feed.state_dict()
    assert (state["epoch"], state["index"]) == (1, 2)
    # What goes on from a state goes on in its epoch.
    feed.load_state_dict(state)
    assert left(fast_forward=True, at=0) == "c"
    assert (feed.state_dict()["epoch"], feed.state_dict()["index"]) == (1, 3)
    feed.load_state_dict(state)
    assert left(fast_forward=True) is None
    assert (feed.state_dict()["epoch"], feed.state_dict()["index"]) == (2, 0)
    assert left(fast_forward=True, at=0) == "a"
    assert (feed.state_dict()["epoch"], feed.state_dict()["index"]) == (2, 1)


def test_a_plain_load_reads_the_state():
    """Random states and all: it refuses what is no tensor and no plain value."""

    def draw():
        return torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002

    data, drawn, feed = [torch.ones(2), torch.zeros(2)], [], ReplayLoader()
    with keep_random_states():
        batches = feed.batches(data, ending=lambda: None)
        next(batches)
        drawn.append(draw())
        feed.replay(feed.take_pending())
        file = io.BytesIO()
        torch.save(feed.state_dict(), file)
        after = draw()
        again = ReplayLoader()
        file.seek(0)
        again.load_state_dict(torch.load(file, weights_only=True))
        given = again.batches(data, fast_forward=True, ending=lambda: None)
        assert torch.equal(next(given), data[0])
        assert draw() == drawn[0]
        again.take_pending()
        assert torch.equal(next(given), data[1])
        assert draw() == after


def test_what_was_given_again_leaves_nothing_in_what_processes_have_alike():
    feed = ReplayLoader()
    batches = feed.batches("abc", ending=lambda: None)
    next(batches)
    feed.replay(feed.take_pending())
    assert ReplayLoader.common_state(feed.state_dict())["frontier"] is not None
    assert next(batches) == "a"
    feed.take_pending()
    state = feed.state_dict()
    assert state["frontier"] is not None, "this process goes on from there"
    common = ReplayLoader.common_state(state)
    assert common["frontier"] is None
    again = ReplayLoader()
    again.load_state_dict(common)
    assert next(again.batches(iter("bc"), ending=lambda: None)) == "b"


def test_an_id_that_is_a_list_is_known_as_a_tuple():
    feed = ReplayLoader(lambda batch: [batch, "text"])
    for _ in feed.batches([3, 4], ending=lambda: None):
        feed.quarantine(feed.take_pending())
    assert list(feed.quarantined) == [(3, "text"), (4, "text")]
    again = ReplayLoader(lambda batch: [batch, "text"])
    again.load_state_dict(feed.state_dict())
    assert list(again.batches([3, 5, 4], ending=lambda: None)) == [5]


def test_ids_are_plain_values():
    feed = ReplayLoader(lambda batch: batch)
    given = feed.batches([np.int64(3), (np.int32(4), ["a"]), np.str_("b")], ending=lambda: None)
    for _ in given:
        feed.quarantine(feed.take_pending())
    assert json.dumps(list(feed.quarantined)) == '[3, [4, ["a"]], "b"]'
    assert {type(each) for each in feed.quarantined} == {int, tuple, str}
    for other in (torch.tensor(3), {"a": 1}, (1, torch.ones(2)), None, 0.5):
        feed = ReplayLoader(lambda batch: batch)
        with pytest.raises(ValueError, match=r"batch_id: got .*; allowed: an integer, a string, or a tuple"):
            next(feed.batches([other], ending=lambda: None))
        with pytest.raises(ValueError, match=r"identity: got .*; allowed: an integer, a string, or a tuple"):
            feed.give(0, other)


def drawn():
    return torch.Generator().manual_seed(3)


class Augmented(Dataset):
    """Draws whenever it is read."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.stack([torch.tensor(float(i)), torch.rand(())])


LOADERS = {
    "in order": lambda: DataLoader(Augmented(), batch_size=2),
    "shuffled": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True),
    "generator": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, generator=drawn()),
    "sampler": lambda: DataLoader(
        Augmented(), batch_size=2, sampler=RandomSampler(Augmented(), generator=drawn())
    ),
    "list": lambda: list(torch.arange(24.0).view(6, 2, 2)),
}


def taken(feed, batches, count):
    """Batches, and what a step draws behind each."""
    found = []
    for batch in islice(batches, count):
        feed.take_pending()
        found += [batch, torch.rand(1)]
    return found


def two_epochs(feed, loader, fast_forward=False):
    for _ in range(2):
        yield from feed.batches(loader, fast_forward=fast_forward, ending=lambda: None)


@pytest.mark.parametrize("done", [1, 4, 6, 8])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_goes_on_with_the_same_batches(kind, done):
    """What is drawn to get there moves nothing else on."""
    torch.manual_seed(5)
    feed = ReplayLoader()
    batches = two_epochs(feed, loader := LOADERS[kind]())
    taken(feed, batches, done)
    state, states = feed.state_dict(), torch.get_rng_state()
    expected = taken(feed, batches, 12 - done)
    again, fresh = ReplayLoader(), LOADERS[kind]()
    again.load_state_dict(state)
    assert str(again.state_dict()) == str(state)
    torch.manual_seed(99)
    torch.set_rng_state(states)
    found = taken(again, two_epochs(again, fresh, fast_forward=True), 12 - done)
    assert same(found, expected)
    assert (again.state_dict()["epoch"], again.state_dict()["index"]) == (1, 6)
    assert same(generator_states(fresh), generator_states(loader))


def test_a_generator_goes_on_with_the_next_epoch():
    feed, loader = ReplayLoader(), LOADERS["generator"]()
    taken(feed, feed.batches(loader, ending=lambda: None), 7)
    state = feed.state_dict()
    assert (state["epoch"], state["index"], state["began"]) == (1, 0, None)
    again = ReplayLoader()
    again.load_state_dict(state)
    found = again.batches(LOADERS["generator"](), fast_forward=True, ending=lambda: None)
    for batch, other in zip(loader, found, strict=True):
        assert torch.equal(batch[:, 0], other[:, 0])


@pytest.mark.parametrize("count", [2, 5])
def test_an_epoch_that_begins_among_batches_that_are_given_again(count):
    """It is begun as if there were none, whatever a step draws."""
    orders = []
    for goes_on in (False, True):
        torch.manual_seed(5)
        feed = ReplayLoader()
        taken(feed, feed.batches(LOADERS["shuffled"](), ending=lambda: None), 3)
        feed.replay_all([])
        batches = feed.batches(LOADERS["shuffled"](), ending=lambda: None)
        taken(feed, batches, count)
        if goes_on:
            state, states = feed.state_dict(), torch.get_rng_state()
            feed = ReplayLoader()
            feed.load_state_dict(state)
            torch.manual_seed(99)
            torch.set_rng_state(states)
            batches = feed.batches(LOADERS["shuffled"](), fast_forward=True, ending=lambda: None)
        orders.append(taken(feed, batches, 9))
    assert len(orders[0]) == 2 * (3 + 6 - count)
    assert same(*orders)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_without_the_start_of_its_epoch_is_read(kind):
    """As those of another number of processes are."""
    torch.manual_seed(5)
    feed = ReplayLoader()
    taken(feed, feed.batches(LOADERS[kind](), ending=lambda: None), 4)
    again, states = ReplayLoader(), torch.get_rng_state()
    again.load_state_dict(ReplayLoader.common_state(feed.state_dict()))
    batches = again.batches(LOADERS[kind](), fast_forward=True, ending=lambda: None)
    told = "loader: the random states with which its epoch began were not saved"
    with nullcontext() if kind == "list" else pytest.warns(UserWarning, match=told):
        batch = next(batches)
    assert again.take_pending()[0].id == (0, 4)
    if kind == "list":
        assert torch.equal(batch, LOADERS[kind]()[4])
        assert torch.equal(torch.get_rng_state(), states)


class MakesItsOwn(Sampler):
    """Its generator, when it is gone through for the first time."""

    generator = None

    def __len__(self):
        return 12

    def __iter__(self):
        self.generator = self.generator or drawn()
        yield from torch.randperm(12, generator=self.generator).tolist()


def of_its_own():
    return DataLoader(Augmented(), batch_size=2, sampler=MakesItsOwn())


def test_a_generator_that_is_not_there_yet_is_told_of():
    """At the beginning of an epoch that was begun among batches that are given again."""
    feed, loader = ReplayLoader(), of_its_own()
    taken(feed, feed.batches(loader, ending=lambda: None), 3)
    feed.replay_all([])
    taken(feed, feed.batches(loader, ending=lambda: None), 1)
    state = feed.state_dict()
    assert (state["epoch"], state["index"], len(state["generators"])) == (1, 0, 1)
    again = ReplayLoader()
    again.load_state_dict(state)
    with pytest.warns(UserWarning, match="1 of its generators were saved, and 0 are there"):
        found = list(again.batches(of_its_own(), fast_forward=True, ending=lambda: None))
    assert len(found) == 2 + 6


@pytest.mark.parametrize("saved, now", [("generator", "in order"), ("in order", "generator")])
def test_other_generators_than_were_saved_are_told_of(saved, now):
    feed = ReplayLoader()
    taken(feed, feed.batches(LOADERS[saved](), ending=lambda: None), 2)
    again = ReplayLoader()
    again.load_state_dict(feed.state_dict())
    with pytest.warns(UserWarning, match="of its generators were saved, and . are there"):
        found = list(again.batches(LOADERS[now](), fast_forward=True, ending=lambda: None))
    assert len(found) == 4


class WithWorkers(list):
    persistent_workers = True


@pytest.mark.parametrize("done", [1, 7])
def test_workers_that_stay_are_told_of(done):
    feed, loader = ReplayLoader(), WithWorkers("abcdef")
    taken(feed, feed.batches(loader, ending=lambda: None), done)
    again = ReplayLoader()
    again.load_state_dict(feed.state_dict())
    with pytest.warns(UserWarning, match="persistent_workers draw their seeds once"):
        next(again.batches(loader, fast_forward=True, ending=lambda: None))


def test_a_loader_with_fewer_batches_than_were_given_is_refused():
    feed = ReplayLoader()
    taken(feed, feed.batches("abcd", ending=lambda: None), 3)
    again = ReplayLoader()
    again.load_state_dict(feed.state_dict())
    with pytest.raises(ValueError, match="batches of the dataloader: got 2; allowed: 3 or more in epoch 0"):
        next(again.batches("ab", fast_forward=True, ending=lambda: None))


def test_batches_to_be_given_again_come_back_on_their_device():
    """A checkpoint has them on the CPU."""
    feed = ReplayLoader()
    feed.give({"x": [torch.ones(2, device="meta"), 3]}, 0)  # the other device that every machine has
    feed.replay(feed.take_pending())
    state = feed.state_dict()
    [entry] = state["again"]
    entry["batch"] = {"x": [torch.ones(2), 3]}
    # Also on one of a machine with more devices than this one has.
    lacking = "cuda" if torch.cuda.is_available() else "cpu"
    for device, wanted in ((entry["device"], "meta"), ("cuda:99", lacking), (None, "cpu")):
        entry["device"] = device
        again = ReplayLoader()
        again.load_state_dict(state)
        given = next(again.batches([], ending=lambda: None))
        assert given["x"][0].device.type == wanted and given["x"][1] == 3


def test_a_guard_goes_with_its_last_reference():
    """With its snapshot and the batches that it keeps, and not when Python next looks for cycles."""
    with uncollected():
        run = guarded("adamw", times(1e3, 40), loss_of=loss_of, data=make_data(count=50))
        assert run.guard.alarms and run.guard.snapshot_bytes
        guard, run.guard = weakref.ref(run.guard), None
        assert guard() is None
