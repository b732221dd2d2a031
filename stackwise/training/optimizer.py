"""Optimizer: AdamW or Muon over parameter groups, each with its learning rate and weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from stackwise.checkpoint.object_state import as_many_groups
from stackwise.config import OptimizerConfig
from stackwise.model.block import Block
from stackwise.model.initialization import learning_rate_multipliers
from stackwise.model.parameter_group import block_matrices
from stackwise.model.rack import Rack
from stackwise.support.arguments import check_sizes, require
from stackwise.training.master import MasterAdamW
from stackwise.training.muon import Muon

__all__ = ["FusedOptimizer", "create_optimizer", "parameter_groups", "per_stack_groups"]


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    multipliers: Mapping[str, float] | None = None,
    embeddings: Iterable[Tensor] = (),
    *,
    frozen: bool = False,
) -> list[dict[str, Any]]:
    """Return the groups of the trainable parameters. Only matrices other than embeddings have weight decay.

    Each parameter is in exactly one group. Norms, biases and embeddings do not decay. A tied head is an
    embedding.

    Args:
        model: any module.
        weight_decay: weight decay of decaying parameters. It is divided by the multiplier, because AdamW
            multiplies it by the learning rate.
        multipliers: multiplier of the learning rate by parameter name; default 1.
        embeddings: additional weights that are embeddings, of modules outside `model`.
        frozen: include frozen parameters.

    Returns:
        Two groups for each multiplier (`lr_multiplier`): parameters with weight decay, parameters without.
    """
    spared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    spared |= {id(p) for p in embeddings}
    by_multiplier: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, p in model.named_parameters():
        if p.requires_grad or frozen:
            by_multiplier.setdefault((multipliers or {}).get(name, 1.0), []).append(p)
    groups = []
    for multiplier, trainable in by_multiplier.items():
        decayed = [p for p in trainable if p.ndim >= 2 and id(p) not in spared]
        kept = [p for p in trainable if p.ndim < 2 or id(p) in spared]
        groups += [
            {"params": decayed, "weight_decay": weight_decay / multiplier, "lr_multiplier": multiplier},
            {"params": kept, "weight_decay": 0.0, "lr_multiplier": multiplier},
        ]
    return groups


def per_stack_groups(
    rack: Rack, config: OptimizerConfig, overrides: Mapping[int, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Return `parameter_groups`, with a separate learning rate or weight decay for some Stacks.

    Args:
        rack: Rack with the trainable parameters. Those of a `mup` Rack have multiplied learning rates.
        config: default of each setting; its own `per_stack` is not read.
        overrides: `{"lr": ..., "weight_decay": ...}`, both or either, by index of the Stack.

    Returns:
        The groups of all other parameters, then those of each Stack in `overrides`. `stack_id` and `matrices`
        identify the groups of a Stack. A frozen Stack has groups as well, empty until it trains.
        `lr_multiplier` is relative to the learning rate of `config`, so that a schedule scales all groups.

    Raises:
        ValueError: an index without a Stack, an unknown key, or a value that `OptimizerConfig` rejects.
    """
    return _groups(rack, rack, config, overrides, "overrides")


def _groups(
    model: nn.Module,
    rack: Rack | None,
    config: OptimizerConfig,
    overrides: Mapping[int, Mapping[str, float]],
    key: str,
) -> list[dict[str, Any]]:
    """Return the groups of `model`, which is a part of `rack`."""
    settings: dict[int | None, OptimizerConfig] = {None: config}
    stack_of: dict[int, int] = {}
    for index, override in overrides.items():
        overridden = _overridden_stack(rack, index, override, key)
        settings[index] = OptimizerConfig.from_dict(
            {**config.to_dict(), **override}, source=f"{key}[{index}]"
        )
        stack_of |= {id(p): index for p in overridden.parameters()}
    matrices = block_matrices(model) if config.kind == "muon" else {}
    multipliers = _multipliers(model, rack, matrices)
    embeddings = () if rack is None else (rack.embedding.weight,)
    groups = []
    for stack, own in settings.items():
        name = _name_in(rack, stack)
        # Each group of Muon is for certain maps: without such a group a frozen Stack could not train later.
        frozen = name is not None or config.kind == "muon"
        of_all = parameter_groups(model, own.weight_decay, multipliers, embeddings, frozen=frozen)
        for group in of_all:
            params = [p for p in group["params"] if stack_of.get(id(p)) == stack]
            if params or stack is None:
                lr = own.lr * group["lr_multiplier"]
                mark = {} if name is None else {"stack_id": name, "matrices": params[0].ndim >= 2}
                groups.append({**group, "params": params, "lr": lr, "lr_multiplier": lr / config.lr, **mark})
    if config.kind == "muon":
        groups = list(_by_kind(groups, matrices))
    return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]


def _overridden_stack(rack: Rack | None, index: int, override: Mapping[str, float], key: str) -> nn.Module:
    """Return the Stack whose settings `override` changes. Refuse an index without a Stack, or other keys."""
    if rack is None:
        raise ValueError(f"{key}: got {index!r}; allowed: none, since the model is no part of a Rack")
    check_sizes(minimum=0, **{key: index})
    require(index < len(rack.stacks), key, index, f"0 to {len(rack.stacks) - 1}")
    unknown = sorted(override.keys() - {"lr", "weight_decay"})
    require(not unknown, f"{key}[{index}]", unknown, "lr, weight_decay")
    return rack.get_stack(index)


def _name_in(rack: Rack | None, stack: int | None) -> int | None:
    """Return the `stack_id` of the Stack at an index; None if it is not unique."""
    if rack is None or stack is None:
        return None
    names = [stack.stack_id for stack in rack.get_stacks()]
    return names[stack] if names.count(names[stack]) == 1 else None


