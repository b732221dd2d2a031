"""Synchronization: places where the host waits for a value from the device, seen on any device."""

from __future__ import annotations

import warnings
from collections import Counter

from stackwise.checks.check import check
from stackwise.checks.probe.host_wait import host_waits_in, listed_places
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

# Number of waits that is accepted if no line of code waits twice. An example is a test for padding.
_FEW = 3


@check
def host_waits(subject: Subject) -> CheckResult:
    """After a warm-up, does the host rarely wait for the device in a forward and backward pass?"""
    model, inputs = subject.model(train=True), subject.inputs(2)

    def step() -> None:
        loss = subject.spec.loss_of(model, inputs)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    with subject.fixed_randomness(), warnings.catch_warnings(action="ignore"):
        step()  # may fill caches
        with host_waits_in(model) as places:
            step()
    count = float(places.total())
    by_line = Counter[str]()
    for (_, place), number in places.items():
        by_line[place.rpartition(", ")[2]] += number  # sum over layers: they share lines
    limit = 0.0 if subject.spec.never_waits else float(_FEW if max(by_line.values(), default=0) <= 1 else 1)
    if count <= limit:
        return subject.passed(count, limit, where=listed_places(places))
    return subject.failed_unless(
        None
        if subject.spec.never_waits
        else "the model need not be fast on a GPU, nor be captured in a graph",
        count,
        limit,
        where=listed_places(places),
        meaning=f"The host waits for the device {int(count)} times in one forward and backward pass, or its "
        "code depends on values. Each wait empties the queue of a GPU, and prevents CUDA graphs.",
        advice="Keep the value on the device (torch.where, masked_fill).",
    )
