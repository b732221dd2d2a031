"""Telemetry: records of each training step, read without a wait of the host for the device."""

from stackwise.stability.telemetry.attention_logit import AttentionLogit
from stackwise.stability.telemetry.gradient_monitor import GradientMonitor, GradientRecord, GradientState
from stackwise.stability.telemetry.gradient_norm import (
    clip_divisor,
    global_norm,
    gradient_norms,
    norms_by_rows,
)
from stackwise.stability.telemetry.loss_tracker import (
    LossRecord,
    LossState,
    LossTracker,
    bits_per_byte,
    perplexity,
)
from stackwise.stability.telemetry.ring_buffer import RingBuffer
from stackwise.stability.telemetry.step_record import StepBuffer, StepRecord, mean_loss

__all__ = [
    "AttentionLogit",
    "GradientMonitor",
    "GradientRecord",
    "GradientState",
    "LossRecord",
    "LossState",
    "LossTracker",
    "RingBuffer",
    "StepBuffer",
    "StepRecord",
    "bits_per_byte",
    "clip_divisor",
    "global_norm",
    "gradient_norms",
    "mean_loss",
    "norms_by_rows",
    "perplexity",
]
