"""Subject of checks: a model or a training step, whose spec is inferred when a test first needs it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

__all__ = ["BadFactoryError", "LazySpec"]


class BadFactoryError(Exception):
    """Failure to build or call a model or training step, for example because its factory raises.

    Attributes:
        kind: name of the class of the original exception.
    """

    def __init__(self, name: str, error: Exception) -> None:
        self.kind = type(error).__name__
        super().__init__("\n".join([f"{name}: {self.kind}: {error}", *_places(error)]))


class LazySpec:
    """Subject of checks, with a spec that is inferred once, at its first use.

    Args:
        model: a TrainerSpec, anything that `ModelSpec.of` (or, with asks="trainer", `TrainerSpec.of`)
            understands, or a function that returns such an object.
        name: name in test ids and reports. None: the name of `model`.
        asks: kind of the subject. None: "trainer" for a TrainerSpec, otherwise "model".
        target: "MODULE:FACTORY" that builds the subject in another process, or None.
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
        """Return the ModelSpec or TrainerSpec.

        Raises:
            BadFactoryError: the subject cannot be built or called. Later calls raise the same error.
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
    """Yield the last three frames of the original exception that are outside of stackwise."""
    error = error.__cause__ or error
    ours = (Path(__file__).parent, Path(__file__).parents[1] / "stackwise")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in ours)
    ]
    for frame in frames[-3:]:
        yield f"  {frame.filename}:{frame.lineno} in {frame.name}"
