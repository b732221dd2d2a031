"""Batches: several of a step, of an epoch, with ids of their own."""

import io
import json
import math
import random

import numpy as np
import pytest
import torch

from stackwise.random_states import random_states_kept
from stackwise.stability.guard import Guard, GuardPolicy
from stackwise.stability.guard.batch_feed import BatchFeed
from tests.stability.guard.guarded_run import (
    OPTIMIZERS,
    POLICY,
    N,
    Outcome,
    Small,
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


def test_a_loss_that_several_batches_have_is_theirs():
    torch.manual_seed(0)
    model, data = Small(), make_data()
    wrong = {id(batch) for batch in data[60:64]}
    part = lambda model, batch: loss_of(model, batch) * (5 if id(batch) in wrong else 1) / 4  # noqa: E731
    guard = Guard(model, OPTIMIZERS["adamw"](model.parameters()), policy=POLICY, loss_of=part)
    total = 0.0
    for place, batch in enumerate(guard.batches(data)):
        loss = part(model, batch)
        loss.backward()
        total += loss.detach()
        if place % 4 == 3:
            guard.step(total)
            total = 0.0
    assert [(a.step, a.kind, a.action) for a in guard.alarms] == [(15, "loss spike", "skipped")]
    assert guard.quarantined == [(0, place) for place in range(60, 64)]


@pytest.mark.parametrize("lag", [0, 3])
def test_the_optimizer_is_left_as_it_was(lag):
    run = guarded("fused adamw", policy=GuardPolicy(clip=1e-3), lag=lag)
    assert (run.optimizer.found_inf, run.optimizer.grad_scale) == (None, None)
    run = guarded("fused adamw", times(10, *range(60, N)), lag=lag)
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
    run = guarded("fused adamw", times(10, *range(60, N)), data=data, lag=lag)
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
    with pytest.raises(ValueError, match="state_dict: got 'a batch in hand'"):
        guard.state_dict()
    guard.step(loss)
    loss = loss_of(model, batch)
    loss.backward()
    with pytest.raises(ValueError, match="step: got 1; allowed: one for each batch"):
        guard.step(loss)


def test_a_loop_that_was_left_is_followed_by_a_new_epoch():
    feed = BatchFeed()

    def left(fast_forward=False, at=2):
        for place, batch in enumerate(feed.batches("abcd", fast_forward=fast_forward, ending=lambda: None)):
            feed.take_hand()
            if place == at:
                return batch
        return None

    assert left() == "c"
    state = feed.state_dict()
    assert (state["epoch"], state["index"]) == (0, 3)
    given = []
    for batch in feed.batches("abcd", ending=lambda: None):
        given += [each.id for each in feed.take_hand()]
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

    data, drawn, feed = [torch.ones(2), torch.zeros(2)], [], BatchFeed()
    with random_states_kept():
        batches = feed.batches(data, ending=lambda: None)
        next(batches)
        drawn.append(draw())
        feed.give_again(feed.take_hand())
        file = io.BytesIO()
        torch.save(feed.state_dict(), file)
        after = draw()
        again = BatchFeed()
        file.seek(0)
        again.load_state_dict(torch.load(file, weights_only=True))
        given = again.batches(data, fast_forward=True, ending=lambda: None)
        assert torch.equal(next(given), data[0])
        assert draw() == drawn[0]
        again.take_hand()
        assert torch.equal(next(given), data[1])
        assert draw() == after
        # One that was saved with an array is read as well.
        old = feed.state_dict()
        old["frontier"]["numpy"] = tuple(np.random.get_state())  # noqa: NPY002
        again.load_state_dict(old)


def test_an_id_that_is_a_list_is_known_as_a_tuple():
    feed = BatchFeed(lambda batch: [batch, "text"])
    for _ in feed.batches([3, 4], ending=lambda: None):
        feed.quarantine(feed.take_hand())
    assert list(feed.quarantined) == [(3, "text"), (4, "text")]
    again = BatchFeed(lambda batch: [batch, "text"])
    again.load_state_dict(feed.state_dict())
    assert list(again.batches([3, 5, 4], ending=lambda: None)) == [5]


def test_ids_are_plain_values():
    feed = BatchFeed(lambda batch: batch)
    given = feed.batches([np.int64(3), (np.int32(4), ["a"]), np.str_("b")], ending=lambda: None)
    for _ in given:
        feed.quarantine(feed.take_hand())
    assert json.dumps(list(feed.quarantined)) == '[3, [4, ["a"]], "b"]'
    assert {type(each) for each in feed.quarantined} == {int, tuple, str}
    for other in (torch.tensor(3), {"a": 1}, (1, torch.ones(2)), None, 0.5):
        feed = BatchFeed(lambda batch: batch)
        with pytest.raises(ValueError, match=r"batch_id: got .*; allowed: an integer, a string, or a tuple"):
            next(feed.batches([other], ending=lambda: None))
        with pytest.raises(ValueError, match=r"identity: got .*; allowed: an integer, a string, or a tuple"):
            feed.give(0, other)
