"""Checks as tests: `parametrize_with_checks` in two lines, `--stackwise-model` in none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import options, records

if TYPE_CHECKING:
    from stackwise.checks import Check, CheckResult
    from stackwise.spec import ModelSpec

__all__ = ["CheckFailedError", "parametrize_with_checks", "zero_code_items"]

Expected = Mapping[str, str] | Callable[["ModelSpec"], Mapping[str, str]]


class CheckFailedError(AssertionError):
    """A check failed. Its text is the result's: what was measured, where, and what to look at.

    Attributes:
        result: the CheckResult.
    """

    def __init__(self, result: CheckResult) -> None:
        self.result = result
        super().__init__(str(result))


def parametrize_with_checks(
    models: Iterable[Any],
    *,
    checks: Iterable[str] | None = None,
    expected_failures: Expected | None = None,
) -> pytest.MarkDecorator:
    """One test per model and check.

        @parametrize_with_checks([spec])
        def test_model(spec, check):
            check(spec)

    A model is built when its first check runs, not when tests are collected.

    Args:
        models: ModelSpecs, or anything that `ModelSpec.of` understands.
        checks: names of checks or families; None: all.
        expected_failures: check name -> reason, or a function of the spec that gives it. Strict: such
            a check must fail, and is then reported as xfailed.

    Raises:
        TypeError: `models` is one model instead of several.
        ValueError: an unknown check, or an expected failure that matches none of the tests.
    """
    from stackwise.checks.check import select_checks
    from stackwise.checks.run import refuse_unmatched

    if not isinstance(models, Iterable) or isinstance(models, str) or hasattr(models, "named_modules"):
        raise TypeError(f"models: got {type(models).__name__}; wanted a list of models")
    selected = select_checks(checks)
    asked = [check.name for check in selected]
    if isinstance(expected_failures, Mapping):
        refuse_unmatched(expected_failures, asked)
    parameters = []
    for model in models:
        subject = LazySpec(model)
        parameters += [
            pytest.param(
                subject, BoundCheck(check, expected_failures, asked), id=f"{subject.name}-{check.name}"
            )
            for check in selected
        ]
    return pytest.mark.parametrize(("spec", "check"), parameters)


class LazySpec:
    """A model whose ModelSpec is inferred once, at its first use.

    Args:
        model: anything that `ModelSpec.of` understands, or a function that gives such a thing.
        name: in test ids and reports; None: the model's own.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        self.model = model
        own = getattr(model, "name", None) or getattr(model, "__name__", None) or type(model).__name__
        self.name = name or str(own)
        self._named = name
        self._spec: ModelSpec | None = None

    def get(self) -> ModelSpec:
        """The ModelSpec; whatever `ModelSpec.of` raises comes out."""
        if self._spec is None:
            from stackwise.spec import ModelSpec

            declared = {"name": self._named} if self._named else {}
            self._spec = ModelSpec.of(self.model, **declared)
        return self._spec


class BoundCheck:
    """A check as a test calls it: on the run's device and seed, raising where it fails.

    Args:
        check: the question.
        expected: expected failures, as in `parametrize_with_checks`.
        asked: names of all checks that are asked, which `expected` must be among.
    """

    def __init__(self, check: Check, expected: Expected | None = None, asked: Iterable[str] = ()) -> None:
        self.check, self.expected, self.asked = check, expected, tuple(asked)

    def __call__(self, spec: Any) -> CheckResult:
        """Ask; return the result where the model is sound, skip where the question does not apply.

        Raises:
            CheckFailedError: the check failed.
        """
        __tracebackhide__ = True
        from stackwise.checks.run import against_expectation, refuse_unmatched
        from stackwise.spec import ModelSpec

        item = records.current_item()
        if item is None:
            raise RuntimeError("check: called outside of a test, or without the stackwise plugin")
        records.pay(item, "check")
        spec = ModelSpec.of(spec)
        expected = self.expected(spec) if callable(self.expected) else self.expected or {}
        refuse_unmatched(expected, self.asked)
        reason = expected.get(self.check.name)
        result = self.check.run(spec, device=options.device_name(item.config), seed=options.seed(item.config))
        result = against_expectation(result, reason)
        records.add(item, "checks", result.to_dict())
        if result.value is not None:
            item.user_properties.append((f"stackwise.{result.check}", result.value))
        match result.status:
            case "failed":
                raise CheckFailedError(result)
            case "expected failure":
                if item.config.option.runxfail:
                    raise CheckFailedError(result)
                pytest.xfail(reason or "")
            case "not applicable":
                pytest.skip(f"{result.check} does not apply: {result.meaning}")
        return result


