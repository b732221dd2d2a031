"""Quality as tests: a trained model is asked a task, and held to what its marker wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import markers, records

if TYPE_CHECKING:
    from stackwise.quality.requirement import Judgement, Requirement

__all__ = ["QualityError", "QualityFixtures", "QualityMarker"]


class QualityError(AssertionError):
    """A model is not as good as the marker quality wants.

    Attributes:
        judgement: all that was found.
    """

    def __init__(self, judgement: Judgement) -> None:
        self.judgement = judgement
        super().__init__(judgement.reason)


@dataclass(frozen=True)
class QualityMarker:
    """What the marker quality says.

    Attributes:
        task: mmlu, hellaswag, or a file.
        data: the folder of published data sets; None: they are loaded.
        how: further keywords of `stackwise.quality.load_task`.
        requirement: what is asked.
    """

    task: str
    data: str | None
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
        data: str | None = None,
        shots: int | None = None,
        limit: int | None = None,
    ) -> QualityMarker:
        """What the arguments of a marker say.

        Raises:
            ValueError: no task, or what `Requirement` refuses.
        """
        from stackwise.quality.requirement import Requirement
        from stackwise.support.arguments import require

        require(isinstance(task, str) and bool(task), "task", task, "mmlu, hellaswag, or the name of a file")
        how = {key: value for key, value in (("shots", shots), ("limit", limit)) if value is not None}
        return cls(task, data, how, Requirement(at_least, at_most, within_of_baseline, level))

    def task_of(self, folder: Path) -> str:
        """The task; a file spelled out from the test's folder."""
        return str(folder / self.task) if Path(self.task).suffix else self.task

    def folder_of(self, folder: Path) -> Path | None:
        """The folder of data sets, spelled out likewise."""
        return None if self.data is None else folder / self.data


class QualityFixtures:
    """The fixture `quality`, and the exit code of a run in which it could not tell."""

    def __init__(self) -> None:
        self._open = False

    @pytest.fixture
    def quality(self, request: pytest.FixtureRequest) -> Callable[..., Judgement]:
        """Evaluate a trained model on the task of the test's quality marker.

            @pytest.mark.quality(task="questions.jsonl", at_least=0.4, within_of_baseline=0.02)
            def test_it_still_knows(quality):
                quality(new_model, tokenizer, baseline=old_model)

        Call it once, with what `stackwise.quality.Scorer` takes; `baseline` is asked the same. A file is
        relative to the test's. Returns the Judgement; raises QualityError where what is asked is missed, and
        skips the test as INCONCLUSIVE where the examples are too few to tell.
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
            from stackwise.quality.task import load_task
            from stackwise.support.arguments import require

            if not records.first_time(item, "quality"):
                raise RuntimeError("quality: call it once in a test; parametrize the test for more")
            records.pay(item, "quality")
            within = marked.requirement.within_of_baseline
            require(
                within is None or baseline is not None, "baseline", None, "a model, for within_of_baseline"
            )
            task = load_task(
                marked.task_of(item.path.parent), marked.folder_of(item.path.parent), **marked.how
            )
            marked.requirement.check(is_cost=task.is_cost)
            found = task.run(Scorer(model, tokenizer, **options))
            base = None if baseline is None else task.run(Scorer(baseline, tokenizer, **options))
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
        """See whether a test could not tell."""
        self._open |= any(
            record["section"] == "quality" and record["verdict"] == "inconclusive"
            for record in records.of_report(report)
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run that is green but for what it could not tell has an exit code of its own."""
        if self._open and session.exitstatus == pytest.ExitCode.OK and not records.is_worker(session.config):
            from stackwise.gate.result import EXIT_INCONCLUSIVE

            session.exitstatus = EXIT_INCONCLUSIVE
