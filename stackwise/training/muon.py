"""Muon: orthogonalised momentum for matrices and AdamW for all other parameters, in one optimizer.

Shapes: R rows and C columns of a matrix, N matrices of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from stackwise.support.arguments import check_choice, require

__all__ = ["Muon", "orthogonalised"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Maximum number of elements per batched orthogonalisation. If one matrix fills the device, larger batches
# only cost memory.
_TOGETHER = {"cpu": 2**17}
_TOGETHER_ELSEWHERE = 2**24


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024), momentum with equalised singular values, combined with AdamW.

    A matrix moves by `lr * 0.2 * sqrt(max(R, C))` along the orthogonalised Nesterov momentum. This is about
    the step size of AdamW, so that both share learning rate and weight decay (Liu et al. 2025,
    arXiv:2502.16982, section 2.2). Weight decay is decoupled.

    `found_inf` and `grad_scale` may be set before a step, as with fused `AdamW`. If `found_inf` is nonzero,
    the step changes nothing. Gradients are divided by `grad_scale`. Neither synchronises the host.

    Sharded matrices (`DTensor`, as in FSDP2) are gathered in every process for the orthogonalisation, a few
    at a time.

    Args:
        groups: parameters, or parameter groups of them. A group may have `kind`: "muon" (default) or "adamw".
            A "muon" group may have `rows`: numbers of rows of several maps that are stacked in one weight,
            such as queries, keys and values. Each map is orthogonalised and scaled separately.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: decay rate of the mean gradient, for "muon".
        betas: decay rates of the two moments, for "adamw".
        eps: added to the root of the second moment, for "adamw".

    Raises:
        ValueError: an unknown kind; for "muon" a parameter that is not a matrix, or has another number of
            rows than the sum of `rows`.
    """

    def __init__(
        self,
        groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        # torch reads `fused` when it loads a state: step counters then stay float32, on the device.
        super().__init__(groups, {**defaults, "kind": "muon", "rows": (), "fused": True})
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Raise ValueError for parameters that cannot be orthogonalised."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_choice("kind", group["kind"], ("muon", "adamw"))
            if group["kind"] == "muon":
                for p in group["params"]:
                    _check_matrix(p, group["rows"])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. No host synchronisation."""
        assert closure is None, "found_inf and grad_scale are of one gradient"
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for device in dict.fromkeys(p.device for p in trained):
                params = [p for p in trained if p.device == device]
                zero = torch.zeros((), device=device)
                left_out = zero if self.found_inf is None else (self.found_inf.to(device) != 0).float()
                scale = None if self.grad_scale is None else self.grad_scale.to(device)
                if group["kind"] == "adamw":
                    self._step_adamw(group, params, left_out, scale)
                else:
                    self._step_muon(group, params, left_out == 0, scale)

    def _step_adamw(
        self, group: dict[str, Any], params: list[nn.Parameter], left_out: Tensor, scale: Tensor | None
    ) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in params]
        adamw(
            params,  # type: ignore[arg-type]
            [p.grad for p in params],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=scale,
            found_inf=left_out,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_muon(
        self, group: dict[str, Any], params: list[nn.Parameter], sound: Tensor, scale: Tensor | None
    ) -> None:
        lr, momentum = group["lr"], group["momentum"]
        for batch in _batches(params):
            updates = []
            for p in batch:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                assert p.grad is not None
                mean, gradient = _local(state["momentum_buffer"]), _local(p.grad)
                if scale is not None:
                    gradient = gradient / scale
                new = mean.lerp(gradient, 1 - momentum)
                updates.append(_whole(gradient.lerp(new, momentum), p))
                mean.copy_(torch.where(sound, new, mean))
            moves = _moves(updates, group["rows"])
            for p, move in zip(batch, moves, strict=True):
                weight = _local(p)
                new = weight * (1 - lr * group["weight_decay"]) - lr * _shard(move, p)
                weight.copy_(torch.where(sound, new, weight))


def orthogonalised(x_NRC: Tensor) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrices, in bfloat16, singular values 0.7 to 1.2.

    Five steps of a Newton-Schulz iteration. Its coefficients make small singular values grow fast, but it
    does not converge (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    Args:
        x_NRC: (N, R, C), or one matrix.
    """
    wide = x_NRC.shape[-2] <= x_NRC.shape[-1]
    x = x_NRC if wide else x_NRC.mT
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)).bfloat16()
    a, b, c = _COEFFICIENTS
    for _ in range(5):
        gram = x @ x.mT
        if x.ndim == 2:
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        else:
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class _Map(NamedTuple):
    """One map of a matrix, or the full matrix: its update, and the tensor that its move is written to."""

    update_RC: Tensor
    move_RC: Tensor


def _moves(updates: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Return the tensor that the learning rate multiplies, per update. Maps of equal shape are batched."""
    moves = [torch.empty_like(update) for update in updates]
    by_shape: dict[torch.Size, list[_Map]] = {}
    for update, move in zip(updates, moves, strict=True):
        sizes = list(rows) or [len(update)]
        for one in map(_Map, torch.split(update, sizes), torch.split(move, sizes)):
            by_shape.setdefault(one.update_RC.shape, []).append(one)
    for shape, maps in by_shape.items():
        together = [one.update_RC for one in maps]
        directions = orthogonalised(torch.stack(together)) if len(maps) > 1 else [orthogonalised(*together)]
        for one, direction_RC in zip(maps, directions, strict=True):
            one.move_RC.copy_(direction_RC).mul_(0.2 * math.sqrt(max(shape)))
    return moves


def _batches(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield batches of matrices of one shape. Small matrices are batched."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for p in params:
        by_shape.setdefault(p.shape, []).append(p)
    for shape, same in by_shape.items():
        together = _TOGETHER.get(same[0].device.type, _TOGETHER_ELSEWHERE)
        many = max(1, together // max(1, shape.numel()))
        for start in range(0, len(same), many):
            yield same[start : start + many]


def _check_matrix(p: nn.Parameter, rows: Sequence[int]) -> None:
    require(p.ndim == 2, "params", tuple(p.shape), "matrices, for kind='muon'")
    require(not rows or sum(rows) == len(p), "rows", tuple(rows), f"() or {len(p)} rows together")


def _local(tensor: Any) -> Tensor:
    """Return the shard of `tensor` in this process, sharing its memory."""
    return cast("Tensor", tensor.to_local() if _is_distributed(tensor) else tensor)


def _whole(local: Tensor, like: Any) -> Tensor:
    """Return the full matrix of the processes' shards, which are sharded like `like`."""
    if not _is_distributed(like):
        return local
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return spread.full_tensor()


def _shard(whole: Tensor, like: Any) -> Tensor:
    """Return this process's shard of `whole`, which is equal in every process."""
    if not _is_distributed(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _is_distributed(tensor: Tensor) -> bool:
    """Return True for a DTensor, without the half second that importing the class takes."""
    return hasattr(tensor, "device_mesh")
