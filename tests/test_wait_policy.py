"""The wait policy: set where it can still act and nobody has said otherwise."""

import os
import subprocess
import sys

import pytest

from stackwise.wait_policy import default_wait_policy

PROBE = """
import os, sys
from stackwise.wait_policy import default_wait_policy
print(default_wait_policy(), os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules, sep="|")
"""


@pytest.mark.parametrize(
    "given, said", [(None, "set to passive|PASSIVE|False"), ("ACTIVE", "as the user set it|ACTIVE|False")]
)
def test_before_torch_is_loaded(given, said):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == said


def test_afterwards_nothing_is_said_that_does_not_hold(monkeypatch):
    import torch  # noqa: F401

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert default_wait_policy() == "too late: torch is loaded"
    assert "OMP_WAIT_POLICY" not in os.environ
