"""Tasks: tasks of lm-evaluation-harness, and tasks of own rows, for any language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stackwise.quality.paired import PairedDifference, difference_of_means, difference_of_shares
from stackwise.quality.row_task import read_rows, require_harness, row_task
from stackwise.quality.scoring import Scorer
from stackwise.support.arguments import check_sizes, require
from stackwise.support.environment import environment_variable
from stackwise.support.random_state import seeded

if TYPE_CHECKING:
    from stackwise.quality.harness import HarnessModel

__all__ = ["Task", "TaskResult", "Tasks", "cut_notes", "harness_model", "names_file"]

_SHOTS_SEED = 1234  # default of the harness
_RESAMPLES = 1000  # bootstrap resamples for standard errors without a formula
_ROW_FILES, _TASK_FILES = (".jsonl", ".parquet"), (".yaml", ".yml")
_BITS = "bits_per_byte"


def harness_model(model: Any, tokenizer: Any = None, **options: Any) -> HarnessModel:
    """Return a model and a tokenizer as a model of lm-evaluation-harness; see `HarnessModel`.

    Raises:
        ImportError: lm_eval is not installed.
        ValueError, TypeError: errors of `Scorer`.
    """
    require_harness()
    from stackwise.quality.harness import HarnessModel

    return HarnessModel(model, tokenizer, **options)


@dataclass(frozen=True)
class Task:
    """Task of the harness, or group of its tasks whose examples are evaluated together.

    Attributes:
        name: name in reports.
        parts: names of the tasks in the harness. Only a group has several.
        metric: metric that is compared between models and with limits. None: the task has no metric with a
            value for each example.
        less_is_better: True if the metric is a cost.
    """

    name: str
    parts: tuple[str, ...]
    metric: str | None
    less_is_better: bool


@dataclass(frozen=True, eq=False)
class TaskResult:
    """Metric of a model at a task, with the value of each example.

    Attributes:
        task: name of the task.
        metric: name of the metric.
        less_is_better: True if the metric is a cost.
        examples: hash of each example.
        values: float64 (examples,). The metric is their mean.
        weights: weight of each example. None: equal weights.
    """

    task: str
    metric: str
    less_is_better: bool
    examples: tuple[str, ...]
    values: np.ndarray
    weights: np.ndarray | None = None

    @property
    def value(self) -> float:
        """Value of the metric."""
        return float(np.average(self.values, weights=self.weights))

    @property
    def standard_error(self) -> float | None:
        """Standard error of `value` as an estimate for other examples of this kind.

        None for a single example, and for a weighted mean.
        """
        n = len(self.values)
        return None if n < 2 or self.weights is not None else float(self.values.std(ddof=1) / np.sqrt(n))

    def difference(self, baseline: TaskResult, *, level: float = 0.95) -> PairedDifference:
        """Return the difference to another model on the same examples.

        Raises:
            ValueError: the other result has another task, metric or other examples.
        """
        require(baseline.metric == self.metric, "metric", baseline.metric, repr(self.metric))
        require(baseline.examples == self.examples, "examples", "others", "the same")
        if self.weights is None and set(self.values) | set(baseline.values) <= {0.0, 1.0}:
            return difference_of_shares(self.values == 1, baseline.values == 1, level=level)
        return difference_of_means(
            self.values, baseline.values, self.weights, level=level, less_is_better=self.less_is_better
        )


class Tasks:
    """Tasks with their data, for any model.

    Args:
        tasks: names of tasks, groups or tags of the harness; paths of task files (.yaml) or of files of rows
            (.jsonl, .parquet; see `row_task`); tasks of the harness as dicts or objects.
        include: folder of user-defined task files (.yaml).
        shots: number of examples in each prompt. None: the number in the task, which is often 0.
        limit: maximum number of examples per task. None: all.
        metric: metric that is compared between models, in each task that has it. None: bits per byte if the
            task has it, otherwise its first metric that is a mean over the examples.

    Attributes:
        each: the tasks by name. A group is one entry, and a tag is one entry per task.

    Raises:
        ImportError: lm_eval is not installed.
        FileNotFoundError: a file does not exist.
        ValueError: an unknown task, a repeated name, data that cannot be read, an unsupported option of
            generation, or an argument out of range.
    """

    def __init__(
        self,
        tasks: Iterable[Any],
        *,
        include: Path | None = None,
        shots: int | None = None,
        limit: int | None = None,
        metric: str | None = None,
    ) -> None:
        require_harness()
        tasks = list(tasks)
        require(len(tasks) > 0, "tasks", tasks, "at least one")
        if shots is not None:
            check_sizes(0, shots=shots)
        if limit is not None:
            check_sizes(limit=limit)
        self._limit = limit
        self._parts: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        self.each: dict[str, Task] = {}
        manager = _manager_of([task for task in tasks if isinstance(task, str)], include)
        with seeded(0):
            for spec in _with_row_tasks(tasks):
                self._add(_loaded(manager, spec), metric)
        found = {each.metric for each in self.each.values()}
        allowed = f"a mean over examples of one of the tasks, such as {', '.join(map(str, found))}"
        require(metric is None or metric in found, "metric", metric, allowed)
        self._check_generation()
        self._set_shots(shots)

    def run(self, scorer: Scorer) -> dict[str, Any]:
        """Evaluate a model, and return the results of the harness.

        Args:
            scorer: scorer with a tokenizer.

        Returns:
            "results" by task and group, each metric with its standard error if available, "samples" with the
            requests and answers of each example, "n-samples" and more.

        Raises:
            ValueError: a task requests more new tokens than the model has positions. It is raised before the
                model is evaluated.
        """
        from lm_eval import evaluate

        from stackwise.quality.harness import new_tokens

        limit = scorer.model.max_length
        asked = {name: new_tokens(options) for name, options in self._generation().items()}
        too_long = {name: count for name, count in asked.items() if limit is not None and count >= limit}
        require(not too_long, "max_gen_toks", too_long, f"below {limit}, as the model reads")
        # A fork may hang if torch has threads, so the harness resamples in this process.
        with environment_variable("DISABLE_MULTIPROC", "1"), seeded(0):
            found: dict[str, Any] = evaluate(
                harness_model(scorer),
                {"tasks": self._parts, "groups": self._groups},
                limit=self._limit,
                bootstrap_iters=_RESAMPLES,
            )
        return found

    def results(self, scorer: Scorer) -> dict[str, TaskResult]:
        """Evaluate a model, and return the result of each task, for comparisons.

        Raises:
            ValueError: an error of `run`, or a task without a metric that has a value for each example.
        """
        for task in self.each.values():
            allowed = f"{_BITS}, or a mean over the examples"
            require(task.metric is not None, f"metric of {task.name}", "others", allowed)
        samples = self.run(scorer)["samples"]
        return {name: _result(task, samples) for name, task in self.each.items()}

    def _add(self, loaded: Mapping[str, Any], metric: str | None) -> None:
        """Add a task, a group or the tasks of a tag."""
        groups, parts = loaded.get("groups") or {}, loaded["tasks"]
        repeated = sorted(parts.keys() & self._parts.keys())
        require(not repeated, "tasks", repeated, "each once")
        self._groups |= groups
        self._parts |= parts
        # The requested group is before the groups inside.
        entries = (
            {next(iter(groups)): parts} if groups else {name: {name: task} for name, task in parts.items()}
        )
        self.each |= {name: _task(name, some, metric) for name, some in entries.items()}

    def _generation(self) -> dict[str, Mapping[str, Any]]:
        """Return the options of generation by task."""
        parts = self._parts.items()
        generating = {
            name: task for name, task in parts if task.get_config("output_type") == "generate_until"
        }
        return {name: task.get_config("generation_kwargs") or {} for name, task in generating.items()}

    def _check_generation(self) -> None:
        from stackwise.quality.harness import ALLOWED_OPTIONS, refused_options

        refused = {name: refused_options(options) for name, options in self._generation().items()}
        refused = {name: options for name, options in refused.items() if options}
        require(not refused, "generation_kwargs", refused, ALLOWED_OPTIONS)

    def _set_shots(self, shots: int | None) -> None:
        for name, task in self._parts.items():
            known = task.get_config("num_fewshot")
            require(not shots or known != 0, "shots", shots, f"none for {name}, which has no examples")
            task.set_config("num_fewshot", shots if shots is not None else known or 0)
            task.set_fewshot_seed(_SHOTS_SEED)


def names_file(task: str) -> bool:
    """Return True if a task is given by the name of a file."""
    return Path(task).suffix in (*_ROW_FILES, *_TASK_FILES)


def cut_notes(scorer: Scorer) -> list[str]:
    """Return a note about contexts that a scorer has cut. Return no notes if there are none."""
    note = (
        f"{scorer.tokens_cut:,} tokens at the beginning of contexts were cut, because sequences were too long"
    )
    return [note] if scorer.tokens_cut else []


def _loaded(manager: Any, spec: Any) -> Mapping[str, Any]:
    """Return the tasks and groups of a task, a group or a tag.

    Raises:
        ValueError: the task is invalid, or its data cannot be read.
    """
    try:
        found: Mapping[str, Any] = manager.load([spec])
    except Exception as error:  # tasks and the network layers have many error classes
        name = spec.get("task") if isinstance(spec, Mapping) else spec
        text = " ".join(str(error).split())[:300]
        advice = "; without a network, use a file, or data in the cache of Hugging Face"
        advice = advice if isinstance(error, OSError) else ""
        raise ValueError(f"task {name}: {type(error).__name__}: {text}{advice}") from error
    return found


def _with_row_tasks(tasks: Sequence[Any]) -> Iterator[Any]:
    """Yield the tasks, with tasks of rows instead of the paths of their files."""
    stems = Counter(Path(task).stem for task in tasks if isinstance(task, str) and names_file(task))
    for task in tasks:
        if not isinstance(task, str) or not names_file(task):
            yield task
            continue
        path = Path(task)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        if path.suffix in _TASK_FILES:
            yield task
            continue
        try:
            yield row_task(path.stem if stems[path.stem] == 1 else task, read_rows(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _manager_of(names: Sequence[str], include: Path | None) -> Any:
    """Return a task manager that knows all tasks that are not files.

    Raises:
        ValueError: the folder does not exist, or a task is unknown.
    """
    if include is not None:
        require(include.is_dir(), "include", str(include), "a folder of task files (.yaml)")
    manager = _manager(include, defaults=False)
    asked = {name for name in names if not names_file(name)}
    if asked - set(manager.all_tasks):  # only if needed, because reading all tasks of the harness is slow
        manager = _manager(include, defaults=True)
    unknown = sorted(asked - set(manager.all_tasks))
    files = "a .yaml, .jsonl or .parquet file"
    where = f" or of {include}" if include else ""
    require(not unknown, "tasks", ", ".join(unknown), f"a task of lm-evaluation-harness{where}, or {files}")
    return manager


@cache
def _default_manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _manager(include: Path | None, *, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    if defaults and include is None:
        return _default_manager()
    return TaskManager(include_path=str(include) if include else None, include_defaults=defaults)


def _task(name: str, parts: Mapping[str, Any], metric: str | None) -> Task:
    """Return the description of a task or a group, with a metric that all parts have."""
    first = next(iter(parts.values()))
    shared = [each for each in _metrics(first) if all(each in _metrics(part) for part in parts.values())]
    chosen = next((each for each in (metric, _BITS, *shared) if each in shared), None)
    higher = first.higher_is_better()
    return Task(name, tuple(parts), chosen, chosen is not None and higher.get(chosen) is False)


def _metrics(task: Any) -> list[str]:
    """Return the metrics of a task of the harness that have a value for each example."""
    from lm_eval.api.metrics import mean

    return [name for name, how in task.aggregation().items() if how is mean or name == _BITS]


def _result(task: Task, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> TaskResult:
    """Return the values of all examples of a task, under the first filter of the harness."""
    assert task.metric is not None
    chosen = [
        each for part in task.parts for each in samples[part] if each["filter"] == samples[part][0]["filter"]
    ]
    values = [each[task.metric] for each in chosen]
    examples = tuple(each["doc_hash"] for each in chosen)
    weights = None
    if task.metric == _BITS:
        log_p, weights = np.array(values, dtype=np.float64).T
        values = -log_p / weights / np.log(2)
    return TaskResult(
        task.name, task.metric, task.less_is_better, examples, np.asarray(values, dtype=np.float64), weights
    )
