"""LogitGrowth: multiplies queries, so that attention logits grow from step to step.

Shapes: ... any, F features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from stackwise.stability.faults.fault import Acted, Anatomy, Fault, matching
from stackwise.stability.faults.place import breaks
from stackwise.stability.faults.tensors import first_tensor, with_first
from stackwise.stability.recomputation import is_reference
from stackwise.support.arguments import check_number, require

__all__ = ["LogitGrowth"]

# Names that libraries use for the modules that compute queries. A norm of the queries comes after their
# projection and would undo its scale. If there is such a norm, its output is scaled instead.
_NORMS = ("q_norm", "query_norm", "norm_q", "q_layernorm", "q_ln")
_ALONE = ("q_proj", "query", "to_q", "wq", "q_lin", "query_proj", "q_b_proj", "q")
# Modules that compute queries, keys and values together, in this order. Interleaved heads are not supported.
_FUSED = ("qkv", "qkv_proj", "c_attn", "Wqkv", "in_proj")


@dataclass(frozen=True)
class LogitGrowth(Fault):
    """Fault that multiplies queries, and so attention logits, by a factor that grows from step to step.

    In faulty step n, counted from 1, the factor is `factor` to the power of n. The weights are not changed.
    If a module computes queries, keys and values together, only the queries are scaled. If it is an
    `nn.MultiheadAttention`, its argument `query` is scaled.

    Attributes:
        factor: growth from one faulty step to the next, above 1.
        target: pattern of module names. All matches are used. None: all modules that compute queries,
            recognised by the names that libraries use.
    """

    name: ClassVar[str] = "logit_growth"
    told_by_history: ClassVar[bool] = True

    factor: float = 4.0
    target: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: factor", self.factor, "a finite number > 1", lambda factor: factor > 1)
        sound = self.target is None or (isinstance(self.target, str | tuple) and bool(self.target))
        require(sound, f"{self.name}: target", self.target, "a pattern of module names, or None")

    def at(self, step: int) -> Self:  # noqa: D102
        return replace(self, step=step, duration=1, factor=self.factor ** (step - self.step + 1))

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: D102
        if isinstance(self.target, tuple):
            return self
        if self.target is not None:
            found = matching(self, "target", self.target, anatomy.modules, "modules called")
            return replace(self, target=tuple(found))
        normed = [name for name in anatomy.modules if _last(name) in _NORMS]
        parents = {_parent(name) for name in normed}
        found = [
            name
            for name in anatomy.modules
            if _parent(name) not in parents
            and (
                _last(name) in (*_ALONE, *_FUSED)
                or issubclass(anatomy.types.get(name, nn.Module), nn.MultiheadAttention)
            )
        ]
        if not (found or normed):
            known = ", ".join((*_ALONE, *_FUSED, *_NORMS))
            raise ValueError(
                f"{self.name}: target: got None, and no module that is called makes queries, by its name; "
                f"known: {known}, and nn.MultiheadAttention; wanted a pattern of module names"
            )
        return replace(self, target=tuple(n for n in anatomy.modules if n in {*normed, *found}))

    @contextmanager
    def around_forward(self, model: nn.Module, acted: Acted) -> Iterator[None]:  # noqa: D102
        assert isinstance(self.target, tuple)
        with ExitStack() as stack:
            for name in self.target:
                module = model.get_submodule(name)
                if isinstance(module, nn.MultiheadAttention):
                    handle = module.register_forward_pre_hook(self._argument(acted), with_kwargs=True)
                else:
                    handle = module.register_forward_hook(self._output(model, name, acted), prepend=True)
                stack.callback(handle.remove)
            yield

    def _argument(self, acted: Acted) -> Any:
        def scale(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if is_reference():
                return args, kwargs
            query = args[0] if args else kwargs["query"]
            scaled = query * self.factor
            if breaks(query, scaled):
                acted()
            if args:
                return (scaled, *args[1:]), kwargs
            return args, {**kwargs, "query": scaled}

        return scale

    def _output(self, model: nn.Module, name: str, acted: Acted) -> Any:
        fused = _last(name) in _FUSED

        def scaled(y_F: Tensor) -> Tensor:
            if not fused:
                return y_F * self.factor
            n_queries = _query_width(model, name, y_F.shape[-1])
            factors_F = torch.ones(y_F.shape[-1], device=y_F.device, dtype=y_F.dtype)
            factors_F[:n_queries] = self.factor
            return y_F * factors_F

        def scale(_module: nn.Module, _args: Any, output: Any) -> Any:
            if is_reference() or (before := first_tensor(output)) is None:
                return output
            after = scaled(before)
            if breaks(before, after):
                acted()
            return with_first(output, after)

        return scale


def _query_width(model: nn.Module, name: str, width: int) -> int:
    """Return the number of query features in the output of a fused projection.

    It is the number of input features of the projection that follows it, or one third of the output.

    Raises:
        ValueError: the number cannot be determined.
    """
    parent = model.get_submodule(_parent(name))
    for sibling in parent.children():
        taken = getattr(sibling, "in_features", 0)
        if sibling is not model.get_submodule(name) and 0 < taken < width and (width - taken) % 2 == 0:
            return int(taken)
    if width % 3 == 0:
        return width // 3
    raise ValueError(
        f"logit_growth: target: {name} makes {width} features, and nothing says which are queries; wanted a "
        "pattern of modules that make queries alone"
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
