"""Check: the command that checks a model or a training loop."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from stackwise.cli.hidden_output import HiddenOutput, hidden_output
from stackwise.subject.factory import TRUST
from stackwise.support.environment import environment_variable
from stackwise.support.progress import ProgressLine

if TYPE_CHECKING:
    import torch

    from stackwise.checks import CheckResult
    from stackwise.report import Report
    from stackwise.subject.spec import ModelSpec
    from stackwise.subject.trainer_spec import TrainerSpec

__all__ = ["Check"]

_NOTHING_CHECKED = 5  # pytest's exit code for a run without tests


@dataclass(frozen=True)
class Check:
    """Check a model or a training loop.

    Exit codes: 0: no check failed; 1: a check failed or crashed, or warned with --strict; 2: wrong
    arguments; 5: no check applies.
    """

    subject: tyro.conf.Positional[str]
    """MODULE:FACTORY, or path/to/file.py:FACTORY; FACTORY() returns an nn.Module, a ModelSpec, a TrainerSpec,
    or an object with model, optimizer and step(batch). Or hf:NAME_OR_FOLDER: a transformers model with random
    weights; hf-tiny:NAME_OR_FOLDER: the same architecture with two to four layers and small widths."""
    checks: tuple[str, ...] = ()
    """Checks or families to run, separated by spaces or commas; default: the whole suite."""
    suite: Literal["fast", "full"] = "fast"
    """fast: takes seconds for a tiny model; full: all checks."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of weights, inputs and dropout."""
    causal: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The model is causal: no output depends on later inputs. Without both flags: inferred from the model."""
    no_causal: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The model is not causal, for example an encoder."""
    reference: str | None = None
    """MODULE:FACTORY of a model with the same results, whose parameter names are equal except for a prefix: a
    simple implementation or an earlier version (git worktree add ../before HEAD; --reference
    ../before/model.py:build)."""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Treat warnings as failures."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(aliases=["-q"])] = False
    """Print only failures, warnings and the line with the verdict and all counts."""
    verbose: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(aliases=["-v"])] = False
    """Also print passed checks, reasons of checks that do not apply, and the output of the model and its
    libraries."""
    trust_remote_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Allow hf: models to run code from the Hugging Face Hub."""
    report: Path | None = None
    """Write the results to this file: .md, .json, .html, or all three if the name has no suffix."""

    def run(self) -> int:
        """Run the checks, print the findings and the verdict, and return the exit code."""
        from stackwise.report import report_files
        from stackwise.support.device import resolve_device

        files = report_files(self.report) if self.report else []
        names = self._names()
        device = resolve_device(self.device)
        spec, results, hidden = self._check(names, device)
        if not self.quiet:
            print(f"{spec.name}: {spec.notes}".removesuffix(": "))
            if hidden.n_lines:
                print(_hidden_text(hidden))
        report = self._report(results, device)
        *lines, verdict = report.lines(self.verbose - self.quiet)
        for line in lines:
            print(line)
        # After the lines of the terminal, which begin with the notes.
        report.subjects = {spec.name: spec.notes} if spec.notes else {}
        try:
            for file in files:
                report.write(file)
        except OSError:
            print(verdict)
            raise
        print(f"{verdict}, report: {', '.join(map(str, files))}" if files else verdict)
        return {"FAIL": 1, "EMPTY": _NOTHING_CHECKED}.get(report.verdict, 0)

    def _names(self) -> list[str] | None:
        """Return the requested checks. Raise ValueError for unknown checks, and options that conflict."""
        from stackwise.checks import refuse_unknown

        names = [name for some in self.checks for name in some.split(",") if name] or None
        if names is not None:
            refuse_unknown(names)
        if self.causal and self.no_causal:
            raise ValueError("got --causal and --no-causal; allowed: one of them")
        if self.quiet and self.verbose:
            raise ValueError("got --quiet and --verbose; allowed: one of them")
        return names

    def _check(
        self, names: list[str] | None, device: torch.device
    ) -> tuple[ModelSpec | TrainerSpec, list[CheckResult], HiddenOutput]:
        """Return the subject, the results of its checks, and the output that was hidden meanwhile."""
        from stackwise.checks import check_model, check_trainer
        from stackwise.checks.output import shown_once
        from stackwise.subject.factory import load_factory
        from stackwise.subject.trainer_spec import TrainerSpec

        declared: dict[str, Any] = {"causal": self.causal} if self.causal or self.no_causal else {}
        hidden = HiddenOutput(sys.stderr)
        try:
            with contextlib.ExitStack() as block:
                if self.trust_remote_code:
                    block.enter_context(environment_variable(TRUST, "1"))
                if self.verbose:
                    block.enter_context(shown_once())
                else:
                    hidden = block.enter_context(hidden_output())
                progress = ProgressLine("checking", stream=None if self.verbose else hidden.terminal)
                block.callback(progress.close)
                if self.reference is not None:
                    declared["reference"] = load_factory(self.reference, search=Path.cwd())
                spec = _describe(load_factory(self.subject, search=Path.cwd()), self.subject, declared)
                check: Any = check_trainer if isinstance(spec, TrainerSpec) else check_model
                results = check(
                    spec,
                    checks=names,
                    suite=self.suite,
                    device=device,
                    seed=self.seed,
                    strict=self.strict,
                    on_progress=progress.update,
                )
        except (ValueError, OSError, ImportError):
            if hidden.n_lines:
                print(_hidden_text(hidden), file=sys.stderr)
            raise
        return spec, results, hidden

    def _report(self, results: list[CheckResult], device: torch.device) -> Report:
        from stackwise.report import Report
        from stackwise.support.device import fingerprint

        failed = [f"{result.model}::{result.check}" for result in results if not result.ok]
        report = Report(failed_tests=failed, noun="check", environment=fingerprint(device))
        for result in results:
            report.add("checks", **result.to_dict())
        found = [row for _, row in report.findings()]
        report.commands = {report.name_of(row): self._command(row["check"], str(device)) for row in found}
        return report

    def _command(self, check: str, device: str) -> str:
        """Return the shell command that repeats one check."""
        words = ["stackwise", "check", self.subject, "--checks", check]
        words += ["--suite", self.suite] if self.suite != "fast" else []
        words += ["--seed", str(self.seed), "--device", device]
        words += ["--causal"] * self.causal + ["--no-causal"] * self.no_causal
        words += ["--reference", self.reference] if self.reference is not None else []
        words += ["--strict"] * self.strict + ["--trust-remote-code"] * self.trust_remote_code
        return shlex.join(words)


def _hidden_text(hidden: HiddenOutput) -> str:
    n_lines = f"{hidden.n_lines:,} line{'' if hidden.n_lines == 1 else 's'}"
    return f"({n_lines} printed by the model and its libraries are hidden; -v shows them)"


def _describe(found: Any, target: str, declared: dict[str, Any]) -> ModelSpec | TrainerSpec:
    """Return the spec of an object or factory: a ModelSpec, or a TrainerSpec for a training step.

    Args:
        found: the object or factory that `target` names. A factory is classified by its return value.
        target: MODULE:FACTORY, for messages and other processes.
        declared: facts about the model that the command line declares.
    """
    from torch import nn

    from stackwise.subject.spec import ModelSpec
    from stackwise.subject.trainer_spec import TrainerSpec

    is_factory = callable(found) and not isinstance(found, nn.Module)
    made: list[Any] = [] if is_factory else [found]

    def remembering() -> Any:
        made.append(found())
        return made[-1]

    asked = functools.wraps(found)(remembering) if is_factory else found
    try:
        spec = ModelSpec.of(asked, **declared)
    except (TypeError, ValueError) as error:
        if not made or not _may_be_a_training_step(made[0], error):
            raise
        try:
            trainer = TrainerSpec.of(found)
        except TypeError as other:
            if not any(hasattr(made[0], name) for name in ("model", "optimizer", "step")):
                wanted = (
                    "an nn.Module, a ModelSpec, a TrainerSpec, or an object with model, optimizer and step"
                )
                raise TypeError(f"{target}: got {type(made[0]).__name__}; wanted {wanted}") from None
            raise TypeError(f"{error}; nor is it a training step: {other}") from None
        return _of_training(trainer, target, declared)
    if _may_be_a_training_step(made[0], None):
        return _of_training(TrainerSpec.of(found), target, declared)
    # Without the wrapper, which stores results: the factory is called for each new model.
    return replace(spec, build=found) if spec.build is asked else spec


def _may_be_a_training_step(made: Any, error: Exception | None) -> bool:
    """Return True if an object may be a training step.

    Args:
        made: the object that the factory returned.
        error: exception of `ModelSpec.of` for this object, or None.
    """
    from torch import nn

    from stackwise.subject.lightning_run import is_lightning_module
    from stackwise.subject.spec import ModelSpec

    if is_lightning_module(made):  # it may have no forward
        return True
    return isinstance(error, TypeError) and not isinstance(made, nn.Module | ModelSpec)


def _of_training(spec: TrainerSpec, target: str, declared: dict[str, Any]) -> TrainerSpec:
    if declared:
        said = "--reference" if "reference" in declared else "--causal or --no-causal"
        raise ValueError(f"{spec.name}: got {said}, and is a training step; wanted a model")
    return spec if spec.factory else replace(spec, factory=_absolute(target))


def _absolute(target: str) -> str:
    """Return the target with the absolute path of its file, for a process with another working directory."""
    module, _, factory = target.rpartition(":")
    return f"{Path.cwd() / module}:{factory}" if module.endswith(".py") else target
