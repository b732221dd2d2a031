"""Capabilities: what a model can do beyond a plain forward pass, seen from its signature and by trial.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["capabilities"]

_CACHE_CAPACITY = 256
# Of padding masks, and whether they are true at real tokens.
_MASKS = {"attention_mask": True, "mask": True, "key_padding_mask": False, "src_key_padding_mask": False}


def capabilities(model: nn.Module, inputs: Tensor, logits_of: Callable[[Any], Tensor]) -> dict[str, Any]:
    """Attributes of a ModelSpec that `model` shows to have; those that it does not show are left out.

    A way to call is kept where it gives outputs of the right shape, whatever is in them.

    Args:
        model: in eval mode; it is called, and of no other use afterwards.
        inputs: a batch that it takes, (B, T) ids or (B, T, C) vectors.
        logits_of: output of a call -> its logits.
    """
    named = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    B, T = inputs.shape[:2]

    def works(call: Callable[[], Any]) -> bool:
        try:
            with torch.no_grad():
                return logits_of(call()).shape[:2] == (B, T)
        except Exception:  # any failure is an answer: it cannot do this
            return False

    everything = torch.ones(B, T, dtype=torch.bool, device=inputs.device)
    for masked, sides in _maskings(named):
        partly = everything.clone()
        partly[-1, T // 2 :] = False
        if works(lambda: masked(model, inputs, partly)):  # noqa: B023
            found |= {"masked": masked, "padding_sides": sides}
            break
    if "document_ids" in named and works(lambda: _packed(model, inputs, everything.long())):
        found["packed"] = _packed
    for decode in _decodings(model, named):
        if works(lambda: _in_two(decode, model, inputs, logits_of)):  # noqa: B023
            found["decode"] = decode
            break
    if "labels" in named and _is_scalar(lambda: _labelled_loss(model, inputs, inputs)):
        found["labelled_loss"] = _labelled_loss
    if "output_router_logits" in named and _is_scalar(lambda: _auxiliary_loss(model, inputs, None)):
        found["auxiliary_loss"] = _auxiliary_loss
    return found | dict(_claims(model))


def _maskings(named: Mapping[str, Any]) -> Iterator[tuple[Callable[..., Any], tuple[str, ...]]]:
    """Ways to say what is padding, and on which sides it may be."""
    for name in _MASKS:
        if name not in named:
            continue
        if "position_ids" in named and name == "attention_mask":
            # Whoever pads on the left says where the real tokens are.
            yield _masked_with_positions, ("right", "left")

        def masked(model: nn.Module, inputs: Tensor, keep: Tensor, name: str = name, /) -> Any:
            mask = keep if _MASKS[name] else ~keep
            return model(inputs, **{name: mask.long() if name == "attention_mask" else mask})

        yield masked, ("right",)


def _masked_with_positions(model: nn.Module, inputs: Tensor, keep: Tensor) -> Any:
    mask = keep.long()
    return model(inputs, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))


def _packed(model: nn.Module, inputs: Tensor, documents: Tensor) -> Any:
    return model(inputs, document_ids=documents)


def _decodings(model: nn.Module, named: Mapping[str, Any]) -> Iterator[Callable[..., Any]]:
    """Ways to decode with a cache."""
    if {"past_key_values", "use_cache"} <= named.keys():
        yield _decode_with_past
    if "cache" in named and hasattr(model, "new_cache"):
        yield _decode_with_new_cache
    if "input_pos" in named and hasattr(model, "set_kv_cache"):
        yield _decode_at_positions


def _decode_with_past(model: nn.Module, inputs: Tensor, cache: Any) -> tuple[Any, Any]:
    output = model(inputs, past_key_values=cache, use_cache=True)
    if output.past_key_values is None:
        raise TypeError("past_key_values: none came back")
    return output, output.past_key_values


def _decode_with_new_cache(model: Any, inputs: Tensor, cache: Any) -> tuple[Any, Any]:
    if cache is None:
        limit = getattr(model, "max_seq_len", None)
        cache = model.new_cache(len(inputs), min(limit or _CACHE_CAPACITY, _CACHE_CAPACITY))
    return model(inputs, cache=cache), cache


def _decode_at_positions(model: Any, inputs: Tensor, cache: Any) -> tuple[Any, Any]:
    """The model keeps its own cache; what is handed on is how many tokens are in it."""
    if cache is None:
        model.set_kv_cache(batch_size=len(inputs))
        cache = 0
    end = cache + inputs.shape[1]
    return model(inputs, input_pos=torch.arange(cache, end, device=inputs.device)), end


def _in_two(
    decode: Callable[..., Any], model: nn.Module, inputs: Tensor, logits_of: Callable[[Any], Tensor]
) -> Tensor:
    half = max(1, inputs.shape[1] // 2)
    one, cache = decode(model, inputs[:, :half], None)
    outputs = [logits_of(one)]
    for t in range(half, inputs.shape[1]):
        output, cache = decode(model, inputs[:, t : t + 1], cache)
        outputs.append(logits_of(output))
    return torch.cat(outputs, dim=1)


def _labelled_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(inputs, labels=labels).loss
    return loss


def _auxiliary_loss(model: nn.Module, inputs: Tensor, keep: Tensor | None) -> Tensor:
    mask = {} if keep is None else {"attention_mask": keep.long()}
    loss: Tensor = model(inputs, output_router_logits=True, **mask).aux_loss
    return loss


def _is_scalar(call: Callable[[], Any]) -> bool:
    try:
        with torch.no_grad():
            value = call()
    except Exception:  # any failure is an answer: it cannot do this
        return False
    return isinstance(value, Tensor) and value.ndim == 0


def _claims(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the model's own settings say: whether its head is tied, and what its layers see."""
    config = getattr(model, "config", None)
    for owner, name in ((model, "tie_embeddings"), (config, "tie_word_embeddings")):
        claim = getattr(owner, name, None)
        if isinstance(claim, bool):
            yield "tied", claim
            break
    if isinstance(sides := getattr(model, "padding_sides", None), tuple):
        yield "padding_sides", sides
    windows: set[Any] = {m.sliding_window for m in model.modules() if hasattr(m, "sliding_window")}
    # Where the layers themselves say nothing, the setting holds for all, unless it is per layer or off.
    everywhere = getattr(config, "layer_types", None) is None and getattr(config, "use_sliding_window", True)
    if not windows and everywhere:
        windows = {getattr(config, "sliding_window", None)}
    if len(windows) == 1 and isinstance(window := windows.pop(), int):
        yield "window", window
