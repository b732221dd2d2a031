"""Activation recomputation (gradient checkpointing) of chosen modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial, wraps
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stackwise.config import RecomputeConfig
from stackwise.model.block import Block
from stackwise.subject.cached_call import names_cache
from stackwise.support.arguments import require

__all__ = ["find_layers", "recomputing"]

Forward = Callable[..., Any]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_int_mm", "_scaled_mm", "_grouped_mm")
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "flex_attention")

_recomputed: WeakSet[nn.Module] = WeakSet()


@contextmanager
def recomputing(
    model: nn.Module, config: RecomputeConfig, layers: Sequence[nn.Module] | None = None
) -> Iterator[list[str]]:
    """Train `model` in this context with the activation recomputation of `config`.

    A recomputed module saves only its inputs, and runs a second time in the backward pass (Chen et al. 2016,
    arXiv:1604.06174) with the original random state and autocast. Gradients are bit-identical if the kernels
    are deterministic. Nothing changes if gradients are disabled, or if the module is in eval mode and no
    argument needs a gradient. A compiled function is recompiled for each kind of recomputation.

    Only `forward` of the modules is replaced, on the instance. It is restored at the end, also after an
    error. Class, parameter names and hooks do not change. Hooks of a recomputed module run once, hooks of its
    submodules twice.

    Args:
        model: any module. `config.names` are matched with its module names. A module that matches includes
            its submodules.
        config: kind of recomputation. `every_nth` chooses the first layer, then each n-th one. `budget` is a
            compiler setting for the entire process.
        layers: modules that are treated as Blocks, in execution order; None: result of `find_layers`.

    Yields:
        Names of the modules that are recomputed.

    Raises:
        ValueError: no layers, or not of this model; a name without a match; a module with running
            statistics, which would be updated twice; a model with modules that are already recomputed.
            During training: a cache, into which a recomputed layer would write twice; `budget` uncompiled.
    """
    names = _names(model)
    for module in names:
        require(module not in _recomputed, "recompute", names[module], "a model that is not recomputed yet")
    with ExitStack() as cleanup:
        chosen: list[nn.Module] = []
        match config.kind:
            case "none":
                pass
            case "budget":
                # A model without layers is treated as one layer.
                for module in _given(names, layers) if layers is not None else _found(model) or [model]:
                    cleanup.enter_context(
                        _replaced(module, _compiled_only(_forward_of(module), config.budget))
                    )
                cleanup.enter_context(_patched("torch._functorch", activation_memory_budget=config.budget))
            case _:
                chosen = _chosen(model, names, config, layers)
                selective = config.kind == "selective"
                for module in chosen:
                    _check(module, names[module])
                    cleanup.enter_context(_replaced(module, _checkpointed(module, selective=selective)))
                # The compiler rejects side effects of a layer's forward pass, such as the masks that Layout
                # caches, unless the recomputation may skip them.
                cleanup.enter_context(
                    _patched("torch._dynamo", skip_fwd_side_effects_in_bwd_under_checkpoint=True)
                )
        yield [names[module] for module in chosen]


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of `model`, in the order of its modules.

    If there are Blocks, return them. Otherwise look at every `nn.ModuleList` and `nn.Sequential` with modules
    of one class, choose the class with the most parameters, and return all of its modules in such containers.
    Of an encoder and a decoder of different classes, only the larger one is returned.

    Raises:
        ValueError: there are none.
    """
    layers = _found(model)
    if not layers:
        raise ValueError(
            f"layers: {type(model).__name__} has no nn.ModuleList or nn.Sequential of modules of one class; "
            "allowed: a sequence of its modules, or kind='by_name' with their names"
        )
    return layers


def _found(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, Block)]
    if blocks:
        return blocks
    groups: dict[type[nn.Module], dict[nn.Module, None]] = {}
    for container in model.modules():
        entries = list(container) if isinstance(container, nn.ModuleList | nn.Sequential) else []
        if len({type(entry) for entry in entries}) == 1 and _is_callable(entries[0]):
            groups.setdefault(type(entries[0]), {}).update(dict.fromkeys(entries))
    sizes = {
        kind: sum(p.numel() for p in nn.ModuleList(group).parameters()) for kind, group in groups.items()
    }
    # Of groups of equal size, the first is the outermost.
    return list(groups[max(sizes, key=lambda kind: sizes[kind])]) if any(sizes.values()) else []


