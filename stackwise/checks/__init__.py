"""Is it right? Checks of any model that a ModelSpec describes."""

from stackwise.checks.check import Check, CheckResult, Status, Subject, check_model, known_checks

__all__ = ["Check", "CheckResult", "Status", "Subject", "check_model", "known_checks"]
