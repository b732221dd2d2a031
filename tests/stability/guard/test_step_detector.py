"""StepDetector: its limits against NumPy, what each signal is told apart by, and what it remembers."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from stackwise.stability.guard import GuardPolicy
from stackwise.stability.guard.step_detector import KINDS, StepDetector
from tests.forked import HANG_SECONDS

CPU = torch.device("cpu")
NUMBERS = st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=4, max_size=20)


def expected_limit(numbers, deviations, factor, recent=8):
    logs = np.log(np.asarray(numbers, dtype=np.float64))
    changes = np.diff(logs)
    mad = np.median(np.abs(changes - np.median(changes)))
    return float(np.exp(np.median(logs[-recent:]) + max(deviations * mad, np.log(factor))))


def decide(judge, norm=1.0, loss=1.0, logit=None, **options):
    logit = None if logit is None else torch.tensor(logit)
    return judge.decide(torch.tensor(loss), torch.tensor([norm]), logit, **options)


def kind_of(judge, **signals):
    return KINDS[int(decide(judge, **signals).code)]


def trained(policy=None, steps=8):
    judge = StepDetector(policy or GuardPolicy(), CPU)
    for _ in range(steps):
        decide(judge, logit=1.0)
    return judge


@given(NUMBERS, NUMBERS, st.floats(0.0, 20.0), st.floats(1.01, 2.0), st.floats(2.0, 50.0))
def test_each_signal_has_the_limits_of_its_own_numbers(norms, losses, deviations, suspect, factor):
    count = min(len(norms), len(losses))
    norms, losses = norms[:count], losses[:count]
    policy = GuardPolicy(
        deviations=deviations,
        factor=factor,
        suspect_factor=suspect,
        proven_factor=factor + 1,
        loss_factor=factor,
        minimum=count,  # nothing is a spike before
    )
    judge, doubting = StepDetector(policy, CPU), StepDetector(policy, CPU)
    for norm, loss in zip(norms, losses, strict=True):
        decide(judge, norm, loss)
        decide(doubting, norm, loss, suspect=True)
    # A loss of 0 is no spike: the limits are those of the norm.
    found, doubted = decide(judge, loss=0.0), decide(doubting, loss=0.0, suspect=True)
    assert found.norm_limit.item() == pytest.approx(expected_limit(norms, deviations, factor), rel=1e-9)
    assert found.proven_limit.equal(found.norm_limit)
    assert found.loss_limit.item() == pytest.approx(expected_limit(losses, deviations, factor), rel=1e-9)
    assert found.logit_limit.item() == math.inf
    assert doubted.norm_limit.item() == pytest.approx(expected_limit(norms, 0.0, suspect), rel=1e-9)
    largest = math.exp(max(math.log(norm) - (count - 1 - i) / 2000 for i, norm in enumerate(norms)))
    level = expected_limit(norms, 0.0, 1.0)
    proven = max(found.norm_limit.item(), (factor + 1) * max(level, largest))
    assert doubted.proven_limit.item() == pytest.approx(proven, rel=1e-9)


@pytest.mark.parametrize(
    "signals, kind",
    [
        ({}, None),
        ({"norm": 100.0}, "gradient spike"),
        ({"loss": 100.0}, "loss spike"),
        ({"logit": 100.0}, "logit growth"),
        ({"logit": math.inf}, "logit growth"),
        ({"logit": math.nan}, None),
        ({"norm": math.inf}, "non-finite gradient"),
        ({"norm": math.nan}, "non-finite gradient"),
        ({"loss": math.nan}, "non-finite loss"),
        ({"loss": -math.inf}, "non-finite loss"),
        # The worst of several, and each of them by itself.
        ({"norm": 100.0, "loss": 100.0, "logit": 100.0}, "gradient spike"),
        ({"norm": 100.0, "loss": math.nan}, "non-finite loss"),
        ({"norm": math.nan, "loss": math.nan}, "non-finite loss"),
    ],
)
def test_kinds(signals, kind):
    assert kind_of(trained(), **signals) == kind


@pytest.mark.parametrize("signal, key", [("loss", "loss_factor"), ("logit", "logit_factor")])
def test_a_signal_without_a_factor_may_rise_as_it_likes(signal, key):
    judge = trained(GuardPolicy(**{key: None}))
    assert kind_of(judge, **{signal: 1e30}) is None
    assert kind_of(trained(), **{signal: 1e30}) is not None


def test_a_largest_logit_holds_from_the_first_step():
    judge = StepDetector(GuardPolicy(logit_limit=50.0), CPU)
    assert kind_of(judge, logit=49.0) is None
    assert kind_of(judge, logit=51.0) == "logit growth"


@pytest.mark.parametrize("rate", [1.1, 1.4])
def test_a_logit_that_grows_from_step_to_step_is_noticed(rate):
    judge = StepDetector(GuardPolicy(), CPU)
    logit, alarms = 1.0, 0
    while logit < 1e30 and not alarms:
        logit *= rate
        found = decide(judge, logit=logit)
        alarms += int(found.code)
    assert KINDS[alarms] == "logit growth"
    assert logit > found.logit_limit.item() > logit / 1.5
    assert logit < 1e6
    # Neither the norm nor the loss is held so: they fall a thousandfold, and may come back.
    judge = StepDetector(GuardPolicy(), CPU)
    assert not any(int(decide(judge, norm=1.1**n, loss=1.1**n).code) for n in range(150))


def test_a_logit_may_rise_while_a_model_settles():
    judge = StepDetector(GuardPolicy(), CPU)
    rises = [0.2] * 80 + [0.2 * 1.1**n for n in range(1, 45)] + [14.0] * 80
    assert not any(int(decide(judge, logit=logit).code) for logit in rises)
    assert not any(int(decide(judge, logit=logit).code) for logit in (14.0 * 0.8**n for n in range(60)))
    # Behind a fall the last ones count, not what was long ago.
    assert kind_of(judge, logit=1.0) == "logit growth"


def test_a_broken_step_is_remembered_by_no_signal():
    judge = trained()
    before = judge.state_dict()["logs"]
    decide(judge, norm=100.0, loss=1.01, logit=1.01)
    assert judge.state_dict()["logs"].nan_to_num(7.0).equal(before.nan_to_num(7.0))
    decide(judge, norm=1.01, loss=1.01, logit=1.01)
    assert judge.state_dict()["logs"][:, -1].tolist() == pytest.approx([math.log(1.01)] * 3, rel=1e-6)


def test_a_signal_that_is_not_given_keeps_what_it_knew():
    judge = trained()
    for _ in range(20):
        decide(judge)
    assert kind_of(judge, logit=100.0) == "logit growth"


@pytest.mark.parametrize("signal", ["norm", "loss"])
def test_a_skipped_spike_is_remembered(signal):
    judge = trained()
    assert kind_of(judge, **{signal: 100.0}) is not None
    assert kind_of(judge, **{signal: 990.0}) is None
    assert kind_of(judge, **{signal: 9950.0}) is not None


def test_a_remembered_spike_fades():
    judge = trained()
    decide(judge, norm=100.0)
    for _ in range(2000):
        decide(judge)
    assert kind_of(judge, norm=100.0 * 10 / math.e * 1.01) is not None


def test_numbers_of_zero_give_no_limit():
    judge = StepDetector(GuardPolicy(), CPU)
    assert not any(int(decide(judge, norm=0.0, loss=0.0).code) for _ in range(50))
    assert kind_of(judge, norm=100.0, loss=100.0) is None


def test_ordinary_norms_are_not_remembered_as_spikes():
    judge = StepDetector(GuardPolicy(), CPU)
    norms = [100.0, *(100.0 * 0.9**n for n in range(60))]
    assert not any(int(decide(judge, norm=norm).code) for norm in norms)
    assert kind_of(judge, norm=10 * norms[-1]) == "gradient spike"


def test_a_recomputed_step_may_be_as_large_as_any_before():
    judge = StepDetector(GuardPolicy(), CPU)
    for norm in [100.0] * 8 + [1.0] * 20:
        decide(judge, norm=norm, suspect=True)
    assert kind_of(judge, norm=2900.0, suspect=True) == "gradient spike"
    judge.trust()
    assert kind_of(judge, norm=2900.0, loss=2.9, suspect=True) is None
    judge.trust()
    assert kind_of(judge, norm=1e6, suspect=True) == "gradient spike"
    judge.trust()
    assert kind_of(judge, loss=1e6, suspect=True) == "loss spike"


def test_a_recomputed_spike_is_learned_with_the_next_healthy_step():
    judge = trained()
    for at_once in (False, True):
        decide(judge, norm=1e4, suspect=True)
        judge.learn(at_once=at_once)
        judge.trust()
        passes = kind_of(judge, norm=1e4, suspect=True) is None
        assert passes == at_once
    decide(judge, suspect=True)
    judge.trust()
    assert kind_of(judge, norm=1e4, suspect=True) is None


def test_a_step_that_is_made_again_is_held_against_itself():
    judge = StepDetector(GuardPolicy(), CPU)  # which knows nothing
    before_S = torch.tensor([2.0, 3.0, math.nan], dtype=torch.float64)
    found = decide(judge, norm=2.0, loss=3.0, logit=50.0, before_S=before_S)
    assert found.code == 0
    assert found.norm_limit.item() == pytest.approx(2.0 * GuardPolicy().factor)
    assert found.loss_limit.item() == pytest.approx(3.0 * GuardPolicy().loss_factor)
    assert found.logit_limit.item() == math.inf
    doubted = decide(judge, norm=2.0, loss=3.0, suspect=True, before_S=before_S)
    assert doubted.norm_limit.item() == pytest.approx(2.0 * GuardPolicy().suspect_factor)
    assert doubted.proven_limit.item() == pytest.approx(2.0 * GuardPolicy().proven_factor)
    for signals, kind in (({"norm": 10.1}, "gradient spike"), ({"loss": 9.1}, "loss spike")):
        code = decide(judge, **{"norm": 2.0, "loss": 3.0, **signals}, before_S=before_S).code
        assert KINDS[int(code)] == kind
    # A history that is long enough is the one of the first time.
    late = trained(steps=20)
    low_S = torch.full((3,), 0.01, dtype=torch.float64)
    assert decide(late, norm=1.0, before_S=low_S).norm_limit == decide(trained(steps=20)).norm_limit


def test_a_clipped_spike_that_is_made_again_is_clipped_to_itself():
    judge = StepDetector(GuardPolicy(spikes_clipped=1), CPU)
    found = decide(judge, norm=100.0, before_S=torch.tensor([2.0, 1.0, math.nan]))
    assert (KINDS[int(found.code)], found.found_inf.item()) == ("gradient spike", 0.0)
    assert found.divisor.item() == pytest.approx(50.0)


def test_the_state_is_a_copy_and_goes_on():
    judge, again = trained(), StepDetector(GuardPolicy(), CPU)
    state = judge.state_dict()
    decide(judge, norm=2.0)
    again.load_state_dict(state)
    assert kind_of(again, loss=100.0) == "loss spike"
    assert again.state_dict()["logs"].nan_to_num(7.0).equal(state["logs"].nan_to_num(7.0))


@pytest.mark.parametrize("logs", [None, 3, torch.zeros(5), torch.zeros(2, 5)])
def test_another_state_is_refused(logs):
    with pytest.raises(ValueError, match=r"state\['logs'\]"):
        trained().load_state_dict({"logs": logs, "clipped": torch.zeros(()), "trusted": False})


def test_all_processes_remember_the_same(monkeypatch):
    """The largest of each signal: a process with harder data is no spike, and a rise of any is one of all."""
    meeting, given = threading.Barrier(2, timeout=HANG_SECONDS), {}

    def all_reduce(tensor, op, group):
        assert (op, group) == (distributed.ReduceOp.MAX, "both")
        given[threading.get_ident()] = tensor.clone()
        meeting.wait()
        tensor.copy_(torch.stack(list(given.values())).amax(0))
        meeting.wait()

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    judges = [StepDetector(GuardPolicy(), CPU, "both") for _ in range(2)]
    kinds = [[], []]

    def train(rank):
        for step in range(10):
            loss = (1.0 + step / 100) * (4 if rank else 1) * (4 if step == 9 and rank else 1)
            logit = [5.0, math.nan][rank] if step < 6 else None if step == 6 else 6.0 + rank
            if step == 8 and not rank:
                loss = math.nan
            kinds[rank].append(kind_of(judges[rank], loss=loss, logit=logit))

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds[0] == kinds[1] == [None] * 8 + ["non-finite loss", "loss spike"]
    ours, theirs = (judge.state_dict() for judge in judges)
    assert torch.equal(ours["logs"].nan_to_num(9.0), theirs["logs"].nan_to_num(9.0))
    _, losses, logits = ours["logs"].exp()
    assert losses[-8:].tolist() == pytest.approx([4 + step / 25 for step in range(8)])
    assert logits[-7:].tolist() == pytest.approx([5.0] * 6 + [7.0])
