"""GenerateCall: function of a ModelSpec that continues prompts, with its options.

Shapes: B prompts, T positions of the longest prompt, N new tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from stackwise.subject.call_form import attempt, can_generate
from stackwise.subject.capability import padding_id
from stackwise.support.arguments import require

__all__ = ["GenerateCall", "inferred_generate", "transformers_calls"]

# Option -> value without an effect. A function without this parameter may be called with this value.
_OPTIONS: dict[str, Any] = {"max_new_tokens": None, "temperature": 0.0, "top_k": None, "top_p": 1.0}
_OPTIONS |= {"stop": (), "seed": 0, "num_samples": 1, "num_beams": 1}
_NAMED = {"seed", "num_samples", "num_beams"}  # options that `**options` does not stand for
_END = re.compile(r"(^|_)(eos|eot|eod|end|stop)(_|$)", re.IGNORECASE)  # names of an end token


@dataclass(frozen=True)
class GenerateCall:
    """Function that continues prompts.

    Attributes:
        function: (model, prompts, **options) -> list of tensors (N,), or one tensor (B, N). `prompts` is a
            list of ids (T,). The parameters of the function are the options that it supports.
        one_length: True if all prompts of a call must have the same length.
        may_end: ids that may end a row, although the function has no parameter `stop`. The tokens after them
            are not compared.

    Raises:
        ValueError: a parameter is not an option, or `max_new_tokens` is missing.
    """

    function: Callable[..., Any]
    one_length: bool = False
    may_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in self.options:
            require(name in _OPTIONS, "generate", f"parameter {name}", ", ".join(_OPTIONS))
        require("max_new_tokens" in self.options, "generate", [*self.options], "max_new_tokens and others")

    @cached_property
    def options(self) -> dict[str, Any]:
        """Supported options with their defaults. `**options` stands for those that are not in `_NAMED`."""
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
        # The function may have other defaults, such as num_beams=4.
        options = {"num_samples": 1, "num_beams": 1} | options
        given = {name: value for name, value in options.items() if name in self.options}
        rows = [torch.as_tensor(row).long().tolist() for row in self.function(model, [*prompts], **given)]
        n_rows = options["num_samples"] * len(prompts)
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
    parameters = list(inspect.signature(method).parameters.values())[1:]
    defaults = {each.name: each.default for each in parameters}
    # With do_sample=False, these have no effect.
    drawn = {"temperature", "top_k", "top_p", "seed"} if "do_sample" not in defaults else set()
    names = [name for name in defaults if name in {"max_new_tokens", "num_beams"} | drawn]
    may_draw = "temperature" not in names and defaults.get("do_sample") is not False
    # A generator of its own draws the same tokens in each call, so a trial does not show the draws.
    is_seeded = may_draw and not {"seed", "generator"}.isdisjoint(defaults)
    if "max_new_tokens" not in defaults or is_seeded or any(map(_changes_tokens, parameters)):
        return None

    def generate(model: Any, prompts: list[Tensor], **options: Any) -> Any:
        if options.get("temperature") == 0.0 and "top_k" in names:
            options |= {"temperature": 1.0, "top_k": 1}  # many methods divide by the temperature
        ids, n_new = torch.stack(prompts), options["max_new_tokens"]
        found = _called(model, ids, options)
        is_known = isinstance(found, Tensor) and found.shape == (len(ids), ids.shape[1] + n_new)
        # Other rows may have the prompt of another row by mistake.
        if not is_known or not (found[:, : ids.shape[1]] == ids).all(1).any():
            raise NotImplementedError(f"needs a generate method that adds {n_new} tokens to each prompt")
        return found[:, ids.shape[1] :]

    first = list(inspect.signature(generate).parameters.values())[:2]
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    generate.__signature__ = inspect.Signature(first + named)  # type: ignore[attr-defined]
    return GenerateCall(generate, one_length=True, may_end=_end_tokens(model, method, defaults))


def _called(model: Any, ids: Tensor, options: dict[str, Any]) -> Any:
    """Return the result of the method. If its top_k cannot be None, try 0, which also stands for all."""
    try:
        return model.generate(ids, **options)
    except TypeError as error:
        if options.get("top_k", 0) is not None:
            raise
        try:
            return model.generate(ids, **options | {"top_k": 0})
        except (LookupError, RuntimeError, TypeError, ValueError):
            raise NotImplementedError("needs a generate method that takes top_k=None or top_k=0") from error


def _changes_tokens(parameter: inspect.Parameter) -> bool:
    """Return True if the default of a parameter is a number with an unknown effect, such as beam_size=4."""
    name, value = parameter.name, parameter.default
    is_known = name in _OPTIONS or _END.search(name) is not None or name.startswith("pad")
    return type(value) in (int, float) and value not in (0, 1) and not is_known


def _end_tokens(model: Any, method: Any, defaults: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids with the name of an end token: defaults, globals of the method, and settings."""
    function = inspect.unwrap(method.__func__)
    used = inspect.getclosurevars(function).globals if inspect.isfunction(function) else {}
    values = [value for name, value in {**defaults, **used}.items() if _END.search(name)]
    for owner in (model, *(getattr(model, name, None) for name in ("config", "cfg", "args", "tokenizer"))):
        # A property may raise any exception.
        values += [attempt(partial(getattr, owner, name)) for name in dir(owner) if _END.search(name)]
    return tuple({value for value in values if type(value) is int and value >= 0})


