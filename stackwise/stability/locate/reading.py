"""Reading: the extremes and the size of a tensor, left on its device until all of a run are wanted."""

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
    """Of one tensor.

    Attributes:
        low: its least value; NaN where there is a NaN.
        high: its largest value; NaN where there is a NaN.
        square: the sum of its squares, in float64.
        count: how many values it has.
    """

    low: float
    high: float
    square: float
    count: int

    @classmethod
    def of_parts(cls, parts: Sequence[Reading]) -> Reading:
        """Of a tensor in several parts."""
        broken = any(math.isnan(part.high) for part in parts)
        return cls(
            math.nan if broken else min((part.low for part in parts), default=0.0),
            math.nan if broken else max((part.high for part in parts), default=0.0),
            sum(part.square for part in parts),
            sum(part.count for part in parts),
        )

    @property
    def is_broken(self) -> bool:
        """Whether there is a NaN or a +inf."""
        return math.isnan(self.high) or self.high == math.inf

    @property
    def has_negative_infinity(self) -> bool:
        """Whether there is a -inf, as far as no NaN hides it."""
        return self.low == -math.inf

    @property
    def is_mask(self) -> bool:
        """Whether it may be an additive mask, whose largest value is 0 unless it hides everything."""
        return self.has_negative_infinity and self.high in (0.0, -math.inf)

    @property
    def is_finite(self) -> bool:
        """Whether every value is."""
        return not self.is_broken and not self.has_negative_infinity

    @property
    def worst(self) -> float:
        """The NaN, +inf or -inf that it has, else the value of the largest magnitude."""
        if self.is_broken:
            return self.high
        return self.low if abs(self.low) > abs(self.high) else self.high


class Readings:
    """Takes readings without waiting for the device."""

    def __init__(self) -> None:
        self._taken: list[Tensor] = []
        self._counts: list[int] = []
        self._lock = threading.Lock()  # devices have a thread each in the backward pass

    def take(self, value: Any) -> list[int]:
        """Read each floating-point tensor in `value`; the places of the readings in `settle`'s list."""
        return [place for tensor in tensors_in(value) if (place := self.take_one(tensor)) is not None]

    @torch.no_grad()
    def take_one(self, tensor: Tensor | None) -> int | None:
        """Read one tensor; None where it has no floating-point values."""
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
        """All readings so far, as numbers."""
        by_device: dict[torch.device, list[int]] = {}
        for place, reading in enumerate(self._taken):
            by_device.setdefault(reading.device, []).append(place)
        settled: dict[int, Reading] = {}
        for device, places in by_device.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # streams of the backward pass
            rows = torch.stack([self._taken[place] for place in places]).tolist()
            for place, (low, high, square) in zip(places, rows, strict=True):
                settled[place] = Reading(low, high, square, self._counts[place])
        return [settled[place] for place in range(len(self._taken))]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's arguments or output: also in tuples, lists, mappings and dataclasses."""
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
    """The values that this process holds, as real numbers that extremes can be taken of."""
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
        tensor = tensor.float()  # torch takes no extremes of 8-bit floats
    return tensor
