"""Records: what a test found out, kept with the test and carried by its report.

A record is a dict of plain values with a `section`: "checks", "stability", "throughput", "memory" or
"quality". Reports cross from xdist workers to the controller as JSON, and the records with them.
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
    """Of one run of one test; a rerun starts with a new one."""

    records: list[dict[str, Any]] = field(default_factory=list)
    debts: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


_STATE = pytest.StashKey[_State]()


def reset(item: pytest.Item) -> None:
    """Forget what an earlier run of the same test left."""
    item.stash[_STATE] = _State()


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


def add(item: pytest.Item, section: str, record: dict[str, Any]) -> dict[str, Any]:
    """Keep a record with its test; returned as it is kept, to be filled in."""
    kept = {"section": section, **record}
    item.stash[_STATE].records.append(kept)
    return kept


def owe(item: pytest.Item, name: str, complaint: str) -> None:
    """From now on the test fails with `complaint`, though it passes, unless `pay` is called."""
    item.stash[_STATE].debts[name] = complaint


def pay(item: pytest.Item, name: str) -> None:
    """The test did what it owed."""
    item.stash[_STATE].debts.pop(name, None)


def first_time(item: pytest.Item, name: str) -> bool:
    """Whether this is the first call with this name in this run of the test."""
    done = item.stash[_STATE].done
    is_first = name not in done
    done.add(name)
    return is_first


def collect_debts(item: pytest.Item) -> None:
    """Fail a test that has passed but still owes something."""
    for complaint in item.stash[_STATE].debts.values():
        pytest.fail(complaint, pytrace=False)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of xdist's workers."""
    return hasattr(config, "workerinput")


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put the records on the report of the test's call. What has no verdict has that of the test."""
    if report.when == "call" and item.stash[_STATE].records:
        for record in item.stash[_STATE].records:
            if record.get("verdict", "") is None:
                record["verdict"] = "caught" if report.passed else "not recovered"
        setattr(report, _ATTRIBUTE, item.stash[_STATE].records)


def of_item(item: pytest.Item) -> list[dict[str, Any]]:
    """Return the records of the current run of a test."""
    return item.stash[_STATE].records


def of_report(report: pytest.TestReport) -> list[dict[str, Any]]:
    """The records on a report; [] where the test had none."""
    found: list[dict[str, Any]] = getattr(report, _ATTRIBUTE, [])
    return found
