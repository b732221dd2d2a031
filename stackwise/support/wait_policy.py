"""Wait policy of OpenMP: idle threads sleep, unless the user has set another policy."""

from __future__ import annotations

import os
import sys
from typing import Literal

__all__ = ["WaitPolicyChange", "default_wait_policy"]

_VARIABLE = "OMP_WAIT_POLICY"

WaitPolicyChange = Literal["set to passive", "as the user set it", "too late: torch is loaded"]


def default_wait_policy() -> WaitPolicyChange:
    """Set OMP_WAIT_POLICY=PASSIVE for this process and its children, if torch is not loaded yet.

    Threads that spin while they wait take the cores from all other processes. OpenMP reads the variable
    once, when torch is loaded. After that the variable is not changed, because it would report a policy that
    is not in effect. Neither this function nor its module loads torch.

    Returns:
        the action that was taken.
    """
    if _VARIABLE in os.environ:
        return "as the user set it"
    if "torch" in sys.modules:
        return "too late: torch is loaded"
    os.environ[_VARIABLE] = "PASSIVE"
    return "set to passive"
