"""Guard: detects a bad training step before its update; skips it, rewinds, or stops with a diagnosis."""

from stackwise.config import GuardPolicy
from stackwise.stability.guard.alarm import Alarm, GuardError
from stackwise.stability.guard.detector import SpikeDetector
from stackwise.stability.guard.guard import Guard
from stackwise.stability.guard.step_detector import Decision, GuardRecord

__all__ = [
    "Alarm",
    "Decision",
    "Guard",
    "GuardError",
    "GuardPolicy",
    "GuardRecord",
    "SpikeDetector",
]
