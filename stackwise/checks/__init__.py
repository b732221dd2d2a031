"""Is it right? Checks of any model that a ModelSpec describes, and of any training step of a TrainerSpec."""

from stackwise.checks.check import Check, known_checks, refuse_unknown
from stackwise.checks.engine.exploration import compare
from stackwise.checks.probe.divergence import Divergence, first_divergence
from stackwise.checks.result import CheckResult, Status
from stackwise.checks.run import check_model, check_trainer
from stackwise.checks.runs.sequence import compare_runs
from stackwise.checks.subject import Subject
from stackwise.checks.trainer_subject import TrainerSubject

__all__ = [
    "Check",
    "CheckResult",
    "Divergence",
    "Status",
    "Subject",
    "TrainerSubject",
    "check_model",
    "check_trainer",
    "compare",
    "compare_runs",
    "first_divergence",
    "known_checks",
    "refuse_unknown",
]
