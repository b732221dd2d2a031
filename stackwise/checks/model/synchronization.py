"""Synchronization: places where the host waits for a value from the device, seen on any device."""

from __future__ import annotations

import warnings

from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.probe.host_wait import host_waits_in, listed_places
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject


@check
def host_waits(subject: Subject) -> CheckResult:
    """Does a forward and backward pass, after a first one, never make the host wait for the device?"""
    model = subject.model(train=True)
    with subject.fixed_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(2):  # the first one may fill caches
            inputs = subject.inputs(2)
            if number:
                with host_waits_in(model) as places:
                    _backward(subject.spec.loss_of(model, inputs))
            else:
                _backward(subject.spec.loss_of(model, inputs))
    count = float(places.total())
    if not count:
        return subject.passed(count, 0.0)
    answer = subject.failed if subject.spec.never_waits else subject.warned
    return answer(
        count,
        0.0,
        where=listed_places(places),
        meaning=f"The host waits {int(count)} times in one forward and backward pass, or its code depends on "
        "values.",
        advice="On a GPU each wait empties its queue, and such code can neither be captured in a CUDA graph "
        "nor compiled as a whole. Keep the value on the device (torch.where, masked_fill).",
    )


def _backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
