"""Claims: who does what where several ask, and when a process counts as gone."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import optuna
import pytest

from stackwise.config import ConfigError
from stackwise.prototype.search import Space, claims
from stackwise.prototype.search.claims import BEAT, Claims
from stackwise.prototype.search.heartbeat import Heartbeat
from stackwise.prototype.search.objective import read_objectives
from stackwise.prototype.search.process_identity import ProcessIdentity
from stackwise.prototype.search.record import CLAIM
from tests.forked import HANG_SECONDS
from tests.prototype.search.searches import FEW

FAIL, RUNNING, WAITING = (getattr(optuna.trial.TrialState, name) for name in ("FAIL", "RUNNING", "WAITING"))


@pytest.fixture
def study():
    storage = optuna.storages.InMemoryStorage()
    found = optuna.create_study(
        storage=storage, study_name="one", sampler=optuna.samplers.RandomSampler(seed=0)
    )
    found.memory = storage
    return found


@pytest.fixture
def asks(study):
    """A process that asks, of as many as one likes; all of them are this one."""
    workers = []

    def asks(budget=3, space=FEW, worker=None, **options):
        workers.append(ProcessIdentity.of_new_search())
        return Claims(
            study,
            study.memory,
            Space.from_dict(space),
            read_objectives("loss"),
            budget,
            worker or workers[-1],
            lambda config: config,
            **options,
        )

    asks.end = lambda: [worker.end() for worker in workers]
    yield asks
    asks.end()


def states(study):
    return [trial.state for trial in study.get_trials(deepcopy=False)]


def test_of_two_at_once_the_lower_number_fits(study, asks):
    one, two = asks(budget=1), asks(budget=1)
    assert one.next().trial.number == 0
    assert two._ask() is None  # as where both saw room before either asked
    assert states(study) == [RUNNING, FAIL]
    assert study.get_trials()[1].user_attrs["surplus"] is True


def test_of_two_that_draw_the_same_the_lower_number_keeps_it(study, asks):
    space = {"space": {"n_layers": [2]}}
    one, two = asks(space=space), asks(space=space)
    claim = one.next()
    assert two._ask() is None
    assert study.get_trials()[1].user_attrs["duplicate_of"] == claim.trial.number
    assert states(study) == [RUNNING, FAIL]


def test_all_of_a_finite_space_are_drawn_each_once(study, asks):
    found = []
    one, two = asks(budget=99), asks(budget=99)
    for number in range(6):
        claim = (one, two)[number % 2].next()
        found.append(str(claim.config))
        study.tell(claim.trial, 1.0)
    assert len(set(found)) == 6
    assert one.next() is None and two.next() is None


def test_a_trial_that_has_not_said_what_it_is_is_waited_for(study, asks, monkeypatch):
    unnamed = study.ask()  # another process, between its number and its draw
    one, waited = asks(), []

    def sleep(seconds):
        waited.append(seconds)
        theirs = {"worker": str(ProcessIdentity.of_new_search()), "digest": "", "values": {}, "config": {}}
        unnamed.set_user_attr(CLAIM, theirs)

    monkeypatch.setattr(claims.time, "sleep", sleep)
    assert one.next().trial.number == 1
    assert waited == [claims._POLL[0]]


class TestGone:
    def test_what_a_search_that_ended_was_at_is_done_again(self, study, asks):
        first = asks().next()
        asks.end()
        again = asks().next()
        assert again.trial.number == 1 and again.config == first.config
        assert states(study) == [FAIL, RUNNING]
        assert study.get_trials()[1].user_attrs["attempt"] == 2

    def test_what_was_given_back_is_no_attempt(self, study, asks):
        one = asks()
        claim = one.next()
        one.release(claim, "interrupted")
        assert not one.owns(claim)
        assert study.get_trials()[0].user_attrs["lost"] == "interrupted"
        again = one.next()
        assert again.config == claim.config and study.get_trials()[1].user_attrs["attempt"] == 1

    def test_another_machine_is_gone_without_a_sign_of_life(self, study, asks, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
        elsewhere = replace(ProcessIdentity.of_new_search(), machine="elsewhere")
        theirs = asks(worker=elsewhere).next()
        ours = asks(stale_seconds=100.0)
        for seconds, beat in ((0.0, None), (90.0, 1), (150.0, 1), (189.0, 1)):
            now[0] = seconds
            if beat is not None:
                theirs.trial.set_user_attr(BEAT, beat)
            ours._recover()
            assert states(study) == [RUNNING], seconds
        now[0] = 191.0  # 101 seconds after the last that was new
        ours._recover()
        assert states(study) == [FAIL, WAITING]
        assert ours.next().config == theirs.config

    def test_two_give_back_one_trial_once(self, study, asks):
        asks().next()
        asks.end()
        one, two = asks(), asks()
        frozen = study.get_trials(deepcopy=False)[0]
        one._lose(frozen, "its process ended", counts=True)
        two._lose(frozen, "its process ended", counts=True)
        assert states(study) == [FAIL, WAITING]


class TestDrawn:
    """Between a trial's number and its claim."""

    def test_what_was_drawn_by_a_process_that_is_gone_is_given_up_at_once(self, study, asks):
        one = asks()
        theirs = ProcessIdentity.of_new_search()
        study.ask().set_user_attr("worker", str(theirs))
        one._recover()
        assert states(study) == [RUNNING]
        theirs.end()
        one._recover()
        assert states(study) == [FAIL]

    def test_it_says_whose_it_is_before_it_is_drawn(self, study, asks, monkeypatch):
        seen = []

        def settled(self, values):
            seen.append(study.get_trials()[-1].user_attrs["worker"])
            return values

        worker = ProcessIdentity.of_new_search()
        monkeypatch.setattr(Space, "settled", settled)
        assert asks(worker=worker).next() is not None
        assert seen == [str(worker)]
        worker.end()

    def test_an_error_leaves_no_trial_that_runs(self, study, asks):
        one = asks()

        def stand_in(config):
            raise RuntimeError("no such variant")

        one._stand_in = stand_in
        with pytest.raises(RuntimeError, match="no such variant"):
            one.next()
        assert states(study) == [FAIL]

    def test_what_breaks_a_rule_that_the_space_does_not_know_is_put_aside(self, study, asks, monkeypatch):
        build = Space.build

        def built(self, settled):
            if settled["n_layers"] == 2:
                raise ConfigError(["n_layers: got 2; allowed: odd ones"], "space")
            return build(self, settled)

        monkeypatch.setattr(Space, "build", built)
        one, found = asks(budget=99), []
        while (claim := one.next()) is not None:
            found.append(claim.config)
            study.tell(claim.trial, 1.0)
        assert len(found) == 4  # of six
        refused = [trial for trial in study.get_trials() if "refused" in trial.user_attrs]
        assert refused and all(trial.state == FAIL for trial in refused)
        assert "n_layers: got 2; allowed: odd ones" in refused[0].user_attrs["refused"]

    def test_what_is_interrupted_is_given_back(self, study, asks):
        one, drawn = asks(), []

        def stand_in(config):
            drawn.append(config)
            if len(drawn) == 1:
                raise KeyboardInterrupt
            return config

        one._stand_in = stand_in
        with pytest.raises(KeyboardInterrupt):
            one.next()
        assert states(study) == [FAIL, WAITING]
        assert one.next().config == drawn[0]


