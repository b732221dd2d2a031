"""MadeBefore: numbers of the steps since the last snapshot, for comparison with their replay.

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
    """Signals of the healthy steps since the last snapshot.

    A replayed step has the same weights and batches, and so the same signals. Directly after the snapshot,
    the history may be too short to judge it.

    Args:
        device: device on which steps are judged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: dict[int, tuple[float, ...]] = {}
        self._again: dict[int, Tensor] = {}

    def note(self, step: int, norm: float, loss: float, logit: float) -> None:
        """Record a healthy step. A replay keeps the first record. A logit of NaN: none was passed."""
        self._noted.setdefault(step, (norm, loss, logit))

    def forget(self, *, before: int) -> None:
        """Forget the steps with a number below `before`, which will not be replayed."""
        self._noted = {step: signals for step, signals in self._noted.items() if step >= before}
        self._again = {step: signals_S for step, signals_S in self._again.items() if step >= before}

    def recall(self) -> None:
        """Prepare the signals of all recorded steps for their replay."""
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        rows = list(self._noted.values())
        values_NS = torch.tensor(rows, dtype=wide).reshape(len(rows), _SIGNALS).to(self._device)
        self._again = dict(zip(self._noted, values_NS.unbind(), strict=True))

    def of(self, step: int) -> Tensor | None:
        """Return the signals of the step's first execution, on the device; None: it is not a replay."""
        return self._again.get(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the signals of the steps to be replayed: plain numbers, None instead of NaN."""
        return {
            "steps": list(self._again),
            "signals": [
                [None if math.isnan(value) else value for value in signals_S.tolist()]
                for signals_S in self._again.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            ValueError: not such a state.
        """
        steps: Any = state.get("steps")
        signals: Any = state.get("signals")
        lists = isinstance(steps, list) and isinstance(signals, list) and len(steps) == len(signals)
        fits = lists and all(isinstance(step, int) for step in steps) and all(map(_is_row, signals))
        require(fits, "made_before", state, "what state_dict() gave")
        self._noted = {
            step: tuple(math.nan if value is None else float(value) for value in row)
            for step, row in zip(steps, signals, strict=True)
        }
        self.recall()


def _is_row(row: Any) -> bool:
    fits = isinstance(row, list) and len(row) == _SIGNALS
    return fits and all(isinstance(value, int | float | None) for value in row)
