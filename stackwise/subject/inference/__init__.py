"""Inference: how a model can be called, and what it claims, as far as that shows from outside."""

from stackwise.subject.inference.infer import infer
from stackwise.subject.inference.output import cast, logits_of
from stackwise.subject.inference.sizes import is_sequence
from stackwise.subject.inference.trial import InferenceError

__all__ = ["InferenceError", "cast", "infer", "is_sequence", "logits_of"]
