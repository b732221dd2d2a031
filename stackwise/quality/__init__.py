"""Quality of language models: multiple choice, cloze, perplexity, programs and lm-evaluation-harness."""

from stackwise.quality.cloze import ClozeResult, score_cloze
from stackwise.quality.comparison import ModelComparison, QualityRow, compare_quality
from stackwise.quality.continuation import Sampling, continue_texts
from stackwise.quality.harness import harness_model, run_harness
from stackwise.quality.hellaswag import hellaswag_questions
from stackwise.quality.human_eval import (
    HumanEvalResult,
    complete_problems,
    evaluate_completions,
    generate_completions,
    load_problems,
)
from stackwise.quality.language_model import LanguageModel
from stackwise.quality.mmlu import mmlu_questions
from stackwise.quality.multiple_choice import MultipleChoiceResult, Question, score_questions
from stackwise.quality.paired import PairedDifference, difference_of_means, difference_of_shares
from stackwise.quality.pass_at_k import PassAtK, estimate_pass_at_k, pass_at_k
from stackwise.quality.perplexity import PerplexityResult, score_texts
from stackwise.quality.proportion import Proportion
from stackwise.quality.request import Request, Score, TokenRequest
from stackwise.quality.requirement import Judgement, Requirement
from stackwise.quality.sandbox import Sandbox, SandboxLimits, isolation_problem
from stackwise.quality.scoring import Scorer, loglikelihoods
from stackwise.quality.task import Task, load_task, load_tasks
from stackwise.quality.text_tokenizer import TextTokenizer

__all__ = [
    "ClozeResult",
    "HumanEvalResult",
    "Judgement",
    "LanguageModel",
    "ModelComparison",
    "MultipleChoiceResult",
    "PairedDifference",
    "PassAtK",
    "PerplexityResult",
    "Proportion",
    "QualityRow",
    "Question",
    "Request",
    "Requirement",
    "Sampling",
    "Sandbox",
    "SandboxLimits",
    "Score",
    "Scorer",
    "Task",
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
    "hellaswag_questions",
    "isolation_problem",
    "load_problems",
    "load_task",
    "load_tasks",
    "loglikelihoods",
    "mmlu_questions",
    "pass_at_k",
    "run_harness",
    "score_cloze",
    "score_questions",
    "score_texts",
]
