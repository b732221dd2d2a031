"""Injection: inserts faults into a training that runs in a block, by hand or by a trainer of any library.

A step begins at the first forward pass with gradients. It ends after the update or, if no update follows a
backward pass, when its gradients are cleared. The hooks and patches of a step are removed at its end.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from stackwise.stability.faults.fault import Acted, Anatomy, Fault, states_of, watched
from stackwise.stability.faults.subject import IN_PLACE, Subject, is_compiled
from stackwise.stability.recomputation import is_recomputation, is_reference

__all__ = ["Injection", "TargetNotReachedError", "broken"]

Batch = Any
Wrap = Callable[[Any], Any]


class TargetNotReachedError(ValueError):
    """Error for a fault without an action, because the training did not reach its target."""


@contextmanager
def broken(
    subject: Any, faults: Iterable[Fault], *, journal: str | os.PathLike[str] | None = None
) -> Iterator[Injection]:
    """Inject faults into the training that runs in the block.

        with broken((model, optimizer), [NanInjection(step=5)]) as injection:
            for batch in injection.batches(loader):
                ...
        assert injection.fired == [5]

    Args:
        subject: a module; a tuple (module, optimizer); a run of a TrainerSpec; a `transformers.Trainer`; or a
            Lightning module, which a Lightning trainer fits in the block. Steps are counted from 0 at the
            start of the block.
        faults: faults to inject. A fault that lasts beyond the end of the training ends with it.
        journal: file for faults that end the process. Each action is appended and flushed to the disk before
            the fault continues.

    Yields:
        The injection. `injection.fired` lists the steps at which a fault acted.

    Raises:
        ValueError: a fault without a target. It is raised immediately if no part of the model matches.
            Otherwise it is raised at the end of the step in which the fault did not act, or at the end of a
            training that did not reach this step.
        TypeError: `subject` has an unsupported type.
    """
    injection = Injection(subject, faults, journal=journal)
    with injection._installed():
        yield injection
    injection._check_all()


class Injection:
    """Faults in a training, and the record of their actions. Created by `broken`.

    Attributes:
        step: number of the current step, or of the next step between two steps.
        faults: faults that were passed to `broken`.
        acted: tuples (step, fault with the full name of its target), in the order of the actions.
    """

    def __init__(
        self, subject: Any, faults: Iterable[Fault], *, journal: str | os.PathLike[str] | None = None
    ) -> None:
        self.faults: Sequence[Fault] = tuple(faults)
        self.step = 0
        self.acted: list[tuple[int, Fault]] = []
        self._subject = Subject.of(subject)
        self._optimizer = self._subject.optimizer
        self._model = self._subject.model
        self._journal = None if journal is None else Path(journal)
        self._possible = Anatomy.possible(self._model)
        for fault in self.faults:
            fault.resolve(self._possible)
        # Modules and parameters used by a step. None until a step was observed.
        self._seen: Anatomy | None = None
        self._watching: set[str] | None = None
        self._with_gradient: set[str] = set()
        self._noted: set[tuple[int, int]] = set()
        self._depth = 0
        self._in_backward = False
        self._waiting = ExitStack()  # closed when a step begins
        self._of_step = ExitStack()  # closed when the step ends
        self._of_saves = ExitStack()  # closed when the next step begins
        self._saving = False
        self._reset()

    @property
    def fired(self) -> list[int]:
        """Steps at which a fault acted."""
        return sorted({step for step, _ in self.acted})

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of `loader`, with the faults of batches and of workers in faulty steps."""
        iterator = iter(loader)
        while True:
            for number, fault in self._active():
                if (self.step, number) not in self._noted:
                    fault.on_loader(iterator, self._noting(number, fault))
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch if self._names_batches else self._broken_batch(batch, "loader")

    def loader(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Return a loader like `loader` that yields broken batches in each iteration."""
        return _Loader(self, loader)

    def end_step(self) -> None:
        """End the step. Needed for a loop that skips an update and does not call `zero_grad`."""
        self._end()

    # Installation of hooks and patches.

    @property
    def _names_batches(self) -> bool:
        """True if batches are broken when a step receives them, instead of when the loader returns them."""
        subject = self._subject
        return not (subject.run is None and subject.trainer is None and subject.lightning is None)

    @property
    def _names_losses(self) -> bool:
        return not (self._subject.trainer is None and self._subject.lightning is None)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._of_saves.close)
            stack.callback(self._of_step.close)
            stack.callback(self._waiting.close)
            for holder, name, wrap in self._patches():
                stack.enter_context(patch.object(holder, name, wrap(getattr(holder, name))))
            handle = register_optimizer_step_post_hook(self._after_update)
            stack.callback(handle.remove)
            if not any(0 in fault.steps for fault in self.faults) and not is_compiled(self._subject.called):
                self._watching = self._of_step.enter_context(watched(self._model))
            self._arm()
            yield

    def _patches(self) -> Iterator[tuple[Any, str, Wrap]]:
        """Yield the attributes that are replaced within the block: holder, name and wrapper."""
        subject = self._subject
        yield torch.autograd, "backward", self._around_backward
        yield nn.Module, "zero_grad", self._around_zero_grad
        yield torch.optim.Optimizer, "zero_grad", self._around_zero_grad
        for given in subject.optimizers:
            if type(given).zero_grad is not torch.optim.Optimizer.zero_grad:
                yield given, "zero_grad", self._around_own_zero_grad
            if not isinstance(given, torch.optim.Optimizer):
                yield given, "step", self._around_own_update
        for module in {id(m): m for m in (subject.called, subject.model)}.values():
            if getattr(module, IN_PLACE, None) is not None:
                yield module, IN_PLACE, self._around_entrance
        if subject.run is not None:
            yield subject.run, "step", self._around_step
            if callable(getattr(subject.run, "accumulate", None)):
                yield subject.run, "accumulate", self._around_accumulate
        if subject.trainer is not None:
            yield subject.trainer, "training_step", partial(self._around_batch, place=1, key="inputs")
            yield subject.trainer, "compute_loss", self._around_loss
        if subject.lightning is not None:
            yield subject.lightning, "training_step", self._around_loss
            yield subject.lightning, "training_step", partial(self._around_batch, place=0, key="batch")

    def _arm(self) -> None:
        """Install hooks that wait for the first forward pass of a faulty step."""
        if not self._active() and not self._saving:
            return

        def enter(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._begin()

        def enter_called(_: nn.Module, args: Any, kwargs: Any) -> Any:
            enter()
            return self._on_input(args, kwargs) if self._begun else None

        called = self._subject.called
        handle = called.register_forward_pre_hook(enter_called, prepend=True, with_kwargs=True)
        self._of_step.callback(handle.remove)
        for module in self._model.modules():
            if module is not called:
                handle = module.register_forward_pre_hook(enter, prepend=True)
                self._waiting.callback(handle.remove)

    # Events of a step.

    def _reset(self) -> None:
        self._begun = False
        self._backwards = 0
        self._now: list[tuple[int, Fault]] | None = None
        self._batch_seam = ""
        self._loss_given = False

    def _active(self) -> list[tuple[int, Fault]]:
        """Return the faults of the current step with their indices, as returned by `Fault.at`."""
        if self._now is None:
            self._now = [
                (number, self._resolved(fault.at(self.step)))
                for number, fault in enumerate(self.faults)
                if self.step in fault.steps and fault.here
            ]
        return self._now

    def _resolved(self, fault: Fault) -> Fault:
        states = None if self._optimizer is None else tuple(states_of(self._model, self._optimizer))
        if self._seen is not None:
            try:
                return fault.resolve(replace(self._seen, states=states))
            except ValueError:  # a module that only some steps call
                pass
        return fault.resolve(replace(self._possible, states=states))

    def _noting(self, number: int, fault: Fault) -> Acted:
        step = self.step  # a save after a step belongs to that step

        def acted() -> None:
            if (step, number) not in self._noted:
                self._noted.add((step, number))
                self.acted.append((step, fault))
                if self._journal is not None:
                    _add_line(self._journal, {"step": step, "number": number, "fault": str(fault)})
            if fault.raises and self.step == step:  # the training continues with another step
                self._end(whole=False)

        return acted

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self._waiting.close()
        self._of_saves.close()
        self._saving = False
        active, step = self._active(), self.step
        if not active:
            return
        try:
            for number, fault in active:
                noting = self._noting(number, fault)
                if fault.breaks == "storage":
                    self._of_saves.enter_context(fault.around_saves(noting))
                    self._saving = True
                fault.before_step(self._model, self._optimizer, noting)
                self._of_step.enter_context(fault.around_forward(self._model, noting))
            if is_compiled(self._subject.called):  # compiled code ignores hooks
                stance: Any = torch.compiler.set_stance("force_eager")
                self._of_step.enter_context(stance)
            if not self._names_losses:
                handle = self._subject.called.register_forward_hook(self._on_output)
                self._of_step.callback(handle.remove)
        except BaseException:
            if self.step == step:
                self._end(whole=False)
            raise

    def _end(self, *, whole: bool = True) -> None:
        if self._watching is not None and self._backwards:
            self._seen = Anatomy.seen(self._model, self._watching, self._with_gradient)
        self._watching = None
        missed = [
            f for number, f in self._active() if (self.step, number) not in self._noted and not f.breaks
        ]
        hint = self._hint(missed[0]) if missed else ""
        step = self.step
        self._waiting.close()
        self._of_step.close()
        self.step += 1
        self._reset()
        self._arm()
        if whole and missed:
            raise TargetNotReachedError(
                f"{missed[0]}: it did not act at step {step}: its target was not reached, or cannot be "
                f"changed by it{hint}"
            )

    def _check_all(self) -> None:
        """Raise an error if a fault never acted. Called after a training without an error."""
        ever = {number for _, number in self._noted}
        for number, fault in enumerate(self.faults):
            if number not in ever and fault.here:
                raise TargetNotReachedError(
                    f"{fault}: it did not act; the training had {self.step} steps{self._hint(fault)}"
                )

    def _hint(self, fault: Fault) -> str:
        batches = fault.breaks == "loader" or type(fault).on_batch is not Fault.on_batch
        if batches and not self._batch_seam:
            return "; batches are reached through injection.batches(loader)"
        return ""

    def _broken_batch(self, batch: Batch, seam: str) -> Batch:
        """Return the batch after the faults of the step.

        A batch may pass several interception points, named by `seam`. It is broken at the first of them in a
        step.
        """
        if is_reference() or self._batch_seam not in ("", seam):
            return batch
        for number, fault in self._active():
            acted: list[bool] = []
            batch = fault.on_batch(batch, partial(acted.append, True))
            if acted:
                self._batch_seam = seam
                self._noting(number, fault)()
        return batch

    def _broken_loss(self, loss: Tensor) -> Tensor:
        """Return the loss after the faults of the step.

        A fault is recorded only if a gradient flows through the changed loss.
        """
        if is_reference():
            return loss
        for number, fault in self._active():
            acted: list[bool] = []
            loss = fault.on_loss(loss, partial(acted.append, True))
            if acted and loss.requires_grad:
                loss.register_hook(_calling(self._noting(number, fault)))  # type: ignore[no-untyped-call]
        return loss

    def _with_broken_loss(self, output: Any) -> Any:
        """Return the output of a step with a broken loss.

        The output is a loss, a tuple (loss, ...), or a mapping or object with a `loss`.
        """
        if isinstance(output, Tensor):
            return self._broken_loss(output) if output.numel() == 1 else output
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].numel() == 1:
            return (self._broken_loss(output[0]), *output[1:])
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return output
        changed = copy.copy(output)
        if isinstance(changed, Mapping):
            whole: Any = changed
            whole["loss"] = self._broken_loss(loss)
        else:
            changed.loss = self._broken_loss(loss)
        return changed

    # Interception points in a training.

    def _on_input(self, args: Any, kwargs: Any) -> Any:
        if self._names_batches or not self._active():
            return None
        if not kwargs and len(args) == 1:
            return (self._broken_batch(args[0], "forward"),), kwargs
        if not args:
            return args, self._broken_batch(kwargs, "forward")
        return self._broken_batch((args, kwargs), "forward")

    def _on_output(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Break the loss in the output of a model that computes its loss itself."""
        if isinstance(output, Tensor | tuple):
            return None
        changed = self._with_broken_loss(output)
        if changed is output:
            return None
        self._loss_given = True
        return changed

    def _around_entrance(self, original: Any) -> Any:
        @wraps(original)
        def entrance(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._begin()
            return original(*args, **kwargs)

        return entrance

    def _around_step(self, original: Any) -> Any:
        @wraps(original)
        def step(batch: Batch, *args: Any, **kwargs: Any) -> Any:
            with self._one_step():
                return original(self._given(batch), *args, **kwargs)

        return step

    def _around_accumulate(self, original: Any) -> Any:
        @wraps(original)
        def accumulate(batches: list[Batch], *args: Any, **kwargs: Any) -> Any:
            with self._one_step():
                return original([self._given(batch) for batch in batches], *args, **kwargs)

        return accumulate

    def _given(self, batch: Batch) -> Batch:
        return self._broken_batch(batch, "run") if self._depth == 1 else batch

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        """Treat a call of the run's own `step` as one step. Its updates are not counted separately."""
        self._depth += 1
        number = self.step
        try:
            if self._depth == 1:
                self._begin()
            yield
        except BaseException:
            if self._depth == 1 and self.step == number:
                self._end(whole=False)
            raise
        finally:
            self._depth -= 1
        if self._depth == 0 and self.step == number:
            self._end()

    def _around_batch(self, original: Any, *, place: int, key: str) -> Any:
        """Wrap a method that takes a batch and runs its backward pass, or causes it to run."""

        @wraps(original)
        def takes(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._begin()
                if key in kwargs:
                    kwargs[key] = self._broken_batch(kwargs[key], "trainer")
                elif len(args) > place:
                    batch = self._broken_batch(args[place], "trainer")
                    args = (*args[:place], batch, *args[place + 1 :])
            return original(*args, **kwargs)

        return takes

    def _around_loss(self, original: Any) -> Any:
        @wraps(original)
        def computes(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            return self._with_broken_loss(output) if self._begun else output

        return computes

    def _around_backward(self, original: Any) -> Any:
        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
            if self._in_backward or not self._subject.is_trained_by(roots):
                return original(tensors, *args, **kwargs)
            self._begin()
            step = self.step
            given: Any = roots[0] if len(roots) == 1 and isinstance(roots[0], Tensor) else None
            loss = given
            if given is not None and given.numel() == 1 and not self._names_losses and not self._loss_given:
                loss = self._broken_loss(given)
            self._in_backward = True
            try:
                with self._contribution():
                    original(tensors if loss is given else loss, *args, **kwargs)
                    if self.step == step and not is_recomputation():
                        self._after_backward()
            finally:
                self._in_backward = False
            if loss is not given:
                # The loop reports this value. `data` bypasses autograd, because the graph of the loss is
                # already freed.
                given.data.copy_(loss.detach())
            return None

        return backward

    @contextmanager
    def _contribution(self) -> Iterator[None]:
        """Isolate the gradients of this backward pass within the block, if a fault breaks gradients.

        Afterwards they are added to the earlier gradients.
        """
        breaks = any(type(fault).on_gradients is not Fault.on_gradients for _, fault in self._active())
        before = [(p, p.grad) for p in self._model.parameters() if p.grad is not None] if breaks else []
        for parameter, _ in before:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in before:
                if parameter.grad is not None and gradient is not None:
                    gradient.add_(parameter.grad)
                parameter.grad = gradient

    def _after_backward(self) -> None:
        self._backwards += 1
        if self._watching is not None:
            self._with_gradient |= {n for n, p in self._model.named_parameters() if p.grad is not None}
        for number, fault in self._active():
            fault.on_gradients(self._model, self._noting(number, fault))

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        if self._depth or not self._backwards or not self._subject.owns(optimizer):
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        self._end()

    def _after_drop(self, holder: Any) -> None:
        """End the step when its gradients are cleared, if a backward pass was not followed by an update."""
        if self._backwards and not self._depth and not self._in_backward and self._subject.owns(holder):
            self._end()

    def _around_zero_grad(self, original: Any) -> Any:
        @wraps(original)
        def zero_grad(holder: Any, *args: Any, **kwargs: Any) -> None:
            original(holder, *args, **kwargs)
            self._after_drop(holder)

        return zero_grad

    def _around_own_zero_grad(self, original: Any) -> Any:
        @wraps(original)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._after_drop(self._subject.optimizer)

        return zero_grad

    def _around_own_update(self, original: Any) -> Any:
        """Wrap the update of an optimizer that is not a subclass of torch's, so torch's hooks do not run."""

        @wraps(original)
        def update(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._after_update(self._subject.optimizer)
            return result

        return update


class _Loader:
    """Loader whose batches are broken by an injection."""

    def __init__(self, injection: Injection, loader: Any) -> None:
        self._injection, self._loader = injection, loader

    def __iter__(self) -> Iterator[Batch]:
        return self._injection.batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _calling(acted: Acted) -> Callable[[Tensor], None]:
    """Return a tensor hook that calls `acted` and leaves the gradient unchanged."""
    return lambda _gradient: acted()


def _add_line(path: Path, action: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(action) + "\n")
        file.flush()
        os.fsync(file.fileno())
