"""DataConfig: settings of the training data."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stackwise.config.section import Applies, Keys, Problems, Section

__all__ = ["DataConfig", "TaskKind"]

TaskKind = Literal["copy", "shift", "induction", "markov"]


class DataConfig(Section):
    """Training data: a text, token shards, or a synthetic task.

    `write_shards` writes shards. Tasks:

    - `copy`, `shift`: repeat earlier tokens.
    - `induction`: after a key that occurred before, predict the token that followed it there.
    - `markov`: text from a Markov chain, whose entropy is known.
    """

    applies: ClassVar[Applies] = {"tokenizer": ("task", (None,))}

    dataset_path: str | None = None
    """Text file, or folder of token shards; null: the documentation of CPython."""
    task: TaskKind | None = None
    """Synthetic task instead of a text; null: none."""
    tokenizer: str = "byte"
    """byte, or the path of a tokenizer.json."""
    pack_documents: bool = False
    """A token attends only to tokens of its own document."""
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0)
    """Share of the data for validation; 0: no validation."""
    shuffle: bool = True
    """Use a new order in each epoch."""

    @classmethod
    def _rules(cls, key: str, given: Keys) -> Problems:
        if key == "task" and given.task is not None and given.dataset_path is not None:
            yield key, "set either task or dataset_path, not both"
