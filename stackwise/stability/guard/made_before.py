"""MadeBefore: what steps had when they were made, which a rewind makes again.

Shapes: S signals: norm, loss, attention logit; N steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stackwise.support.arguments import require

__all__ = ["MadeBefore"]

_SIGNALS = 3


class MadeBefore:
    """The signals of sound steps since the last snapshot.

    A step made again with the same weights and batches has them again, and right behind the snapshot there
    may be no history that tells as much.

    Args:
        device: where steps are judged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: dict[int, tuple[float, ...]] = {}
        self._again: dict[int, Tensor] = {}

    def note(self, step: int, norm: float, loss: float, logit: float) -> None:
        """A step was sound; logit NaN: it was not given. Made again it is what it was the first time."""
        self._noted.setdefault(step, (norm, loss, logit))

    def forget(self, *, before: int) -> None:
        """No step before this one will be made again."""
        self._noted = {step: signals for step, signals in self._noted.items() if step >= before}
        self._again = {step: signals_S for step, signals_S in self._again.items() if step >= before}

    def recall(self) -> None:
        """All that were noted are to be made again."""
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        rows = list(self._noted.values())
        values_NS = torch.tensor(rows, dtype=wide).reshape(len(rows), _SIGNALS).to(self._device)
        self._again = dict(zip(self._noted, values_NS.unbind(), strict=True))

    def of(self, step: int) -> Tensor | None:
        """What it had, on the device; None: it is not one that is made again."""
        return self._again.get(step)

    def state_dict(self) -> dict[str, Any]:
        """Of the steps that are made again: plain numbers, None in place of NaN."""
        return {
            "steps": list(self._again),
            "signals": [
                [None if math.isnan(value) else value for value in signals_S.tolist()]
                for signals_S in self._again.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            ValueError: anything else.
        """
        steps, signals = state.get("steps"), state.get("signals")
        fits = (
            isinstance(steps, list)
            and isinstance(signals, list)
            and len(steps) == len(signals)
            and all(isinstance(step, int) for step in steps)
            and all(isinstance(row, list) and len(row) == _SIGNALS for row in signals)
            and all(value is None or isinstance(value, int | float) for row in signals for value in row)
        )
        require(fits, "made_before", state, "what state_dict() gave")
        assert isinstance(steps, list) and isinstance(signals, list)
        self._noted = {
            step: tuple(math.nan if value is None else float(value) for value in row)
            for step, row in zip(steps, signals, strict=True)
        }
        self.recall()
