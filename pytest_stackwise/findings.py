"""Findings of tests that pass: one pytest warning each, or a failure with --stackwise-strict."""

from __future__ import annotations

import pytest

from pytest_stackwise import options, records

__all__ = ["StackwiseWarning", "report"]


class StackwiseWarning(UserWarning):
    """Finding of a test that passed. It makes the verdict WARN.

    Warning filters apply, by the name `pytest_stackwise.StackwiseWarning`.
    """


def report(item: pytest.Item) -> None:
    """Issue a warning for each finding of a test that has not failed.

    If warnings are errors, by --stackwise-strict or by a warning filter, the test fails. Findings of the
    section "quality" cause no warning: the fixture skips the test, and the run has a separate exit code.
    """
    # A verdict of None is replaced by the outcome of the test. It passed, so there is no finding.
    found = [(each["section"], each) for each in records.of_item(item) if each.get("verdict", "") is not None]
    if not found:
        return
    from stackwise.report.row_text import is_finding, record_text

    texts = [record_text(*each) for each in found if each[0] != "quality" and is_finding(*each)]
    errors = list(texts) if options.strict(item.config) else []
    for text in () if errors else texts:
        try:
            item.warn(StackwiseWarning(text))
        except StackwiseWarning:
            errors.append(text)
    if errors:
        why = "--stackwise-strict" if options.strict(item.config) else "a warning filter"
        pytest.fail("\n".join([*errors, f"This warning is an error because of {why}."]), pytrace=False)
