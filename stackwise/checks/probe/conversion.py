"""Conversion: the state dict of a reference, computed from the state dict of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.result import listed
from stackwise.subject.spec import ToReference
from stackwise.support.arguments import require
from stackwise.support.system_errors import reraise_if_out_of_memory

__all__ = ["State", "convert", "load", "match_names", "parameter_names"]

State = Mapping[str, Tensor]


def convert(to_reference: ToReference, state: State) -> dict[str, Tensor]:
    """Return the state dict of the reference.

    Raises:
        ValueError: a function of the conversion raised an exception or returned a wrong type.
    """
    converted: Any
    if isinstance(to_reference, Mapping):
        converted = {}
        for name, source in to_reference.items():
            key = f"to_reference[{name!r}]"
            if callable(source):
                converted[name] = _called(key, source, state)
            else:
                require(source in state, key, source, f"names of the model: {listed(state)}")
                converted[name] = state[source]
    else:
        converted = _called("to_reference", to_reference, state)
        kind = type(converted).__name__
        require(isinstance(converted, Mapping), "to_reference: result", kind, "a dict of tensors")
    for name, tensor in converted.items():
        kind = type(tensor).__name__
        require(isinstance(tensor, Tensor), f"to_reference: {name}", kind, "a tensor")
    return dict(converted)


def _called(key: str, function: Callable[[dict[str, Tensor]], Any], state: State) -> Any:
    try:
        return function({name: tensor.clone() for name, tensor in state.items()})
    except Exception as error:
        reraise_if_out_of_memory(error)
        name = getattr(function, "__name__", type(function).__name__)
        text = f"{key}: {name} raised {type(error).__name__}: {error}"
        # With the traceback, the result shows the line of the user's function.
        raise ValueError(text).with_traceback(error.__traceback__) from error


@torch.no_grad()
def load(reference: nn.Module, weights: State) -> None:
    """Copy the result of a conversion into the reference.

    Raises:
        ValueError: a name or a shape that the reference does not have.
    """
    own = reference.state_dict()
    for name, tensor in weights.items():
        require(name in own, "to_reference", name, f"names of the reference: {listed(own)}")
        got, allowed = tuple(tensor.shape), tuple(own[name].shape)
        if got != allowed:
            raise ValueError(f"to_reference: {name}: got shape {got}; allowed: {allowed}")
        own[name].copy_(tensor)


def match_names(model: nn.Module, reference: nn.Module) -> dict[str, str]:
    """Return a mapping of equal names, or of names that differ by one common prefix.

    Raises:
        ValueError: the names differ in another way.
    """
    own, others = parameter_names(model), parameter_names(reference)
    added, removed = _prefix(others, own), _prefix(own, others)
    if added is None and removed is None:
        here, there = listed(sorted(own - others)) or "none", listed(sorted(others - own)) or "none"
        raise ValueError(
            f"reference: only the reference has parameters {there}; only the model has {here}; wanted "
            "equal names, or to_reference={name in the reference: name in the model, or a function of the "
            "model's state dict}, or a function from the model's state dict to that of the reference"
        )
    state = model.state_dict()
    pairs = {name: (added or "") + name.removeprefix(removed or "") for name in reference.state_dict()}
    return {name: source for name, source in pairs.items() if isinstance(state.get(source), Tensor)}


def parameter_names(model: nn.Module) -> set[str]:
    """Return the names of all parameters. A tied weight has several."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _prefix(names: set[str], longer: set[str]) -> str | None:
    """Return the prefix that turns `names` into `longer`, or None."""
    first = min(names, default="")
    prefixes = {name.removesuffix(first) for name in longer if name.endswith(first)} | {""}
    return next((each for each in prefixes if {each + name for name in names} == longer), None)
