"""Checks as tests: `parametrize_with_checks` in a test file, or `--stackwise-model` without a test file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytest

from pytest_stackwise import options, records
from pytest_stackwise.subject import BadFactoryError, LazySpec

if TYPE_CHECKING:
    from stackwise.checks import Check, CheckResult
    from stackwise.checks.check import Suite

__all__ = ["CheckFailedError", "parametrize_with_checks", "zero_code_items"]

Asks = Literal["model", "trainer"]
Reasons = Mapping[str, str] | Callable[[Any], Mapping[str, str]]


class CheckFailedError(AssertionError):
    """Failure of a check. The message is the text of the result: values, their locations and advice.

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
    suite: Suite | None = None,
    expected_failures: Reasons | None = None,
    accepted_warnings: Reasons | None = None,
    strict: bool = False,
) -> pytest.MarkDecorator:
    """Make one test for each check of each model or training step.

        @parametrize_with_checks([spec])
        def test_model(spec, check):
            check(spec)

    A model is built when its first check runs, not during collection. `--stackwise-checks` narrows the
    selection of checks. A check that warns passes, with a `StackwiseWarning`.

    Args:
        models: ModelSpecs, anything that `ModelSpec.of` understands, or TrainerSpecs.
        checks: names of checks or families. None: all checks of the suite.
        suite: "fast" or "full". None: the suite of `--stackwise-suite`.
        expected_failures: check name -> reason, or a function of the spec that returns such a mapping. Such
            a check must fail, and is then reported as xfailed.
        accepted_warnings: the same for checks that warn. Such a check must warn, and then passes without a
            warning.
        strict: fail the test for a warning that is not accepted. False: only with `--stackwise-strict`.

    Raises:
        TypeError: `models` is one model instead of several.
        ValueError: an unknown check, or a declaration that matches none of the tests.
    """
    from stackwise.checks.run import Declared

    if not isinstance(models, Iterable) or isinstance(models, str) or hasattr(models, "named_modules"):
        raise TypeError(f"models: got {type(models).__name__}; wanted a list of models")
    declared = (expected_failures or {}, accepted_warnings or {})
    questions = Questions(models, None if checks is None else tuple(checks), suite, declared, strict)
    failures, accepted = (each if isinstance(each, Mapping) else {} for each in declared)
    Declared(failures, accepted).refuse_unmatched(questions.may_be_asked)
    return pytest.mark.parametrize(("spec", "check"), questions)


class Questions(Sequence[Any]):
    """Parameter sets of `parametrize_with_checks`. They contain the whole suite before `choose` is called.

    The arguments are those of `parametrize_with_checks`. `declared` is the pair of expected failures and
    accepted warnings.
    """

    def __init__(
        self,
        models: Iterable[Any],
        names: tuple[str, ...] | None,
        suite: Suite | None,
        declared: tuple[Reasons, Reasons],
        strict: bool,
    ) -> None:
        self.subjects: list[LazySpec] = []
        numbers: Counter[str] = Counter()
        for model in models:
            subject = LazySpec(model)
            numbers[subject.name] += 1
            if (number := numbers[subject.name]) > 1:  # reports identify models by name
                subject = LazySpec(model, name=f"{subject.name}_{number}")
            self.subjects.append(subject)
        self.names, self.suite, self.declared, self.strict = names, suite, declared, strict
        kinds = {subject.asks for subject in self.subjects} or set(get_args(Asks))
        _refuse_unknown(names, kinds)
        # A declaration may be for a check that this run, or its suite, does not select.
        self.may_be_asked = [c.name for kind in kinds for c in _select(names, "full", kind)]
        self._parameters = self._of(suite or "fast", None)

    def choose(self, config: pytest.Config) -> None:
        """Select the checks that the options of the run request."""
        require_names(config)
        self._parameters = self._of(self.suite or options.suite(config), options.check_names(config))

    def _of(self, suite: Suite, narrowed: tuple[str, ...] | None) -> list[Any]:
        parameters = []
        for subject in self.subjects:
            for check in _select(narrowed if self.names is None else self.names, suite, subject.asks):
                if narrowed is None or not {check.name, check.family}.isdisjoint(narrowed):
                    bound = BoundCheck(check, self.declared, self.may_be_asked, strict=self.strict)
                    parameters.append(pytest.param(subject, bound, id=f"{subject.name}-{check.name}"))
        return parameters

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, index: Any) -> Any:
        return self._parameters[index]


def choose(metafunc: pytest.Metafunc) -> None:
    """Select the checks of a test that the options of the run request."""
    for marker in metafunc.definition.iter_markers("parametrize"):
        for values in (*marker.args[1:2], marker.kwargs.get("argvalues")):
            if isinstance(values, Questions):
                values.choose(metafunc.config)


