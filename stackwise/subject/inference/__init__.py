"""Inference: call form, input kind, causality and capabilities of a model, found by trial."""

from stackwise.subject.inference.infer import infer
from stackwise.subject.inference.inputs import is_sequence
from stackwise.subject.inference.trial import InferenceError
from stackwise.subject.output import cast, logits_of

__all__ = ["InferenceError", "cast", "infer", "is_sequence", "logits_of"]
