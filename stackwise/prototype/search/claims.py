"""Claims: which trials are to be done, agreed among processes through the storage and nothing else.

A trial's number is given by the storage, each once. Whatever two processes could both do, the trial with the
lower number does: it is the one that fits into the budget, and the one that keeps a configuration that both
drew. A process that is gone, as its machine says at once and elsewhere a missing sign of life does, has lost
what it was at; that is done again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.prototype.search.objective import Objective
from stackwise.prototype.search.optuna_import import import_optuna, quiet_optuna
from stackwise.prototype.search.process_identity import ProcessIdentity
from stackwise.prototype.search.record import CLAIM, Claimed, finish_lost, is_result
from stackwise.prototype.search.space import Space, config_digest

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

__all__ = ["BEAT", "Claim", "Claims"]

BEAT = "beat"  # user attribute: a number that grows while the process of a running trial lives
_WORKER = "worker"  # user attribute: whose a trial is, from before it is drawn on
_LOST, _DUPLICATE_OF, _SURPLUS, _ATTEMPT = "lost", "duplicate_of", "surplus", "attempt"
_REFUSED = "refused"  # user attribute: which rule a draw breaks, of those that a space does not know
_ATTEMPTS = 3  # of a configuration whose process ended each time, before that is its result
_DUPLICATES = 3  # draws that were there already, before one that was not is sought among all
_ENUMERATED = 4096  # draws of a space that are gone through for it
_TRIED = 256  # draws at random where there are more
_POLL = 0.05, 1.0  # seconds: while another process draws, while others train the last ones


@dataclass(frozen=True)
class Claim:
    """A trial that this process is to do.

    Attributes:
        trial: of Optuna.
        config: that was drawn.
        trained: what is trained in its place, as a small variant of it; else the same.
    """

    trial: Trial
    config: StackWiseConfig
    trained: StackWiseConfig


class Claims:
    """The trials of a study, for one process.

    Args:
        study: of Optuna.
        storage: its storage.
        space: what is drawn from.
        objectives: of the study.
        budget: how many results the study is to have.
        worker: this process.
        stand_in: configuration -> what is trained in its place.
        seed: of draws that replace duplicates.
        stale_seconds: how long a process on another machine may be without a sign of life.
    """

    def __init__(
        self,
        study: Study,
        storage: BaseStorage,
        space: Space,
        objectives: Sequence[Objective],
        budget: int,
        worker: ProcessIdentity,
        stand_in: Callable[[StackWiseConfig], StackWiseConfig],
        *,
        seed: int = 0,
        stale_seconds: float = 120.0,
    ) -> None:
        self._study, self._storage, self._space, self._budget = study, storage, space, budget
        self._objectives, self._worker, self._stand_in = tuple(objectives), worker, stand_in
        self._seed, self._stale = seed, stale_seconds
        self._states = import_optuna().trial.TrialState
        self._seen_alive: dict[int, tuple[object, float]] = {}
        self._digests: dict[str, str] = {}

    def next(self) -> Claim | None:
        """The next trial for this process; None: the study has its budget, or its space holds no more.

        Waits while other processes are at the last ones, since those may be lost.
        """
        duplicates = 0
        while True:
            self._recover()
            trials = self._results()
            running = any(each.state == self._states.RUNNING for each in trials)
            waiting = any(each.state == self._states.WAITING for each in trials)
            if len(trials) >= self._budget and not waiting:
                if not running:
                    return None
                time.sleep(_POLL[1])
                continue
            if duplicates >= _DUPLICATES and not waiting:
                unseen = self._unseen(trials)
                if unseen is None and not running:
                    return None
                if unseen is None:
                    time.sleep(_POLL[1])
                    continue
                self._enqueue(unseen, {})
                duplicates = 0
            claim = self._ask()
            if claim is not None:
                return claim
            duplicates += 1

    def release(self, claim: Claim, reason: str, *, counts: bool = False) -> None:
        """Give a trial back that is not finished: another process, or this one later, does it again.

        Args:
            claim: of this process.
            reason: in a few words.
            counts: as where the process ended: the third time that is the trial's result.
        """
        self._lose(self._frozen(claim.trial.number), reason, counts=counts)

    def owns(self, claim: Claim) -> bool:
        """Whether the trial is this process's still: others give up on it where no sign of life comes."""
        return bool(self._frozen(claim.trial.number).state == self._states.RUNNING)

    def _ask(self) -> Claim | None:
        """A new trial, or one that waits; None: it did not fit, was there already, or cannot be built."""
        with quiet_optuna():
            trial = self._study.ask()
        try:
            trial.set_user_attr(_WORKER, str(self._worker))
            return self._claimed(trial)
        except Exception:
            with suppress(Exception), quiet_optuna():  # the first error is the one to be told
                self._study.tell(trial, state=self._states.FAIL, skip_if_finished=True)
            raise
        except BaseException:
            self._lose(self._frozen(trial.number), "interrupted", counts=False)
            raise

    def _claimed(self, trial: Trial) -> Claim | None:
        """Draw what a trial is of, and say so."""
        before = [each for each in self._results() if each.number < trial.number]
        if len(before) >= self._budget:
            self._discard(trial, _SURPLUS, True)
            return None
        with quiet_optuna():
            drawn = {key: each.suggest(trial, key) for key, each in self._space.dimensions.items()}
        try:
            values = self._space.settled(drawn)
            config = self._space.build(values)
        except ConfigError as error:
            self._discard(trial, _REFUSED, str(error))
            return None
        trained = self._stand_in(config)
        digest = config_digest(trained)
        claimed = Claimed(str(self._worker), digest, values, config.to_dict())
        trial.set_user_attr(CLAIM, claimed.to_dict())
        for other in self._settled_before(trial.number):
            theirs = Claimed.of(other)
            if theirs is not None and theirs.digest == digest:
                self._discard(trial, _DUPLICATE_OF, other.number)
                return None
        return Claim(trial, config, trained)

    def _settled_before(self, number: int) -> list[FrozenTrial]:
        """The results before a trial, once each of them has said what it is."""
        while True:
            before = [each for each in self._results() if each.number < number]
            open_ = [
                each for each in before if each.state == self._states.RUNNING and Claimed.of(each) is None
            ]
            if not open_:
                return before
            time.sleep(_POLL[0])
            self._recover()

    def _recover(self) -> None:
        """Give back what processes were at that are gone."""
        for frozen in self._study.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
            if self._is_gone(frozen):
                self._lose(frozen, "its process ended", counts=True)

    def _is_gone(self, frozen: FrozenTrial) -> bool:
        claimed = Claimed.of(frozen)
        worker = frozen.user_attrs.get(_WORKER) if claimed is None else claimed.worker
        lives = None if worker is None else ProcessIdentity.from_text(worker).lives()
        if lives is not None:
            return not lives
        sign = (claimed is None, frozen.user_attrs.get(BEAT))
        now = time.monotonic()
        known, since = self._seen_alive.get(frozen.number, (None, now))
        if known != sign:
            self._seen_alive[frozen.number] = (sign, now)
            return False
        return now - since > self._stale

    def _lose(self, frozen: FrozenTrial, reason: str, *, counts: bool) -> None:
        """End a running trial, and have its configuration wait; each of many processes may try to."""
        optuna = import_optuna()
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(
            self._storage.get_study_id_from_name(self._study.study_name), frozen.number
        )
        attempt = int(frozen.user_attrs.get(_ATTEMPT, 1))
        try:
            if counts and attempt >= _ATTEMPTS and Claimed.of(frozen) is not None:
                trial = optuna.trial.Trial(self._study, trial_id)
                finish_lost(self._study, trial, self._objectives, f"{reason}, {attempt} times")
                return
            self._storage.set_trial_user_attr(trial_id, _LOST, reason)
            self._storage.set_trial_state_values(trial_id, self._states.FAIL)
        except (optuna.exceptions.UpdateFinishedTrialError, RuntimeError, ValueError):
            return  # another process was faster, or the lost one came back and finished it
        if frozen.params.keys() == self._space.dimensions.keys():
            self._enqueue(dict(frozen.params), {_ATTEMPT: attempt + 1 if counts else attempt})

    def _enqueue(self, params: dict[str, Any], attrs: dict[str, Any]) -> None:
        with quiet_optuna():
            self._study.enqueue_trial(params, user_attrs=attrs)

    def _discard(self, trial: Trial, why: str, value: Any) -> None:
        trial.set_user_attr(why, value)
        self._study.tell(trial, state=self._states.FAIL)

    def _unseen(self, trials: Sequence[FrozenTrial]) -> dict[str, Any] | None:
        """A draw, as the storage has it, of a configuration that no trial has; None: there is none."""
        known = {claimed.digest for claimed in map(Claimed.of, trials) if claimed is not None}
        source = random.Random(f"{self._seed}/{len(trials)}")  # noqa: S311
        size = self._space.size
        if size is not None and size <= _ENUMERATED:
            draws = list(self._space.points())
            source.shuffle(draws)
        else:
            draws = [self._space.sample(source) for _ in range(_TRIED)]
        for values in draws:
            with suppress(ConfigError):
                if self._digest(values) not in known:
                    return {key: each.stored(values[key]) for key, each in self._space.dimensions.items()}
        return None

    def _digest(self, values: dict[str, Any]) -> str:
        text = repr(sorted(values.items()))
        if text not in self._digests:
            self._digests[text] = config_digest(self._stand_in(self._space.config(values)))
        return self._digests[text]

    def _results(self) -> list[FrozenTrial]:
        return [each for each in self._study.get_trials(deepcopy=False) if is_result(each)]

    def _frozen(self, number: int) -> FrozenTrial:
        return next(each for each in self._study.get_trials(deepcopy=False) if each.number == number)