def _select(names: Iterable[str] | None, suite: Suite, asks: Asks) -> list[Check]:
    """Return the checks of a suite with these names or families. Names of another kind are ignored."""
    from stackwise.checks.check import select_checks

    if names is None:
        return select_checks(suite=suite, asks=asks)
    mine = [name for name in names if name in _names(asks)]
    return select_checks(mine, suite=suite, asks=asks) if mine else []


def _names(asks: Asks) -> dict[str, None]:
    """Return the names of all checks and families, and the earlier names of checks."""
    from stackwise.checks.check import OTHER_NAMES, select_checks

    checks = select_checks(suite="full", asks=asks)
    others = [old for old, new in OTHER_NAMES.items() if any(c.name == new for c in checks)]
    return dict.fromkeys([*(c.name for c in checks), *(c.family for c in checks), *others])


def _refuse_unknown(names: Iterable[str] | None, kinds: Iterable[Asks]) -> None:
    """Raise an error for names that are neither checks nor families. None means all checks.

    Raises:
        ValueError: unknown names, which the message lists, or an empty list of names.
    """
    if names is None:
        return
    known = dict.fromkeys(name for kind in sorted(kinds) for name in _names(kind))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        shown = ", ".join(unknown) or "none"
        raise ValueError(f"checks: unknown {shown}; known checks and families: {', '.join(known)}")


class BoundCheck:
    """Callable that runs a check in a test, with the device and the seed of the run.

    Args:
        check: the check.
        declared: expected failures and accepted warnings, as in `parametrize_with_checks`.
        asked: names of all checks that may be selected. A declaration for another check is refused.
        strict: warnings fail, also without --stackwise-strict.
    """

    def __init__(
        self,
        check: Check,
        declared: tuple[Reasons, Reasons] = ({}, {}),
        asked: Iterable[str] = (),
        *,
        strict: bool = False,
    ) -> None:
        self.check, self.declared, self.asked, self.strict = check, declared, tuple(asked), strict

    def __call__(self, spec: Any) -> CheckResult:
        """Run the check and return its result. Skip the test if the check does not apply.

        If the check warns, the result is returned, and the plugin issues the warning at the end of the test.

        Raises:
            CheckFailedError: the check failed.
        """
        __tracebackhide__ = True
        from stackwise.checks.output import shown_once
        from stackwise.checks.run import Declared, broken_off
        from stackwise.subject.spec import ModelSpec
        from stackwise.subject.trainer_spec import TrainerSpec

        item = records.current_item()
        if item is None:
            raise RuntimeError("check: called outside of a test, or without the stackwise plugin")
        records.pay(item, "check")
        spec = ModelSpec.of(spec) if self.check.asks == "model" else TrainerSpec.of(spec)
        failures, accepted = (each(spec) if callable(each) else each for each in self.declared)
        declared = Declared(failures, accepted, self.strict or options.strict(item.config))
        declared.refuse_unmatched(self.asked)
        device, seed = options.device_name(item.config), options.seed(item.config)
        try:
            with shown_once():
                result = self.check.run(spec, device=device, seed=seed)
        except Exception as error:
            broken = broken_off(self.check.name, spec.name, error)
            records.add(item, "checks", {"test": item.nodeid, **broken.to_dict()})
            raise
        result = declared.apply(result)
        notes = {"subject_notes": getattr(spec, "notes", "")}
        records.add(item, "checks", {"test": item.nodeid, **result.to_dict(), **notes})
        for ending, number in (("", result.value), (".limit", result.limit)):
            if number is not None:
                item.user_properties.append((f"stackwise.{result.check}{ending}", number))
        match result.status:
            case "failed":
                raise CheckFailedError(result)
            case "expected failure":
                if item.config.option.runxfail:
                    raise CheckFailedError(result)
                pytest.xfail(failures[result.check])
            case "not applicable":
                pytest.skip(f"{result.check} does not apply: {result.meaning}")
        return result


def hand_over(item: pytest.Item) -> None:
    """Replace the LazySpec among the arguments of a test by its spec, and require a call of the check.

    Raises:
        BadFactoryError: the model cannot be built or called. Later tests of the model are then skipped.
    """
    __tracebackhide__ = True
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    for name, value in tuple(arguments.items()):
        if isinstance(value, LazySpec):
            arguments[name] = _first_or_skipped(value, item)
        elif isinstance(value, BoundCheck):
            records.owe(item, "check", "the test never called its check: check(spec)")


def _first_or_skipped(subject: LazySpec, item: pytest.Item) -> Any:
    __tracebackhide__ = True
    try:
        return subject.get()
    except BadFactoryError as error:
        subject.told_by = subject.told_by or item.nodeid
        if subject.told_by == item.nodeid:
            raise
        pytest.skip(f"the {subject.asks} cannot be driven: {error.kind}; see {subject.told_by}")


