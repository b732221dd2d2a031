"""OutOfMemory: raises the error of a failed allocation in the middle of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import nn

from stackwise.stability.faults.fault import Acted, Anatomy, Fault, called_module
from stackwise.stability.faults.tensors import first_tensor
from stackwise.support.arguments import check_choice, require

__all__ = ["OutOfMemory"]

_MOMENTS = ("forward", "backward")


@dataclass(frozen=True)
class OutOfMemory(Fault):
    """Fault that raises `torch.OutOfMemoryError` when a module is computed. No memory is allocated.

    The error ends the step. If a loop catches the error, it continues with its next step.

    Attributes:
        target: pattern of names of modules that a step calls. The first match is used. None: middle one of
            the called modules without children.
        moment: "forward" or "backward".
    """

    name: ClassVar[str] = "out_of_memory"
    raises: ClassVar[bool] = True

    target: str | None = None
    moment: str = "forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        sound = self.target is None or (isinstance(self.target, str) and bool(self.target))
        require(sound, f"{self.name}: target", self.target, "a pattern of module names, or None")
        check_choice(f"{self.name}: moment", self.moment, _MOMENTS)

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: D102
        return replace(self, target=called_module(self, self.target, anatomy))

    @contextmanager
    def around_forward(self, model: nn.Module, acted: Acted) -> Iterator[None]:  # noqa: D102
        assert self.target is not None

        def fail(*_: Any) -> NoReturn:
            acted()
            raise torch.OutOfMemoryError(f"CUDA out of memory ({self}, {self.target})")

        def wait(_module: nn.Module, _args: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(fail)  # type: ignore[no-untyped-call]

        module = model.get_submodule(self.target)
        if self.moment == "forward":
            handle = module.register_forward_pre_hook(fail)
        else:
            handle = module.register_forward_hook(wait)
        with handle:
            yield
