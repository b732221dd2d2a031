"""Generation: prefill of the prompt, then decoding token by token, with a KV cache.

Shapes: B batch, T prompt, N new tokens, C model width, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stackwise.model.cache import RackCache
from stackwise.model.decode import DecodeStep
from stackwise.model.mask import padding_mask
from stackwise.model.sampling import GenerationOptions
from stackwise.support.arguments import require
from stackwise.support.mode import evaluating

if TYPE_CHECKING:
    from stackwise.model.rack import Rack

__all__ = ["generate", "prefill", "stream"]


def generate(rack: Rack, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Generate a continuation of each row of `input_ids`.

    Args:
        rack: causal Rack. It runs in eval mode, and its training mode is restored.
        input_ids: integer (B, T), on any device.
        attention_mask: bool or integer (B, T), nonzero at real tokens; None: all are real. Rows may be padded
            on either side and in between. Padding does not change the continuation.
        **options: fields of `GenerationOptions`; `max_new_tokens` is required.

    Returns:
        int64 (B, T + N) on the device of the Rack: the unchanged prompts, then N <= `max_new_tokens` tokens.

    Raises:
        TypeError: an unknown option, or no `max_new_tokens`.
        ValueError: an argument outside its range, an empty prompt, a bidirectional Rack, or a sequence
            that could exceed `rack.max_seq_len`, padding not counted.
        FloatingPointError: logits of a row that has not stopped contain NaN or +inf, or only -inf.
    """
    new_BN = torch.stack(list(stream(rack, input_ids, attention_mask, **options)), dim=1)
    return torch.cat((input_ids.to(new_BN), new_BN), dim=1)


