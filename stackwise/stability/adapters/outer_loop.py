"""OuterLoop: the steps of a loop of others, which draws batches and updates by itself, under a guard.

Each batch is drawn once. Steps that are to be made again are made where the last one is closed, so that the
loop counts what it has drawn and knows of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from stackwise.stability.guard import Decision, Guard

__all__ = ["OuterLoop"]


class OuterLoop:
    """Between the hooks of a loop and its guard.

    Args:
        guard: of the loop.
        make_again: makes a step of as many batches as it is told, of `guard.give_again()`: all up to and with
            the scheduler, and forgets the gradients. It comes by `add_loss` and `judge` as other steps do.
        logit: gives the largest attention logit since it was last asked; None: nobody watches.

    Attributes:
        guard: of the loop.
        again: whether a step is being made again.
        n_given: batches of the step at hand.
        decision: of the step at hand; None: it is not judged yet.
        makes_update: whether the optimizer is to be called at all.
    """

    def __init__(
        self, guard: Guard, make_again: Callable[[int], None], logit: Callable[[], Tensor] | None = None
    ) -> None:
        self.guard, self._make_again, self._logit = guard, make_again, logit
        self.again = False
        self.n_given = 0
        self.decision: Decision | None = None
        self.makes_update = True
        self._loss: Tensor | None = None

    def give(self, batch: Any, identity: Hashable) -> None:
        """A batch that the loop has drawn, before its forward pass; one that is made again is known."""
        if not self.again:
            self.guard.give(batch, identity)
            if self.n_given == 0:
                self._forget_logits()
        self.n_given += 1

    def add_loss(self, loss: Tensor) -> None:
        """The part that a batch has in the loss of the step: one element."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    @property
    def has_loss(self) -> bool:
        """Whether a batch of the step at hand had a loss."""
        return self._loss is not None

    @property
    def among_alarms(self) -> bool:
        """Whether no update was made since the last alarm that was answered: weights may be broken."""
        return self.guard.in_row > 0

    def judge(self, scale: Tensor | None = None) -> None:
        """Behind the last backward pass of a step, before clipping; see `Guard.judge_step`."""
        assert self._loss is not None, "add_loss() first"
        loss, self._loss = self._loss, None
        logit = None if self._logit is None else self._logit()
        self.decision = self.guard.judge_step(loss, logit=logit, scale=scale)
        self.makes_update = self.guard.makes_update(self.decision)

    def close(self, *, settle: bool = False) -> None:
        """Behind a step and its gradients: answer alarms, and make again what is to be made again.

        Args:
            settle: wait for all alarms of the steps so far.

        Raises:
            GuardError: training is broken for good.
        """
        self._close()
        self._make_all_again(settle)

    def pass_over(self) -> None:
        """In place of `close`: no batch of the step had a loss. It counts, and a rewind makes it again."""
        self._forget_hand()
        self.guard._feed.take_hand()

    def drop(self) -> None:
        """What was given since the last step is made no step of."""
        self._forget_hand()
        self.guard._feed.drop_hand()

    def settle(self) -> None:
        """Wait for all alarms of the steps so far, and make again what is to be made again.

        Raises:
            GuardError: training is broken for good.
        """
        self._make_all_again(settle=True)

    def _close(self) -> None:
        assert self.decision is not None, "judge() first"
        decision = self.decision
        self._forget_hand()
        self.guard.close_step(decision)

    def _forget_hand(self) -> None:
        self.decision = self._loss = None
        self.makes_update, self.n_given = True, 0

    def _forget_logits(self) -> None:
        """Those that were seen before a step are none of its own, as when another one is computed again."""
        if self._logit is not None:
            self._logit()

    def _make_all_again(self, settle: bool) -> None:
        while True:
            if settle:
                self.guard.settle()
            count = self.guard.to_give_again
            if not count:
                break
            self.again = True
            self._forget_logits()
            try:
                self._make_again(count)
            finally:
                self.again = False
            if self.decision is None:
                self.pass_over()
            else:
                self._close()
        self.guard.take_up()
