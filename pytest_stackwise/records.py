"""Records: what a test found out, kept with the test and carried by its report.

A record is a dict of plain values with a `section`: "checks", "stability" or "throughput". Reports
cross from xdist workers to the controller as JSON, and the records with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

__all__ = [
    "add",
    "attach",
    "collect_debts",
    "current",
    "current_item",
    "is_worker",
    "of_report",
    "owe",
    "pay",
]

_RECORDS = pytest.StashKey[list[dict[str, Any]]]()
_DEBTS = pytest.StashKey[dict[str, str]]()
_ATTRIBUTE = "stackwise"
_current: ContextVar[pytest.Item | None] = ContextVar("stackwise_item", default=None)


@contextmanager
def current(item: pytest.Item) -> Iterator[None]:
    """Inside, `current_item` is `item`."""
    token = _current.set(item)
    try:
        yield
    finally:
        _current.reset(token)


def current_item() -> pytest.Item | None:
    """The test that is running, or None outside of one."""
    return _current.get()


def add(item: pytest.Item, section: str, record: dict[str, Any]) -> None:
    """Keep a record with its test."""
    item.stash.setdefault(_RECORDS, []).append({"section": section, **record})


def owe(item: pytest.Item, name: str, complaint: str) -> None:
    """From now on the test fails with `complaint`, though it passes, unless `pay` is called."""
    item.stash.setdefault(_DEBTS, {})[name] = complaint


def pay(item: pytest.Item, name: str) -> None:
    """The test did what it owed."""
    item.stash.setdefault(_DEBTS, {}).pop(name, None)


def collect_debts(item: pytest.Item) -> None:
    """Fail a test that has passed but still owes something."""
    for complaint in item.stash.get(_DEBTS, {}).values():
        pytest.fail(complaint, pytrace=False)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of xdist's workers."""
    return hasattr(config, "workerinput")


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put the records on the report of the test's call."""
    if report.when == "call" and _RECORDS in item.stash:
        setattr(report, _ATTRIBUTE, item.stash[_RECORDS])


def of_report(report: pytest.TestReport) -> list[dict[str, Any]]:
    """The records on a report; [] where the test had none."""
    found: list[dict[str, Any]] = getattr(report, _ATTRIBUTE, [])
    return found
