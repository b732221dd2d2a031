"""MemoryGrowth: what there is more of after each step, and whether that is growth."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from stackwise.benchmark.memory.trend import Trend
from stackwise.support.units import byte_text

__all__ = ["GrowingPlace", "GrowingType", "MemoryGrowth"]

Verdict = Literal["flat", "grows", "fragments"]

# Free memory that the C library keeps rises by whole pages while blocks of many sizes come and go.
_HOST_FREE_TOLERANCE = 64 * 1024


@dataclass(frozen=True)
class GrowingType:
    """Objects of one type, of which there are more after each quarter of the steps.

    Attributes:
        name: of the type, or "autograd NAME" of nodes in a graph.
        count_per_step: how many more.
        bytes_per_step: how much more they are themselves: of tensors the storages, of lists their slots.
    """

    name: str
    count_per_step: float
    bytes_per_step: float

    def __str__(self) -> str:
        size = f", {byte_text(self.bytes_per_step)}" if abs(self.bytes_per_step) >= 1 else ""
        return f"{self.name}: {self.count_per_step:+.3g} a step{size}"


@dataclass(frozen=True)
class GrowingPlace:
    """A line of code whose Python objects stay.

    Attributes:
        file: its path.
        line: its number.
        code: its text; "" where the file cannot be read.
        count_per_step: how many objects more: for a tensor the object that Python sees.
    """

    file: str
    line: int
    code: str
    count_per_step: float

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}".rstrip(": ")


@dataclass(frozen=True)
class MemoryGrowth:
    """What a step leaves behind, each time that it is made.

    A trend that is None was not read: nothing on this machine tells it.

    Attributes:
        steps: that were looked at.
        warmup: steps before them.
        tolerance: bytes per step below which nothing is held against the step.
        host: bytes that the C library has given out: tensors on the CPU, graphs of autograd.
        python: bytes that Python's allocators have given out since they are traced; in part the same. Rises
            too while what was there before is replaced.
        blocks: of at most 512 bytes, that Python's allocators have given out.
        device: bytes that tensors hold on the CUDA device.
        host_free: bytes that the C library keeps without having given them out.
        device_free: bytes of the CUDA device that torch's allocator keeps without a tensor in them.
        tensors: how many there are.
        nodes: of autograd's graph, within reach of a tensor.
        objects: that the garbage collector knows.
        callables: those of them that can be called: functions, closures, modules.
        hooks: callbacks that are registered with modules, tensors and optimizers that were there before.
        cyclic_bytes: median of the bytes that each step leaves to the garbage collector, which was run after
            every step; without it they stay until it runs by itself.
        types: that grow, the largest first.
        places: lines of code whose objects stay, those of most objects first.
    """

    steps: int
    warmup: int
    tolerance: float
    host: Trend | None
    python: Trend
    blocks: Trend
    device: Trend | None
    host_free: Trend | None
    device_free: Trend | None
    tensors: Trend
    nodes: Trend
    objects: Trend
    callables: Trend
    hooks: Trend
    cyclic_bytes: int
    types: tuple[GrowingType, ...] = ()
    places: tuple[GrowingPlace, ...] = ()

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is not "flat", one a line; [] where it is."""
        found = []
        for where, rise in (("the device", self.device), ("the host", self.host), ("Python", self._python)):
            if rise is not None and rise.exceeds(self.tolerance):
                interval = f"99 % interval {byte_text(rise.low)} to {byte_text(rise.high)}"
                found.append(f"{byte_text(rise.per_step)} more a step are in use by {where} ({interval})")
        if self.tensors.exceeds(0):
            found.append(f"{self.tensors.per_step:.3g} tensors more a step are alive")
        if self.nodes.exceeds(0):
            found.append(
                f"{self.nodes.per_step:.3g} nodes more a step are in autograd's graph: something keeps the "
                "graph of each step, as `total += loss` does; of a loss that is only looked at, keep "
                "loss.item() or loss.detach()"
            )
        if self.hooks.each_step:
            found.append(
                f"{self.hooks.per_step:.3g} hooks more a step are registered: keep the handle that "
                "registering gives, and call its remove(), or register once"
            )
        elif self.callables.each_step:
            found.append(
                f"{self.callables.per_step:.3g} functions, closures, modules or others that can be called "
                "are alive more after each step without exception: something keeps a callback of each"
            )
        if not found:
            return self._fragmentation
        python = self._python
        seen = (
            (python is not None and python.exceeds(self.tolerance))
            or self.tensors.exceeds(0)
            or self.nodes.exceeds(0)
            or self.callables.each_step
            or self.hooks.each_step
        )
        seen |= any(each.bytes_per_step > 0.1 * self.bytes_per_step for each in self.types)
        if not seen:
            found.append(
                "no tensor, node or object of Python grows with it: a library that keeps something for each "
                "new shape (more warm-up, or fewer shapes, would show it), or a leak in C or C++"
            )
        return found

    @property
    def _python(self) -> Trend | None:
        """What is traced, where objects or small blocks get more as steadily; of large ones the host tells.

        What interpreter and libraries note of each place in the code that they come by gets more for hundreds
        of steps, ever more slowly. Bytes alone say nothing, where the host tells nothing either: of a
        window that was full before, more and more is traced, with each object that it replaces.
        """
        steady = self.blocks.exceeds(0) and not self.blocks.fades
        return self.python if steady or self.objects.exceeds(0) else None

    @property
    def _fragmentation(self) -> list[str]:
        least = max(self.tolerance, _HOST_FREE_TOLERANCE)
        for free, whose, limit in (
            (self.device_free, "reserved on the device", self.tolerance),
            (self.host_free, "kept by the C library", least),
        ):
            if free is not None and free.exceeds(limit):
                text = f"{byte_text(free.per_step)} more a step are {whose} and not in use: "
                return [f"{text}that memory is in pieces too small for what is asked of it"]
        return []

    @property
    def verdict(self) -> Verdict:
        """Whether more is in use or alive each step, "grows"; only more reserved, "fragments"; or neither."""
        if not self.reasons:
            return "flat"
        return "fragments" if self._fragmentation == self.reasons else "grows"

    @property
    def bytes_per_step(self) -> float:
        """The largest rise of bytes in use: on the device, the host, or in Python."""
        rises = [rise.per_step for rise in (self.device, self.host, self._python) if rise is not None]
        return max(rises, default=0.0)

    @property
    def tensors_per_step(self) -> float:
        """How many tensors more are alive after a step."""
        return self.tensors.per_step

    @property
    def objects_per_step(self) -> float:
        """How many objects more there are after a step that the garbage collector knows."""
        return self.objects.per_step

    def __str__(self) -> str:
        if self.verdict == "flat":
            return (
                f"memory is flat over {self.steps} steps: {byte_text(self.bytes_per_step)} a step, "
                f"{byte_text(self.tolerance)} are allowed"
            )
        noun = "fragments" if self.verdict == "fragments" else "grows"
        lines = [f"memory {noun} over {self.steps} steps, after {self.warmup} of warm-up"]
        lines += [f"  {reason}" for reason in self.reasons]
        if self.verdict == "grows" and self.types:
            lines.append("types that grow:")
            lines += [f"  {each}" for each in self.types]
        if self.verdict == "grows" and self.places:
            lines.append("allocated at these lines and not freed:")
            lines += [f"  {each}" for each in self.places]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        told = {
            name: value.to_dict() if isinstance(value, Trend) else value for name, value in values.items()
        }
        told |= {name: [asdict(each) for each in values[name]] for name in ("types", "places")}
        return {
            "verdict": self.verdict,
            "bytes_per_step": self.bytes_per_step,
            "tensors_per_step": self.tensors_per_step,
            "objects_per_step": self.objects_per_step,
            **told,
        }
