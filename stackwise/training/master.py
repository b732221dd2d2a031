"""MasterAdamW: optimizer of bfloat16 weights with float32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.model.compilation import compiled

__all__ = ["MasterAdamW"]


class MasterAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with float32 master weights for bfloat16 weights.

    A bfloat16 weight has 8 bits of precision: an update below 1/256 of it is lost. The master weights receive
    every update and the weights are rounded from them, in one pass over memory that also scales the gradients
    and converts them to float32. `found_inf` and `grad_scale` may be set before a step, as with fused
    `AdamW`. If `found_inf` is nonzero, the step changes nothing. Gradients are divided by `grad_scale`.

    Args:
        groups: float32 parameters, or parameter groups of them; they are converted to bfloat16.
        frozen: parameters that the model uses but does not train; they are converted as well. bfloat16
            parameters are unchanged.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        compile: compile the step into one pass. The first step then takes some seconds.

    Raises:
        ValueError: a parameter is not float32; frozen parameters may also be bfloat16.
    """

    def __init__(
        self,
        groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        frozen: Iterable[nn.Parameter] = (),
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compile: bool = False,  # noqa: A002  # the name in PyTorch
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self._compiles = compile
        self._updates: list[Callable[..., None]] = []
        self._frozen = [(p, p.data) for p in frozen if p.dtype != torch.bfloat16]
        for p in (*self._parameters(), *(p for p, _ in self._frozen)):
            if p.dtype != torch.float32:
                raise ValueError(f"parameters: got dtype {p.dtype}; allowed: float32, to be made masters")
        self._start_new()
        for p, original in self._frozen:
            p.data = original.bfloat16()

    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Convert parameters that join the model to bfloat16, and store their float32 values.

        Trained parameters get master weights once they are in a group; before that they are treated as
        frozen.
        """
        for p in parameters:
            self._frozen.append((p, p.data.float()))
            p.data = p.data.bfloat16()

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restore the float32 values of parameters that leave the model, and forget them."""
        leaving = {id(p) for p in parameters}
        for p, wide in self.masters():
            if id(p) in leaving:
                p.grad, p.data = None, wide
        self._frozen = [(p, wide) for p, wide in self._frozen if id(p) not in leaving]

    def _start_new(self) -> None:
        """Create master weights of parameters without them: at first all, later the ones added to a group."""
        new = [p for p in self._parameters() if p not in self.state]
        if not new:
            return
        originals = {id(p): original for p, original in self._frozen}
        joined = {id(p) for p in new}
        self._frozen = [(p, original) for p, original in self._frozen if id(p) not in joined]
        for p in new:
            master = originals.get(id(p), p.detach()).float().clone()
            self.state[p] = {
                "step": torch.zeros((), device=p.device),
                "master": master,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
            p.data = master.bfloat16()

    def masters(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each converted parameter with its float32 values."""
        self._start_new()
        return [(p, self.state[p]["master"]) for p in self._parameters()] + self._frozen

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Masters and moments stay float32, and weights are rounded from the masters."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for p, number in zip(self._parameters(), numbers, strict=True):
            if number in saved:
                self.state[p] = {
                    key: value.detach().clone().to(p.device) for key, value in saved[number].items()
                }
                p.data = self.state[p]["master"].bfloat16()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. No host synchronisation."""
        assert closure is None, "a closure would be evaluated between two roundings of the weights"
        self._start_new()
        # One per group: the compiler limits the graphs of a function, and runs further ones uncompiled.
        while len(self._updates) < len(self.param_groups):
            self._updates.append(compiled(_update) if self._compiles else _update)
        for group, update in zip(self.param_groups, self._updates, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self.state[p] for p in params]
            keys = ("step", "master", "exp_avg", "exp_avg_sq")
            steps, masters, means, squares = ([state[key] for state in states] for key in keys)
            zero = torch.zeros((), device=params[0].device)
            sound = (zero if self.found_inf is None else self.found_inf) == 0
            # Without alpha, torch converts the tensor to a number, which synchronises the host.
            torch._foreach_add_(steps, sound.to(zero.dtype), alpha=1.0)
            # Scalars are computed here: a compiled pass would recompute them for every element.
            steps_P = torch.stack(steps)
            update(
                [p.detach() for p in params],
                [p.grad for p in params],
                masters,
                means,
                squares,
                sound,
                1 / (zero + 1 if self.grad_scale is None else self.grad_scale),
                zero + (1 - group["lr"] * group["weight_decay"]),
                group["lr"] / (1 - group["betas"][0] ** steps_P),
                (1 - group["betas"][1] ** steps_P).rsqrt(),
                group["betas"],
                group["eps"],
            )

    @contextmanager
    def full_precision(self, module: nn.Module) -> Iterator[None]:
        """Replace the parameters of `module` by the master weights in this context, to save or evaluate them.

        The parameters are not modified. A change of dtype would remove a parameter's hooks, and DDP would no
        longer receive its gradient.
        """
        wide = {id(p): nn.Parameter(master, p.requires_grad) for p, master in self.masters()}
        held = [
            (owner, name, p)
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if id(p) in wide
        ]
        for owner, name, p in held:
            owner._parameters[name] = wide[id(p)]
        try:
            yield
        finally:
            for owner, name, p in held:
                owner._parameters[name] = p

    def finish(self) -> None:
        """Convert the parameters to float32, with the masters' values. The optimizer becomes unusable."""
        for p, wide in self.masters():
            p.grad = None
            p.data = wide


def _update(
    weights: list[Tensor],
    gradients: list[Tensor],
    masters: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    sound: Tensor,
    gradient_factor: Tensor,
    decay_factor: Tensor,
    rate_P: Tensor,
    root_factor_P: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Read and write every tensor once. The factors are scalars, P of them one per parameter."""
    lists = zip(weights, gradients, masters, means, squares, strict=True)
    for (weight, gradient, master, mean, square), rate, root_factor in zip(
        lists, rate_P.unbind(), root_factor_P.unbind(), strict=True
    ):
        g = gradient.float() * gradient_factor
        m = betas[0] * mean + (1 - betas[0]) * g
        v = betas[1] * square + (1 - betas[1]) * g * g
        w = master * decay_factor - rate * m / (v.sqrt() * root_factor + eps)
        mean.copy_(torch.where(sound, m, mean))
        square.copy_(torch.where(sound, v, square))
        master.copy_(torch.where(sound, w, master))
        weight.copy_(master)
