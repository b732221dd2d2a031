"""Synchronization: a step seldom makes the host wait for the device. Measured on any device."""

from __future__ import annotations

import warnings

from stackwise.checks.probe.applicable import trainer_check
from stackwise.checks.probe.call import reason_of, refusals
from stackwise.checks.probe.host_wait import host_waits_in, listed_places
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject


@trainer_check
def step_waits(subject: TrainerSubject) -> CheckResult:
    """Does a step, after the first one, make the host wait for the device at most once?"""
    run = subject.run()
    with subject.fixed_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.step(subject.batch(0))  # the first one may fill caches
        batch = subject.batch(1)
        try:
            with host_waits_in(run.model) as places:
                run.step(batch)
        except refusals() as error:
            return subject.not_applicable(f"needs a step whose calls can be recorded: {reason_of(error)}")
    # Most steps read the loss or the number of targets, and a scaler reads if a gradient overflowed.
    limit = 0.0 if subject.spec.never_waits is not None else 1.0 + subject.scales(run)
    count, where = float(places.total()), listed_places(places)
    if count <= limit:
        return subject.passed(count, limit, where=where)
    return subject.failed_unless(
        None if subject.spec.never_waits else "the speed of the step on a GPU does not matter",
        count,
        limit,
        where=where,
        meaning=f"Number of times that the host waits for the device in one step: {int(count)}. Each wait "
        "empties the queue of a GPU.",
        advice="Keep losses, norms and checks for finite values on the device, and read them every few steps."
        " A fused optimizer avoids the wait of a gradient scaler.",
    )
