"""The wait policy of OpenMP: set before torch is loaded, unless the user has set one."""

import os
import subprocess
import sys

import pytest

from stackwise.support.wait_policy import default_wait_policy

PROBE = """
import os, sys
from stackwise.support.wait_policy import default_wait_policy
print(default_wait_policy(), os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules, sep="|")
"""
COMMAND = """
import os, sys
from stackwise.cli import main
main(["check", "module.that.does.not:exist"])
print(os.environ.get("OMP_WAIT_POLICY"))
"""


def run(code, policy):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "policy, printed", [(None, "set to passive|PASSIVE|False"), ("ACTIVE", "as the user set it|ACTIVE|False")]
)
def test_policy_is_set_before_torch_is_loaded(policy, printed):
    assert run(PROBE, policy) == printed


@pytest.mark.parametrize("policy, seen", [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_policy_of_the_command_line_is_that_of_the_plugin(policy, seen):
    assert run(COMMAND, policy) == seen


def test_policy_is_not_changed_after_torch_is_loaded(monkeypatch):
    import torch  # noqa: F401

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert default_wait_policy() == "too late: torch is loaded"
    assert "OMP_WAIT_POLICY" not in os.environ
