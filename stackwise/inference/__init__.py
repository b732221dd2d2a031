"""Inference: how a model can be called, and what it claims, as far as that shows from outside."""

from stackwise.inference.infer import infer
from stackwise.inference.output import cast, logits_of
from stackwise.inference.sizes import is_sequence
from stackwise.inference.trial import InferenceError

__all__ = ["InferenceError", "cast", "infer", "is_sequence", "logits_of"]