class ZeroCodeCollector(pytest.Collector):
    """Parent of the tests of one model or training step that is checked without a test file."""

    def __init__(self, *, subject: LazySpec, **node: Any) -> None:
        super().__init__(**node)
        self.subject = subject

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test that builds the subject, then one test per selected check; none without checks."""
        asks = self.subject.asks
        chosen = _select(options.check_names(self.config), options.suite(self.config), asks)
        if chosen:
            yield ZeroCodeItem.from_parent(self, name=asks, check=None)
        for check in chosen:
            yield ZeroCodeItem.from_parent(self, name=check.name, check=BoundCheck(check))


class ZeroCodeItem(pytest.Item):
    """Test of a model or training step that is checked without a test file.

    Args:
        check: the check to run. None: the test only builds the subject and infers its spec.
    """

    def __init__(self, *, check: BoundCheck | None, **node: Any) -> None:
        super().__init__(**node)
        self.check = check

    @property
    def collector(self) -> ZeroCodeCollector:
        """Collector of the subject."""
        assert isinstance(self.parent, ZeroCodeCollector)
        return self.parent

    def runtest(self) -> None:
        """Run the check. A subject that cannot be built or called fails one test, and the others are skipped.

        The spec of the subject is inferred once per process.
        """
        subject = self.collector.subject
        try:
            spec = subject.get()
        except BadFactoryError as error:
            siblings = (item for item in self.session.items if item.parent is self.parent)
            if self.check is not None:
                if any(item.name == subject.asks for item in siblings):
                    pytest.skip(f"the {subject.asks} cannot be driven: {error.kind}; see ::{subject.asks}")
                _first_or_skipped(subject, self)
            raise
        if self.check is None:
            self.add_report_section("call", "stackwise", spec.notes)
        else:
            self.check(spec)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the message of a failed check or a bad factory, or the traceback of any other exception."""
        if isinstance(excinfo.value, CheckFailedError | BadFactoryError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def _traceback_filter(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
        """Remove the frames of pytest and of this file."""
        inside = excinfo.traceback.cut(path=__file__)
        return inside.cut(excludepath=Path(__file__)) if len(inside) else inside

    def reportinfo(self) -> tuple[str, int, str]:
        """Return the location and the name of the test, for the terminal."""
        return self.collector.name, 0, f"{self.collector.name}::{self.name}"


def require_targets(config: pytest.Config) -> None:
    """Stop the run if a subject of `--stackwise-model` or `--stackwise-trainer` cannot be imported.

    Raises:
        pytest.UsageError: a subject that cannot be imported, or an unknown name in `--stackwise-checks` on
            the command line. The message names it.
    """
    for asks in get_args(Asks):
        for target, folder in options.targets(config, asks).items():
            _load(target, folder, asks)
    # Names in the configuration file are validated when a model uses them: validation loads torch.
    if config.getoption("stackwise_checks") is not None:
        require_names(config)


def require_names(config: pytest.Config) -> None:
    """Stop the run if `--stackwise-checks` has an unknown name, or none.

    Raises:
        pytest.UsageError: the message lists the unknown names.
    """
    try:
        _refuse_unknown(options.check_names(config), get_args(Asks))
    except ValueError as error:
        raise pytest.UsageError(f"--stackwise-{error}") from None


def zero_code_items(session: pytest.Session, config: pytest.Config) -> list[pytest.Item]:
    """Return the tests of all subjects on the command line and in the configuration file.

    Raises:
        pytest.UsageError: a module, name or check does not exist.
    """
    items: list[pytest.Item] = []
    for asks in get_args(Asks):
        targets = options.targets(config, asks)
        if config.getoption("stackwise_trust_remote_code"):
            from stackwise.subject.factory import TRUST

            os.environ[TRUST] = "1"
        factories = [target.rpartition(":")[2] for target in targets]
        if targets:
            require_names(config)
        for (target, folder), factory in zip(targets.items(), factories, strict=True):
            name = f"stackwise[{target}]"
            subject = LazySpec(
                _load(target, folder, asks),
                name=target if factories.count(factory) > 1 else None,
                asks=asks,
                target=_from_anywhere(target, folder),
            )
            collector = ZeroCodeCollector.from_parent(session, name=name, nodeid=name, subject=subject)
            items += [node for node in collector.collect() if isinstance(node, pytest.Item)]
    return items


def _load(target: str, folder: Path, asks: Asks) -> Any:
    from stackwise.subject.factory import load_factory

    try:
        return load_factory(target, search=folder)
    except (ValueError, ImportError) as error:
        raise pytest.UsageError(f"--stackwise-{asks}: {error}") from None


def _from_anywhere(target: str, folder: Path) -> str:
    """Return the target with the absolute path of its file, for a process with another working directory."""
    module, _, factory = target.rpartition(":")
    is_model_folder = module in ("hf", "hf-tiny") and (folder / factory).is_dir()
    if is_model_folder:
        return f"{module}:{folder / factory}"
    return f"{folder / module}:{factory}" if module.endswith(".py") else target
