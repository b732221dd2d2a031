"""Architecture search on Optuna: spaces of valid configurations, resumable studies and Pareto fronts."""

from stackwise.prototype.search.evaluation import Evaluate, PrototypeEvaluation
from stackwise.prototype.search.score import ScoreWeights, score_config
from stackwise.prototype.search.search_result import SearchResult
from stackwise.prototype.search.space import Space
from stackwise.prototype.search.study import load_search, search_architecture_space
from stackwise.prototype.search.trial import SearchTrial, TrialOutcome

__all__ = [
    "Evaluate",
    "PrototypeEvaluation",
    "ScoreWeights",
    "SearchResult",
    "SearchTrial",
    "Space",
    "TrialOutcome",
    "load_search",
    "score_config",
    "search_architecture_space",
]
