"""Refusal: errors of tests that the gate cannot measure until they are changed."""

from __future__ import annotations

__all__ = ["RefusedError", "UnstartedError"]


class RefusedError(RuntimeError):
    """The gate cannot measure a test. The message says what to change in it."""


class UnstartedError(RefusedError, TypeError):
    """A call returned a generator or an awaitable, whose body has not run."""
