"""Side effects: changes that a call leaves in its arguments, in modes, global settings and generators."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stackwise.checks.probe.difference import same_bits
from stackwise.subject.call_form import forward_parameters
from stackwise.support.global_settings import restore_settings, settings_now

__all__ = [
    "SideEffect",
    "SideEffects",
    "same_generators",
    "watched_call",
]

# Name, function that returns the state.
_GENERATORS: tuple[tuple[str, Callable[[], object]], ...] = (
    ("torch", lambda: torch.get_rng_state().numpy().tobytes()),
    ("NumPy", lambda: [np.random.get_state()[1].tobytes(), np.random.get_state()[2]]),  # type: ignore[index] # noqa: NPY002
    ("Python", random.getstate),
    ("CUDA", lambda: torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b""),
)
# Parts of the names of arguments that are not a cache. A call may write into its cache.
_NO_CACHES = ("ids", "mask", "embeds")


@dataclass(frozen=True)
class SideEffect:
    """Change that a call leaves.

    Attributes:
        text: the change as a sentence.
        correct_if: condition under which it is correct. None: it never is.
    """

    text: str
    correct_if: str | None = None


@dataclass
class SideEffects:
    """Side effects of a call.

    Attributes:
        found: the side effects, except those on random generators.
        before: state of each random generator before the call.
        after: state of each random generator after it.
    """

    found: list[SideEffect] = field(default_factory=list)
    before: dict[str, object] = field(default_factory=dict)
    after: dict[str, object] = field(default_factory=dict)

    @property
    def moved(self) -> list[str]:
        """Names of the generators that the call drew from, or seeded."""
        return [name for name in self.before if self.before[name] != self.after[name]]


def same_generators(one: SideEffects, other: SideEffects) -> list[SideEffect]:
    """Return a side effect for each generator with the same state after two calls.

    The calls start from different states.
    """
    return [
        SideEffect(f"The call sets the global random generator of {name} to a fixed state.")
        for name in one.moved
        if name in other.moved and one.after[name] == other.after[name]
    ]


@contextmanager
def watched_call(
    model: nn.Module, given: Mapping[str, Tensor | None], *, decodes: bool = False
) -> Iterator[SideEffects]:
    """Record the side effects of a block that calls the model, and restore global settings after it.

    Args:
        model: the model.
        given: tensors of the caller, by name.
        decodes: the model writes into a cache, so only arguments that are not a cache are compared.
    """
    effects = SideEffects()
    copies = [(name, x, x.detach().clone()) for name, x in given.items() if x is not None]
    modes = _modes(model)
    settings = settings_now()
    with warnings.catch_warnings(), _watched_arguments(model, effects, decodes):
        warnings.filterwarnings("ignore", message=".*")  # the model sets no filter that is equal to this one
        filters = list(warnings.filters)
        effects.before = {name: state() for name, state in _GENERATORS}
        try:
            yield effects
        finally:
            effects.after = {name: state() for name, state in _GENERATORS}
            effects.found += [
                SideEffect(f"The call changes the {name} from {value} to {now}.")
                for name, value, now in restore_settings(settings)
            ]
        if list(warnings.filters) != filters:
            reason = "the call changes on purpose which warnings the caller sees"
            effects.found.append(SideEffect("The call changes the warnings filters.", reason))
    if not effects.found:
        effects.found += [_changed(name) for name, x, copy in copies if not same_bits(x, copy)]
    effects.found += _changed_modes(modes, _modes(model))


def _changed(name: str) -> SideEffect:
    return SideEffect(f"The call changes its argument {name} in place.")


@contextmanager
def _watched_arguments(model: nn.Module, effects: SideEffects, decodes: bool) -> Iterator[None]:
    """Compare the tensors among the arguments of each call of the model before and after it."""
    if model._compiled_call_impl is not None:  # the compiler would trace the hooks
        yield
        return
    names = list(forward_parameters(model))
    stack: list[list[tuple[str, Tensor, Tensor]]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(names, args, strict=False)) | kwargs
        if args and isinstance(args[0], Mapping):
            named |= args[0]
        stack.append(
            [
                (name, x, x.detach().clone())
                for name, x in named.items()
                if isinstance(x, Tensor)
                and (not decodes or name == names[0] or any(word in name for word in _NO_CACHES))
            ]
        )

    def after(*_: object) -> None:
        effects.found += [_changed(name) for name, x, copy in stack.pop() if not same_bits(x, copy)]

    with (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    ):
        yield


def _modes(model: nn.Module) -> dict[str, tuple[object, bool]]:
    """Return each module with its mode, and each parameter with its requires_grad."""
    modules = {f"{name}.training".lstrip("."): (x, x.training) for name, x in model.named_modules()}
    return modules | {f"{name}.requires_grad": (p, p.requires_grad) for name, p in model.named_parameters()}


def _changed_modes(
    before: Mapping[str, tuple[object, bool]], after: Mapping[str, tuple[object, bool]]
) -> Iterator[SideEffect]:
    for name, (owner, value) in before.items():
        now, changed = after.get(name, (owner, value))
        # A call may replace a module, such as a cache for another number of rows.
        if now is owner and changed != value:
            yield SideEffect(
                f"The call changes {name} from {value} to {not value}.",
                "the call freezes this part of the model on purpose" if value else None,
            )
