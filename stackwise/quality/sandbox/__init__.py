"""Sandbox: runs untrusted code in an isolated process."""

from stackwise.quality.sandbox.jailed import SandboxError
from stackwise.quality.sandbox.limits import SandboxLimits
from stackwise.quality.sandbox.sandbox import WITHOUT_ISOLATION, Execution, Sandbox, isolation_problem

__all__ = ["WITHOUT_ISOLATION", "Execution", "Sandbox", "SandboxError", "SandboxLimits", "isolation_problem"]
