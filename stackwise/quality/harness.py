"""Harness: runs tasks of lm-evaluation-harness with any language model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackwise.quality.scoring import Scorer
from stackwise.support.arguments import check_sizes, require

if TYPE_CHECKING:
    from stackwise.quality.harness_model import HarnessModel

__all__ = ["harness_model", "run_harness"]

_RESAMPLES = 1000  # bootstrap resamples for standard errors without a formula


def harness_model(model: Any, tokenizer: Any = None, **options: Any) -> HarnessModel:
    """Return a model and a tokenizer as a model of lm-evaluation-harness; see `HarnessModel`.

    Raises:
        ImportError: lm_eval is not installed.
        ValueError, TypeError: errors of `Scorer`.
    """
    _require_harness()
    from stackwise.quality.harness_model import HarnessModel

    return HarnessModel(model, tokenizer, **options)


def run_harness(
    scorer: Scorer,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    defaults: bool = True,
    shots: int | None = None,
    limit: int | None = None,
    samples: bool = False,
) -> dict[str, Any]:
    """Run tasks of the harness, and return its results.

    Args:
        scorer: scorer with a tokenizer.
        tasks: names of tasks, groups or tags.
        include: folder of user-defined task files (YAML).
        defaults: True: the harness's own tasks are available, too.
        shots: number of examples in each prompt. None: the number in the task.
        limit: number of examples per task. None: all.
        samples: True: the results contain requests and answers of each example.

    Returns:
        The harness's results: "results" by task, each metric with its standard error if available, "groups",
        "versions", "n-samples" and more.

    Raises:
        ImportError: lm_eval is not installed.
        ValueError: an unknown task, a task with unsupported generation options or more new tokens than the
            model has positions, an invalid number of shots or examples, or a folder that does not exist. It
            is raised before the run starts.
    """
    _require_harness()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if include is not None:
        require(include.is_dir(), "include", str(include), "a folder of task files (.yaml)")
    require(len(tasks) > 0, "tasks", list(tasks), "at least one")
    if shots is not None:
        check_sizes(0, shots=shots)
    if limit is not None:
        check_sizes(limit=limit)
    path = str(include) if include else None

    class CheckedTasks(TaskManager):  # type: ignore[misc]  # lm_eval has no types
        """Task manager that refuses unsupported tasks before the run starts."""

        def load(self, *arguments: Any, **more: Any) -> Any:
            loaded = super().load(*arguments, **more)
            _check_generation(loaded["tasks"], scorer.model.max_length)
            return loaded

    manager = CheckedTasks(include_path=path, include_defaults=defaults and include is None)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown and defaults and include is not None:
        # Only if needed, because reading all task files of the harness is slow.
        manager = CheckedTasks(include_path=path)
        unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        where = f" or {include}" if include else ""
        raise ValueError(f"tasks: got {', '.join(unknown)}; allowed: a task of the harness{where}")
    with _one_process():
        found: dict[str, Any] = simple_evaluate(
            model=harness_model(scorer),
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=_RESAMPLES,
            log_samples=samples,
        )
    return found


def _check_generation(tasks: Mapping[str, Any], max_length: int | None) -> None:
    """Refuse unsupported generation options, with the names of the tasks that use them."""
    from stackwise.quality.harness_model import ALLOWED_OPTIONS, new_tokens, refused_options

    refused, too_long = {}, {}
    for name, task in tasks.items():
        if task.get_config("output_type") == "generate_until":
            asked = task.get_config("generation_kwargs") or {}
            if options := refused_options(asked):
                refused[name] = options
            if max_length is not None and new_tokens(asked) >= max_length:
                too_long[name] = new_tokens(asked)
    require(not refused, "generation_kwargs", refused, ALLOWED_OPTIONS)
    require(not too_long, "max_gen_toks", too_long, f"below {max_length}, as the model reads")


@contextmanager
def _one_process() -> Iterator[None]:
    """Make the harness resample in one process, because a fork may hang if torch has threads."""
    key = "DISABLE_MULTIPROC"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _require_harness() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"lm-evaluation-harness is not installed: pip install 'stackwise[quality]' ({error})"
        ) from error
