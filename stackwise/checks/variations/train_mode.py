"""Train mode: the model is in train mode, with dropout switched off."""

from __future__ import annotations

from typing import ClassVar

from stackwise.checks.engine.variation import TRAIN_MODE, Switch


class TrainMode(Switch):
    """Ask in train mode, with dropout off."""

    name = "train_mode"
    question = "Is the output the same in train mode, apart from dropout?"
    words = "the model is in train mode (dropout off)"
    rank = 55
    needs = (TRAIN_MODE,)
    sets: ClassVar[dict[str, bool]] = {"train": True}
    advice = "Look for branches on self.training, and for weights that train() and eval() change."
