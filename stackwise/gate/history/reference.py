"""Reference: a pinned workload, timed in turns with a test, so that a machine may drift without an alarm.

A product of two matrices and a copy of memory, of sizes that never change. What slows all of a machine down
slows both, and the ratio of a test to them does not know it. What is stored is the time of each by itself, so
that a machine whose memory alone became slower is seen; see `drift`.

A reference cancels what it shares with the test, and no more: of a test that waits for a disk, nothing.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stackwise.support.arguments import check_sizes, require

if TYPE_CHECKING:
    import torch

__all__ = ["REFERENCE_VERSION", "Reference", "ReferenceTime", "Referenced", "log_ratio", "referenced"]

# Part of the key of a machine: a change to what follows is another reference, whose ratios are others.
REFERENCE_VERSION = 1
# Double precision on the CPU: no setting of torch makes it faster. The copy is larger than a core's caches.
_CPU_SIZE, _CPU_BYTES = 256, 32 * 2**20
_CUDA_SIZE, _CUDA_BYTES = 4096, 256 * 2**20


@dataclass(frozen=True)
class ReferenceTime:
    """Seconds of the reference's two parts.

    Attributes:
        gemm: of the product of two matrices.
        copy: of the copy of memory.

    Raises:
        ValueError: no positive numbers.
    """

    gemm: float
    copy: float

    def __post_init__(self) -> None:
        for name in ("gemm", "copy"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"reference {name}", value, "seconds > 0")

    @property
    def seconds(self) -> float:
        """What a test is compared with: the geometric mean of both, so that neither weighs more."""
        return math.sqrt(self.gemm * self.copy)


@dataclass(frozen=True)
class Referenced:
    """A test that was timed in turns with the reference.

    Attributes:
        samples: seconds of a call, one per turn.
        reference: the reference's time in the same turns.
    """

    samples: tuple[float, ...]
    reference: tuple[ReferenceTime, ...]

    @property
    def level(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.samples)

    @property
    def reference_level(self) -> ReferenceTime:
        """Median seconds of the reference's parts."""
        return median_time(self.reference)

    @property
    def log_ratio(self) -> float:
        """Median over turns of log(test / reference)."""
        return log_ratio(self.samples, self.reference)


class Reference:
    """The pinned workload on a device, ready to be timed.

    Args:
        device: where the test does its work; its tensors stay there: about 65 MiB on a CPU, 610 MiB on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        from stackwise.benchmark.timing.clock import HostClock

        cuda = device.type == "cuda"
        size, n_bytes = (_CUDA_SIZE, _CUDA_BYTES) if cuda else (_CPU_SIZE, _CPU_BYTES)
        dtype = torch.float16 if cuda else torch.float64
        generator = torch.Generator(device).manual_seed(0)

        def matrix() -> torch.Tensor:
            made = torch.randn(size, size, device=device, dtype=torch.float32, generator=generator)
            return made.to(dtype)

        self._a, self._b = matrix(), matrix()
        self._product = torch.empty_like(self._a)
        self._from = torch.ones(n_bytes // 4, device=device, dtype=torch.float32)
        self._to = torch.empty_like(self._from)
        self._device, self._clock = device, HostClock(device)
        for _ in range(3):
            self.sample()

    def sample(self) -> ReferenceTime:
        """Time each part once, from an idle device to an idle device again."""
        import torch

        # What a test has switched on around itself is not to reach the reference.
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            gemm = self._clock.sample(self._multiply, 1)[0]
            copy = self._clock.sample(self._copy, 1)[0]
        return ReferenceTime(gemm, copy)

    def _multiply(self) -> Any:
        import torch

        return torch.mm(self._a, self._b, out=self._product)

    def _copy(self) -> Any:
        return self._to.copy_(self._from)


def referenced(
    take: Callable[[], float], reference: Reference, *, turns: int = 24, seed: int = 0
) -> Referenced:
    """Time a test and the reference in turns.

    Who begins is drawn by chance, and the turn after has the order reversed: nobody is first more often.

    Args:
        take: takes one sample of the test, warmed up: seconds of a call.
        reference: on the test's device.
        turns: how many; an even number is balanced.
        seed: of the order.
    """
    check_sizes(turns=turns)
    draw = random.Random(seed)  # noqa: S311
    samples, references = [], []
    first = True
    for turn in range(turns):
        first = draw.random() < 0.5 if turn % 2 == 0 else not first
        if first:
            samples.append(take())
        references.append(reference.sample())
        if not first:
            samples.append(take())
    return Referenced(tuple(samples), tuple(references))


def log_ratio(samples: Sequence[float], reference: Sequence[ReferenceTime]) -> float:
    """Median over turns of log(test / reference): dimensionless.

    Args:
        samples: seconds of the test, one per turn.
        reference: the reference's time in the same turns.

    Raises:
        ValueError: no turns, not as many of both, or a sample that is no positive number.
    """
    require(len(samples) == len(reference) > 0, "samples", len(samples), f"one per turn, of {len(reference)}")
    for value in samples:
        require(math.isfinite(value) and value > 0, "sample", value, "seconds > 0")
    pairs = zip(samples, reference, strict=True)
    return statistics.median(math.log(each / turn.seconds) for each, turn in pairs)


def median_time(times: Sequence[ReferenceTime]) -> ReferenceTime:
    """The median of each part."""
    gemm, copy = (statistics.median(getattr(each, name) for each in times) for name in ("gemm", "copy"))
    return ReferenceTime(gemm, copy)
