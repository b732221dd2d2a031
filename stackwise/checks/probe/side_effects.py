"""Side effects: changes that a call leaves in its arguments, in modes, global settings and generators."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
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
    copies, modes, settings = _copies(given), _modes(model), settings_now()
    with warnings.catch_warnings(), _watched_arguments(model, effects, decodes):
        warnings.filterwarnings("ignore", message=".*")  # the model sets no filter that is equal to this one
        filters = list(warnings.filters)
        effects.before = _generators()
        try:
            yield effects
        finally:
            effects.after = _generators()
            effects.found += [
                SideEffect(f"The call changes the {name} from {value} to {now}.")
                for name, value, now in restore_settings(settings)
            ]
        if list(warnings.filters) != filters:
            reason = "the call changes on purpose which warnings the caller sees"
            effects.found.append(SideEffect("The call changes the warnings filters.", reason))
    if not effects.found:
        effects.found += _changed(copies)
    effects.found += _changed_modes(modes, _modes(model))


def _generators() -> dict[str, object]:
    """Return the state of each global random generator."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": (numpy_state[1].tobytes(), numpy_state[2]),
        "Python": random.getstate(),
        "CUDA": torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b"",
    }


# Name, tensor, and a copy of its values.
_Copies = list[tuple[str, Tensor, Tensor]]


def _copies(values: Mapping[str, Any]) -> _Copies:
    return [(name, x, x.detach().clone()) for name, x in values.items() if isinstance(x, Tensor)]


def _changed(copies: _Copies) -> Iterator[SideEffect]:
    for name, x, copy in copies:
        if not same_bits(x, copy):
            yield SideEffect(f"The call changes its argument {name} in place.")


@contextmanager
def _watched_arguments(model: nn.Module, effects: SideEffects, decodes: bool) -> Iterator[None]:
    """Compare the tensors among the arguments of each call of the model before and after it."""
    if model._compiled_call_impl is not None:  # the compiler would trace the hooks
        yield
        return
    names = list(forward_parameters(model))
    stack: list[_Copies] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(names, args, strict=False)) | kwargs
        if args and isinstance(args[0], Mapping):
            named |= args[0]
        if decodes:
            kept = (n for n in named if n == names[0] or any(word in n for word in _NO_CACHES))
            named = {name: named[name] for name in kept}
        stack.append(_copies(named))

    def after(*_: object) -> None:
        effects.found += _changed(stack.pop())

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
