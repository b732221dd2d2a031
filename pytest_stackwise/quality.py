"""Quality tests: evaluate a trained model on a task, and compare the result with the marker quality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import markers, records

if TYPE_CHECKING:
    from stackwise.quality.requirement import Judgement, Requirement
    from stackwise.quality.tasks import TaskResult, Tasks

__all__ = ["QualityError", "QualityFixtures", "QualityMarker"]


class QualityError(AssertionError):
    """Quality of a model below the requirement of the marker quality.

    Attributes:
        judgement: the complete result of the comparison.
    """

    def __init__(self, judgement: Judgement) -> None:
        self.judgement = judgement
        super().__init__(judgement.reason)


@dataclass(frozen=True)
class QualityMarker:
    """Arguments of a marker quality.

    Attributes:
        task: task of lm-evaluation-harness, or the name of a file.
        include: folder of task files. None: no such folder.
        how: further keyword arguments of `stackwise.quality.Tasks`.
        requirement: limits on the result.
    """

    task: str
    include: str | None
    how: dict[str, Any]
    requirement: Requirement

    @classmethod
    def read(
        cls,
        task: str,
        at_least: float | None = None,
        at_most: float | None = None,
        within_of_baseline: float | None = None,
        level: float = 0.95,
        include: str | None = None,
        metric: str | None = None,
        shots: int | None = None,
        limit: int | None = None,
    ) -> QualityMarker:
        """Return the marker with these arguments.

        Raises:
            ValueError: no task, or limits that `Requirement` does not allow.
        """
        from stackwise.quality.requirement import Requirement
        from stackwise.support.arguments import require

        allowed = "a task of lm-evaluation-harness, or the name of a file"
        require(isinstance(task, str) and bool(task), "task", task, allowed)
        how = {"metric": metric, "shots": shots, "limit": limit}
        return cls(task, include, how, Requirement(at_least, at_most, within_of_baseline, level))

    def load(self, folder: Path) -> Tasks:
        """Return the task with its data. File names are relative to `folder`.

        Raises:
            ImportError, FileNotFoundError, ValueError: errors of `stackwise.quality.Tasks`, or several tasks.
        """
        from stackwise.quality.tasks import Tasks, names_file
        from stackwise.support.arguments import require

        name = str(folder / self.task) if names_file(self.task) else self.task
        tasks = Tasks([name], include=None if self.include is None else folder / self.include, **self.how)
        require(len(tasks.each) == 1, "task", self.task, f"one of {', '.join(tasks.each)}")
        return tasks


class QualityFixtures:
    """Fixture `quality`, and the exit code of a run in which it was inconclusive."""

    def __init__(self) -> None:
        self._open = False

    @pytest.fixture
    def quality(self, request: pytest.FixtureRequest) -> Callable[..., Judgement]:
        """Evaluate a trained model on the task of the test's quality marker.

            @pytest.mark.quality(task="questions.jsonl", at_least=0.4, within_of_baseline=0.02)
            def test_it_still_knows(quality):
                quality(new_model, tokenizer, baseline=old_model)

        Call it once per test, with the arguments of `stackwise.quality.Scorer`. `baseline` is evaluated on
        the same task. The name of a file is relative to the folder of the test. The result is a Judgement. If
        the requirement is missed, QualityError is raised. If there are too few examples to decide, the test
        is skipped as INCONCLUSIVE.
        """
        item = request.node
        marked = markers.quality_of(item)
        if marked is None:
            pytest.fail(
                "the fixture quality needs the marker quality: task=, and what is asked", pytrace=False
            )
        records.owe(item, "quality", "the test is marked quality but never called quality")

        def run(model: Any, tokenizer: Any = None, *, baseline: Any = None, **options: Any) -> Judgement:
            __tracebackhide__ = True
            from stackwise.quality.scoring import Scorer
            from stackwise.support.arguments import require

            if not records.first_time(item, "quality"):
                raise RuntimeError("quality: call it once in a test; parametrize the test for more")
            records.pay(item, "quality")
            within = marked.requirement.within_of_baseline
            require(
                within is None or baseline is not None, "baseline", None, "a model, for within_of_baseline"
            )
            tasks = marked.load(item.path.parent)
            [task] = tasks.each.values()
            marked.requirement.check(less_is_better=task.less_is_better)

            def evaluate(subject: Any) -> TaskResult:
                return tasks.results(Scorer(subject, tokenizer, **options))[task.name]

            found = evaluate(model)
            base = None if baseline is None else evaluate(baseline)
            judgement = marked.requirement.judge(found, base)
            told = {"test": item.nodeid, "task": task.name, **judgement.to_dict()}
            records.add(item, "quality", told)
            item.user_properties.append((f"stackwise.{judgement.metric}", judgement.value))
            if judgement.verdict == "missed":
                raise QualityError(judgement)
            if judgement.verdict == "inconclusive":
                pytest.skip(f"INCONCLUSIVE: {judgement.reason}")
            return judgement

        return run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record if a test was inconclusive."""
        self._open |= any(
            record["section"] == "quality" and record["verdict"] == "inconclusive"
            for record in records.of_report(report)
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the exit code EXIT_INCONCLUSIVE if no test failed and a test was inconclusive."""
        if self._open and session.exitstatus == pytest.ExitCode.OK and not records.is_worker(session.config):
            from stackwise.gate.result import EXIT_INCONCLUSIVE

            session.exitstatus = EXIT_INCONCLUSIVE
