"""Prototypes of an architecture: representative runs, small variants, learning-rate sweeps and searches."""

from stackwise.prototype.coordinate import CoordinateCheck, coordinate_check
from stackwise.prototype.loss_verdict import DivergenceRule, LossVerdict, SpikeRule, loss_verdict
from stackwise.prototype.observation import Observation, observe
from stackwise.prototype.prototype import ArchitecturePrototype
from stackwise.prototype.prototype_run import ForwardPass, PrototypeRun, Status
from stackwise.prototype.search import (
    ScoreWeights,
    SearchResult,
    score_config,
    search_architecture_space,
)
from stackwise.prototype.sensitivity import LEARNING_RATES, learning_rate_sweep, plan_sweep
from stackwise.prototype.shrink import SmallVariant, create_small_variant
from stackwise.prototype.sweep_result import LearningRateSweep, learning_rate_sensitivity
from stackwise.prototype.sweep_run import PlannedRun, SweepRun
from stackwise.prototype.widen import widened

__all__ = [
    "LEARNING_RATES",
    "ArchitecturePrototype",
    "CoordinateCheck",
    "DivergenceRule",
    "ForwardPass",
    "LearningRateSweep",
    "LossVerdict",
    "Observation",
    "PlannedRun",
    "PrototypeRun",
    "ScoreWeights",
    "SearchResult",
    "SmallVariant",
    "SpikeRule",
    "Status",
    "SweepRun",
    "coordinate_check",
    "create_small_variant",
    "learning_rate_sensitivity",
    "learning_rate_sweep",
    "loss_verdict",
    "observe",
    "plan_sweep",
    "score_config",
    "search_architecture_space",
    "widened",
]
