"""Reading: extremes and size of a tensor. Readings stay on their device until all of a run are settled."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Reading", "Readings", "tensors_in"]


@dataclass(frozen=True)
class Reading:
    """Extremes and size of one tensor.

    Attributes:
        low: least value; NaN if the tensor has a NaN.
        high: largest value; NaN if the tensor has a NaN.
        square: sum of the squares, in float64.
        count: number of values.
    """

    low: float
    high: float
    square: float
    count: int

    @classmethod
    def of_parts(cls, parts: Sequence[Reading]) -> Reading:
        """Return the reading of a tensor in several parts."""
        broken = any(math.isnan(part.high) for part in parts)
        return cls(
            math.nan if broken else min((part.low for part in parts), default=0.0),
            math.nan if broken else max((part.high for part in parts), default=0.0),
            sum(part.square for part in parts),
            sum(part.count for part in parts),
        )

    @property
    def is_broken(self) -> bool:
        """True if the tensor has a NaN or a +inf."""
        return math.isnan(self.high) or self.high == math.inf

    @property
    def has_negative_infinity(self) -> bool:
        """True if the tensor has a -inf that no NaN hides."""
        return self.low == -math.inf

    @property
    def is_mask(self) -> bool:
        """True for a possible additive mask: its largest value is 0, or -inf if it hides everything."""
        return self.has_negative_infinity and self.high in (0.0, -math.inf)

    @property
    def is_finite(self) -> bool:
        """True if every value is finite."""
        return not self.is_broken and not self.has_negative_infinity

    @property
    def worst(self) -> float:
        """The NaN, +inf or -inf of the tensor; if it has none, the value of the largest magnitude."""
        if self.is_broken:
            return self.high
        return self.low if abs(self.low) > abs(self.high) else self.high


class Readings:
    """Collection of readings that are taken without waiting for the device."""

    def __init__(self) -> None:
        self._taken: list[Tensor] = []
        self._counts: list[int] = []
        self._lock = threading.Lock()  # each device has its own thread in the backward pass

    def take(self, value: Any) -> list[int]:
        """Read each floating-point tensor in `value`. Return the indices of the readings in `settle()`."""
        return [place for tensor in tensors_in(value) if (place := self.take_one(tensor)) is not None]

    @torch.no_grad()
    def take_one(self, tensor: Tensor | None) -> int | None:
        """Read one tensor and return the index of the reading; None if it has no floating-point values."""
        if tensor is None or tensor.is_meta:
            return None
        values = _values(tensor.detach())
        if not values.is_floating_point() or not values.numel():
            return None
        low, high = values.aminmax()
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
        reading = torch.stack((low.double(), high.double(), norm.square()))
        with self._lock:
            self._taken.append(reading)
            self._counts.append(values.numel())
            return len(self._taken) - 1

    def settle(self) -> list[Reading]:
        """Return all readings as numbers."""
        by_device: dict[torch.device, list[int]] = {}
        for place, reading in enumerate(self._taken):
            by_device.setdefault(reading.device, []).append(place)
        settled: dict[int, Reading] = {}
        for device, places in by_device.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # wait for the streams of the backward pass
            rows = torch.stack([self._taken[place] for place in places]).tolist()
            for place, (low, high, square) in zip(places, rows, strict=True):
                settled[place] = Reading(low, high, square, self._counts[place])
        return [settled[place] for place in range(len(self._taken))]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or an output, also in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, SimpleNamespace):
        yield from tensors_in(vars(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def _values(tensor: Tensor) -> Tensor:
    """Return the values of this process as real numbers of a type that has extremes."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_nested:
        tensor = torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch has no extremes of 8-bit floats
    return tensor
