"""Rivals: the same subjects before three other tools, as far as each can be asked from outside.

Nothing of a tool is changed. A tool that is not installed (`make rivals`), or that has no way to be asked,
says so. What it says of a bug counts where it does not say it of the clean twin.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.isolated import isolated
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec

__all__ = ["TOOLS", "ask_all", "versions"]

BATCH, LENGTH = 8, 16


class CannotBeAskedError(Exception):
    """The tool has no question for this subject."""


def ask_all(make: Callable[[], Any], seconds: float = 60.0) -> dict[str, dict[str, Any]]:
    """What each tool says of a subject: names of its checks that failed, or why it could not be asked."""
    said = {}
    for tool, ask in TOOLS.items():
        ended = isolated(functools.partial(_ask, ask, make), seconds=seconds)
        reason = ended.error
        if reason is not None and "CannotBeAskedError: " in reason:
            reason = reason.partition("CannotBeAskedError: ")[2].rpartition(" (")[0]
        # What it said before it was stopped holds.
        said[tool] = {"failed": ended.values, "reason": None if ended.values else reason}
    return said


def _ask(ask: Callable[[Any], Iterator[str]], make: Callable[[], Any]) -> Iterator[str]:
    torch.manual_seed(0)
    yield from ask(make())


class Plain(nn.Module):
    """A model that returns its logits, as these tools want it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.inner = spec.create()
        self.spec = spec

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None and self.spec.masked is not None:
            from stackwise.subject.inference import logits_of

            return logits_of(self.spec.masked(self.inner, input_ids, attention_mask.bool()))
        return self.spec.logits(self.inner, input_ids)


def neural_net_checklist(subject: Any) -> Iterator[str]:
    """Its causal language model suite, check by check, so that the first failure hides no other."""
    tool = _import("neural_net_checklist.torch_diagnostics")
    spec = _token_model(subject)
    ids = spec.batch(min(128, spec.width), LENGTH + 1)  # as many rows as it asks for
    batch = (ids[:, :-1], ids[:, 1:])
    few = (batch[0][:2], batch[1][:2])
    one_hot = (F.one_hot(batch[0], spec.width).float(), batch[1])
    embeddings = [
        name
        for name, module in Plain(spec).named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == spec.width
    ]

    def make() -> nn.Module:
        return Plain(spec)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.reshape(-1, spec.width), targets.reshape(-1))

    def calibrated() -> None:
        tool.assert_balanced_classification_cross_entropy_init_calibrated(
            make(), batch, num_classes=spec.width
        )

    def overfit() -> None:
        model = make()
        # A larger rate and fewer steps than its own, so that it ends.
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        tool.assert_overfit_to_batch(
            model, few, loss_fn=loss, optimizer=optimizer, threshold=1e-1, max_steps=500
        )

    checks: dict[str, Callable[[], Any]] = {
        "loss at init": lambda: tool.assert_balanced_classification_cross_entropy_loss_at_init(
            make(), batch, loss_fn=loss, num_classes=spec.width
        ),
        "calibrated": calibrated,
        "forward batch": lambda: tool.assert_forward_batch_independence(make, batch),
        "forward causal": lambda: tool.assert_forward_causal_property(make, batch),
        "gradients": lambda: tool.assert_non_zero_gradients(make(), batch),
        "input baseline": lambda: tool.assert_input_independent_baseline_worse(make, batch, loss_fn=loss),
        "overfit": overfit,
    }
    if embeddings:
        # Gradients of the input need one-hot vectors, which not every model lets through.
        factory = tool.replace_input_embedding_layer(make, embeddings[0])
        with contextlib.suppress(Exception):
            factory()(one_hot[0])
            checks["backward batch"] = lambda: tool.assert_backward_batch_independence(factory, one_hot)
            checks["backward causal"] = lambda: tool.assert_backward_causal_property(factory, one_hot)
    yield from _failing(checks)


def torchtest2(subject: Any) -> Iterator[str]:
    """Its one call, of a model with its own loss where it has one, or of a trainer's model and optimizer."""
    tool = _import("torchtest2")
    if isinstance(subject, TrainerSpec):
        run = subject.create()
        batch = subject.batch()
        ids = batch["input_ids"] if isinstance(batch, dict) and "input_ids" in batch else None
        if ids is None or "labels" not in inspect.signature(run.model.forward).parameters:
            raise CannotBeAskedError("needs a model that takes ids and labels")

        report = tool.check_model(_Logits(run.model), ids, ids, loss_fn=_next_token, optimizer=run.optimizer)
    else:
        spec = _token_model(subject)
        ids = spec.batch(BATCH, LENGTH)
        model = Plain(spec)
        report = tool.check_model(
            model, ids, ids, loss_fn=_next_token, optimizer=spec.optimizer(model.parameters())
        )
    for result in report:
        if result.status.name == "FAIL":
            yield result.name


class _Logits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Tensor:
        from stackwise.subject.inference import logits_of

        return logits_of(self.inner(input_ids))


def _next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def pytest_torch(subject: Any) -> Iterator[str]:
    """What its zero-code run asks of a model, and its assertions about optimizers and accumulation."""
    tool = _import("pytest_torch")
    plans = _import("pytest_torch.zero_code")
    if isinstance(subject, TrainerSpec):
        run = subject.create()
        training = _import("pytest_torch.training_loop")
        yield from _failing(
            {"optimizer coverage": lambda: training.assert_optimizer_coverage(run.model, run.optimizer)}
        )
        return
    spec = _token_model(subject)
    model = Plain(spec).eval()
    inputs = plans.text_plan(spec.width, LENGTH).make(torch.Generator().manual_seed(0))
    if spec.masked is None:
        del inputs["attention_mask"]
    tolerance = {"rtol": 1e-4, "atol": 1e-4}

    def mean(output: Any) -> Tensor:
        return output.float().mean()

    checks = {
        "contract": lambda: tool.check_inference_contract(model, inputs, **tolerance),
        "layout": lambda: tool.assert_layout_invariant(model, inputs, **tolerance),
        "checkpoint": lambda: tool.assert_checkpoint_roundtrip(
            lambda: Plain(spec), inputs, model=model, **tolerance
        ),
        "gradients": lambda: tool.assert_gradients_finite(copy.deepcopy(model).train(), inputs, mean),
    }
    if spec.masked is not None:
        checks["padding"] = lambda: tool.assert_padding_invariant(model, inputs, **tolerance)
        checks["mask"] = lambda: tool.assert_mask_invariant(model, inputs, vocab_size=spec.width, **tolerance)
    yield from _failing(checks)


TOOLS: dict[str, Callable[[Any], Iterator[str]]] = {
    "neural-net-checklist": neural_net_checklist,
    "torchtest2": torchtest2,
    "pytest-torch": pytest_torch,
}


def versions() -> dict[str, str]:
    """Of the tools."""
    found = {}
    for tool in TOOLS:
        try:
            found[tool] = importlib.metadata.version(tool)
        except importlib.metadata.PackageNotFoundError:
            found[tool] = "not installed"
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotBeAskedError(f"not installed: {error}") from None


def _token_model(subject: Any) -> ModelSpec:
    if isinstance(subject, TrainerSpec):
        raise CannotBeAskedError("has no question about a training step")
    spec = ModelSpec.of(subject)
    if spec.inputs != "tokens":
        raise CannotBeAskedError("needs token ids")
    return spec


def _failing(checks: dict[str, Callable[[], Any]]) -> Iterator[str]:
    for name, check in checks.items():
        try:
            check()
        except AssertionError:
            yield name
        except Exception as error:
            yield f"{name} ({type(error).__name__})"
