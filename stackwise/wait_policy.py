"""The wait policy of OpenMP: threads that have nothing to do sleep, unless the user has said otherwise."""

from __future__ import annotations

import os
import sys
from typing import Literal

__all__ = ["WaitPolicyChange", "default_wait_policy"]

_VARIABLE = "OMP_WAIT_POLICY"

WaitPolicyChange = Literal["set to passive", "as the user set it", "too late: torch is loaded"]


def default_wait_policy() -> WaitPolicyChange:
    """Set OMP_WAIT_POLICY=PASSIVE for this process and those that it starts, where that can still act.

    Threads that spin while they wait take the cores from whatever else runs there, and timings then depend
    on it. OpenMP reads the variable once, as torch is loaded: afterwards it is left alone, so that it never
    says what does not hold. Neither this function nor its module loads torch.

    Returns:
        what was done.
    """
    if _VARIABLE in os.environ:
        return "as the user set it"
    if "torch" in sys.modules:
        return "too late: torch is loaded"
    os.environ[_VARIABLE] = "PASSIVE"
    return "set to passive"
