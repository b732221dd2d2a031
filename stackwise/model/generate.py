"""Generation: prefill, then one token at a time, from a cache taken once.

Shapes: B batch, T prompt, C model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stackwise.argument import check_sizes, require
from stackwise.model.cache import RackCache
from stackwise.model.mask import padding_mask
from stackwise.model.mode import evaluating
from stackwise.model.sampling import Sampler

if TYPE_CHECKING:
    from stackwise.model.rack import Rack

__all__ = ["generate", "stream"]

_LOOK_EVERY = 16  # steps between looks at whether every row has ended, where a look stalls the device


def generate(
    rack: Rack,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int = 0,
    seed: int | None = None,
    prefill_chunk: int | None = None,
) -> Tensor:
    """Continue each row of `input_ids`.

    Args:
        rack: causal. Computes in eval mode meanwhile.
        input_ids: integer (B, T).
        attention_mask: bool or integer (B, T), nonzero at real tokens; rows may be padded on either
            side. A padded row continues as it would alone.
        max_new_tokens: at most so many; fewer where every row has ended.
        temperature: 0 takes the most likely token; otherwise logits are divided by it and drawn from.
        top_k: draw from the k most likely only.
        top_p: draw from the most likely that make up p only.
        stop_token_ids: a row that yields one of these ends with it.
        pad_token_id: what a row that has ended yields.
        seed: of the draws; None: PyTorch's own generator.
        prefill_chunk: read the prompt in pieces of so many tokens, which bounds the memory that takes;
            None: at once.

    Returns:
        int64 (B, T + N): the prompts as they were given, then N <= `max_new_tokens` tokens.

    Raises:
        ValueError: nothing to continue, a bidirectional Rack, or a sequence that would become longer
            than `rack.max_seq_len`.
    """
    columns = list(
        stream(
            rack,
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token_ids=stop_token_ids,
            pad_token_id=pad_token_id,
            seed=seed,
            prefill_chunk=prefill_chunk,
        )
    )
    new_BN = torch.stack(columns, dim=1)
    return torch.cat((input_ids.to(new_BN), new_BN), dim=1)


def stream(
    rack: Rack,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int = 0,
    seed: int | None = None,
    prefill_chunk: int | None = None,
) -> Iterator[Tensor]:
    """As `generate`, but each column of tokens, int64 (B,), as soon as it is there.

    Errors come with the call, before the first token.
    """
    check_sizes(max_new_tokens=max_new_tokens)
    if prefill_chunk is not None:
        check_sizes(prefill_chunk=prefill_chunk)
    for key, ids in (("stop_token_ids", stop_token_ids), ("pad_token_id", [pad_token_id])):
        for token in ids:
            known = isinstance(token, int) and 0 <= token < rack.vocab_size
            require(known, key, token, f"0 to {rack.vocab_size - 1}")
    require(input_ids.ndim == 2, "input_ids", tuple(input_ids.shape), "a shape (batch, positions)")
    require(input_ids.numel() > 0, "input_ids", tuple(input_ids.shape), "at least one row of one token")
    if not rack.is_causal:
        raise ValueError("generate: this Rack is bidirectional; only a causal one says what comes next")
    device = rack.embedding.weight.device
    prompt_BT, keep_BT = _left_padded(input_ids.to(device), attention_mask)
    prompt_length = prompt_BT.shape[1]
    if rack.max_seq_len is not None and prompt_length + max_new_tokens > rack.max_seq_len:
        room = max(0, rack.max_seq_len - prompt_length)
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens} after a prompt of {prompt_length}; allowed: {room}, "
            f"to stay within max_seq_len={rack.max_seq_len}"
        )
    sampler = Sampler(temperature, top_k, top_p)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    stops = torch.tensor(list(stop_token_ids), dtype=torch.int64, device=device)
    return _stream(
        rack, prompt_BT, keep_BT, max_new_tokens, sampler, generator, stops, pad_token_id, prefill_chunk
    )


@torch.no_grad()
def _stream(
    rack: Rack,
    prompt_BT: Tensor,
    keep_BT: Tensor | None,
    max_new_tokens: int,
    sampler: Sampler,
    generator: torch.Generator | None,
    stops: Tensor,
    pad_token_id: int,
    prefill_chunk: int | None,
) -> Iterator[Tensor]:
    batch_size, prompt_length = prompt_BT.shape
    with evaluating(rack):
        # The last token is never fed back, so it needs no room.
        cache = rack.new_cache(batch_size, prompt_length + max_new_tokens - 1)
        logits_BV = prefill(rack, cache, prompt_BT, keep_BT, prefill_chunk)
        ended_B = torch.zeros(batch_size, dtype=torch.bool, device=prompt_BT.device)
        decode = DecodeStep(rack, cache)
        for step in range(max_new_tokens):
            token_B = sampler(logits_BV, generator)
            if len(stops):
                token_B = token_B.masked_fill(ended_B, pad_token_id)
                ended_B = ended_B | torch.isin(token_B, stops)
            yield token_B
            last = step == max_new_tokens - 1
            look = len(stops) and (prompt_BT.device.type == "cpu" or step % _LOOK_EVERY == _LOOK_EVERY - 1)
            if last or (look and bool(ended_B.all())):
                return
            logits_BV = decode(token_B)


def prefill(
    rack: Rack, cache: RackCache, prompt_BT: Tensor, keep_BT: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Put the prompt into the cache, `chunk` tokens at a time; the logits (B, V) that follow it."""
    hidden_BTC = None
    chunk = chunk or prompt_BT.shape[1]
    for start in range(0, prompt_BT.shape[1], chunk):
        part = slice(start, start + chunk)
        mask = None if keep_BT is None else keep_BT[:, part]
        hidden_BTC = rack.hidden(prompt_BT[:, part], mask, cache=cache)
    assert hidden_BTC is not None
    return rack.head(hidden_BTC[:, -1:])[:, 0]


