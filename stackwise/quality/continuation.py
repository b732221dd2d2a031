"""Continuation: generation of text after each context, until a stop sequence.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from stackwise.quality.language_model import LanguageModel
from stackwise.quality.scoring import Scorer
from stackwise.quality.text_tokenizer import TextTokenizer
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.random_state import seeded

__all__ = ["Sampling", "continue_texts"]

_TAIL = 16  # context tokens that suffice to detect how a tokenizer decodes the start of a text


@dataclass(frozen=True)
class Sampling:
    """Selection of the next token.

    Attributes:
        temperature: divisor of the logits before sampling. 0: the most likely token.
        top_k: sample from the k most likely tokens. None: from all.
        top_p: sample from the smallest set of most likely tokens with a total probability of p.
        seed: seed of the samples.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "a number >= 0", lambda value: value >= 0)
        check_number("top_p", self.top_p, "above 0, at most 1", lambda value: 0 < value <= 1)
        if self.top_k is not None:
            check_sizes(top_k=self.top_k)

    def __call__(self, logits_BV: Tensor, uniform_B: Tensor | None = None) -> Tensor:
        """Return tokens, int64 (B,).

        Args:
            logits_BV: floating-point logits.
            uniform_B: float64 in [0, 1), a random number for the token of each row. None: use torch's
                generator.
        """
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        # After this subtraction, a division by a tiny temperature gives 0 or -inf, but never inf.
        logits_BV = logits_BV.float()
        logits_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV / max(self.temperature, torch.finfo(torch.float32).tiny)
        if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(self.top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
        if self.top_p < 1:
            sorted_BV, order_BV = logits_BV.sort(descending=True)
            p_BV = sorted_BV.softmax(-1)
            outside_BV = p_BV.cumsum(-1) - p_BV >= self.top_p  # the token that crosses p is included
            logits_BV = logits_BV.masked_fill(
                torch.zeros_like(outside_BV).scatter(-1, order_BV, outside_BV), -torch.inf
            )
        if uniform_B is None:
            return torch.multinomial(logits_BV.softmax(-1), 1)[:, 0]
        sums_BV = logits_BV.double().softmax(-1).cumsum(-1)
        # The first token whose cumulative probability is above the number. A token of probability 0 is never
        # selected.
        found_B1 = torch.searchsorted(sums_BV, uniform_B[:, None] * sums_BV[:, -1:], right=True)
        return found_B1[:, 0].clamp(max=sums_BV.shape[-1] - 1)


def continue_texts(
    scorer: Scorer,
    contexts: Sequence[str],
    *,
    max_new_tokens: int,
    until: Sequence[str] = (),
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    joined: bool = False,
) -> list[str]:
    """Return the text that the model generates after each context.

    A text ends before the first occurrence of one of `until`, at an end token (the scorer's `eos_token_ids`),
    or after `max_new_tokens`. If a context leaves too little room, its start is cut.

    Args:
        scorer: scorer with a tokenizer. At most its `batch_size` texts are generated at once.
        contexts: contexts. An empty one is replaced by the tokenizer's `prefix_token_id`.
        max_new_tokens: maximum number of new tokens, below the model's number of positions.
        until: stop sequences, which are not part of the text. They may be names of special tokens.
        sampling: selection of tokens. None: the most likely token.
        seeds: one seed per context, so that each text is independent of the batch. None: all texts use the
            seed of `sampling`, batch by batch.
        joined: True: decode a text together with the end of its context. Some tokenizers, such as that of
            Llama 2, drop a leading space, which belongs to the text. False: like the harness.

    Raises:
        ValueError: `max_new_tokens` is too large, a token id is outside the vocabulary, the numbers of seeds
            and contexts differ, or the model returns NaN.
    """
    check_sizes(max_new_tokens=max_new_tokens)
    if seeds is not None:
        require(len(seeds) == len(contexts), "seeds", len(seeds), f"one for each of {len(contexts)} contexts")
    limit = scorer.model.max_length
    if limit is not None:
        require(
            max_new_tokens < limit, "max_new_tokens", max_new_tokens, f"below {limit}, as the model reads"
        )
    sampling = sampling or Sampling()
    prompts = []
    for context in contexts:
        ids = scorer.texts.encode(context) or [scorer.texts.needed_prefix()]
        ids = ids if limit is None else ids[-(limit - max_new_tokens) :]
        allowed = f"below {scorer.model.vocab_size}, the vocabulary of {scorer.model.spec.name}"
        require(max(ids) < scorer.model.vocab_size, "token id", max(ids), allowed)
        prompts.append(ids)
    # Contexts of similar length together. The shorter ones of a batch start to generate while the longer ones
    # are read.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    written: dict[int, str] = {}
    with scorer.model.reading(), seeded(sampling.seed, scorer.model.device):
        for i in range(0, len(order), scorer.batch_size):
            some = order[i : i + scorer.batch_size]
            writings = [_Writing.after(prompts[k], scorer.texts if joined else None) for k in some]
            generators = None if seeds is None else [torch.Generator().manual_seed(seeds[k]) for k in some]
            texts = _written(scorer, writings, max_new_tokens, until, sampling, generators)
            written.update(zip(some, texts, strict=True))
    return [written[i] for i in range(len(prompts))]


@dataclass
class _Writing:
    """Continuation of one context.

    Attributes:
        prompt: tokens of the context.
        new: new tokens so far, without the end token.
        text: finished text. None while it is unfinished.
        tail: end of the prompt, which is decoded with the new tokens. Empty: they are decoded without it.
        shown: text of `tail`.
    """

    prompt: list[int]
    new: list[int] = field(default_factory=list)
    text: str | None = None
    tail: list[int] = field(default_factory=list)
    shown: str = ""

    @classmethod
    def after(cls, prompt: list[int], texts: TextTokenizer | None) -> _Writing:
        """Return an empty continuation of a prompt.

        If `texts` is a tokenizer, the new tokens are decoded together with the end of the prompt.
        """
        if texts is None:
            return cls(prompt)
        tail = prompt[-_TAIL:]
        return cls(prompt, tail=tail, shown=texts.decode(tail))

    def decoded(self, texts: TextTokenizer) -> str:
        """Return the text of all new tokens."""
        if not self.tail:
            return texts.decode(self.new)
        whole = texts.decode([*self.tail, *self.new])
        pairs = enumerate(zip(self.shown, whole, strict=False))
        parted = (i for i, (one, other) in pairs if one != other)
        return whole[next(parted, min(len(self.shown), len(whole))) :]

    def take(
        self,
        token: int,
        texts: TextTokenizer,
        max_new_tokens: int,
        until: Sequence[str],
        ends: Collection[int],
    ) -> None:
        """Add a token. It may end the text."""
        if token in ends:
            self.text = self.decoded(texts)
            return
        self.new.append(token)
        whole = self.decoded(texts)
        kept = _cut(whole, until)
        if kept != whole or len(self.new) == max_new_tokens:
            self.text = kept


def _written(
    scorer: Scorer,
    writings: Sequence[_Writing],
    max_new_tokens: int,
    until: Sequence[str],
    sampling: Sampling,
    generators: Sequence[torch.Generator] | None,
) -> list[str]:
    """Return the continuations of one batch.

    All rows are read up to the length of the shortest prompt, and continued token by token.
    """
    lengths = [len(writing.prompt) for writing in writings]
    read = _reader(scorer.model, len(writings), max(lengths) + max_new_tokens)
    # The output layer may be wider than the vocabulary, to have a round size.
    width = min(scorer.model.vocab_size, scorer.texts.vocab_size or scorer.model.vocab_size)
    named = {token for text in until if (token := scorer.texts.special_token(text)) is not None}
    ends = scorer.eos_token_ids | named
    position = min(lengths)
    ids = [writing.prompt[:position] for writing in writings]
    while True:
        logits_BV = read(torch.tensor(ids, device=scorer.model.device))
        writes = [position >= length for length in lengths]
        unfinished = [write and writing.text is None for write, writing in zip(writes, writings, strict=True)]
        broken = bool(logits_BV[unfinished].isnan().any())
        require(not broken, f"logits of {scorer.model.spec.name}", "NaN", "numbers")
        tokens = sampling(logits_BV[:, :width], _uniform(generators, writes, logits_BV.device)).tolist()
        for writing, token in compress(zip(writings, tokens, strict=True), unfinished):
            writing.take(token, scorer.texts, max_new_tokens, until, ends)
        finished = [writing.text for writing in writings if writing.text is not None]
        if len(finished) == len(writings):
            return finished
        # A row with a longer prompt continues with its prompt.
        ids = [
            writing.prompt[position : position + 1] or [token]
            for writing, token in zip(writings, tokens, strict=True)
        ]
        position += 1


def _uniform(
    generators: Sequence[torch.Generator] | None, writes: Sequence[bool], device: torch.device
) -> Tensor | None:
    """Return a random number per row, from its own generator. A row that is still reading draws no number."""
    if generators is None:
        return None
    drawn = [
        torch.rand((), dtype=torch.float64, generator=each).item() if writing else 0.0
        for each, writing in zip(generators, writes, strict=True)
    ]
    return torch.tensor(drawn, dtype=torch.float64, device=device)


def _reader(model: LanguageModel, batch_size: int, capacity: int) -> Callable[[Tensor], Tensor]:
    """Return a function that appends tokens (B, T) to the rows and returns the next logits (B, V)."""
    so_far = torch.empty(batch_size, 0, dtype=torch.int64, device=model.device)
    if model.keeps_cache:
        cache = model.empty_cache(batch_size, capacity)

        def follow(ids_BT: Tensor) -> Tensor:
            nonlocal cache, so_far
            before, so_far = so_far.shape[1], torch.cat((so_far, ids_BT), dim=1)
            if before and model.span(before) != model.span(so_far.shape[1]):
                # From here on, all positions have other rotary angles, also the positions in the cache.
                cache, ids_BT = model.empty_cache(batch_size, capacity), so_far
            logits_BTV, cache = model.follow(ids_BT, cache, first=ids_BT.shape[1] - 1)
            return logits_BTV[:, -1]

        return follow

    def again(ids_BT: Tensor) -> Tensor:
        nonlocal so_far
        so_far = torch.cat((so_far, ids_BT), dim=1)
        return model.logits(so_far, so_far.shape[1] - 1)[:, -1]

    return again


def _cut(text: str, until: Sequence[str]) -> str:
    """Return the text before the first occurrence of one of `until`."""
    for end in until:
        if end:
            text = text.split(end)[0]
    return text
