"""Processes as they are where nothing was started before."""

import pytest

from tests import forked


@pytest.fixture
def childless():
    """This process has no children: those that copy it would be taken for a test's."""
    forked.stop()