def _names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the first name of each module."""
    return {module: name for name, module in model.named_modules()}


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _chosen(
    model: nn.Module,
    names: dict[nn.Module, str],
    config: RecomputeConfig,
    layers: Sequence[nn.Module] | None,
) -> list[nn.Module]:
    if config.kind == "by_name":
        return _matching(model, config.names)
    every = config.every if config.kind == "every_nth" else 1
    return (find_layers(model) if layers is None else _given(names, layers))[::every]


def _given(names: dict[nn.Module, str], layers: Sequence[nn.Module]) -> list[nn.Module]:
    require(len(layers) > 0, "layers", list(layers), "at least one module of the model, or None")
    inside: set[nn.Module] = set()
    for layer in layers:
        kind = type(layer).__name__
        require(layer in names, "layers", kind, "modules of the model")
        require(layer not in inside, "layers", names[layer], "modules that share no part")
        inside.update(layer.modules())
    return list(layers)


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the outermost modules that match a pattern."""
    # A module that is used twice has two names.
    names = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and _is_callable(module)
    }
    matched = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            near = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"recompute.names: {pattern!r} matches no module of {type(model).__name__} that is called; "
                f"near it are {', '.join(map(repr, near))}"
            )
        matched.update(hits)
    outermost: dict[nn.Module, None] = {}
    for name, module in names.items():
        parents = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if name in matched and not any(parent in matched for parent in parents):
            outermost[module] = None
    return list(outermost)


def _check(module: nn.Module, name: str) -> None:
    require(
        _is_callable(module), "recompute", f"{name}, a {type(module).__name__}", "modules that are called"
    )
    for part_name, part in module.named_modules(prefix=name):
        counting = isinstance(part, _NormBase) and part.track_running_stats
        allowed = "modules without running statistics, which a second run would take twice"
        require(not counting, "recompute", f"{part_name}, a {type(part).__name__}", allowed)


@contextmanager
def _replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    before = vars(module).get("forward")
    # A bound method, so that a deep copy of the model gets its own.
    module.forward = MethodType(wraps(type(module).forward)(forward), module)
    _recomputed.add(module)
    try:
        yield
    finally:
        _recomputed.discard(module)
        del module.forward
        if before is not None:
            module.forward = before


def _forward_of(module: nn.Module) -> Forward:
    """Return the current forward function, of the class or of the instance; it takes the module."""
    before = vars(module).get("forward")
    if before is None:
        return type(module).forward
    return lambda _, *args, **kwargs: before(*args, **kwargs)


def _checkpointed(module: nn.Module, *, selective: bool) -> Forward:
    plain = _forward_of(module)
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    caches = [(place, name) for place, name in enumerate(parameters) if names_cache(name)]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not (self.training or _needs_gradient(args, kwargs)):
            return plain(self, *args, **kwargs)
        for name, value in kwargs.items():
            if names_cache(name):
                _refuse_cache(name, value)
        for place, name in caches:
            _refuse_cache(name, args[place] if place < len(args) else None)
        return checkpoint(partial(plain, self), *args, **options, **kwargs)

    return forward


def _compiled_only(plain: Forward, budget: float) -> Forward:
    kind = f"budget {budget}"

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # If a compiled function has read `kind`, another budget recompiles it.
        trained = kind != "" and self.training and torch.is_grad_enabled()
        compiling = torch.compiler.is_compiling()
        allowed = "under torch.compile only; this layer runs as it is"
        require(compiling or not trained, "recompute", kind, allowed)
        return plain(self, *args, **kwargs)

    return forward


def _needs_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in (*args, *kwargs.values()))


def _refuse_cache(name: str, cache: object) -> None:
    if cache is not None and not isinstance(cache, int):  # an integer is a length or a flag
        raise ValueError(
            f"{name}: got {type(cache).__name__}; allowed: None where layers are recomputed, since the "
            "second run would write into it again (in transformers: use_cache=False)"
        )


def _policy(_: object, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().rpartition("::")[2].partition(".")[0]
    attends = name.startswith(_ATTENTION)
    # A saved operation draws no random numbers in the recomputation; later dropout would differ.
    if name in _PRODUCTS or (attends and not _dropout(operation, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _dropout(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the dropout probability of a call of an attention operation; 0 without such an argument."""
    names = (
        [argument.name for argument in operation._schema.arguments] if hasattr(operation, "_schema") else []
    )
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    probability: float = given.get("dropout_p", 0.0)
    return probability


@contextmanager
def _patched(package: str, **settings: object) -> Iterator[None]:
    """Change settings of a compiler module in this context. The module is imported only if needed."""
    from importlib import import_module

    config: Any = import_module(f"{package}.config")
    with config.patch(**settings):
        yield
