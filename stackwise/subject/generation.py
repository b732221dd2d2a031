"""GenerateCall: function of a ModelSpec that continues prompts, with its options.

Shapes: B prompts, T positions of the longest prompt, N new tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from stackwise.subject.call_form import can_generate
from stackwise.subject.capability import padding_id
from stackwise.support.arguments import require

__all__ = ["GenerateCall", "inferred_generate"]

# Option -> value without an effect. A function without this parameter may be called with this value.
_OPTIONS: dict[str, Any] = {"max_new_tokens": None, "temperature": 0.0, "top_k": None, "top_p": 1.0}
_OPTIONS |= {"stop": (), "seed": 0, "num_samples": 1, "num_beams": 1}
_NAMED = {"seed", "num_samples", "num_beams"}  # options that `**options` does not stand for


@dataclass(frozen=True)
class GenerateCall:
    """Function that continues prompts.

    Attributes:
        function: (model, prompts, **options) -> list of tensors (N,), or one tensor (B, N). `prompts` is a
            list of ids (T,). The parameters of the function are the options that it supports.
        one_length: True if all prompts of a call must have the same length.

    Raises:
        ValueError: a parameter is not an option, or `max_new_tokens` is missing.
    """

    function: Callable[..., Any]
    one_length: bool = False

    def __post_init__(self) -> None:
        for name in self.options:
            require(name in _OPTIONS, "generate", f"parameter {name}", ", ".join(_OPTIONS))
        require("max_new_tokens" in self.options, "generate", [*self.options], "max_new_tokens and others")

    @cached_property
    def options(self) -> dict[str, Any]:
        """Supported options with their defaults. `**options` stands for all but `_NAMED`."""
        named = list(inspect.signature(self.function).parameters.values())[2:]
        found = {each.name: each.default for each in named if each.kind is not each.VAR_KEYWORD}
        variadic = _OPTIONS.keys() - _NAMED if len(found) < len(named) else ()
        return dict.fromkeys(variadic) | found

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids at which a row ends if no `stop` is passed: the default of the parameter `stop`."""
        return tuple(self.options.get("stop") or ())

    def __call__(self, model: nn.Module, prompts: Sequence[Tensor], **options: Any) -> list[list[int]]:
        """Return the new tokens of each row.

        Raises:
            NotImplementedError: the function does not support an option, or several prompts.
            ValueError: the function returned a wrong number of rows.
        """
        for name, value in options.items():
            if name not in self.options and value != _OPTIONS[name]:
                raise NotImplementedError(f"needs a generate function with the parameter {name}")
        if "num_samples" in self.options and len(prompts) > 1:
            raise NotImplementedError("needs a generate function of several prompts (without num_samples)")
        given = {name: value for name, value in options.items() if name in self.options}
        rows = [torch.as_tensor(row).long().tolist() for row in self.function(model, [*prompts], **given)]
        n_rows = options.get("num_samples", 1) * len(prompts)
        require(len(rows) == n_rows, "generate", len(rows), f"new tokens of {n_rows} rows")
        return rows


def inferred_generate(model: Any, padding_sides: Sequence[str]) -> GenerateCall | None:
    """Return the call of the method `generate` of a model, or None.

    Known are those of transformers, of a causal Rack, and of models in the style of nanoGPT:
    `generate(ids, max_new_tokens, ...)` returns ids that begin with the prompts.
    """
    if type(model).__module__ == "stackwise.model.rack":
        return GenerateCall(_by_rack)
    if can_generate(model) and hasattr(model, "generation_config"):
        return GenerateCall(_by_transformers, one_length="left" not in padding_sides)
    return _by_method(model)


def _by_rack(
    model: Any, prompts: list[Tensor], *, seed: int | None = None, stop: Sequence[int] = (), **options: Any
) -> Any:
    ids, keep = _left_padded(prompts, 0)
    return model.generate(ids, keep, seed=seed, stop_token_ids=stop, **options)[:, ids.shape[1] :]


def _by_method(model: Any) -> GenerateCall | None:
    """Return the call of a method `generate` that repeats the prompts before the new tokens."""
    method = getattr(model, "generate", None)
    if not inspect.ismethod(method):
        return None
    _, *parameters = inspect.signature(method).parameters.values()
    defaults = {each.name: each.default for each in parameters}
    changes_logits = any("penalty" in name and value not in (None, 0, 1) for name, value in defaults.items())
    if "max_new_tokens" not in defaults or changes_logits:
        return None
    # With do_sample=False, these have no effect.
    drawn = {"temperature", "top_k", "top_p", "seed"} if "do_sample" not in defaults else set()
    names = [name for name in defaults if name in {"max_new_tokens", "num_beams"} | drawn]

    def generate(model: Any, prompts: list[Tensor], **options: Any) -> Any:
        if options.get("temperature") == 0.0 and "top_k" in names:
            options |= {"temperature": 1.0, "top_k": 1}  # many methods divide by the temperature
        # None may be no value of a parameter whose default is a number, such as top_k=50.
        given = {name: (defaults[name] and 0) if value is None else value for name, value in options.items()}
        ids, n_new = torch.stack(prompts), options["max_new_tokens"]
        found = model.generate(ids, **given)
        is_known = isinstance(found, Tensor) and found.shape == (len(ids), ids.shape[1] + n_new)
        if not is_known or not torch.equal(found[:, : ids.shape[1]], ids):
            raise NotImplementedError(f"needs a generate method that adds {n_new} tokens to each prompt")
        return found[:, ids.shape[1] :]

    first = list(inspect.signature(generate).parameters.values())[:2]
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    generate.__signature__ = inspect.Signature(first + named)  # type: ignore[attr-defined]
    return GenerateCall(generate, one_length=True)


def _by_transformers(
    model: Any, prompts: list[Tensor], *, stop: Sequence[int] = (), num_beams: int = 1, **options: Any
) -> Any:
    """Call `generate` of transformers with a configuration that contains only the options."""
    from transformers import GenerationConfig

    own, make = model.generation_config, cast("Any", GenerationConfig)
    pad = padding_id(model) or 0
    ids, keep = _left_padded(prompts, pad)
    is_drawn = options["temperature"] > 0
    names = ("temperature", "top_k", "top_p") if is_drawn else ()
    known = {name: options[name] or 0 for name in (*names, "max_new_tokens")}
    ends = {"pad_token_id": pad, "eos_token_id": [*stop] or None}
    model.generation_config = make(do_sample=is_drawn, num_beams=num_beams, **ends, **known)
    try:
        return model.generate(ids, attention_mask=keep)[:, ids.shape[1] :]
    finally:
        model.generation_config = own


def _left_padded(prompts: list[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Return prompts as ids (B, T) with padding on the left, and their mask (B, T)."""
    keep = [torch.ones_like(prompt) for prompt in prompts]
    sides: Any = {"batch_first": True, "padding_side": "left"}
    return pad_sequence(prompts, padding_value=pad, **sides), pad_sequence(keep, **sides)
