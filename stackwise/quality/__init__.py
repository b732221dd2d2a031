"""Quality of language models: tasks of lm-evaluation-harness, own rows, and programs."""

from stackwise.quality.comparison import ModelComparison, QualityRow, compare_quality
from stackwise.quality.continuation import Sampling, continue_texts
from stackwise.quality.human_eval import (
    HumanEvalResult,
    complete_problems,
    evaluate_completions,
    generate_completions,
    load_problems,
)
from stackwise.quality.language_model import LanguageModel
from stackwise.quality.paired import PairedDifference, difference_of_means, difference_of_shares
from stackwise.quality.pass_at_k import PassAtK, estimate_pass_at_k, pass_at_k
from stackwise.quality.request import Request, Score, TokenRequest
from stackwise.quality.requirement import Judgement, Requirement
from stackwise.quality.row_task import row_task
from stackwise.quality.sandbox import Sandbox, SandboxLimits, isolation_problem
from stackwise.quality.scoring import Scorer, loglikelihoods
from stackwise.quality.tasks import Task, TaskResult, Tasks, harness_model
from stackwise.quality.text_tokenizer import TextTokenizer

__all__ = [
    "HumanEvalResult",
    "Judgement",
    "LanguageModel",
    "ModelComparison",
    "PairedDifference",
    "PassAtK",
    "QualityRow",
    "Request",
    "Requirement",
    "Sampling",
    "Sandbox",
    "SandboxLimits",
    "Score",
    "Scorer",
    "Task",
    "TaskResult",
    "Tasks",
    "TextTokenizer",
    "TokenRequest",
    "compare_quality",
    "complete_problems",
    "continue_texts",
    "difference_of_means",
    "difference_of_shares",
    "estimate_pass_at_k",
    "evaluate_completions",
    "generate_completions",
    "harness_model",
    "isolation_problem",
    "load_problems",
    "loglikelihoods",
    "pass_at_k",
    "row_task",
]
