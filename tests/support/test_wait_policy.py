"""The wait policy of OpenMP: set before torch is loaded, unless the user has set one."""

import os
import subprocess
import sys

import pytest

from stackwise.support.wait_policy import default_wait_policy

FUNCTION = """
import os, sys
from stackwise.support.wait_policy import default_wait_policy
print(default_wait_policy(), os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules, sep="|")
"""
COMMAND = """
import os
from stackwise.cli import main
main(["check", "module.that.does.not:exist"])
print(os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(
    "code, policy, printed",
    [
        (FUNCTION, None, "set to passive|PASSIVE|False"),
        (FUNCTION, "ACTIVE", "as the user set it|ACTIVE|False"),
        (COMMAND, None, "PASSIVE"),
        (COMMAND, "ACTIVE", "ACTIVE"),
    ],
    ids=["function", "function, set", "command", "command, set"],
)
def test_policy_is_passive_unless_the_user_has_set_one(code, policy, printed):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == printed


def test_policy_is_not_changed_after_torch_is_loaded(monkeypatch):
    import torch  # noqa: F401

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert default_wait_policy() == "too late: torch is loaded"
    assert "OMP_WAIT_POLICY" not in os.environ
