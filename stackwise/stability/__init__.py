"""Stability: faults, telemetry and alarms, for any model and any training loop."""

from stackwise.stability.faults import Fault, GradientExplosion, Injection, NanInjection, broken
from stackwise.stability.gradient_controller import GradientController, GradientWarning
from stackwise.stability.guard import Alarm, Guard, GuardError, GuardPolicy, SpikeDetector
from stackwise.stability.run import StabilityRun, stability_run
from stackwise.stability.telemetry import GradientMonitor, LossTracker, StepRecord

__all__ = [
    "Alarm",
    "Fault",
    "GradientController",
    "GradientExplosion",
    "GradientMonitor",
    "GradientWarning",
    "Guard",
    "GuardError",
    "GuardPolicy",
    "Injection",
    "LossTracker",
    "NanInjection",
    "SpikeDetector",
    "StabilityRun",
    "StepRecord",
    "broken",
    "stability_run",
]
