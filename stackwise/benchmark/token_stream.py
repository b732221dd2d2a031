"""Token streams: the continuation of a prompt by a model, token by token.

Shapes: B batch, T prompt, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.call_form import forward_parameters, unwrapped
from stackwise.subject.inference import cast, logits_of
from stackwise.subject.spec import ModelSpec
from stackwise.support.system_errors import is_out_of_memory

__all__ = [
    "ALL_AGAIN",
    "LOOPS",
    "OnToken",
    "TokenStream",
    "cache_maker",
    "empty_cache",
    "missing_cache",
    "of_last",
    "token_stream",
]

LOOPS = ("common", "own")
ALL_AGAIN = "all tokens again"
_TRIAL = 3  # number of positions of the trial call
OnToken = Callable[[Tensor], object]
Run = Callable[[Tensor, int, OnToken], None]


@dataclass(frozen=True)
class TokenStream:
    """Method of continuing prompts.

    Attributes:
        run: (prompt (B, T), number of new tokens, on_token) -> None. It calls `on_token` with each column of
            tokens as soon as the model has returned it. Each run starts from the prompt.
        told: description of the method for users.
    """

    run: Run
    told: str


def token_stream(spec: ModelSpec, model: nn.Module, loop: str, *, compiled: bool = False) -> TokenStream:
    """Return the method by which `model` continues a prompt. Each token is the most likely one (greedy).

    Greedy selection ensures that all models do the same work.

    Args:
        spec: spec of the model.
        model: the model in eval mode.
        loop: "common": the same loop for every model, with the model's cache. A model without a cache
            recomputes all tokens for each new one. Logits are computed only for the last position if the
            model supports it, see `of_last`. "own": the model's method `stream(prompt, max_new_tokens=)` or
            transformers' `generate`. A run of it raises RuntimeError if the model returns fewer or more
            tokens than requested.
        compiled: call `stream` with `compile=True`. Only for the loop "own".

    Raises:
        ValueError: the model has no own loop, or its own loop cannot be compiled.
    """
    if loop == "common":
        last = of_last(spec, model)
        way = f"{ALL_AGAIN}: {missing_cache(spec)}" if spec.decode is None else "with the cache of the model"
        told = f"greedy, {way}" + ("" if last else "; logits of all positions of a pass")
        run = _again if spec.decode is None else _cached
        return TokenStream(run(last or spec, model), told)
    if callable(getattr(model, "stream", None)):
        return TokenStream(_counted(_streamed(model, compiled), "stream"), "the model's own stream()")
    if callable(getattr(model, "generate", None)) and hasattr(model, "generation_config"):
        if compiled:
            raise ValueError(f"compile: got True; allowed: False, since {spec.name} has its own generate()")
        return TokenStream(_counted(_generated(model), "generate"), "the model's own generate(), greedy")
    raise ValueError(
        f"loop: got 'own', but {spec.name} has neither stream(prompt, max_new_tokens=) nor transformers' "
        "generate(); allowed: 'common'"
    )


def missing_cache(spec: ModelSpec) -> str:
    """Return the reason why a model without `decode` is not used with a cache, in a few words."""
    return "no cache was found" if spec.cache_problem else "the model keeps no cache"


def empty_cache(model: nn.Module, batch_size: int, capacity: int) -> Any:
    """Return a cache with room for `capacity` tokens. None: the model has no preallocated cache.

    The cache is created by the model's method `new_cache(batch_size, capacity)`. If the method has another
    signature, it is not called.
    """
    return cache_maker(model)(batch_size, capacity)


def cache_maker(model: nn.Module) -> Callable[[int, int], Any]:
    """Return `empty_cache` of this model as a function, for timed code.

    The method is inspected only once, here.
    """
    make: Callable[[int, int], Any] | None = getattr(unwrapped(model), "new_cache", None)
    if not callable(make):
        return lambda *_: None
    try:
        signature(make).bind(1, 1)
    except TypeError:
        return lambda *_: None
    return make


def of_last(spec: ModelSpec, model: nn.Module) -> ModelSpec | None:
    """Return `spec` with calls that compute logits only for the last position of each row. None: unsupported.

    If only the next token is needed, the head of all other positions is unnecessary work. Models of
    transformers take `logits_to_keep`. Other models have the methods `hidden`, with the arguments of
    `forward`, and `head`, which together are `forward`. These two are not used if the call of the model is
    compiled. Each candidate is tested before it is used.

    Args:
        spec: spec of the model.
        model: the model in eval mode.
    """
    return next((each for each in _asking(spec, model) if _is_last_of(each, spec, model)), None)


def _asking(spec: ModelSpec, model: nn.Module) -> Iterator[ModelSpec]:
    """Yield the spec with each method of requesting the last position that the model seems to support."""
    decode = spec.decode

    def asked(ask: Callable[..., Any]) -> ModelSpec:
        return replace(
            spec,
            forward=lambda model, inputs: spec.forward(_Asked(model, ask), inputs),  # type: ignore[arg-type]
            decode=decode and (lambda model, inputs, cache: decode(_Asked(model, ask), inputs, cache)),  # type: ignore[arg-type]
        )

    if "logits_to_keep" in forward_parameters(model):
        yield asked(_keeping_one)
    # `hidden` and `head` would bypass the compiled call of the model.
    compiled = unwrapped(model) is not model or getattr(model, "_compiled_call_impl", None) is not None
    if not compiled and all(callable(getattr(model, name, None)) for name in ("hidden", "head")):
        yield asked(_head_of_last)


class _Asked:
    """Wrapper of a model that passes every call to `ask`."""

    def __init__(self, model: nn.Module, ask: Callable[..., Any]) -> None:
        self._model, self._ask = model, ask

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        return self._ask(self._model, *inputs, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _keeping_one(model: nn.Module, *inputs: Any, **more: Any) -> Any:
    return model(*inputs, **more, logits_to_keep=1)


def _head_of_last(model: Any, *inputs: Any, **more: Any) -> Any:
    return model.head(model.hidden(*inputs, **more)[:, -1:])


@torch.no_grad()
def _is_last_of(asked: ModelSpec, spec: ModelSpec, model: nn.Module) -> bool:
    """Return True if a call of `asked` returns the last of the logits of `spec`, up to rounding."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = cast(spec.batch(1, min(_TRIAL, spec.max_length or _TRIAL), device=device), model)

    def logits(each: ModelSpec) -> Tensor:
        if each.decode is None:
            return each.logits(model, inputs)
        return logits_of(each.decode(model, inputs, empty_cache(model, *inputs.shape[:2]))[0])

    whole = logits(spec)[:, -1:]
    try:
        last = logits(asked)
    except Exception as error:  # any other failure means that the model does not support this method
        if is_out_of_memory(error):
            raise
        return False
    if last.shape != whole.shape:
        return False
    tolerance = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 5e-2
    return torch.allclose(last.float(), whole.float(), rtol=0.0, atol=tolerance * float(whole.abs().max()))


