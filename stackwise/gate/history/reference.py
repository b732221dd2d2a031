"""Reference: pinned workload that is interleaved with a test, so that drift of the machine raises no alarm.

The workload is a product of two matrices and a copy of memory, of fixed sizes. A slowdown of the complete
machine affects both, and the ratio of a test to them cancels it. The times of both parts are stored
separately, so that a machine with slower memory only is detected; see `drift`.

A reference cancels only effects that it shares with the test. For a test that waits for a disk, it cancels
none.
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

# Part of the key of a machine. A change of the workload requires a new version, since its ratios differ.
REFERENCE_VERSION = 1
# Double precision on the CPU: no setting of torch speeds it up. The copy is larger than a core's caches.
_CPU_SIZE, _CPU_BYTES = 256, 32 * 2**20
_CUDA_SIZE, _CUDA_BYTES = 4096, 256 * 2**20


@dataclass(frozen=True)
class ReferenceTime:
    """Seconds of the two parts of the reference.

    Attributes:
        gemm: seconds of the matrix product.
        copy: seconds of the memory copy.

    Raises:
        ValueError: a time that is not a positive number.
    """

    gemm: float
    copy: float

    def __post_init__(self) -> None:
        for name in ("gemm", "copy"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"reference {name}", value, "seconds > 0")

    @property
    def seconds(self) -> float:
        """Time that tests are compared with: the geometric mean of both parts, with equal weights."""
        return math.sqrt(self.gemm * self.copy)


@dataclass(frozen=True)
class Referenced:
    """Samples of a test that was interleaved with the reference.

    Attributes:
        samples: seconds of a call, one per turn.
        reference: reference time in the same turns.
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
    """Pinned workload on a device, ready to be timed.

    Args:
        device: device of the test. It holds the tensors: about 65 MiB on a CPU, 610 MiB on a GPU.
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
        """Time each part once, from an idle device to an idle device."""
        import torch

        # Modes that a test has enabled must not affect the reference.
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
    """Time a test and the reference in interleaved turns.

    The order of a turn is random, and the next turn has the reverse order. So both are first equally often.

    Args:
        take: takes one sample of the test after its warm-up: seconds of a call.
        reference: reference on the test's device.
        turns: number of turns; an even number is balanced.
        seed: seed of the order.
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
    """Return the median over turns of log(test / reference), which has no unit.

    Args:
        samples: seconds of the test, one per turn.
        reference: reference time in the same turns.

    Raises:
        ValueError: no turns, different numbers of both, or a sample that is not a positive number.
    """
    require(len(samples) == len(reference) > 0, "samples", len(samples), f"one per turn, of {len(reference)}")
    for value in samples:
        require(math.isfinite(value) and value > 0, "sample", value, "seconds > 0")
    pairs = zip(samples, reference, strict=True)
    return statistics.median(math.log(each / turn.seconds) for each, turn in pairs)


def median_time(times: Sequence[ReferenceTime]) -> ReferenceTime:
    """Return the median of each part."""
    gemm, copy = (statistics.median(getattr(each, name) for each in times) for name in ("gemm", "copy"))
    return ReferenceTime(gemm, copy)