class TestIdentity:
    def test_of_this_process(self):
        identity = ProcessIdentity.of_new_search()
        assert identity.lives() is True
        assert ProcessIdentity.from_text(str(identity)) == identity
        identity.end()
        assert identity.lives() is False

    def test_of_another_process(self):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        here = ProcessIdentity.of_new_search()
        from stackwise.prototype.search import process_identity

        theirs = replace(here, process=child.pid, began=process_identity._began(child.pid) or "")
        assert theirs.lives() is True
        # The number came again; where the system does not say when a process began, nobody can tell.
        assert replace(theirs, began="1").lives() is (not theirs.began)
        child.kill()
        limit = time.monotonic() + HANG_SECONDS
        while theirs.lives() and time.monotonic() < limit:  # its parent has not waited for it yet
            time.sleep(0.01)
        assert theirs.lives() is False or not theirs.began
        child.communicate()
        assert theirs.lives() is False
        here.end()

    def test_of_another_machine(self):
        assert replace(ProcessIdentity.of_new_search(), machine="elsewhere").lives() is None

    @pytest.mark.parametrize("unknown", ["boot", "beginning", "beginning of the other"])
    def test_what_a_system_does_not_say_is_left_to_the_sign_of_life(self, unknown, monkeypatch):
        from stackwise.prototype.search import process_identity

        with monkeypatch.context() as patch:
            if unknown == "boot":
                patch.setattr(process_identity, "_kernel", lambda: None)
            if unknown == "beginning":
                patch.setattr(process_identity, "_began", lambda process: None)
            ours = ProcessIdentity.of_new_search()
            assert ours.lives() is True
            # There is a process of this number; but it may be another one than is meant.
            theirs = replace(ours, search="another", process=os.getppid(), began=ours.began and "1")
            if unknown == "beginning of the other":
                patch.setattr(process_identity, "_began", lambda process: None)
                theirs = replace(theirs, began="1")
            assert theirs.lives() is None
            ours.end()


def test_heartbeat(study):
    trial = study.ask()

    def beats():
        return study.get_trials(deepcopy=False)[0].user_attrs.get(BEAT, 0)

    with Heartbeat(trial, 0.01):
        limit = time.monotonic() + HANG_SECONDS
        while beats() < 3 and time.monotonic() < limit:
            time.sleep(0.01)
    last = beats()
    assert last >= 3
    time.sleep(0.05)
    assert beats() == last


def test_a_beat_that_fails_is_not_the_last():
    sent = []

    class Busy:
        def set_user_attr(self, key, value):
            sent.append(value)
            if value in (1, 2):
                raise (OSError, RuntimeError)[value - 1]("the database is locked")
            if value == 4:
                raise optuna.exceptions.UpdateFinishedTrialError

    heartbeat = Heartbeat(Busy(), 0.01)
    with heartbeat:
        heartbeat._thread.join(30)  # it ends with a trial that is finished, and with nothing else
        assert not heartbeat._thread.is_alive()
    assert sent == [1, 2, 3, 4]
