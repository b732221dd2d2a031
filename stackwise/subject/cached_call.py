"""Cached calls: find the call that continues a sequence from a cache, by trial.

Libraries rename the arguments for their caches, so names of arguments only determine the order of trials. A
call is accepted if the continued tokens get the same logits as in a full pass. If no call is exact, a call
with a bug that is named like a cache is returned, so that checks can report the bug.

Shapes: B batch, T positions, V outputs.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stackwise.subject.call_form import CallForm, can_generate, forward_parameters, unwrapped
from stackwise.subject.output import logits_of, part_of
from stackwise.support.system_errors import is_out_of_memory

__all__ = [
    "NO_PARAMETER",
    "ONLY_ONE_ROW",
    "CacheSearch",
    "CachedCall",
    "cache_tensors",
    "find_cached_call",
    "names_cache",
]

NO_PARAMETER = "forward has no parameter for one"
# Start of `cache_problem` if the cache is correct for one row only, and several rows raise no exception.
ONLY_ONE_ROW = "The cache works for batches of one row only"

Verdict = Literal["refused", "ignored", "remembers", "equal"]
PlaceKind = Literal["start", "index", "rows"]
_Parameters = Mapping[str, inspect.Parameter]

_CAPACITY = 256
_CONTINUED = 2  # tokens of a trial, one at a time
_CACHE_NAME = re.compile(r"cache|past|(^|_)kvs?(_|$)")
_STATE_NAME = re.compile(r"state|mem|hidden|(^|_)hx?(_|$)")
_POSITION_NAME = re.compile(r"pos|offset|start")
_MAKER_NAME = re.compile(r"(new|make|create|init|empty|allocate|set|setup|reset|clear)_(\w+_)?caches?$")
# Parameters that never take a cache. A wrong tensor in some of them ends a CUDA process.
_NO_CACHES = ("attention_mask", "position_ids", "token_type_ids", "labels", "targets", "inputs_embeds")
_NAMELESS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Largest difference of logits that counts as equal, relative to their variation between positions.
_TOLERANCES = {torch.float32: 3e-5, torch.float64: 3e-5}
_HALF_TOLERANCE = 2e-2


@dataclass(frozen=True)
class CachedCall:
    """Call of a model that continues the tokens in a cache: (model, inputs, cache) -> (output, cache).

    `cache` is one of:

    - None: before the first tokens;
    - the cache object of the model;
    - number of tokens so far, if the model stores its cache itself;
    - (cache object, number of tokens), if the model takes a cache object and a position.

    Attributes:
        form: how the model takes its inputs.
        parameter: name of the parameter that takes the cache. None: the model keeps the cache in itself.
        before: arguments to pass before a positional-only cache.
        part: name or index of the cache in the output. None: the call changes the cache in place.
        flags: parameters that are set to True.
        place: parameter that takes the position of the first new token. None: the model knows it.
        place_kind: the number itself ("start"), the positions (T,) ("index") or (B, T) ("rows").
        maker: method that returns an empty cache, or that prepares the model's own cache.
        capacity: capacity argument of `maker`, if it needs one.
    """

    form: CallForm
    parameter: str | None = None
    before: tuple[Any, ...] | None = None
    part: str | int | None = None
    flags: tuple[str, ...] = ()
    place: str | None = None
    place_kind: PlaceKind = "start"
    maker: str | None = None
    capacity: int = _CAPACITY

    def __call__(self, model: nn.Module, inputs: Tensor, cache: Any) -> tuple[Any, Any]:
        """Return the output for `inputs`, which follow the tokens in `cache`, and the cache with both.

        Raises:
            TypeError: the model returned no cache.
        """
        return self._continue(model, inputs, cache)

    def _continue(self, model: nn.Module, inputs: Tensor, cache: Any, **named: Any) -> tuple[Any, Any]:
        held, past = self._unpacked(model, inputs, cache)
        named |= dict.fromkeys(self.flags, True)
        if self.place is not None:
            named[self.place] = self._position(past, inputs)
        if self.before is not None:
            output = model(inputs, *self.before, held, **named)
        else:
            given = {} if self.parameter is None else {self.parameter: held}
            output = self.form(model, inputs, **given, **named)
        past += inputs.shape[1]
        if self.parameter is None:
            return output, past
        if self.part is not None:
            held = output[self.part] if isinstance(self.part, int) else part_of(output, self.part)
            if held is None:
                raise TypeError(f"{self.parameter}: the model returned no cache at {self.part!r}")
        return output, held if self.place is None else (held, past)

    def _unpacked(self, model: nn.Module, inputs: Tensor, cache: Any) -> tuple[Any, int]:
        """Return the cache argument of the model, and the number of tokens before the inputs."""
        if cache is None:
            own = unwrapped(model)
            made = None if self.maker is None else _make_cache(own, self.maker, inputs, self.capacity)
            return made, 0
        if self.parameter is None:
            return None, cache
        return (cache, 0) if self.place is None else cache

    def _position(self, past: int, inputs: Tensor) -> int | Tensor:
        if self.place_kind == "start":
            return past
        index = torch.arange(past, past + inputs.shape[1], device=inputs.device)
        return index if self.place_kind == "index" else index.repeat(inputs.shape[0], 1)

    def __str__(self) -> str:
        given = [name for name in (self.parameter, *self.flags, self.place) if name is not None]
        made = [] if self.maker is None else [f"{self.maker}()"]
        return " and ".join([*made, *(f"{name}=" for name in given)])


@dataclass(frozen=True)
class _MaskedCachedCall(CachedCall):
    """CachedCall of a model that takes an attention mask, so that prompts can be padded on the left.

    Attributes:
        positions: the model also takes the positions of the real tokens.
        whole: the mask covers the cached tokens, not only the new ones.
    """

    positions: bool = False
    whole: bool = True

    def __call__(
        self, model: nn.Module, inputs: Tensor, cache: Any, keep: Tensor | None = None
    ) -> tuple[Any, Any]:
        """Return output and cache. `keep` (B, S) is True for real tokens, of all tokens so far."""
        more: dict[str, Tensor] = {}
        if keep is not None:
            new = slice(-inputs.shape[1], None)
            more["attention_mask"] = keep.long() if self.whole else keep[:, new].contiguous()
            if self.positions:
                more["position_ids"] = (keep.long().cumsum(-1) - 1).clamp(min=0)[:, new].contiguous()
        return self._continue(model, inputs, cache, **more)


@dataclass(frozen=True)
class CacheSearch:
    """Result of `find_cached_call`.

    Attributes:
        call: the call that continues from a cache. None: none was found.
        problem: why none was found, if the model can generate or seems to have a cache; otherwise "".
    """

    call: CachedCall | None = None
    problem: str = ""


@torch.no_grad()
def find_cached_call(
    model: nn.Module, inputs: Tensor, form: CallForm, *, capacity: int | None = None
) -> CacheSearch:
    """Find the call with which `model` continues from a cache.

    Each call that the signature, the output and the methods of the model suggest is tried on a prefix and
    some single tokens. The first call whose logits equal those of a full pass is returned. If no call is
    exact, return the first call with a cache-like name that runs, so that checks can report its bug. A
    working call with another name is reported as a problem, because it may be no cache.

    Args:
        model: in eval mode. Its state may change.
        inputs: a batch (B, T) or (B, T, C) that the model takes, T >= 2.
        form: how the model takes its inputs.
        capacity: number of tokens of a cache, if the model preallocates it. None: 256.

    Raises:
        RuntimeError, MemoryError: memory was too small for a call, so the result is unknown.
    """
    if getattr(unwrapped(model), "can_cache_kv", True) is False:
        return CacheSearch(None, _problem(model, form, "its attribute can_cache_kv is False"))
    if inputs.shape[1] < 2:
        return CacheSearch(None, _problem(model, form, "it takes only one position"))
    trial = _Trial(model, inputs, form)
    found: dict[str, CachedCall] = {}
    reason = ""
    for call in _candidates(trial, capacity or _CAPACITY):
        verdict = trial.verdict(call)
        if verdict == "equal":
            return CacheSearch(_with_mask(call, trial))
        found.setdefault(_likelihood(call, verdict), call)
        if _is_named(call) and not reason:
            reason = f"{call}: {trial.last_error}"
    if "likely" in found:
        return CacheSearch(_with_mask(found["likely"], trial))
    if "unnamed" in found:
        return CacheSearch(None, f"calls with {found['unnamed']} give other logits than a full pass")
    problem = _problem(model, form, reason)
    if problem and len(inputs) > 1:
        problem = _only_one_row(trial, capacity) or problem
    return CacheSearch(None, problem)


def _only_one_row(trial: _Trial, capacity: int | None) -> str:
    """Return the problem of a call that is exact for one row, and gives wrong outputs for several; or ""."""
    row = _Trial(trial.model, trial.inputs[:1], trial.form)
    call = find_cached_call(row.model, row.inputs, row.form, capacity=capacity).call
    if call is None or row.verdict(call) != "equal" or trial.verdict(call) == "equal":
        return ""
    if not isinstance(trial.error, _WrongOutput | None):
        return ""  # the model refuses several rows
    return f"{ONLY_ONE_ROW}: with {call}, several rows give {trial.error or 'other logits'}"


def _likelihood(call: CachedCall, verdict: str) -> str:
    """Return "likely" or "unnamed" for a call that may use a cache although it is not exact, otherwise ""."""
    takes_cache = call.parameter is not None
    if _is_named(call):
        return "likely" if verdict == "remembers" or (verdict == "ignored" and takes_cache) else ""
    return "unnamed" if verdict == "remembers" and takes_cache else ""


def cache_tensors(cache: Any, depth: int = 6) -> Iterator[Tensor]:
    """Yield the tensors of more than one element anywhere in a cache."""
    if isinstance(cache, Tensor):
        if cache.numel() > 1:
            yield cache
        return
    if depth == 0 or cache is None or isinstance(cache, str | int | float | nn.Module):
        return
    parts: Iterable[Any]
    if isinstance(cache, Mapping):
        parts = cache.values()
    elif isinstance(cache, list | tuple):
        parts = cache
    else:
        parts = getattr(cache, "__dict__", {}).values()
    for part in parts:
        yield from cache_tensors(part, depth - 1)


def names_cache(name: str) -> bool:
    """Return True if a parameter of this name is likely to take a cache of keys and values."""
    is_flag = name.startswith(("use_", "return_", "output_", "input_"))
    return bool(_CACHE_NAME.search(name)) and not is_flag and not _POSITION_NAME.search(name)


class _WrongOutput(ValueError):  # noqa: N818  not for users
    """The output of a call has not one row of logits for each token."""


class _Trial:
    """A model that is tried with one call after another."""

    def __init__(self, model: nn.Module, inputs: Tensor, form: CallForm) -> None:
        self.model, self.inputs, self.form = model, inputs, form
        self.error: Exception | None = None
        half = max(1, inputs.shape[1] // 2)
        self._sizes = (half, *(1,) * min(_CONTINUED, inputs.shape[1] - half))
        other = inputs.flip(0) if len(inputs) > 1 and not torch.equal(*inputs[:2]) else inputs.roll(1, dims=1)
        # The same last tokens after another prefix.
        self._others = torch.cat((other[:, :half], inputs[:, half:]), dim=1)

    def prefix_output(self, **named: Any) -> Any:
        """Return the output for the prefix of the trial; None if the model refuses the call."""
        prefix = self.inputs[:, : self._sizes[0]].contiguous()
        return self.attempt(lambda: self.form(self.model, prefix, **named))

    @cached_property
    def _whole(self) -> Tensor | None:
        """Return the logits of a full pass without a cache."""
        logits: Tensor | None = self.attempt(lambda: logits_of(self.form(self.model, self.inputs)))
        return logits

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`; None if it raises anything but an out-of-memory error."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of calls that the model may not support
                return call()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.error = error
            return None

    @property
    def last_error(self) -> str:
        """Return the last error in words."""
        if self.error is None:
            return "other logits than without a cache"
        return f"{type(self.error).__name__}: {' '.join(str(self.error).split())[:160]}"

    def verdict(self, call: CachedCall) -> Verdict:
        """Return the verdict on `call`, from a continuation of the prefix."""
        if self._whole is None:
            return "refused"
        half, end = self._sizes[0], sum(self._sizes)
        with_cache = self.attempt(lambda: self._continued(call, self.inputs))
        after_others = self.attempt(lambda: self._continued(call, self._others))
        again = with_cache
        if call.parameter is None:  # each sequence has to start with an empty cache
            again = self.attempt(lambda: self._continued(call, self.inputs))
        whole = self._whole[:, :end]
        if any(found is None or found.shape != whole.shape for found in (with_cache, after_others, again)):
            return "refused"
        self.error = None
        limit = _TOLERANCES.get(whole.dtype, _HALF_TOLERANCE) * float((whole - whole[:, :1]).abs().max())
        depends = float((with_cache - after_others)[:, half:].abs().max()) > limit
        restarts = float((with_cache - again).abs().max()) <= limit
        if not depends:
            return "ignored"
        gap = float((with_cache - whole).abs().max())
        return "equal" if restarts and gap <= limit else "remembers"

    def _continued(self, call: CachedCall, inputs: Tensor) -> Tensor:
        cache, outputs = None, []
        for part in torch.split(inputs[:, : sum(self._sizes)], list(self._sizes), dim=1):
            output, cache = call(self.model, part.contiguous(), cache)
            outputs.append(logits_of(output))
            if outputs[-1].shape[:2] != part.shape[:2]:
                raise _WrongOutput(f"logits {tuple(outputs[-1].shape)} for inputs {tuple(part.shape)}")
        return torch.cat(outputs, dim=1)


def _candidates(trial: _Trial, capacity: int) -> Iterator[CachedCall]:
    """Yield the calls to try."""
    base = CachedCall(trial.form, capacity=capacity)
    named = _named_parameters(trial.model, trial.form)
    if {"cache", "return_intermediates", "input_not_include_cache"} <= set(named):  # x-transformers
        flags = ("return_intermediates", "input_not_include_cache")
        yield replace(base, parameter="cache", part=1, flags=flags)
    yield from _with_made_cache(trial, base, named)
    yield from _with_returned_cache(trial, base, named)
    yield from _with_own_cache(trial, base, named)


def _is_named(call: CachedCall) -> bool:
    """Return True if the name of a parameter or of a method says that a call uses a cache."""
    if call.parameter is None:
        return call.maker is not None
    is_returned = call.parameter == call.part and any(map(_CACHE_NAME.search, call.flags))
    return is_returned or names_cache(call.parameter)


def _with_made_cache(trial: _Trial, base: CachedCall, named: _Parameters) -> Iterator[CachedCall]:
    """Yield calls with a cache from a method of the model, which a call changes in place."""
    own = unwrapped(trial.model)
    for maker in _makers(own):
        if trial.attempt(lambda: _make_cache(own, maker, trial.inputs, base.capacity)) is None:  # noqa: B023
            continue
        for name in _takers(named, None, variadic=False):
            call = replace(base, parameter=name, maker=maker, before=_arguments_before(named, name))
            yield from _with_position(call, named)


def _with_returned_cache(trial: _Trial, base: CachedCall, named: _Parameters) -> Iterator[CachedCall]:
    """Yield calls that pass a part of the last output to a parameter."""
    variadic = trial.form.in_batch or any(p.kind is p.VAR_KEYWORD for p in named.values())
    if not variadic and not _takers(named, None, variadic):
        return
    for flags in _flags(named, variadic):
        for part in _cache_parts(trial.prefix_output(**dict.fromkeys(flags, True)), trial):
            for name in _takers(named, part, variadic):
                before = _arguments_before(named, name)
                call = replace(base, parameter=name, part=part, flags=flags, before=before)
                yield from _with_position(call, named)


def _with_position(call: CachedCall, named: _Parameters) -> Iterator[CachedCall]:
    """Yield a call, and the same call with the position of the new tokens."""
    yield call
    for place, kind in _places(named):
        # A model that leaves the position to its caller has no None as its default.
        if place != call.parameter and named[place].default is not None:
            yield replace(call, place=place, place_kind=kind)


def _with_own_cache(trial: _Trial, base: CachedCall, named: _Parameters) -> Iterator[CachedCall]:
    """Yield calls of a model that stores its cache in itself."""
    flags = [each for each in _flags(named, variadic=False) if any(map(_CACHE_NAME.search, each))]
    for maker in (*_makers(unwrapped(trial.model)), None):
        for place, kind in _places(named):
            for some in ((), *flags):
                yield replace(base, maker=maker, place=place, place_kind=kind, flags=some)
        for some in flags:
            yield replace(base, maker=maker, flags=some)


def _named_parameters(model: nn.Module, form: CallForm) -> dict[str, inspect.Parameter]:
    """Return the parameters of `forward` beyond the inputs."""
    if form.in_batch:
        return {}
    named = dict(forward_parameters(model))
    named.pop(form.keyword or next(iter(named), ""), None)
    return named


def _flags(named: _Parameters, variadic: bool) -> list[tuple[str, ...]]:
    """Return switches to set, in order of trial: named like a cache, none, all others."""

    def is_switch(name: str, parameter: inspect.Parameter) -> bool:
        says_so = name.startswith(("use_", "return_", "output_"))
        return isinstance(parameter.default, bool) or (parameter.default is None and says_so)

    switches = [name for name, parameter in named.items() if is_switch(name, parameter)]
    if variadic and "use_cache" not in named:
        switches.append("use_cache")
    first = [name for name in switches if _CACHE_NAME.search(name)]
    return [*((name,) for name in first), (), *((name,) for name in switches if name not in first)]


def _cache_parts(output: Any, trial: _Trial) -> list[str | int]:
    """Return names or indices of the parts of an output that may be a cache.

    A part may be a cache if it contains tensors and is not the logits. A part with the name of a cache also
    counts if it contains none, because a bug may leave the cache empty.
    """
    if output is None or isinstance(output, Tensor):
        return []
    logits = trial.attempt(lambda: logits_of(output))
    parts: Iterable[tuple[str | int, Any]]
    if isinstance(output, Mapping):
        parts = output.items()
    elif isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        parts = enumerate(output)
    else:
        parts = [(name, getattr(output, name)) for name in _attributes(output)]
    found = [
        name
        for name, value in parts
        if value is not logits
        and (
            any(True for _ in cache_tensors(value))
            or (isinstance(name, str) and names_cache(name) and _may_hold_tensors(value))
        )
    ]
    return sorted(found, key=lambda name: not (isinstance(name, str) and names_cache(name)))


def _may_hold_tensors(value: Any) -> bool:
    """Return True for the object of a cache. None, () and plain values mean that there is none."""
    return value is not None and not isinstance(value, tuple | list | bool | int | float | str)


def _attributes(output: Any) -> Iterable[str]:
    if hasattr(output, "_fields"):
        return tuple(output._fields)
    slots = [name for kind in type(output).__mro__ for name in getattr(kind, "__slots__", ())]
    return [name for name in (*getattr(output, "__dict__", {}), *slots) if hasattr(output, name)]


def _takers(named: _Parameters, part: str | int | None, variadic: bool) -> list[str]:
    """Return the parameters that may take a cache, the likeliest first."""
    names = [
        name
        for name, parameter in named.items()
        if parameter.kind not in _NAMELESS
        and (parameter.default is None or parameter.default is parameter.empty)
        and name not in _NO_CACHES
    ]
    if variadic and isinstance(part, str) and part not in named:
        names.append(part)
    return sorted(names, key=lambda name: (name != part, not names_cache(name), not _STATE_NAME.search(name)))


def _arguments_before(named: _Parameters, name: str) -> tuple[Any, ...] | None:
    """Return the defaults of the parameters before `name`, if it can only be passed by position."""
    if name not in named or named[name].kind is not inspect.Parameter.POSITIONAL_ONLY:
        return None
    names = list(named)
    defaults = (named[each].default for each in names[: names.index(name)])
    return tuple(None if each is inspect.Parameter.empty else each for each in defaults)


def _places(named: _Parameters) -> list[tuple[str, PlaceKind]]:
    """Return parameters that may take the position of new tokens, with each possible value."""
    found: list[tuple[str, PlaceKind]] = []
    for name, parameter in named.items():
        if parameter.kind in _NAMELESS or not _POSITION_NAME.search(name):
            continue
        if type(parameter.default) is int:
            found.append((name, "start"))
        elif parameter.default in (None, parameter.empty):
            found += [(name, "index"), (name, "start"), (name, "rows")]
    return found


def _makers(own: nn.Module) -> list[str]:
    """Return methods that create or prepare a cache, `new_cache` first."""
    names = [
        name for name in dir(type(own)) if _MAKER_NAME.match(name) and callable(getattr(own, name, None))
    ]
    return sorted(names, key=lambda name: name != "new_cache")


def _make_cache(own: Any, maker: str, inputs: Tensor, capacity: int) -> Any:
    """Call a method that creates or prepares a cache.

    Raises:
        TypeError: it needs an argument that is neither a batch size, a length, a device nor a dtype.
    """
    weight = next((p for p in own.parameters() if p.is_floating_point()), inputs)
    method = getattr(own, maker)
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind in _NAMELESS:
            continue
        if "batch" in name:
            given[name] = len(inputs)
        elif name in ("device", "dtype"):
            given[name] = getattr(weight, name)
        elif parameter.default is parameter.empty:
            if not re.search(r"len|capacity|size|tokens|positions", name):
                raise TypeError(f"{maker}: no value is known for {name}")
            given[name] = capacity
    return method(**given)


def _with_mask(call: CachedCall, trial: _Trial) -> CachedCall:
    """Return `call`, with a mask for padding if the model takes one."""
    named = _named_parameters(trial.model, call.form)
    if "attention_mask" not in named:
        return call
    whole = call.maker is None
    values = {each.name: getattr(call, each.name) for each in fields(call)}
    masked = _MaskedCachedCall(**values, positions=whole and "position_ids" in named, whole=whole)
    ones = torch.ones(trial.inputs.shape[:2], dtype=torch.bool, device=trial.inputs.device)
    plain, with_ones = (
        trial.attempt(lambda: logits_of(masked(trial.model, trial.inputs, None, keep)[0]))  # noqa: B023
        for keep in (None, ones)
    )
    if plain is None or with_ones is None or not masked.positions:
        return masked
    # The positions of some models, such as RoBERTa, do not start at 0.
    starts_at_0 = (plain - with_ones).abs().max() <= 1e-3 * plain.abs().max()
    return replace(masked, positions=bool(starts_at_0))


def _problem(model: nn.Module, form: CallForm, reason: str) -> str:
    """Return why no cache was found; "" if nothing suggests that the model has one."""
    own = unwrapped(model)
    takes = [name for name in _named_parameters(model, form) if _CACHE_NAME.search(name)]
    signs = [f"{name}=" for name in takes] + [f"{name}()" for name in _makers(own)]
    generates = can_generate(own)
    if callable(getattr(own, "generate", None)) if generates is None else generates:
        signs.insert(0, "generate()")
    if not signs:
        return ""
    if not reason:
        reason = (
            "no part of its output and no cache that its methods make could be passed back"
            if takes
            else NO_PARAMETER
        )
    return f"the model has {', '.join(signs)}, but none of the tried calls continues from a cache: {reason}"
