"""Records: results of a test, stored with the test and transferred with its report.

A record is a dict of plain values with a `section`: "checks", "stability", "throughput", "memory" or
"quality". xdist sends reports from workers to the controller as JSON, and they include the records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest

__all__ = [
    "add",
    "attach",
    "collect_debts",
    "current",
    "current_item",
    "first_time",
    "is_worker",
    "of_item",
    "of_report",
    "owe",
    "pay",
    "reset",
]

_ATTRIBUTE = "stackwise"
_current: ContextVar[pytest.Item | None] = ContextVar("stackwise_item", default=None)


@dataclass
class _State:
    """State of one run of a test. A rerun has a new state.

    Attributes:
        records: results so far.
        debts: calls that the test has to make, with the message of the failure if it does not.
        done: names that were passed to `first_time`.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    debts: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


_STATE = pytest.StashKey[_State]()


def reset(item: pytest.Item) -> None:
    """Delete the state of an earlier run of a test."""
    item.stash[_STATE] = _State()


@contextmanager
def current(item: pytest.Item) -> Iterator[None]:
    """Set the test that `current_item` returns inside the block."""
    token = _current.set(item)
    try:
        yield
    finally:
        _current.reset(token)


def current_item() -> pytest.Item | None:
    """Return the running test, or None if no test is running."""
    return _current.get()


def add(item: pytest.Item, section: str, record: dict[str, Any]) -> dict[str, Any]:
    """Add a record to a test. Return the stored dict, so that the caller can change it later."""
    kept = {"section": section, **record}
    item.stash[_STATE].records.append(kept)
    return kept


def owe(item: pytest.Item, name: str, complaint: str) -> None:
    """Fail the test with `complaint` if it passes without a call of `pay` with the same name."""
    item.stash[_STATE].debts[name] = complaint


def pay(item: pytest.Item, name: str) -> None:
    """Cancel the `owe` with the same name, because the test made the required call."""
    item.stash[_STATE].debts.pop(name, None)


def first_time(item: pytest.Item, name: str) -> bool:
    """Return True at the first call with this name in the current run of the test."""
    done = item.stash[_STATE].done
    is_first = name not in done
    done.add(name)
    return is_first


def collect_debts(item: pytest.Item) -> None:
    """Fail a passed test that did not make a required call."""
    for complaint in item.stash[_STATE].debts.values():
        pytest.fail(complaint, pytrace=False)


def is_worker(config: pytest.Config) -> bool:
    """Return True if this process is an xdist worker."""
    return hasattr(config, "workerinput")


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Attach the records to the report of a test's call. A verdict of None is set from the test's outcome."""
    if report.when == "call" and item.stash[_STATE].records:
        for record in item.stash[_STATE].records:
            if record.get("verdict", "") is None:
                record["verdict"] = "caught" if report.passed else "not recovered"
        setattr(report, _ATTRIBUTE, item.stash[_STATE].records)


def of_item(item: pytest.Item) -> list[dict[str, Any]]:
    """Return the records of the current run of a test."""
    return item.stash[_STATE].records


def of_report(report: pytest.TestReport) -> list[dict[str, Any]]:
    """Return the records of a report, or [] if the test has none."""
    found: list[dict[str, Any]] = getattr(report, _ATTRIBUTE, [])
    return found
