"""Faults: planned errors in a training run, each with a target and a first step.

Each file defines one kind.
"""

import inspect
from collections.abc import Mapping

from stackwise.stability.faults.attention import LogitGrowth
from stackwise.stability.faults.data import (
    CorruptSample,
    LabelCorruption,
    UnreadableSample,
    UnreadableSampleError,
    WorkerDeath,
)
from stackwise.stability.faults.fault import Acted, Anatomy, Fault
from stackwise.stability.faults.injection import Injection, TargetNotReachedError, broken
from stackwise.stability.faults.process import DeadRank, OutOfMemory, ProcessSignal, SlowRank, kill_child
from stackwise.stability.faults.scaling import EmbeddingExplosion, GradientExplosion, GradientScale, LossSpike
from stackwise.stability.faults.storage import BitRot, DiskFull, ShortWrite
from stackwise.stability.faults.values import BitFlip, HalfOverflow, NanInjection
from stackwise.support.markdown import markdown_table

__all__ = [
    "KNOWN_FAULTS",
    "Acted",
    "Anatomy",
    "BitFlip",
    "BitRot",
    "CorruptSample",
    "DeadRank",
    "DiskFull",
    "EmbeddingExplosion",
    "Fault",
    "GradientExplosion",
    "GradientScale",
    "HalfOverflow",
    "Injection",
    "LabelCorruption",
    "LogitGrowth",
    "LossSpike",
    "NanInjection",
    "OutOfMemory",
    "ProcessSignal",
    "ShortWrite",
    "SlowRank",
    "TargetNotReachedError",
    "UnreadableSample",
    "UnreadableSampleError",
    "WorkerDeath",
    "broken",
    "fault_table",
    "kill_child",
]

# Maps the name of each fault, as used by markers and messages, to its class.
KNOWN_FAULTS: Mapping[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        NanInjection,
        GradientExplosion,
        GradientScale,
        LossSpike,
        LogitGrowth,
        EmbeddingExplosion,
        LabelCorruption,
        BitFlip,
        HalfOverflow,
        CorruptSample,
        UnreadableSample,
        WorkerDeath,
        OutOfMemory,
        SlowRank,
        DeadRank,
        ProcessSignal,
        DiskFull,
        ShortWrite,
        BitRot,
    )
}


def fault_table() -> str:
    """Return the table of all faults for the documentation, from their declarations."""
    rows = []
    for fault in KNOWN_FAULTS.values():
        own = [name for name in inspect.signature(fault).parameters if name not in ("step", "duration")]
        effect = (inspect.getdoc(fault) or "").partition("\n")[0]
        rows.append((f"`{fault.__name__}({', '.join(own)})`", effect.removeprefix("Fault that ")))
    return markdown_table(("fault", "effect"), rows)
