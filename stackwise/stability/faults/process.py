"""Process faults: a signal, a killed child process, a slow or dead rank, and a failed allocation."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import distributed, nn

from stackwise.stability.faults.fault import Acted, Anatomy, Fault, called_module
from stackwise.stability.faults.file_operations import Operation, intercepted
from stackwise.stability.faults.tensors import first_tensor
from stackwise.support.arguments import check_choice, check_number, check_sizes, require

__all__ = ["DeadRank", "OutOfMemory", "ProcessSignal", "SlowRank", "kill_child"]


_SIGNALS: Mapping[str, signal.Signals] = {"SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
_POLL = 1e-3


@dataclass(frozen=True)
class ProcessSignal(Fault):
    """Fault that sends a signal to this process. The action is recorded in the journal.

    Attributes:
        kind: "SIGTERM" or "SIGKILL".
        moment: "forward", in the middle of the forward pass; "update", between gradients and update; or
            "save", before one of the operations on files below `folder`.
        folder: folder of the saved files. None with any other moment.
        operation: index of the file operation since the beginning of the step, counted from 0. Operations are
            opening for writing, writing, syncing and renaming.
        target: pattern of module names, for "forward". None: middle one of the called modules without
            children.
    """

    name: ClassVar[str] = "process_signal"

    kind: str = "SIGTERM"
    moment: str = "forward"
    folder: str | os.PathLike[str] | None = None
    operation: int = 0
    target: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: kind", self.kind, _SIGNALS)
        check_choice(f"{self.name}: moment", self.moment, ("forward", "update", "save"))
        check_sizes(0, **{f"{self.name}: operation": self.operation})
        saves = self.moment == "save"
        require(
            (self.folder is not None) == saves,
            f"{self.name}: folder",
            self.folder,
            'a path with moment "save"',
        )

    @property
    def breaks(self) -> str:  # type: ignore[override]
        """Target of the fault: "storage" for a save, which follows the step, otherwise "process"."""
        return "storage" if self.moment == "save" else "process"

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: D102
        if self.moment != "forward":
            return self
        return replace(self, target=called_module(self, self.target, anatomy))

    @contextmanager
    def around_forward(self, model: nn.Module, acted: Acted) -> Iterator[None]:  # noqa: D102
        if self.moment != "forward":
            yield
            return
        assert self.target is not None
        sent = False

        def send(*_: Any) -> None:
            nonlocal sent
            if not sent:  # a module may be called several times
                sent = True
                self._send(acted)

        with model.get_submodule(self.target).register_forward_hook(send):
            yield

    def on_gradients(self, model: nn.Module, acted: Acted) -> None:  # noqa: ARG002, D102
        if self.moment == "update":
            self._send(acted)

    @contextmanager
    def around_saves(self, acted: Acted) -> Iterator[None]:  # noqa: D102
        if self.folder is None:
            yield
            return
        count = 0

        def decide(operation: Operation) -> int:
            nonlocal count
            count += 1
            if count == self.operation + 1:
                self._send(acted)
            return operation.size

        with intercepted(self.folder, "*", decide, None):
            yield

    def _send(self, acted: Acted) -> None:
        acted()
        os.kill(os.getpid(), _SIGNALS[self.kind])


def kill_child(
    command: Sequence[str],
    *,
    when: Callable[[], bool] | None = None,
    after: float = 0.0,
    kind: str = "SIGKILL",
    limit: float = 600.0,
    **arguments: Any,
) -> int:
    """Start a process, and end it from outside.

    Args:
        command: command of the process.
        when: called every millisecond. The process may live until it returns True. None: True from the start.
        after: seconds that the process may live after that.
        kind: signal, "SIGKILL" or "SIGTERM".
        limit: seconds after which the process is killed in any case.
        **arguments: arguments of `subprocess.Popen`.

    Returns:
        The return code: negative if a signal ended the process (-9 for SIGKILL), its own if it finished
        before.

    Raises:
        TimeoutError: `limit` passed before `when` returned True, or the process survived the signal.
    """
    check_choice("kind", kind, _SIGNALS)
    end = time.monotonic() + limit
    with subprocess.Popen(command, **arguments) as child:  # noqa: S603  what the caller says
        try:
            while when is not None and not when():
                if child.poll() is not None:
                    return child.returncode
                if time.monotonic() > end:
                    raise TimeoutError(f"limit: {limit} seconds have passed, and when() never said yes")
                time.sleep(_POLL)
            try:
                return child.wait(after)
            except subprocess.TimeoutExpired:
                child.send_signal(_SIGNALS[kind])
            try:
                return child.wait(max(end - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"limit: {limit} seconds have passed; {kind} did not end it") from None
        finally:
            if child.poll() is None:
                child.kill()


@dataclass(frozen=True)
class _OfRank(Fault):
    breaks: ClassVar[str] = "ranks"

    rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(0, **{f"{self.name}: rank": self.rank})

    @property
    def here(self) -> bool:
        return distributed.get_rank() == self.rank

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: ARG002
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ValueError(f"{self.name}: needs an initialised torch.distributed; there is none")
        if self.rank >= distributed.get_world_size():
            raise ValueError(f"{self.name}: rank: got {self.rank}; there are {distributed.get_world_size()}")
        return self


@dataclass(frozen=True)
class SlowRank(_OfRank):
    """Fault that delays one rank before its step.

    Attributes:
        rank: number of the rank.
        seconds: delay in seconds, above 0.
    """

    name: ClassVar[str] = "slow_rank"

    seconds: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(
            f"{self.name}: seconds", self.seconds, "a finite number > 0", lambda seconds: seconds > 0
        )

    def on_start(self, acted: Acted) -> None:  # noqa: D102
        acted()
        time.sleep(self.seconds)


@dataclass(frozen=True)
class DeadRank(_OfRank):
    """Fault that ends one rank when its step begins, without a message to the other ranks.

    The action is recorded in the journal.

    Attributes:
        rank: number of the rank.
        kind: "kill" ends it by SIGKILL, "exit" with code 1 and without cleanup.
    """

    name: ClassVar[str] = "dead_rank"

    kind: str = "kill"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: kind", self.kind, ("kill", "exit"))

    def on_start(self, acted: Acted) -> None:  # noqa: D102
        acted()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)


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
        check_choice(f"{self.name}: moment", self.moment, ("forward", "backward"))

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
