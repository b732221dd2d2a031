"""Check and CheckResult: one question asked of a model, and its answer as data.

A family of checks is one file in this folder; `@check` enters each function in the registry, and
the registry reads the folder, so that a new family is one new file and touches nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stackwise.argument import require
from stackwise.seed import seeded
from stackwise.spec import ModelSpec

__all__ = [
    "Check",
    "CheckResult",
    "Status",
    "Subject",
    "against_expectation",
    "check",
    "check_model",
    "known_checks",
    "refuse_unmatched",
    "select_checks",
]

Status = Literal["passed", "failed", "warned", "not applicable", "expected failure", "error"]


@dataclass(frozen=True)
class CheckResult:
    """The answer of one check.

    Attributes:
        check: the check's name.
        model: the model's name.
        status: "passed", "failed", "warned" (unusual, to be looked at), "not applicable",
            "expected failure" (failed, as was declared), "error" (the check could not finish).
        value: what was measured, or None.
        limit: the largest value that passes, or None.
        where: the place: a position, a parameter, a module.
        meaning: what the value says, in one sentence.
        advice: the likely cause and what to look at.
    """

    check: str
    model: str
    status: Status
    value: float | None = None
    limit: float | None = None
    where: str = ""
    meaning: str = ""
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing needs to be mended: all but "failed" and "error"."""
        return self.status not in ("failed", "error")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.check} {self.status}"]
        if self.value is not None:
            lines[0] += f": measured {self.value:.3g}"
            lines[0] += f", limit {self.limit:.3g}" if self.limit is not None else ""
        lines += [f"  {text}" for text in (self.where, self.meaning, self.advice) if text]
        return "\n".join(lines)


@dataclass(frozen=True)
class Subject:
    """A model under examination: a spec, on a device, under a seed.

    Attributes:
        spec: the model.
        device: where it runs.
        seed: of weights, inputs and dropout.
    """

    spec: ModelSpec
    device: torch.device
    seed: int = 0

    def model(
        self, *, train: bool = False, dtype: torch.dtype | None = None, fill_zeros: bool = False
    ) -> nn.Module:
        """A fresh model.

        Args:
            train: in train mode, else in eval mode.
            dtype: of floating-point weights and buffers; complex ones get the complex dtype as wide.
            fill_zeros: make the weights random that `starts_at_zero` finds.
        """
        model = self.spec.create(self.device, self.seed)
        if fill_zeros:
            generator = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                for p in _zero_weights(model):
                    p.copy_(0.02 * torch.randn(p.shape, generator=generator))
        if dtype is not None:
            model._apply(lambda tensor: _as_wide_as(tensor, dtype))  # type: ignore[no-untyped-call]
        return model.train(train)

    @property
    def starts_at_zero(self) -> bool:
        """Whether a weight (not a bias) is all zero, as in branches and heads that start switched off.

        What is behind it cannot be seen until it has trained, or has been made random.
        """
        return bool(_zero_weights(self.spec.create(self.device, self.seed)))

    def inputs(self, batch_size: int, seq_len: int | None = None, *, shift: int = 0) -> Tensor:
        """A batch; `shift` gives another one."""
        seq_len = self.seq_len if seq_len is None else seq_len
        return self.spec.batch(batch_size, seq_len, device=self.device, seed=self.seed + 7919 * shift)

    @property
    def seq_len(self) -> int:
        """T of the checks, within what the model takes."""
        return min(self.spec.seq_len, self.spec.max_length or self.spec.seq_len)

    @torch.no_grad()
    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The output without gradients, with every random choice (dropout) the same at each call.

        Buffers that the call updates (running statistics) are put back, so that calls are comparable.
        """
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with self.fixed_randomness():
            output = self.spec.logits(model, inputs.clone())
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])
        return output

    def fixed_randomness(self) -> AbstractContextManager[None]:
        """Inside, random choices start from the seed; outside, nothing is changed."""
        return seeded(self.seed, self.device)

    def passed(self, value: float | None = None, limit: float | None = None, **text: str) -> CheckResult:
        """A result that is as it should be."""
        return CheckResult("", self.spec.name, "passed", value, limit, **text)

    def failed(self, value: float | None = None, limit: float | None = None, **text: str) -> CheckResult:
        """A result that shows a defect."""
        return CheckResult("", self.spec.name, "failed", value, limit, **text)

    def warned(self, value: float | None = None, limit: float | None = None, **text: str) -> CheckResult:
        """A result that is unusual, but not wrong for certain."""
        return CheckResult("", self.spec.name, "warned", value, limit, **text)

    def not_applicable(self, reason: str) -> CheckResult:
        """The question makes no sense for this model."""
        return CheckResult("", self.spec.name, "not applicable", meaning=reason)


@dataclass(frozen=True)
class Check:
    """A named question.

    Attributes:
        name: in test ids, reports and selections.
        family: the file it lives in.
        summary: the question, in one line.
        function: asks it.
    """

    name: str
    family: str
    summary: str
    function: Callable[[Subject], CheckResult]

    def run(self, spec: ModelSpec, *, device: torch.device | str = "cpu", seed: int = 0) -> CheckResult:
        """Ask. An exception of the model or of the check comes out as it is."""
        result = self.function(Subject(spec, torch.device(device), seed))
        return replace(result, check=self.name)


_registry: dict[str, Check] = {}


def check(function: Callable[[Subject], CheckResult]) -> Callable[[Subject], CheckResult]:
    """Enter `function` in the registry under its own name; its docstring's first line is the question."""
    name = function.__name__
    assert name not in _registry, name
    assert function.__doc__, name
    family = function.__module__.rpartition(".")[2]
    _registry[name] = Check(name, family, function.__doc__.strip().splitlines()[0], function)
    return function


