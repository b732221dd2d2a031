"""Continuation: texts that a model writes after others, until a sequence that ends them.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stackwise.quality.language_model import LanguageModel
from stackwise.quality.scoring import Scorer
from stackwise.quality.text_tokenizer import TextTokenizer
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.random_state import seeded

__all__ = ["Sampling", "continue_texts"]

_TAIL = 16  # tokens of a context, which are text enough to see what a tokenizer does at a beginning


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0: the most likely one; otherwise logits are divided by it and drawn from.
        top_k: draw from the k most likely only; None: from all.
        top_p: draw from the most likely that make up p only.
        seed: of the draws.
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
        """Tokens, int64 (B,).

        Args:
            logits_BV: floating.
            uniform_B: float64, 0 to below 1: a number for each row by which its token is drawn; None: the
                draws are of torch's own generator.
        """
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        # Differences: what is divided by a tiny temperature is then 0 or -inf, and never inf.
        logits_BV = logits_BV.float()
        logits_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV / max(self.temperature, torch.finfo(torch.float32).tiny)
        if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(self.top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
        if self.top_p < 1:
            sorted_BV, order_BV = logits_BV.sort(descending=True)
            p_BV = sorted_BV.softmax(-1)
            outside_BV = p_BV.cumsum(-1) - p_BV >= self.top_p  # the one that crosses p is inside
            logits_BV = logits_BV.masked_fill(
                torch.zeros_like(outside_BV).scatter(-1, order_BV, outside_BV), -torch.inf
            )
        if uniform_B is None:
            return torch.multinomial(logits_BV.softmax(-1), 1)[:, 0]
        sums_BV = logits_BV.double().softmax(-1).cumsum(-1)
        # The first token whose sum is above the number: one that cannot be drawn adds nothing.
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
    """What the model writes after each context.

    A text ends before the first of `until` that it comes to, at a token that ends a text (the scorer's
    `eos_token_ids`), or after `max_new_tokens`. A context for which there is not that much room is cut at its
    beginning.

    Args:
        scorer: a model with a tokenizer; at most its `batch_size` texts are written at once.
        contexts: one with no text follows the tokenizer's `prefix_token_id`.
        max_new_tokens: fewer than the model has positions.
        until: texts that end a continuation and are no part of it, special tokens by their names as well.
        sampling: None: the most likely token each time.
        seeds: of the draws of each context, so that a text depends on no other one; None: all are drawn with
            the seed of `sampling`, batch by batch.
        joined: decode a text together with the end of its context. A tokenizer such as that of Llama 2 leaves
            out a space at the beginning of what it decodes, which belongs to the text; False: as the harness.

    Raises:
        ValueError: no room for so many new tokens, an id that the model has no embedding for, or another
            number of seeds than of contexts; or a model whose logits are no numbers.
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
    # Of like length together: the shorter ones of a batch begin to write while the longer ones are read.
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
    """One continuation.

    Attributes:
        prompt: what it follows.
        new: tokens so far, without the one that ends it.
        text: None as long as it goes on.
        tail: the end of the prompt, with which it is decoded; none where it is decoded by itself.
        shown: the text of `tail`.
    """

    prompt: list[int]
    new: list[int] = field(default_factory=list)
    text: str | None = None
    tail: list[int] = field(default_factory=list)
    shown: str = ""

    @classmethod
    def after(cls, prompt: list[int], texts: TextTokenizer | None) -> _Writing:
        """Decoded together with the end of the prompt by `texts`; None: by itself."""
        if texts is None:
            return cls(prompt)
        tail = prompt[-_TAIL:]
        return cls(prompt, tail=tail, shown=texts.decode(tail))

    def decoded(self, texts: TextTokenizer) -> str:
        """The text of all new tokens."""
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
        """One more token, which may end it."""
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
    """Continuations of one batch: all rows are read as far as the shortest, and go on token by token."""
    lengths = [len(writing.prompt) for writing in writings]
    read = _reader(scorer.model, len(writings), max(lengths) + max_new_tokens)
    # A head may be wider than the vocabulary, to be of a round size.
    width = min(scorer.model.vocab_size, scorer.texts.vocab_size or scorer.model.vocab_size)
    named = (scorer.texts.special_token(text) for text in until)
    ends = scorer.eos_token_ids | {token for token in named if token is not None}
    position = min(lengths)
    ids = [writing.prompt[:position] for writing in writings]
    while True:
        logits_BV = read(torch.tensor(ids, device=scorer.model.device))
        writes = [position >= length for length in lengths]
        broken = logits_BV.isnan().any(-1).tolist()
        for row, writing in enumerate(writings):
            seen = broken[row] and writes[row] and writing.text is None
            require(not seen, f"logits of {scorer.model.spec.name}", "NaN", "numbers")
        tokens = sampling(logits_BV[:, :width], _uniform(generators, writes, logits_BV.device)).tolist()
        for writing, token in zip(writings, tokens, strict=True):
            if position >= len(writing.prompt) and writing.text is None:
                writing.take(token, scorer.texts, max_new_tokens, until, ends)
        if all(writing.text is not None for writing in writings):
            return [writing.text or "" for writing in writings]
        # A row that is longer goes on with its own text.
        ids = [
            [writing.prompt[position] if position < len(writing.prompt) else token]
            for writing, token in zip(writings, tokens, strict=True)
        ]
        position += 1


def _uniform(
    generators: Sequence[torch.Generator] | None, writes: Sequence[bool], device: torch.device
) -> Tensor | None:
    """A number for each row, of its own generator; a row that does not write yet takes none from it."""
    if generators is None:
        return None
    drawn = [
        torch.rand((), dtype=torch.float64, generator=each).item() if writing else 0.0
        for each, writing in zip(generators, writes, strict=True)
    ]
    return torch.tensor(drawn, dtype=torch.float64, device=device)


def _reader(model: LanguageModel, batch_size: int, capacity: int) -> Callable[[Tensor], Tensor]:
    """What takes more tokens (B, T) of each row, and gives the logits (B, V) that follow them."""
    so_far = torch.empty(batch_size, 0, dtype=torch.int64, device=model.device)
    if model.keeps_cache:
        cache = model.empty_cache(batch_size, capacity)

        def follow(ids_BT: Tensor) -> Tensor:
            nonlocal cache, so_far
            before, so_far = so_far.shape[1], torch.cat((so_far, ids_BT), dim=1)
            if before and model.span(before) != model.span(so_far.shape[1]):
                # All positions have other angles from here on, those in the cache too.
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
    """The text before whatever of `until` comes first."""
    for end in until:
        if end:
            text = text.split(end)[0]
    return text
