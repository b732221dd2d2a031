"""Recomputation of activations, switched on in a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from stackwise.checks.probe.layers import repeated_layers
from stackwise.subject.call_form import forward_parameters

__all__ = ["NoSwitch", "by_its_own_switch", "by_wrapping_layers", "switched"]


class NoSwitch(Exception):  # noqa: N818  not for users
    """The model cannot be made to recompute in this way."""


def switched(model: nn.Module, switch: Callable[[nn.Module], None]) -> None:
    """Switch recomputation on and the cache off, as training code does, without the warnings of old names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        switch(model)
    if "use_cache" in forward_parameters(model):
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"use_cache": False, **kwargs}), with_kwargs=True
        )


def by_its_own_switch(model: nn.Module) -> None:
    """Call `gradient_checkpointing_enable()` or `set_grad_checkpointing(True)`.

    Raises:
        NoSwitch: the model has neither, or refuses.
    """
    switch: Any
    if callable(switch := getattr(model, "gradient_checkpointing_enable", None)):
        try:
            switch()
        except (ValueError, NotImplementedError) as error:  # it says that it cannot
            raise NoSwitch from error
    elif callable(switch := getattr(model, "set_grad_checkpointing", None)):
        switch(True)
    else:
        raise NoSwitch


def by_wrapping_layers(model: nn.Module) -> None:
    """Wrap the repeated layers in `torch.utils.checkpoint`, with every argument of their calls.

    Raises:
        NoSwitch: no repeated layers are called.
    """
    # The outermost layers first: their parts may be repeated as well.
    for names in sorted(repeated_layers(model), key=lambda names: names[0].count(".")):
        layers = [model.get_submodule(name) for name in names]
        are_containers = any(isinstance(layer, nn.ModuleList | nn.ModuleDict) for layer in layers)
        if not are_containers and all(type(layer).forward is not nn.Module.forward for layer in layers):
            for layer in layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            return
    raise NoSwitch
