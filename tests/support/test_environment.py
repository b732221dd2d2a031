"""Environment: variables have their previous values after the block."""

import os

import pytest

from stackwise.support.environment import environment_variable


@pytest.mark.parametrize("before", [None, "", "2"])
def test_variable_is_restored_after_the_block(monkeypatch, before):
    monkeypatch.delenv("STACKWISE_TEST", raising=False)
    if before is not None:
        monkeypatch.setenv("STACKWISE_TEST", before)
    with environment_variable("STACKWISE_TEST", "1"):
        assert os.environ["STACKWISE_TEST"] == "1"
    assert os.environ.get("STACKWISE_TEST") == before
