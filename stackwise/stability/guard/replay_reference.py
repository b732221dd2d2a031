"""ReplayReference: signals of the steps since the last snapshot, for comparison with their replay.

Shapes: S signals: norm, loss, attention logit; N steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stackwise.support.arguments import require

__all__ = ["ReplayReference"]

_SIGNALS = 3


class ReplayReference:
    """Signals of the healthy steps since the last snapshot.

    A replayed step has the same weights and batches, and so the same signals. Directly after the snapshot,
    the history may be too short to judge it.

    Args:
        device: device on which steps are judged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: dict[int, tuple[float, ...]] = {}
        self._replayed: dict[int, Tensor] = {}

    def record(self, step: int, norm: float, loss: float, logit: float) -> None:
        """Record a healthy step. A replay keeps the first record. A logit of NaN: none was passed."""
        self._recorded.setdefault(step, (norm, loss, logit))

    def forget(self, *, before: int) -> None:
        """Forget the steps with a number below `before`, which will not be replayed."""
        self._recorded = {step: signals for step, signals in self._recorded.items() if step >= before}
        self._replayed = {step: signals_S for step, signals_S in self._replayed.items() if step >= before}

    def start_replay(self) -> None:
        """Prepare the signals of all recorded steps for their replay."""
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        rows = list(self._recorded.values())
        values_NS = torch.tensor(rows, dtype=wide).reshape(len(rows), _SIGNALS).to(self._device)
        self._replayed = dict(zip(self._recorded, values_NS.unbind(), strict=True))

    def signals_of(self, step: int) -> Tensor | None:
        """Return the signals of the step's first execution, on the device; None: it is not a replay."""
        return self._replayed.get(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the signals of the steps to be replayed: plain numbers, None instead of NaN."""
        return {
            "steps": list(self._replayed),
            "signals": [
                [None if math.isnan(value) else value for value in signals_S.tolist()]
                for signals_S in self._replayed.values()
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
        require(fits, "replay_reference", state, "what state_dict() gave")
        self._recorded = {
            step: tuple(math.nan if value is None else float(value) for value in row)
            for step, row in zip(steps, signals, strict=True)
        }
        self.start_replay()


def _is_row(row: Any) -> bool:
    fits = isinstance(row, list) and len(row) == _SIGNALS
    return fits and all(isinstance(value, int | float | None) for value in row)
