"""Attention backend: another implementation of the same attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Need, Refused, Variation


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
