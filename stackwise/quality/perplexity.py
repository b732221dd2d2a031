"""Perplexity: how well a model predicts whole texts, whatever their length."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stackwise.quality.request import TokenRequest
from stackwise.quality.scoring import Scorer
from stackwise.support.arguments import check_sizes, require

__all__ = ["PerplexityResult", "TextScore", "rolling_windows", "score_texts"]


@dataclass(frozen=True)
class TextScore:
    """What a model says of a whole text.

    Attributes:
        log_probability: natural logarithm, of all tokens.
        tokens: how many the tokenizer made of it, without what it puts before a text.
        characters, bytes: of the text, bytes in UTF-8.
        words: parts between white space, counted as the harness does.
    """

    log_probability: float
    tokens: int
    characters: int
    bytes: int
    words: int


@dataclass(frozen=True)
class PerplexityResult:
    """What a model says of several texts. Those by byte and word compare models of different tokenizers.

    Attributes:
        texts: one for each.
    """

    texts: tuple[TextScore, ...]

    metric = "byte_perplexity"
    cut = 0  # windows leave nothing out

    @property
    def log_probability(self) -> float:
        """Natural logarithm, of all texts."""
        return math.fsum(text.log_probability for text in self.texts)

    @property
    def token_perplexity(self) -> float:
        """e to the mean loss of a token."""
        return self._per(sum(text.tokens for text in self.texts))

    @property
    def byte_perplexity(self) -> float:
        """e to the mean loss of a byte of UTF-8."""
        return self._per(sum(text.bytes for text in self.texts))

    @property
    def word_perplexity(self) -> float:
        """e to the mean loss of a word; infinite where that is too large for a number."""
        return self._per(sum(text.words for text in self.texts))

    @property
    def bits_per_byte(self) -> float:
        """The mean loss of a byte, in bits."""
        return -self.log_probability / sum(text.bytes for text in self.texts) / math.log(2)

    @property
    def figure(self) -> float:
        """The one that is reported."""
        return self.byte_perplexity

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "metric": self.metric,
            "texts": len(self.texts),
            "tokens": sum(text.tokens for text in self.texts),
            "token_perplexity": self.token_perplexity,
            "byte_perplexity": self.byte_perplexity,
            "word_perplexity": self.word_perplexity,
            "bits_per_byte": self.bits_per_byte,
        }

    def _per(self, count: int) -> float:
        try:
            return math.exp(-self.log_probability / count)
        except OverflowError:
            return math.inf


def rolling_windows(
    ids: Sequence[int], before: Sequence[int], max_length: int, context: int = 1
) -> Iterator[TokenRequest]:
    """A text in parts that a model can read, so that each token is predicted exactly once.

    The first part follows `before` and is as long as the model reads; each later one has `context` tokens
    before what it predicts, the last one as many as there is room for. With 1, parts hardly overlap, as in
    the harness; with `max_length`, each token but the first ones has all the context that there is room for,
    at the price of a pass for each.

    Args:
        ids: of the text.
        before: what stands before it, at least one id.
        max_length: how many positions the model reads, at least those of `before`.
        context: 1 to `max_length`.

    Raises:
        ValueError: another `context`, or no room for `before`.
    """
    check_sizes(max_length=max_length, context=context)
    require(context <= max_length, "context", context, f"1 to {max_length}, as the model reads")
    n = len(before)
    require(n <= max_length, "max_length", max_length, f"at least {n}, the tokens before a text")
    whole = (*before, *ids)
    end = min(max_length - n + 1, len(ids))
    if end:
        yield TokenRequest(whole[:n], whole[n : end + n])
    step = max_length - context + 1
    while end < len(ids):
        start, end = end, min(end + step, len(ids))
        # `whole` is n ahead of `ids`. The last token is predicted and never read.
        first = max(0, end + n - 1 - max_length)
        yield TokenRequest(whole[first : start + n], whole[start + n : end + n])


def score_texts(
    scorer: Scorer, texts: Sequence[str], *, context: int = 1, max_length: int | None = None
) -> PerplexityResult:
    """Score each text as a whole, from what stands before a text that follows nothing.

    That is what the tokenizer puts before texts, else its prefix token (`TextTokenizer.encode_whole`). It is
    read and never scored, whether the text itself begins with it or not: no model is trained to predict it.

    Args:
        scorer: with a tokenizer that puts something before texts, or has a prefix token.
        texts: none of them empty.
        context: see `rolling_windows`.
        max_length: how many tokens to read at once; None: as many as the model takes.

    Raises:
        ValueError: no text, an empty one, nothing to stand before it, no length known, or more than the model
            takes.
    """
    require(len(texts) > 0, "texts", len(texts), "at least one")
    limit = scorer.model.max_length if max_length is None else max_length
    if limit is None:
        raise ValueError(
            "max_length: got None, and the model names no longest sequence; allowed: how many tokens to read "
            "at once"
        )
    if scorer.model.max_length is not None:
        require(limit <= scorer.model.max_length, "max_length", limit, f"at most {scorer.model.max_length}")
    windows: list[TokenRequest] = []
    parts: list[slice] = []
    encoded = [scorer.texts.encode_whole(text) for text in texts]
    for i, (before, ids) in enumerate(encoded):
        require(len(ids) > 0, f"texts[{i}]", texts[i], "at least one token")
        start = len(windows)
        windows += rolling_windows(ids, before, limit, context)
        parts.append(slice(start, len(windows)))
    scores = scorer.score_tokens(windows)
    return PerplexityResult(
        tuple(
            TextScore(
                math.fsum(score.log_probability for score in scores[part]),
                len(ids),
                len(text),
                len(text.encode()),
                len(re.split(r"\s+", text)),
            )
            for text, (_, ids), part in zip(texts, encoded, parts, strict=True)
        )
    )