def hand_over(item: pytest.Item) -> None:
    """Give a test its ModelSpec, now that it runs, and make it owe the call of its check."""
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    for name, value in tuple(arguments.items()):
        if isinstance(value, LazySpec):
            arguments[name] = value.get()
        elif isinstance(value, BoundCheck):
            records.owe(item, "check", "the test never called its check: check(spec)")


class ModelCollector(pytest.Collector):
    """The parent of a model's zero-code checks."""

    def __init__(self, *, subject: LazySpec, **node: Any) -> None:
        super().__init__(**node)
        self.subject = subject

    def collect(self) -> Iterator[pytest.Item]:
        """First whether the model can be driven at all, then each check."""
        from stackwise.checks.check import select_checks

        yield ModelItem.from_parent(self, name="model", check=None)
        for check in select_checks():
            yield ModelItem.from_parent(self, name=check.name, check=BoundCheck(check))


class ModelItem(pytest.Item):
    """One check of a model that `--stackwise-model` names; without a check, whether it can be driven."""

    def __init__(self, *, check: BoundCheck | None, **node: Any) -> None:
        super().__init__(**node)
        self.check = check

    @property
    def collector(self) -> ModelCollector:
        """The model's collector."""
        assert isinstance(self.parent, ModelCollector)
        return self.parent

    def runtest(self) -> None:
        """Infer once a process; a model that cannot be driven fails one test and skips the others."""
        try:
            spec = self.collector.subject.get()
        except Exception as error:
            siblings = (item for item in self.session.items if item.parent is self.parent)
            if self.check is None or not any(item.name == "model" for item in siblings):
                raise
            pytest.skip(f"the model cannot be driven: {type(error).__name__}; see ::model")
        if self.check is None:
            self.add_report_section("call", "stackwise", spec.notes)
        else:
            self.check(spec)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The result's own text; a traceback only for what nobody expected."""
        from stackwise.inference import InferenceError

        if isinstance(excinfo.value, CheckFailedError | InferenceError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def _traceback_filter(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
        """Leave out the frames of pytest and of this file."""
        inside = excinfo.traceback.cut(path=__file__)
        return inside.cut(excludepath=Path(__file__)) if len(inside) else inside

    def reportinfo(self) -> tuple[str, int, str]:
        """Where the test is, for the terminal."""
        return self.collector.name, 0, f"{self.collector.name}::{self.name}"


def require_targets(config: pytest.Config) -> None:
    """Stop the run where `--stackwise-model` names what cannot be imported.

    Raises:
        pytest.UsageError: naming it.
    """
    for target, folder in options.model_targets(config).items():
        _load(target, folder)


def zero_code_items(session: pytest.Session, config: pytest.Config) -> list[pytest.Item]:
    """The checks of every model that the command line or the configuration file names.

    Raises:
        pytest.UsageError: there is no such module or name.
    """
    targets = options.model_targets(config)
    factories = [target.rpartition(":")[2] for target in targets]
    items: list[pytest.Item] = []
    for (target, folder), factory in zip(targets.items(), factories, strict=True):
        name = f"stackwise[{target}]"
        collector = ModelCollector.from_parent(
            session,
            name=name,
            nodeid=name,
            subject=LazySpec(_load(target, folder), target if factories.count(factory) > 1 else None),
        )
        items += [node for node in collector.collect() if isinstance(node, pytest.Item)]
    return items


def _load(target: str, folder: Path) -> Any:
    from stackwise.factory import load_factory

    try:
        return load_factory(target, search=folder)
    except ValueError as error:
        raise pytest.UsageError(f"--stackwise-model: {error}") from None