def _by_transformers(
    model: Any, prompts: list[Tensor], *, stop: Sequence[int] = (), num_beams: int = 1, **options: Any
) -> Any:
    """Call `generate` of transformers with a configuration that contains only the options."""
    ids, keep = _left_padded(prompts, padding_id(model) or 0)
    with _generation_config(model, stop=stop, num_beams=num_beams, **options):
        return model.generate(ids, attention_mask=keep)[:, ids.shape[1] :]


def transformers_calls(call: GenerateCall) -> dict[str, GenerateCall]:
    """Return other calls of `generate` of transformers that must give the same tokens, by name.

    The calls raise an exception if the model does not support them.
    """
    if call.function is not _by_transformers:
        return {}
    calls = {"inputs_embeds": _from_embeddings, "past_key_values": _from_cache, "prompt lookup": _by_lookup}
    return {name: replace(call, function=function) for name, function in calls.items()}


def _from_embeddings(model: Any, prompts: list[Tensor], **options: Any) -> Any:
    """Pass the embeddings of the prompts. The result contains only the new tokens."""
    ids, keep = _left_padded(prompts, padding_id(model) or 0)
    with _generation_config(model, **options):
        return model.generate(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=keep)


def _from_cache(model: Any, prompts: list[Tensor], **options: Any) -> Any:
    """Pass the cache of a call with the first half of the prompts.

    Raises:
        NotImplementedError: the model returns no cache, or prepares the inputs of a cache by itself.
    """
    from transformers import GenerationMixin

    own = type(model).prepare_inputs_for_generation
    if own is not GenerationMixin.prepare_inputs_for_generation:
        raise NotImplementedError("its prepare_inputs_for_generation may pass only the last token")
    ids, keep = _left_padded(prompts, padding_id(model) or 0)
    half = ids.shape[1] // 2
    cache = model(ids[:, :half], attention_mask=keep[:, :half], use_cache=True).past_key_values
    if cache is None:
        raise NotImplementedError("the model returns no cache")
    with _generation_config(model, **options):
        return model.generate(ids, attention_mask=keep, past_key_values=cache)[:, ids.shape[1] :]


def _by_lookup(model: Any, prompts: list[Tensor], **options: Any) -> Any:
    """Let `generate` try several tokens at once, which it finds in the prompts."""
    ids, keep = _left_padded(prompts, padding_id(model) or 0)
    with _generation_config(model, **options, prompt_lookup_num_tokens=3):
        return model.generate(ids, attention_mask=keep)[:, ids.shape[1] :]


@contextmanager
def _generation_config(
    model: Any, *, stop: Sequence[int] = (), num_beams: int = 1, **options: Any
) -> Iterator[None]:
    """Give the model a generation configuration that contains only the options."""
    from transformers import GenerationConfig

    own, make = model.generation_config, cast("Any", GenerationConfig)
    known = {name: options.pop(name, None) or 0 for name in ("temperature", "top_k", "top_p")}
    is_drawn = known["temperature"] > 0
    options |= known if is_drawn else {}
    ends = {"pad_token_id": padding_id(model) or 0, "eos_token_id": [*stop] or None}
    model.generation_config = make(do_sample=is_drawn, num_beams=num_beams, **ends, **options)
    try:
        yield
    finally:
        model.generation_config = own


def _left_padded(prompts: list[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Return prompts as ids (B, T) with padding on the left, and their mask (B, T)."""
    keep = [torch.ones_like(prompt) for prompt in prompts]
    sides: Any = {"batch_first": True, "padding_side": "left"}
    return pad_sequence(prompts, padding_value=pad, **sides), pad_sequence(keep, **sides)