class DecodeStep:
    """One more token: ids (B,) to the logits (B, V) that follow it.

    On CUDA the step is captured once in a graph and replayed, since launching the kernels of a small
    model takes longer than running them.

    Args:
        rack: in eval mode.
        cache: holds the prompt.
    """

    def __init__(self, rack: Rack, cache: RackCache) -> None:
        self.rack, self.cache = rack, cache
        self._graph: torch.cuda.CUDAGraph | None = None
        self._token_B1 = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device=cache.device)
        self._logits_BV: Tensor | None = None

    @torch.no_grad()
    def __call__(self, token_B: Tensor) -> Tensor:
        """The tensor returned is overwritten by the next call on CUDA."""
        if self.cache.device.type != "cuda":
            return self._step(token_B[:, None])
        self._token_B1.copy_(token_B[:, None])
        if self._graph is None:
            self._capture()
        assert self._graph is not None and self._logits_BV is not None
        self._graph.replay()
        self.cache.length += 1
        return self._logits_BV

    def _step(self, token_B1: Tensor) -> Tensor:
        return self.rack.head(self.rack.hidden(token_B1, cache=self.cache))[:, 0]

    def _capture(self) -> None:
        """Capture changes nothing: warming up does, and is undone."""
        cache = self.cache
        cache.count_on_device()
        length, before = cache.length, cache.snapshot()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(self._token_B1)
            cache.length = length
        torch.cuda.current_stream().wait_stream(side)
        cache.restore(before)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits_BV = self._step(self._token_B1)
        cache.length = length


def _left_padded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Each row's real tokens at its right end, columns of padding alone cut off; the mask is None if full."""
    keep_BT = padding_mask(attention_mask, *input_ids.shape)
    if keep_BT is None:
        return input_ids, None
    keep_BT = keep_BT.to(input_ids.device)
    counts = keep_BT.sum(1)
    if not bool(counts.all()):
        row = int((counts == 0).nonzero()[0])
        raise ValueError(f"attention_mask: row {row} has no real token; allowed: at least one in each row")
    order_BT = keep_BT.to(torch.int8).argsort(dim=1, stable=True)
    longest = int(counts.max())
    prompt_BT, keep_BT = (each.gather(1, order_BT)[:, -longest:] for each in (input_ids, keep_BT))
    return prompt_BT, None if bool(keep_BT.all()) else keep_BT