def _multipliers(
    model: nn.Module, rack: Rack | None, matrices: Mapping[int, tuple[int, ...]]
) -> Mapping[str, float] | None:
    """Return the multiplier of the learning rate, by parameter name in `model`.

    The multipliers of `mup` are for Adam, whose updates have a spectral norm proportional to the width. The
    spectral norm of Muon's updates is proportional to its square root, and should not depend on the width
    (Yang et al. 2023, arXiv:2310.17813). So Muon's multiplier is the square root.
    """
    if rack is None or rack.mup_base_width is None:
        return None
    by_name = learning_rate_multipliers(rack, rack.mup_base_width)
    by_id = {id(p): by_name[name] for name, p in rack.named_parameters()}
    # A copy, such as the head of a unit, is found by the name that it shares.
    all_of = {name: by_id.get(id(p), by_name.get(name, 1.0)) for name, p in model.named_parameters()}
    return {
        name: math.sqrt(all_of[name]) if id(p) in matrices else all_of[name]
        for name, p in model.named_parameters()
    }


def _by_kind(
    groups: Iterable[dict[str, Any]], matrices: Mapping[int, tuple[int, ...]]
) -> Iterator[dict[str, Any]]:
    """Yield each group in parts: the parameters of AdamW, and matrices with equal `rows`."""
    for group in groups:
        parts: dict[tuple[int, ...] | None, list[nn.Parameter]] = {None: []}
        for p in group["params"]:
            parts.setdefault(matrices.get(id(p)), []).append(p)
        # This order does not depend on which Stack is first.
        for rows, params in sorted(parts.items(), key=lambda part: (part[0] is not None, part[0])):
            if rows is None:
                yield {**group, "params": params, "kind": "adamw"}
            else:
                yield {**group, "params": params, "kind": "muon", "rows": rows}


class FusedOptimizer(Protocol):
    """Optimizer that scales gradients, and can skip a step, in the pass that updates the weights.

    Attributes:
        param_groups: parameter groups. A change of the learning rate sets each group's to the new one times
            its `lr_multiplier`.
        found_inf: float32 scalar, 0 or 1. If it is 1, a step changes nothing: no weight, no state, no step
            counter. None: 0.
        grad_scale: float32 scalar that gradients are divided by; None: 1.
    """

    param_groups: list[dict[str, Any]]
    found_inf: Tensor | None
    grad_scale: Tensor | None

    def step(self) -> None:
        """Update every parameter that has a gradient."""

    def zero_grad(self) -> None:
        """Free the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as in `torch.optim.Optimizer`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in `torch.optim.Optimizer`."""


def create_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    masters: bool = False,
    compile: bool = False,  # noqa: A002  # the name in PyTorch
    rack: Rack | None = None,
) -> FusedOptimizer:
    """Return the optimizer that `config` describes, over the trainable parameters of `model`.

    `kind: adamw` is fused AdamW. `kind: muon` is `Muon`: it trains the matrices of the Blocks. Each map of
    a weight with several maps (queries, keys and values) is handled separately. AdamW trains embedding, head,
    norms and biases. Parameters of a `mup` Rack have multiplied learning rates.

    Args:
        model: module with the parameters; it may be a part of a Rack.
        config: learning rate, weight decay and so on; `per_stack` uses indices in the Rack.
        masters: convert the parameters to bfloat16 with float32 master weights; see `MasterAdamW`.
        compile: compile the pass over the master weights.
        rack: Rack that `model` is a part of; None: `model` itself, if it is a Rack.

    Raises:
        ValueError: nothing to train; `per_stack` for a missing Stack, or without a Rack; `muon` with
            master weights, or without a Block; master weights of sharded parameters.
    """
    if rack is None and isinstance(model, Rack):
        rack = model
    if config.kind == "muon":
        key = "training.optimizer.kind"
        reason = "'adamw' with precision 'bf16_weights': Muon keeps no float32 masters of bfloat16 weights"
        require(not masters, key, "muon", reason)
        found = any(isinstance(m, Block) for m in (rack or model).modules())
        require(found, key, "muon", "'adamw' for a model without a Block, whose matrices Muon is for")
    overrides = {index: own.model_dump(exclude_none=True) for index, own in config.per_stack.items()}
    groups = _groups(model, rack, config, overrides, "training.optimizer.per_stack")
    if not any(group["params"] for group in groups):
        raise ValueError("model: every parameter is frozen; unfreeze a Stack to train it")
    beta1, beta2 = config.betas
    if masters:
        sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
        allowed = "'fp32' or 'bf16' with FSDP, which keeps float32 weights and gathers narrow ones by itself"
        require(not sharded, "training.precision", "bf16_weights", allowed)
    optimizer: torch.optim.Optimizer
    if config.kind == "muon":
        optimizer = Muon(groups, lr=config.lr, momentum=config.momentum, betas=(beta1, beta2), eps=config.eps)
    elif masters:
        frozen = [p for p in model.parameters() if not p.requires_grad]
        optimizer = MasterAdamW(
            groups, frozen, lr=config.lr, betas=(beta1, beta2), eps=config.eps, compile=compile
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)
        optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.register_load_state_dict_pre_hook(_fitting)
    return cast("FusedOptimizer", optimizer)


def _fitting(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the number of groups of `optimizer`, each matched to the same Stack."""
    ours = optimizer.param_groups
    groups = as_many_groups(state["param_groups"], ours)
    if len(groups) == len(ours):
        marks: list[dict[str, Any]] = [
            {key: own[key] for key in ("stack_id", "matrices") if key in own} for own in ours
        ]
        groups = [{**group, **mark} for group, mark in zip(groups, marks, strict=True)]
    return {**state, "param_groups": groups}
