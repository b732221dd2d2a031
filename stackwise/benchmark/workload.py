"""Workloads: what is timed. One call is one forward pass or one training step of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from stackwise.argument import check_choice, check_sizes
from stackwise.spec import ModelSpec

__all__ = ["MODES", "Workload", "check_shape", "model_workload"]

MODES = ("forward", "train")


@dataclass(frozen=True)
class Workload:
    """Something to time.

    Attributes:
        name: in reports.
        call: does the work once.
        device: where it runs.
        tokens: how many one call handles; 0 where that means nothing.
        execution: asked after a call, how the work was done: the kernels that were chosen, say.
    """

    name: str
    call: Callable[[], object]
    device: torch.device
    tokens: int = 0
    execution: Callable[[], dict[str, str]] = dict


def model_workload(
    spec: ModelSpec,
    mode: str,
    *,
    batch_size: int,
    seq_len: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Workload:
    """A forward pass without gradients in eval mode, or a step with backward pass and update.

    Args:
        spec: the model.
        mode: "forward" or "train".
        batch_size: rows.
        seq_len: positions in each.
        device: where to run.
        seed: of weights and inputs.

    Raises:
        ValueError: another mode, or sizes that are no positive integers or beyond the model.
    """
    check_shape(mode=mode, batch_size=batch_size, seq_len=seq_len)
    device = torch.device(device)
    model = spec.create(device, seed).train(mode == "train")
    inputs = spec.batch(batch_size, seq_len, device=device, seed=seed)

    def forward() -> None:
        with torch.no_grad():
            spec.logits(model, inputs)

    if mode == "forward":
        return Workload(
            f"{spec.name} forward", forward, device, batch_size * seq_len, lambda: _execution(model)
        )
    optimizer = spec.optimizer(p for p in model.parameters() if p.requires_grad)

    def train() -> None:
        spec.loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Workload(f"{spec.name} train", train, device, batch_size * seq_len, lambda: _execution(model))


def _execution(model: nn.Module) -> dict[str, str]:
    """What a model says of its last call: its own `execution()`, or the attention of a transformers model."""
    tell = getattr(model, "execution", None)
    if callable(tell):
        return dict(tell())
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return {} if attention is None else {"attention": str(attention)}


def check_shape(*, mode: str = "forward", batch_size: int = 1, seq_len: int = 1) -> None:
    """Refuse what `model_workload` would refuse, without building anything.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    check_choice("mode", mode, MODES)
    check_sizes(batch_size=batch_size, seq_len=seq_len)
