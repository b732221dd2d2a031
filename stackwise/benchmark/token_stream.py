"""Token streams: how a model continues a prompt, one token after the other.

Shapes: B batch, T prompt, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.inference import logits_of
from stackwise.spec import ModelSpec

__all__ = ["LOOPS", "OnToken", "TokenStream", "empty_cache", "token_stream"]

LOOPS = ("common", "own")
OnToken = Callable[[Tensor], object]


@dataclass(frozen=True)
class TokenStream:
    """A way to continue prompts.

    Attributes:
        run: (prompt (B, T), number of new tokens, on_token) -> None; calls `on_token` with each column of
            tokens as soon as the model has given it. Each run starts from the prompt alone.
        told: which way this is, for people.
    """

    run: Callable[[Tensor, int, OnToken], None]
    told: str


def token_stream(spec: ModelSpec, model: nn.Module, loop: str, *, compiled: bool = False) -> TokenStream:
    """How `model` is made to continue a prompt, by the most likely token each, so that all do the same.

    Args:
        spec: of the model.
        model: in eval mode.
        loop: "common": the same loop for every model, with the cache that it keeps; where it keeps none,
            all tokens are computed again for each new one. "own": what the model itself offers, a method
            `stream(prompt, max_new_tokens=)` or transformers' `generate`.
        compiled: own loop: ask `stream` for `compile=True`.

    Raises:
        ValueError: a loop of its own that the model does not have, or that cannot be compiled.
    """
    if loop == "common":
        if spec.decode is None:
            return TokenStream(_again(spec, model), "greedy, all tokens again: the model keeps no cache")
        return TokenStream(_cached(spec, model), "greedy, with the cache of the model")
    if callable(getattr(model, "stream", None)):
        return TokenStream(_streamed(model, compiled), "the model's own stream()")
    if callable(getattr(model, "generate", None)) and hasattr(model, "generation_config"):
        if compiled:
            raise ValueError(f"compile: got True; allowed: False, since {spec.name} has its own generate()")
        return TokenStream(_generated(model), "the model's own generate(), greedy")
    raise ValueError(
        f"loop: got 'own', but {spec.name} has neither stream(prompt, max_new_tokens=) nor transformers' "
        "generate(); allowed: 'common'"
    )


def empty_cache(model: nn.Module, batch_size: int, capacity: int) -> Any:
    """A cache with room for `capacity` tokens, of a model that takes it at once; None: it grows by itself.

    Such a model has a method `new_cache(batch_size, capacity)`.
    """
    make = getattr(model, "new_cache", None)
    return make(batch_size, capacity) if callable(make) else None


def _cached(spec: ModelSpec, model: nn.Module) -> Callable[[Tensor, int, OnToken], None]:
    decode = spec.decode
    assert decode is not None

    @torch.no_grad()
    def run(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        # The last token is never fed back.
        cache = empty_cache(model, prompt_BT.shape[0], prompt_BT.shape[1] + n_new - 1)
        fed = prompt_BT
        for _ in range(n_new):
            output, cache = decode(model, fed, cache)
            fed = _most_likely(logits_of(output), spec.width)
            on_token(fed[:, 0])

    return run


def _again(spec: ModelSpec, model: nn.Module) -> Callable[[Tensor, int, OnToken], None]:
    @torch.no_grad()
    def run(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        ids = prompt_BT
        for _ in range(n_new):
            token_B1 = _most_likely(spec.logits(model, ids), spec.width)
            on_token(token_B1[:, 0])
            ids = torch.cat((ids, token_B1.to(ids)), dim=1)

    return run


def _most_likely(logits_BTV: Tensor, width: int) -> Tensor:
    """The token (B, 1) that follows; a head may be wider than the embedding, which takes no more."""
    return logits_BTV[:, -1:, :width].argmax(-1)


def _streamed(model: Any, compiled: bool) -> Callable[[Tensor, int, OnToken], None]:
    options = {"compile": True} if compiled else {}

    def run(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        for token_B in model.stream(prompt_BT, max_new_tokens=n_new, **options):
            on_token(token_B)

    return run


class _Streamer:
    """What transformers' `generate` hands its tokens to, the prompt first."""

    def __init__(self, on_token: OnToken) -> None:
        self.on_token = on_token
        self.count = -1

    def put(self, value: Tensor) -> None:
        """The prompt (B, T), then tokens (B,)."""
        self.count += 1
        if self.count:
            self.on_token(value)

    def end(self) -> None:
        """Nothing is left to do."""


def _generated(model: Any) -> Callable[[Tensor, int, OnToken], None]:
    def run(prompt_BT: Tensor, n_new: int, on_token: OnToken) -> None:
        settings = copy.deepcopy(model.generation_config)
        settings.update(do_sample=False, num_beams=1, max_new_tokens=n_new, max_length=None)
        # All models write as many tokens as were asked for, whatever these are.
        settings.eos_token_id, settings.pad_token_id = None, 0
        streamer = _Streamer(on_token)
        mask = torch.ones_like(prompt_BT)
        model.generate(prompt_BT, attention_mask=mask, generation_config=settings, streamer=streamer)
        if streamer.count != n_new:
            raise RuntimeError(f"generate: the model gave {streamer.count} tokens; wanted {n_new}")

    return run
