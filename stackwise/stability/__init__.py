"""Does it stay alive? Faults, telemetry and alarms, for any model and any loop."""

from stackwise.stability.faults import Fault, GradientExplosion, NanInjection
from stackwise.stability.guard import Alarm, SpikeDetector
from stackwise.stability.run import StabilityRun, stability_run
from stackwise.stability.telemetry import GradientMonitor, LossTracker, StepRecord

__all__ = [
    "Alarm",
    "Fault",
    "GradientExplosion",
    "GradientMonitor",
    "LossTracker",
    "NanInjection",
    "SpikeDetector",
    "StabilityRun",
    "StepRecord",
    "stability_run",
]
