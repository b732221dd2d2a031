"""Checks as tests: `parametrize_with_checks` in two lines, `--stackwise-model` in none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
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

    Args:
        models: ModelSpecs, or anything that `ModelSpec.of` understands.
        checks: names of checks or families; None: all.
        expected_failures: check name -> reason, or a function of the spec that gives it. Strict: such
            a check must fail, and is then reported as xfailed.

    Raises:
        ValueError: an unknown check, or an expected failure that matches none of the tests.
    """
    from stackwise.checks.check import refuse_unmatched, select_checks
    from stackwise.spec import ModelSpec

    selected = select_checks(checks)
    parameters = []
    for spec in map(ModelSpec.of, models):
        expected = expected_failures(spec) if callable(expected_failures) else expected_failures or {}
        refuse_unmatched(expected, selected)
        parameters += [
            pytest.param(spec, BoundCheck(check, expected.get(check.name)), id=f"{spec.name}-{check.name}")
            for check in selected
        ]
    return pytest.mark.parametrize(("spec", "check"), parameters)


class BoundCheck:
    """A check as a test calls it: on the run's device and seed, raising where it fails.

    Args:
        check: the question.
        expected: the reason why it is expected to fail, or None.
    """

    def __init__(self, check: Check, expected: str | None = None) -> None:
        self.check, self.expected = check, expected

    def __call__(self, spec: Any) -> CheckResult:
        """Ask; return the result where the model is sound, skip where the question does not apply.

        Raises:
            CheckFailedError: the check failed.
        """
        __tracebackhide__ = True
        from stackwise.checks.check import against_expectation
        from stackwise.spec import ModelSpec

        item = records.current_item()
        assert item is not None, "a check runs inside a test"
        result = self.check.run(
            ModelSpec.of(spec), device=options.device_name(item.config), seed=options.seed(item.config)
        )
        result = against_expectation(result, self.expected)
        records.add(item, "checks", result.to_dict())
        if result.value is not None:
            item.user_properties.append((f"stackwise.{result.check}", result.value))
        match result.status:
            case "failed":
                raise CheckFailedError(result)
            case "expected failure":
                pytest.xfail(self.expected or "")
            case "not applicable":
                pytest.skip(f"{result.check} does not apply: {result.meaning}")
        return result


class ModelCollector(pytest.Collector):
    """The parent of a model's zero-code checks."""

    def collect(self) -> Iterator[pytest.Item]:
        """First whether the model can be driven at all, then each check."""
        from stackwise.checks import known_checks

        yield ModelItem.from_parent(self, name="model", check=None)
        for check in known_checks().values():
            yield ModelItem.from_parent(self, name=check.name, check=BoundCheck(check))


class ModelItem(pytest.Item):
    """One check of a model that `--stackwise-model` names; without a check, whether it can be built."""

    def __init__(self, *, check: BoundCheck | None, **node: Any) -> None:
        super().__init__(**node)
        self.check = check

    def runtest(self) -> None:
        """Build and infer once a process; a model that cannot be built fails one test and skips the rest."""
        assert self.parent is not None
        try:
            spec = _spec_of(self.parent.name, self.config)
        except Exception as error:
            if self.check is None:
                raise
            pytest.skip(f"the model cannot be driven: {type(error).__name__}; see ::model")
        if self.check is None:
            self.add_report_section("call", "stackwise", spec.notes)
        else:
            self.check(spec)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The result's own text; a traceback only for what nobody expected."""
        from stackwise.spec import InferenceError

        if isinstance(excinfo.value, CheckFailedError | InferenceError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where the test is, for the terminal."""
        assert self.parent is not None
        return self.parent.name, None, f"{self.parent.name}::{self.name}"


def zero_code_items(session: pytest.Session, config: pytest.Config) -> list[pytest.Item]:
    """The checks of every model that the command line or the configuration file names.

    Raises:
        pytest.UsageError: there is no such module or name.
    """
    items: list[pytest.Item] = []
    for target in options.model_targets(config):
        _load(target, config)
        collector = ModelCollector.from_parent(
            session, name=f"stackwise[{target}]", nodeid=f"stackwise[{target}]"
        )
        items += [node for node in collector.collect() if isinstance(node, pytest.Item)]
    return items


@cache
def _load(target: str, config: pytest.Config) -> Any:
    from stackwise.spec import load_factory

    try:
        return load_factory(target, search=config.invocation_params.dir)
    except ValueError as error:
        raise pytest.UsageError(f"--stackwise-model: {error}") from None


@cache
def _spec_of(node: str, config: pytest.Config) -> ModelSpec:
    from stackwise.spec import ModelSpec

    target = node.removeprefix("stackwise[").removesuffix("]")
    return ModelSpec.of(_load(target, config))
