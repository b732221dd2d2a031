"""What a test checks: a model or a training step, whose spec is inferred when a test first needs it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

__all__ = ["BadFactoryError", "LazySpec"]


class BadFactoryError(Exception):
    """A model or a training step cannot be driven: its factory raises, or gives something else.

    Attributes:
        kind: the name of the exception that says so.
    """

    def __init__(self, name: str, error: Exception) -> None:
        self.kind = type(error).__name__
        super().__init__("\n".join([f"{name}: {self.kind}: {error}", *_places(error)]))


class LazySpec:
    """What is checked, its spec inferred once, at its first use.

    Args:
        model: a TrainerSpec, anything that `ModelSpec.of` (or, with asks="trainer", `TrainerSpec.of`)
            understands, or a function that gives such a thing.
        name: in test ids and reports; None: the model's own.
        asks: what it is; None: a training step where it is a TrainerSpec, else a model.
        target: "MODULE:FACTORY", which makes it in another process, or None.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str | None = None,
        asks: Literal["model", "trainer"] | None = None,
        target: str | None = None,
    ) -> None:
        from stackwise.subject.trainer_spec import TrainerSpec

        self.model, self.target = model, target
        self.asks = asks or ("trainer" if isinstance(model, TrainerSpec) else "model")
        own = getattr(model, "name", None) or getattr(model, "__name__", None) or type(model).__name__
        self.name = name or str(own)
        self.told_by: str | None = None
        self._declared = {"name": name} if name else {}
        self._found: Any = None

    def get(self) -> Any:
        """The ModelSpec or TrainerSpec.

        Raises:
            BadFactoryError: there is none, each time for the reason of the first.
        """
        __tracebackhide__ = True
        if self._found is None:
            try:
                self._found = self._infer()
            except Exception as error:
                self._found = BadFactoryError(self.target or self.name, error)
                self._found.__cause__ = error
        if isinstance(self._found, BadFactoryError):
            raise self._found
        return self._found

    def _infer(self) -> Any:
        from stackwise.subject.spec import ModelSpec
        from stackwise.subject.trainer_spec import TrainerSpec

        if self.asks == "model":
            return ModelSpec.of(self.model, **self._declared)
        spec = TrainerSpec.of(self.model, **self._declared)
        return spec if spec.factory or self.target is None else replace(spec, factory=self.target)


def _places(error: BaseException) -> Iterator[str]:
    """The last frames outside of stackwise, of what it was in the first place."""
    error = error.__cause__ or error
    ours = (Path(__file__).parent, Path(__file__).parents[1] / "stackwise")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in ours)
    ]
    for frame in frames[-3:]:
        yield f"  {frame.filename}:{frame.lineno} in {frame.name}"
