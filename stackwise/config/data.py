"""DataConfig: settings of the training data."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stackwise.config.section import Applies, Keys, Problems, Section

__all__ = ["DataConfig", "TaskKind"]

TaskKind = Literal["copy", "shift", "induction", "markov"]


class DataConfig(Section):
    """Training data: a text, token shards, or a synthetic task.

    Shards are written by `write_shards`. Of the tasks, `copy` and `shift` repeat earlier tokens, `induction`
    asks for the token that followed an earlier one, and `markov` is text of known entropy.
    """

    applies: ClassVar[Applies] = {"tokenizer": ("task", (None,))}

    dataset_path: str | None = None
    """Text file, or folder of token shards; null: the documentation of CPython."""
    task: TaskKind | None = None
    """Synthetic task instead of a text; null: none."""
    tokenizer: str = "byte"
    """byte, or the path of a tokenizer.json."""
    pack_documents: bool = False
    """Tokens of a document do not attend to other documents."""
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0)
    """Share of the data for validation; 0: no validation."""
    shuffle: bool = True
    """Use a new order in each epoch."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        if key == "task" and given.task is not None and given.dataset_path is not None:
            yield key, "needs dataset_path=null: the data is one or the other"
