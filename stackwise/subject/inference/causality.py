"""Causality: the model's claim, from its settings and its class."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stackwise.subject.cached_call import names_cache
from stackwise.subject.call_form import attempt, can_generate, forward_parameters
from stackwise.subject.inference.inputs import example_batch
from stackwise.subject.output import logits_of
from stackwise.support.random_state import seeded

__all__ = ["ASSUMED_CAUSAL", "CALL_READS_AHEAD", "READS_AHEAD", "claimed_causality"]

ASSUMED_CAUSAL = "assumed causal (otherwise declare causal=False)"
READS_AHEAD = "assumed causal, although it reads later tokens (otherwise declare causal=False)"
CALL_READS_AHEAD = (
    "assumed causal, although the declared call reads later tokens (otherwise declare visible=)"
)
# Settings that make a model causal.
_CAUSAL_SETTINGS = {
    "is_decoder": True,
    "is_causal": True,
    "causal": True,
    "attn_type": "uni",
    "use_bidirectional_attention": False,
    "bidirectional": False,
}

_CAUSAL_NAME = re.compile(r"GPT|LM(?![a-z])|LanguageModel|Decoder|Causal|Llama|Autoregressive")
_NOT_CAUSAL_NAME = re.compile(r"MLM|MaskedL|Bert|BERT|Diffusion|Encoder(?!Decoder)|Tagger")
_ENCODER_ARGUMENT = re.compile("mask|pad|type|segment|len")
_CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")


def claimed_causality(
    model: nn.Module, known: Mapping[str, Any], *, has_own_call: bool = False
) -> tuple[bool | None, str]:
    """Return True, False or None (no claim), and the reason.

    A model of tokens is assumed to be causal if it does not read later tokens, or if it has a sign of
    causality. It is also assumed to be causal if it has no sign of an encoder, but then a leak is only a
    warning. The same is true if only the declared call reads later tokens, and not the call with ids alone:
    positions of an image may see each other.

    Args:
        model: in eval mode.
        known: declared and inferred arguments of the spec.
        has_own_call: the call is declared, and may pass more than the inputs.
    """
    for owner in (model, getattr(model, "attn_layers", None)):
        for name in ("is_causal", "causal"):
            claim = getattr(owner, name, None)
            if isinstance(claim, bool):
                return claim, f"says {name}={claim}"
    if can_generate(model) is not None:
        return _causality_of_pretrained(model, known)
    if known["inputs"] == "tokens" and _gets_ids_twice(model, known):
        return None, "no claim about causality: it gets the ids twice (declare causal=True to check it)"
    if known["inputs"] != "tokens":
        return None, "no claim about causality (declare causal=True to check it)"
    reads_ahead = attempt(lambda: _reads_ahead(model, known))
    if reads_ahead is None:
        return None, "no claim about causality: it refuses other ids (declare causal=True to check it)"
    if not reads_ahead or _is_meant_causal(model, known):
        opens = has_own_call and _opens_later_tokens(model, known)
        return True, CALL_READS_AHEAD if opens else ASSUMED_CAUSAL
    if _may_be_causal(model, known):
        return True, READS_AHEAD
    return None, "no claim about causality: it reads later tokens (declare causal=True if it should not)"


def _causality_of_pretrained(model: nn.Module, known: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Return the claim of a model of transformers."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None, "no claim about causality: its encoder sees everything"
    if not can_generate(model) and type(model).__name__.endswith(_CAUSAL_CLASSES):
        return True, "causal, by the name of its class"  # a custom model without GenerationMixin
    if not can_generate(model):
        return False, "not causal: it cannot generate"
    if (setting := _setting_against_causality(model, known)) is not None:
        return False, f"not causal, as configured: {setting}"
    return True, "causal, since it can generate"


def _may_be_causal(model: nn.Module, known: Mapping[str, Any]) -> bool:
    """Return True if outputs have an entry per token id, and no name or argument shows an encoder."""
    names = forward_parameters(model)
    required = [name for name, each in names.items() if each.default is each.empty]
    if len(required) > 1 or any(map(_ENCODER_ARGUMENT.search, names)):
        return False
    output = logits_of(known.get("forward", _called)(model, example_batch(model, known)))
    return output.shape[-1] >= known["width"] and not _NOT_CAUSAL_NAME.search(_class_names(model))


def _is_meant_causal(model: nn.Module, known: Mapping[str, Any]) -> bool:
    """Return True if the class is named like a causal model, takes a cache, or computes a causal mask."""
    signs = _CausalSigns(known["seq_len"])
    name = _class_names(model)
    if _NOT_CAUSAL_NAME.search(name):
        return False
    if (
        _CAUSAL_NAME.search(name)
        or hasattr(model, "generate")
        or any(map(names_cache, forward_parameters(model)))
    ):
        return True
    with signs:
        attempt(lambda: known.get("forward", _called)(model, example_batch(model, known)))
    return signs.found


def _class_names(model: nn.Module) -> str:
    """Return the names of the class and its base classes."""
    return " ".join(each.__name__ for each in type(model).__mro__)


def _called(model: nn.Module, inputs: Tensor) -> Any:
    return model(inputs)


class _CausalSigns(TorchFunctionMode):
    """Mode that detects attention with is_causal=True, and results (..., T, T) with a masked triangle."""

    def __init__(self, n_positions: int) -> None:
        super().__init__()
        self.found, self._n = False, n_positions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and inspect its result."""
        output = func(*args, **(kwargs or {}))
        self.found |= bool((kwargs or {}).get("is_causal"))
        if isinstance(output, Tensor) and output.shape[-2:] == (self._n, self._n) and self._n > 2:
            upper = torch.ones(self._n, self._n, dtype=torch.bool, device=output.device).triu(2)
            values = output.reshape(-1, self._n, self._n)[0]
            one, two = values[upper], values.T[upper]
            self.found |= bool((one == one[0]).all()) and not bool((two == one[0]).any())
        return output


