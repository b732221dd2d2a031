"""Guard: notices a broken step before its update is made; leaves it out, goes back, or stops and says why."""

from stackwise.config import GuardPolicy
from stackwise.stability.guard.alarm import Alarm, GuardError
from stackwise.stability.guard.detector import DeviceDetector, SpikeDetector
from stackwise.stability.guard.guard import Guard
from stackwise.stability.guard.guard_record import GuardRecord
from stackwise.stability.guard.judge import Decision

__all__ = [
    "Alarm",
    "Decision",
    "DeviceDetector",
    "Guard",
    "GuardError",
    "GuardPolicy",
    "GuardRecord",
    "SpikeDetector",
]
