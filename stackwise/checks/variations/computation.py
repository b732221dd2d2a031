"""Computation: another attention backend, a lower precision, or the compiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stackwise.checks.engine.examination import HALF_PRECISION, Examination
from stackwise.checks.engine.question import Precision, Question
from stackwise.checks.engine.variation import Need, Refused, Switch, Variation
from stackwise.checks.probe.compiler import BACKEND, counting_backend, fresh_compiler


class AttentionBackend(Variation):
    """Compute attention with another backend.

    Value: "math" (the plain formula of scaled_dot_product_attention) or "eager" (the Python code of a
    transformers model).
    """

    name = "attention_backend"
    check, family = "backend_gradients", "backend"
    question = "Are output and gradients the same with another attention backend?"
    rank = 52
    words = "attention uses the {} backend"
    needs = (Need("needs a call of scaled_dot_product_attention", lambda exam: _calls_attention(exam)),)
    explained_by = frozenset({"later_tokens"})
    advice = (
        "Look for branches on the backend: a mask or a window that one of them drops, is_causal plus "
        "a mask, and a different scale."
    )

    def values(self, exam: Examination) -> list[str]:
        """Return the backends."""
        return ["math", "eager"] if hasattr(exam.base, "set_attn_implementation") else ["math"]

    def change(self, question: Question, value: str, exam: Examination) -> None:
        """Allow for the softmax of eager attention, which transformers computes in float32."""
        question.computes_in_float32 = question.computes_in_float32 or value == "eager"

    def prepare(self, model: nn.Module, value: str, exam: Examination) -> nn.Module:
        """Choose the implementation of a transformers model."""
        if value == "eager":
            try:
                model.set_attn_implementation("eager")  # type: ignore[operator]
            except (ValueError, TypeError, AttributeError) as error:
                raise Refused("the model has no eager attention") from error
        return model

    def around(self, value: str) -> AbstractContextManager[object]:
        """Choose the kernel of torch."""
        return sdpa_kernel(SDPBackend.MATH) if value == "math" else nullcontext()


def _calls_attention(exam: Examination) -> bool:
    calls = _AttentionCalls()
    with calls, torch.no_grad():
        exam.spec.logits(exam.model(), exam.plain_inputs)
    return calls.seen


class _AttentionCalls(TorchFunctionMode):
    """Notes if the attention of torch is called."""

    seen = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or function is F.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


class HalfPrecision(Variation):
    """Ask in half precision. Value: name of the dtype, or "autocast".

    A position, loss or gradient differs if it is not finite, but finite in a plain call in the same dtype.
    """

    name = "half_precision"
    question = "In bfloat16, float16 and autocast, is each result finite if it is finite in a plain call?"
    family = "finiteness"
    rank = 90
    no_values = "needs a model with a finite output in bfloat16, in float16 or under autocast"
    words: ClassVar[dict[str, str]] = {
        "bfloat16": "the model is in bfloat16",
        "float16": "the model is in float16",
        "autocast": "the model runs under autocast to bfloat16",
    }
    compares_less = True
    advice = (
        "Look for masks of finfo.min that are added twice (their sum is -inf), for a softmax with all keys "
        "masked, and for a NaN that is multiplied by 0."
    )

    def values(self, exam: Examination) -> list[str]:
        """Return the precisions with a finite plain answer."""
        return [_name(each) for each in HALF_PRECISION if exam.in_dtype(each).is_finite]

    def change(self, question: Question, value: str, exam: Examination) -> None:
        """Choose the precision."""
        question.dtype = next(each for each in HALF_PRECISION if _name(each) == value)


def _name(precision: Precision) -> str:
    return str(precision).removeprefix("torch.")


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
