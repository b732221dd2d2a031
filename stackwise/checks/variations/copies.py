"""Copies: a copy of the model, or another model that loads its weights."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.variation import Refused, Variation
from stackwise.checks.probe.call import dtype_of
from stackwise.support.system_errors import reraise_if_out_of_memory


class Copies(Variation):
    """Ask a copy of the model. Value: "state_dict", "deepcopy", "pickle" or "save_pretrained".

    "train mode", if eval() changes weights, such as by merging adapters: the state_dict of eval mode is
    loaded into a model in train mode.
    """

    name = "copies"
    question = "Does a copy of the model give the same output?"
    rank = 65
    words: ClassVar[dict[str, str]] = {
        "state_dict": "the state_dict of the model is loaded into a new model",
        "deepcopy": "the model is copied with deepcopy",
        "pickle": "the model is copied with pickle",
        "save_pretrained": "the model is saved by save_pretrained and loaded by from_pretrained",
        "train mode": "the state_dict of eval mode is loaded into a new model in train mode, before eval()",
    }
    single_checks = ("load_round_trip",)
    advice = (
        "Look for tensors that are neither parameters nor buffers, and for references to the first model."
    )

    def values(self, exam: Examination) -> list[str]:
        """Return the ways that the model has."""
        ways = ["state_dict", "deepcopy", "pickle"]
        if all(hasattr(exam.base, name) for name in ("save_pretrained", "from_pretrained")):
            ways.append("save_pretrained")
        if exam.once("weights of eval mode", lambda: _changes_in_eval_mode(exam.model())):
            ways.append("train mode")
        return ways

    def correct_if(self, exam: Examination, value: str) -> str | None:
        """Return a condition for a model that is only saved in train mode, as loralib demands."""
        return "the state_dict is only saved in train mode" if value == "train mode" else None

    def prepare(self, model: nn.Module, value: str, exam: Examination) -> nn.Module:
        """Copy the model."""
        if value in _WAYS:
            try:
                return _WAYS[value](model)
            except Exception as error:
                reraise_if_out_of_memory(error)
                raise Refused(f"the model cannot be copied with {value}") from error
        # Built with another seed, so that a weight that is not saved differs.
        other = exam.other_model().train(value == "train mode")
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        return other.eval()


def _changes_in_eval_mode(model: nn.Module) -> bool:
    """Return True if train() and eval() change the state_dict."""
    merged = copy.deepcopy(model.state_dict())
    return any(not torch.equal(merged[name], value) for name, value in model.train().state_dict().items())


def _saved_and_loaded(model: Any) -> nn.Module:
    """Return a transformers model that was written to files and read again."""
    # Progress bars go to stderr.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        other: nn.Module = type(model).from_pretrained(folder, dtype=dtype_of(model))
    return other.to(next(model.parameters()).device).eval()


_WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301  made in this line
    "save_pretrained": _saved_and_loaded,
}