@cache
def known_checks() -> Mapping[str, Check]:
    """Every check by name, determinism first: where it fails, no comparison means much."""
    import stackwise.checks as package

    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return dict(sorted(_registry.items(), key=lambda item: (item[1].family != "determinism", item[0])))


def select_checks(names: Iterable[str] | None = None) -> list[Check]:
    """The checks or families of these names, in registry order; None: all.

    Raises:
        ValueError: a name that is neither a check nor a family.
    """
    known = known_checks()
    if names is None:
        return list(known.values())
    wanted = set(names)
    require(bool(wanted), "checks", [], "names of checks or families, or None for all")
    unknown = wanted - known.keys() - {c.family for c in known.values()}
    if unknown:
        raise ValueError(f"checks: unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return [c for c in known.values() if c.name in wanted or c.family in wanted]


def check_model(
    model: Any,
    *,
    checks: Iterable[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[CheckResult]:
    """Ask a model every question, and go on where one of them breaks.

    Args:
        model: anything that `ModelSpec.of` understands.
        checks: names of checks or families; None: all.
        expected_failures: check name -> reason. Strict: such a check must fail.
        device: where to run.
        seed: of weights, inputs and dropout.

    Raises:
        ValueError: an unknown check, or an expected failure of a check that is not asked.
    """
    spec = ModelSpec.of(model)
    selected = select_checks(checks)
    expected = dict(expected_failures or {})
    refuse_unmatched(expected, [c.name for c in selected])
    results = []
    for one in selected:
        try:
            result = one.run(spec, device=device, seed=seed)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            result = CheckResult(
                one.name,
                spec.name,
                "error",
                where=f"{place.filename}:{place.lineno}",
                meaning=f"{type(error).__name__}: {error}",
            )
        results.append(against_expectation(result, expected.get(one.name)))
    return results


def refuse_unmatched(expected: Mapping[str, str], names: Iterable[str]) -> None:
    """Refuse expected failures of checks other than `names`.

    Raises:
        ValueError: naming them.
    """
    names = list(names)
    unmatched = sorted(set(expected) - set(names))
    if unmatched:
        raise ValueError(f"expected_failures: no check {', '.join(unmatched)}; asked: {', '.join(names)}")


def against_expectation(result: CheckResult, reason: str | None) -> CheckResult:
    """The result where a failure was declared with `reason`: a failure is right, all else is not."""
    if reason is None:
        return result
    if result.status == "failed":
        return replace(result, status="expected failure", advice=f"declared: {reason}")
    if result.status == "error":
        return result
    return replace(
        result,
        status="failed",
        meaning=f"declared as an expected failure, but {result.status}. {result.meaning}".strip(),
        advice=f"remove the declaration ({reason})",
    )


def _zero_weights(model: nn.Module) -> list[nn.Parameter]:
    named = model.named_parameters()
    return [p for name, p in named if p.is_floating_point() and not name.endswith("bias") and not p.any()]


def _as_wide_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
