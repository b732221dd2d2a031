"""DataConfig: what a Rack is trained on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from stackwise.config.section import Applies, Section

__all__ = ["DataConfig", "TaskKind"]

TaskKind = Literal["copy", "shift", "induction", "markov"]


class DataConfig(Section):
    """What is read: a text, token shards, or a task that is made up.

    `dataset_path` is a file of text, or a folder of shards as `write_shards` makes them; null is the
    documentation that every CPython carries. `tokenizer` is `byte`, or the path of a `tokenizer.json`.
    `task` takes the place of a text: `copy` and `shift` repeat what came before, `induction` asks for what
    followed a token earlier, `markov` is text of known entropy. `pack_documents` keeps the tokens of
    one document from seeing another's.
    """

    applies: ClassVar[Applies] = {"tokenizer": ("task", (None,))}

    dataset_path: str | None = None
    task: TaskKind | None = None
    tokenizer: str = "byte"
    pack_documents: bool = False
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0)
    shuffle: bool = True

    @field_validator("task")
    @classmethod
    def _one_source(cls, task: str | None, info: ValidationInfo) -> str | None:
        if task is not None and info.data.get("dataset_path") is not None:
            raise ValueError("goes with dataset_path=null: the data is one or the other")
        return task