def _cached(spec: ModelSpec, model: nn.Module) -> Run:
    decode, make_cache = spec.decode, cache_maker(model)
    assert decode is not None

    @torch.no_grad()
    def run(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        # The last token is never an input, so it needs no room.
        cache = make_cache(prompt_BT.shape[0], prompt_BT.shape[1] + n_new - 1)
        fed = prompt_BT
        for _ in range(n_new):
            output, cache = decode(model, fed, cache)
            fed = _most_likely(logits_of(output), spec.width)
            on_token(fed[:, 0])

    return run


def _again(spec: ModelSpec, model: nn.Module) -> Run:
    @torch.no_grad()
    def run(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        ids = prompt_BT
        for _ in range(n_new):
            token_B1 = _most_likely(spec.logits(model, ids), spec.width)
            on_token(token_B1[:, 0])
            ids = torch.cat((ids, token_B1.to(ids)), dim=1)

    return run


def _most_likely(logits_BTV: Tensor, width: int) -> Tensor:
    """Return the next token (B, 1). A head may be wider than the embedding, so wider ids are excluded."""
    return logits_BTV[:, -1:, :width].argmax(-1)


def _counted(run: Run, name: str) -> Run:
    """Return `run` of a model's own method with a check of the number of tokens.

    If the model returns fewer or more tokens than requested, for example because of an end token, its time is
    that of different work. The call then raises RuntimeError.
    """

    def counted(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        count = 0

        def on_next(token_B: Tensor) -> None:
            nonlocal count
            count += 1
            if count > n_new:
                raise RuntimeError(f"{name}: the model gave more than {n_new} tokens; wanted {n_new}")
            on_token(token_B)

        run(prompt_BT, n_new, on_next)
        if count != n_new:
            raise RuntimeError(f"{name}: the model gave {count} tokens; wanted {n_new}")

    return counted


def _streamed(model: Any, compiled: bool) -> Run:
    options = {"compile": True} if compiled else {}

    def run(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        for token_B in model.stream(prompt_BT, max_new_tokens=n_new, **options):
            on_token(token_B)

    return run


class _Streamer:
    """Receiver for the tokens of transformers' `generate`, which sends the prompt first."""

    def __init__(self, on_token: OnToken) -> None:
        self.on_token = on_token
        self.begun = False

    def put(self, value: Tensor) -> None:
        """Receive the prompt (B, T) or the next tokens (B,)."""
        if self.begun:
            self.on_token(value)
        self.begun = True

    def end(self) -> None:
        """Do nothing: no cleanup is needed."""


def _generated(model: Any) -> Run:
    def run(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        own = model.generation_config
        settings = copy.deepcopy(own)
        settings.update(do_sample=False, num_beams=1, max_new_tokens=n_new, max_length=None)
        # All models generate the requested number of tokens, so no token stops a generation.
        settings.eos_token_id, settings.pad_token_id = None, 0
        streamer = _Streamer(on_token)
        mask = torch.ones_like(prompt_BT)
        # `generate` replaces None in its settings by the value of the model's own config. The config is
        # changed in place, because a model that wraps another one may only expose the inner config.
        eos_token_id, max_length = own.eos_token_id, own.max_length
        own.eos_token_id = own.max_length = None
        try:
            model.generate(prompt_BT, attention_mask=mask, generation_config=settings, streamer=streamer)
        finally:
            own.eos_token_id, own.max_length = eos_token_id, max_length

    return run
