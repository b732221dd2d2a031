"""Inference: call form, input kind, causality and capabilities of a model, found by trial."""

from stackwise.subject.inference.infer import infer
from stackwise.subject.inference.inputs import is_sequence
from stackwise.subject.inference.output import cast, logits_of
from stackwise.subject.inference.trial import InferenceError

__all__ = ["InferenceError", "cast", "infer", "is_sequence", "logits_of"]