def _gets_ids_twice(model: nn.Module, known: Mapping[str, Any]) -> bool:
    """Return True if two required arguments get the same ids, such as source and target."""
    inputs, names = example_batch(model, known), set[str]()
    required = [name for name, each in forward_parameters(model).items() if each.default is each.empty]

    def see(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        by_name = dict(zip(forward_parameters(model), given, strict=False)) | named
        names.update(n for n in required if isinstance(by_name.get(n), Tensor) and by_name[n].equal(inputs))

    if len(required) < 2 or "forward" not in known:
        return False
    with model.register_forward_pre_hook(see, with_kwargs=True):
        attempt(lambda: known["forward"](model, inputs))
    return len(names) > 1


def _setting_against_causality(model: nn.Module, known: Mapping[str, Any]) -> str | None:
    """Return the setting that makes a model bidirectional, or None.

    If the model reads later tokens with every setting, or if a rebuilt model does not read them, this is a
    bug and no setting.
    """
    config = getattr(model, "config", None)
    settings = {
        name: value
        for name, value in _CAUSAL_SETTINGS.items()
        if getattr(config, name, None) not in (None, value)
    }
    if not settings or not _reads_ahead(model, known):
        return None

    def rebuilt(**changes: Any) -> nn.Module:
        changed = copy.deepcopy(config)
        for name, value in changes.items():
            setattr(changed, name, value)
        twin: nn.Module = type(model)(changed)
        return twin.to(next(model.parameters()).device).eval()

    # None: the class needs more than its configuration.
    if not attempt(lambda: _reads_ahead(rebuilt(), known)):
        return None
    for name, value in settings.items():
        if attempt(lambda: _reads_ahead(rebuilt(**{name: value}), known)) is False:  # noqa: B023
            return f"{name}={getattr(config, name)!r}"
    return None


def _opens_later_tokens(model: nn.Module, known: Mapping[str, Any]) -> bool:
    """Return True if only the declared call reads later tokens, and it passes more than ids and masks."""
    starts = range(1, known["seq_len"])
    start = next((n for n in starts if attempt(lambda: _reads_ahead(model, known, n))), None)  # noqa: B023
    if start is None or not _passes_more(model, known):
        return False
    return attempt(lambda: _reads_ahead(model, {**known, "forward": _called}, start)) is False


def _passes_more(model: nn.Module, known: Mapping[str, Any]) -> bool:
    """Return True if the declared call passes a tensor that is neither the inputs nor a mask of pairs."""
    inputs, found = example_batch(model, known), list[bool]()

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        T = inputs.shape[1]
        found.extend(x.shape[-2:] != (T, T) for x in tensors if not x.equal(inputs))

    with model.register_forward_pre_hook(see, with_kwargs=True):
        attempt(lambda: known["forward"](model, inputs))
    return any(found)


def _reads_ahead(model: nn.Module, known: Mapping[str, Any], start: int = -1) -> bool:
    """Return True if changes of the inputs from `start` on change earlier outputs by more than rounding."""
    if known["seq_len"] < 2:
        return False
    forward = known.get("forward", _called)
    for _ in range(3):  # an id may mean padding, which would hide the effect
        inputs = example_batch(model, known)
        changed = inputs.clone()
        later = inputs[:, start:]
        changed[:, start:] = (later + 1) % known["width"] if known["inputs"] == "tokens" else -later
        outputs = []
        for each in (inputs, changed):
            with seeded(0, inputs.device):
                outputs.append(logits_of(forward(model, each)).double())
        moved = (outputs[1] - outputs[0]).abs()
        if not moved[:, :start].max() > 1e-5 * moved.max():
            return False
    return True
