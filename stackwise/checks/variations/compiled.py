"""Compiled: the model under torch.compile."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.variation import Switch
from stackwise.checks.probe.compiler import BACKEND, counting_backend, fresh_compiler


class Compiled(Switch):
    """Compile the model in place. Gradients are compared by `compiled_gradients`."""

    name = "compiled"
    check, family, suite = "compiled_outputs", "compilation", "full"
    question = "Is the output the same under torch.compile?"
    words = "the model is compiled"
    rank = 95
    sets: ClassVar[dict[str, bool]] = {"gradients": False}
    excludes = frozenset({"train_mode", "recomputation", "half_precision"})
    explained_by = frozenset({"later_tokens"})
    advice = (
        "Look for branches on torch.compiler.is_compiling(), and for values that the trace makes constant, "
        "such as a length or a position that the model counts itself."
    )

    def missing(self, exam: Examination) -> str:
        """Require a model that can be compiled, at least in part."""
        sequence, graphs = exam.sequence(0, exam.lengths[-1]), list[int]()
        with fresh_compiler(), torch.no_grad():
            exam.plain(_compiled(exam.model(), graphs), sequence)
        return "" if graphs else "needs a part that torch.compile compiles"

    def prepare(self, model: nn.Module, value: bool, exam: Examination) -> nn.Module:
        """Compile the model."""
        return _compiled(model, [])

    def around(self, value: bool) -> AbstractContextManager[object]:
        """Forget other models."""
        return fresh_compiler()


def _compiled(model: nn.Module, graphs: list[int]) -> nn.Module:
    """Return the model, which compiles itself in its next call."""
    model.compile(backend=counting_backend(BACKEND, graphs), dynamic=False)
    return model
