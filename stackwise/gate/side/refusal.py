"""Refusal: errors of tests that the gate cannot measure until they are changed."""

from __future__ import annotations

__all__ = ["RefusedError", "UnstartedError"]


class RefusedError(RuntimeError):
    """The gate cannot measure a test. The message has the necessary change of the test."""


class UnstartedError(RefusedError, TypeError):
    """A call returned a generator or an awaitable. Its body has not run."""