def stream(
    rack: Rack, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> Iterator[Tensor]:
    """Generate like `generate`, but yield each column of tokens, int64 (B,), as soon as it is computed.

    Errors in arguments are raised by the call, before the first token. Non-finite logits raise an error
    instead of yielding the sampled token; on a GPU the error follows the last token, because no step is
    synchronised. Between two tokens the Rack is in its original mode, so that streams can be interleaved,
    and a stream can be left unfinished.
    """
    asked = GenerationOptions(**options)
    is_stop_V = asked.is_stop(rack.vocab_size, rack.embedding.weight.device)
    pad_token_id = asked.padding(rack.vocab_size)
    if not rack.is_causal:
        raise ValueError("generate: this Rack is bidirectional; only a causal one says what comes next")
    prompt_BT, keep_BT = _left_padded(_token_ids(rack, input_ids), attention_mask)
    _check_room(rack, prompt_BT.shape[1], asked.max_new_tokens)
    return _columns(rack, prompt_BT, keep_BT, asked, is_stop_V, pad_token_id)


def _columns(
    rack: Rack,
    prompt_BT: Tensor,
    keep_BT: Tensor | None,
    asked: GenerationOptions,
    is_stop_V: Tensor | None,
    pad_token_id: int,
) -> Iterator[Tensor]:
    batch_size, prompt_length = prompt_BT.shape
    generator = asked.generator(prompt_BT.device)
    # The last token is not an input, so it needs no slot.
    capacity = prompt_length + asked.max_new_tokens - 1
    cache = rack.new_cache(batch_size, DecodeStep.capacity(capacity) if asked.compile else capacity)
    logits_BV = prefill(rack, cache, prompt_BT, keep_BT, asked.prefill_chunk)
    decode = DecodeStep(rack, cache, compile=asked.compile)
    ended_B = torch.zeros(batch_size, dtype=torch.bool, device=prompt_BT.device)
    extreme_B = torch.zeros(batch_size, device=prompt_BT.device)  # maximum score; NaN and infinity persist
    for count in range(1, asked.max_new_tokens + 1):
        score_B, token_B = asked.draw(logits_BV, generator)
        if is_stop_V is not None:
            score_B = score_B.masked_fill(ended_B, 0)
            token_B = token_B.masked_fill(ended_B, pad_token_id)
            ended_B = ended_B | is_stop_V[token_B]
        extreme_B = torch.maximum(extreme_B, score_B.abs())
        if not extreme_B.is_cuda:
            _check_scores(extreme_B)
        yield token_B
        if count == asked.max_new_tokens:
            break
        all_ended = _never if is_stop_V is None else _on_its_way(ended_B.all())
        # A GPU gets its next step before the result is read, to avoid idle time. The first step is a capture.
        if (count == 1 or not ended_B.is_cuda) and all_ended():
            break
        logits_BV = decode(token_B)
        if all_ended():
            break
    _check_scores(extreme_B)


@torch.no_grad()
def prefill(
    rack: Rack, cache: RackCache, prompt_BT: Tensor, keep_BT: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Add a prompt to the cache, in eval mode, and return the logits (B, V) that follow it.

    Args:
        rack: causal Rack.
        cache: result of `rack.new_cache`, with enough capacity for the prompt.
        prompt_BT: integer, with a real token at the end of each row.
        keep_BT: bool, False at padding; None: no padding.
        chunk: number of tokens per pass; None: all.
    """
    chunk = chunk or prompt_BT.shape[1]
    with evaluating(rack):
        for start in range(0, prompt_BT.shape[1], chunk):
            part = slice(start, start + chunk)
            mask = None if keep_BT is None else keep_BT[:, part]
            hidden_BTC = rack.hidden(prompt_BT[:, part], mask, cache=cache)
        return rack.head(hidden_BTC[:, -1:])[:, 0]


def _check_scores(extreme_B: Tensor) -> None:
    if not _on_its_way((extreme_B < math.inf).all())():
        rows = [row for row, extreme in enumerate(extreme_B.tolist()) if not math.isfinite(extreme)]
        raise FloatingPointError(
            f"logits: NaN or infinite in row {', '.join(map(str, rows))} of the batch, so that there is no "
            "token to take: a weight is, or a sum has left the range of its dtype"
        )


def _never() -> bool:
    return False


def _on_its_way(truth: Tensor) -> Callable[[], bool]:
    """Start to copy a boolean to the host. Return a function that waits for it."""
    on_host = truth.to("cpu", non_blocking=truth.is_cuda)
    copied = torch.cuda.current_stream(truth.device).record_event() if truth.is_cuda else None

    def wait() -> bool:
        if copied is not None:
            copied.synchronize()
        return bool(on_host)

    return wait


def _token_ids(rack: Rack, input_ids: Tensor) -> Tensor:
    """Return the prompts as int64, on the device of the Rack."""
    require(isinstance(input_ids, Tensor), "input_ids", type(input_ids).__name__, "a tensor of integers")
    require(input_ids.ndim == 2, "input_ids", tuple(input_ids.shape), "a shape (batch, positions)")
    require(input_ids.numel() > 0, "input_ids", tuple(input_ids.shape), "at least one row of one token")
    no_ids = input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool
    require(not no_ids, "input_ids", input_ids.dtype, "an integer dtype")
    ids_BT = input_ids.to(rack.embedding.weight.device, torch.int64)
    unknown = ids_BT[(ids_BT < 0) | (ids_BT >= rack.vocab_size)]
    if len(unknown):
        raise ValueError(f"input_ids: got {int(unknown[0])}; allowed: 0 to {rack.vocab_size - 1}")
    return ids_BT


def _check_room(rack: Rack, prompt_length: int, max_new_tokens: int) -> None:
    if rack.max_seq_len is not None and prompt_length + max_new_tokens > rack.max_seq_len:
        room = max(0, rack.max_seq_len - prompt_length)
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens} after a prompt of {prompt_length}; allowed: {room}, "
            f"to stay within max_seq_len={rack.max_seq_len}"
        )


def _left_padded(ids_BT: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Move each row's real tokens to its right end, and drop columns with only padding.

    The mask is None if no padding remains.
    """
    keep_BT = padding_mask(attention_mask, *ids_BT.shape)
    if keep_BT is None:
        return ids_BT, None
    keep_BT = keep_BT.to(ids_BT.device)
    counts = keep_BT.sum(1)
    if not bool(counts.all()):
        row = int((counts == 0).nonzero()[0])
        raise ValueError(f"attention_mask: row {row} has no real token; allowed: at least one in each row")
    order_BT = keep_BT.to(torch.int8).argsort(dim=1, stable=True)
    longest = int(counts.max())
    prompt_BT, keep_BT = (each.gather(1, order_BT)[:, -longest:] for each in (ids_BT, keep_BT))
    return prompt_BT, None if bool(keep_BT.all()) else keep_BT
