"""Claims: coordination of trials between processes through the storage.

The storage assigns each trial number once. If two processes could claim the same work, the trial with the
lower number wins: it fits into the budget, and it gets a configuration that both have sampled. If a process
has died, its trial is lost and repeated. On the same machine, this is known immediately. On another machine,
a missing heartbeat shows it.
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

BEAT = "beat"  # user attribute: a number that grows while the process of a running trial is alive
_WORKER = "worker"  # user attribute: owner of a trial, set before the trial is sampled
_LOST, _DUPLICATE_OF, _SURPLUS, _ATTEMPT = "lost", "duplicate_of", "surplus", "attempt"
_REFUSED = "refused"  # user attribute: rule that a sample breaks and that the space does not know
_ATTEMPTS = 3  # attempts per configuration; if its process dies each time, this is its result
_DUPLICATES = 3  # consecutive duplicates before a configuration without a trial is selected
_ENUMERATED = 4096  # maximum number of samples of a space that is enumerated for this
_TRIED = 256  # random samples for larger spaces
_POLL = 0.05, 1.0  # seconds: while another process samples, while others run the last trials


@dataclass(frozen=True)
class Claim:
    """Trial that this process must run.

    Attributes:
        trial: trial of Optuna.
        config: sampled configuration.
        trained: configuration that is trained: a small variant of `config`, or `config` itself.
    """

    trial: Trial
    config: StackWiseConfig
    trained: StackWiseConfig


class Claims:
    """Trials of a study from the point of view of one process.

    Args:
        study: study of Optuna.
        storage: storage of the study.
        space: space of the samples.
        objectives: objectives of the study.
        budget: number of results that the study should have.
        worker: identity of this process.
        stand_in: function from a configuration to the one that is trained instead.
        seed: seed of samples that replace duplicates.
        stale_seconds: seconds without a heartbeat after which a process on another machine is treated as
            dead.
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
        """Return the next trial for this process. None: the budget is reached, or the space is exhausted.

        It waits while other processes run the last trials, because these may be lost.
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
        """Release an unfinished trial. Another process, or this one later, repeats it.

        Args:
            claim: claim of this process.
            reason: reason in a few words.
            counts: True if the attempt counts like a death of the process. The third one is the trial's
                result.
        """
        self._lose(self._frozen(claim.trial.number), reason, counts=counts)

    def owns(self, claim: Claim) -> bool:
        """Return True if the trial still belongs to this process.

        Without a heartbeat, another process takes it over.
        """
        return bool(self._frozen(claim.trial.number).state == self._states.RUNNING)

    def _ask(self) -> Claim | None:
        """Return a new or requeued trial.

        None: beyond the budget, a duplicate, or a configuration that is refused.
        """
        with quiet_optuna():
            trial = self._study.ask()
        try:
            trial.set_user_attr(_WORKER, str(self._worker))
            return self._claimed(trial)
        except Exception:
            with suppress(Exception), quiet_optuna():  # the first error is reported
                self._study.tell(trial, state=self._states.FAIL, skip_if_finished=True)
            raise
        except BaseException:
            self._lose(self._frozen(trial.number), "interrupted", counts=False)
            raise

    def _claimed(self, trial: Trial) -> Claim | None:
        """Sample the configuration of a trial, and record the claim."""
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
        """Return the results before a trial, after each of them has recorded its claim."""
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
        """Requeue the trials of dead processes."""
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
        """Finish a running trial as lost, and requeue its configuration. Several processes may try it."""
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
            return  # another process was faster, or the lost process finished the trial
        if frozen.params.keys() == self._space.dimensions.keys():
            self._enqueue(dict(frozen.params), {_ATTEMPT: attempt + 1 if counts else attempt})

    def _enqueue(self, params: dict[str, Any], attrs: dict[str, Any]) -> None:
        with quiet_optuna():
            self._study.enqueue_trial(params, user_attrs=attrs)

    def _discard(self, trial: Trial, why: str, value: Any) -> None:
        trial.set_user_attr(why, value)
        self._study.tell(trial, state=self._states.FAIL)

    def _unseen(self, trials: Sequence[FrozenTrial]) -> dict[str, Any] | None:
        """Return a sample, in the format of the storage, of a configuration without a trial.

        None: not found.
        """
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
