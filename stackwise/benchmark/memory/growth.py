"""MemoryGrowth: trends of bytes and objects over steps, and the verdict on them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from stackwise.benchmark.memory.trend import Trend
from stackwise.support.units import byte_text

__all__ = ["GrowingPlace", "GrowingType", "MemoryGrowth"]

Verdict = Literal["flat", "grows", "fragments"]

# Free memory of the C library rises by pages when blocks of many sizes are allocated and freed.
_HOST_FREE_TOLERANCE = 64 * 1024


@dataclass(frozen=True)
class GrowingType:
    """Type whose number of objects rises in each quarter of the steps.

    Attributes:
        name: name of the type, or "autograd NAME" for nodes of a graph.
        count_per_step: additional objects per step.
        bytes_per_step: additional bytes of these objects per step: storages of tensors, slots of lists.
    """

    name: str
    count_per_step: float
    bytes_per_step: float

    def __str__(self) -> str:
        size = f", {byte_text(self.bytes_per_step)}" if abs(self.bytes_per_step) >= 1 else ""
        return f"{self.name}: {self.count_per_step:+.3g} a step{size}"


@dataclass(frozen=True)
class GrowingPlace:
    """Line of code that allocates Python objects which are not freed.

    Attributes:
        file: path of the file.
        line: line number.
        code: text of the line. "" if the file cannot be read.
        count_per_step: additional objects per step. For a tensor, its Python object counts.
    """

    file: str
    line: int
    code: str
    count_per_step: float

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}".rstrip(": ")


@dataclass(frozen=True)
class MemoryGrowth:
    """Growth of memory per step.

    A trend of None could not be read on this machine.

    Attributes:
        steps: number of measured steps.
        warmup: number of steps before them.
        tolerance: bytes per step below which a rise is ignored.
        host: bytes allocated by the C library: tensors on the CPU, graphs of autograd.
        python: bytes allocated by Python's allocators since tracing started. They partly overlap with `host`.
            They also rise while older objects are replaced.
        blocks: number of allocated blocks of at most 512 bytes in Python's allocators.
        device: bytes of tensors on the CUDA device.
        host_free: free bytes that the C library has reserved.
        device_free: bytes of the CUDA device that torch's allocator has reserved without a tensor in them.
        tensors: number of tensors.
        nodes: number of nodes in autograd's graph that are reachable from a tensor.
        objects: number of objects that the garbage collector tracks.
        callables: number of these objects that can be called: functions, closures, modules.
        hooks: number of callbacks registered with modules, tensors and optimizers that existed before.
        cyclic_bytes: median bytes per step that only the garbage collector can free. It ran after every step.
            Otherwise they stay until it runs automatically.
        types: growing types, largest growth first.
        places: lines of code with objects that are not freed, most objects first.
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
        """Reasons for a verdict other than "flat", one per line. Empty if it is "flat"."""
        rises = {"the device": self.device, "the host": self.host, "Python": self._python}
        in_use = {
            where: f"{byte_text(rise.per_step)} more a step are in use by {where} "
            f"(99 % interval {byte_text(rise.low)} to {byte_text(rise.high)})"
            for where, rise in rises.items()
            if rise is not None and rise.exceeds(self.tolerance)
        }
        objects = []
        if self.tensors.exceeds(0):
            objects.append(f"{self.tensors.per_step:.3g} tensors more a step are alive")
        if self.nodes.exceeds(0):
            objects.append(
                f"{self.nodes.per_step:.3g} nodes more a step are in autograd's graph: something keeps the "
                "graph of each step, as `total += loss` does; of a loss that is only looked at, keep "
                "loss.item() or loss.detach()"
            )
        if self.hooks.each_step:
            objects.append(
                f"{self.hooks.per_step:.3g} hooks more a step are registered: keep the handle that "
                "registering gives, and call its remove(), or register once"
            )
        elif self.callables.each_step:
            objects.append(
                f"{self.callables.per_step:.3g} functions, closures, modules or others that can be called "
                "are alive more after each step without exception: something keeps a callback of each"
            )
        found = [*in_use.values(), *objects]
        if not found:
            return self._fragmentation
        explained = any(each.bytes_per_step > 0.1 * self.bytes_per_step for each in self.types)
        if not (objects or explained or "Python" in in_use):
            found.append(
                "no tensor, node or object of Python grows with it: a library that keeps something for each "
                "new shape (more warm-up, or fewer shapes, would show it), or a leak in C or C++"
            )
        return found

    @property
    def _python(self) -> Trend | None:
        """Trend of traced bytes, if the number of objects or of small blocks rises too. None otherwise.

        The rise of small blocks must be steady: interpreter and libraries store data for each executed place
        in the code, which grows for hundreds of steps at a decreasing rate. Large objects are visible in
        `host`. Traced bytes are no evidence by themselves, even if `host` is unknown: a sliding window that
        was full before tracing adds traced bytes with each object that it replaces.
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
        """Verdict: "grows" (more is in use per step), "fragments" (only more is reserved) or "flat"."""
        if not self.reasons:
            return "flat"
        return "fragments" if self._fragmentation == self.reasons else "grows"

    @property
    def bytes_per_step(self) -> float:
        """Largest rise of bytes in use per step: on the device, on the host, or in Python."""
        rises = [rise.per_step for rise in (self.device, self.host, self._python) if rise is not None]
        return max(rises, default=0.0)

    @property
    def tensors_per_step(self) -> float:
        """Number of additional tensors per step."""
        return self.tensors.per_step

    @property
    def objects_per_step(self) -> float:
        """Number of additional objects per step that the garbage collector tracks."""
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
        """Return plain values for JSON."""
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
