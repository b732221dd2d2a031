"""Perplexity: loss of a model on texts of any length."""

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
    """Score of a text.

    Attributes:
        log_probability: natural logarithm of the probability of all tokens.
        tokens: number of tokens, without the tokens that the tokenizer prepends.
        characters, bytes: number of characters, and of bytes in UTF-8.
        words: number of parts between white space, counted like in the harness.
    """

    log_probability: float
    tokens: int
    characters: int
    bytes: int
    words: int


@dataclass(frozen=True)
class PerplexityResult:
    """Scores of several texts. To compare models with different tokenizers, use metrics by byte or word.

    Attributes:
        texts: one score per text.
    """

    texts: tuple[TextScore, ...]

    metric = "byte_perplexity"
    cut = 0  # windows cut no tokens

    @property
    def log_probability(self) -> float:
        """Natural logarithm of the probability of all texts."""
        return math.fsum(text.log_probability for text in self.texts)

    @property
    def token_perplexity(self) -> float:
        """Exponential of the mean loss per token."""
        return self._per(sum(text.tokens for text in self.texts))

    @property
    def byte_perplexity(self) -> float:
        """Exponential of the mean loss per byte of UTF-8."""
        return self._per(sum(text.bytes for text in self.texts))

    @property
    def word_perplexity(self) -> float:
        """Exponential of the mean loss per word. Infinite if it exceeds the range of a float."""
        return self._per(sum(text.words for text in self.texts))

    @property
    def bits_per_byte(self) -> float:
        """Mean loss per byte, in bits."""
        return -self.log_probability / sum(text.bytes for text in self.texts) / math.log(2)

    @property
    def figure(self) -> float:
        """Reported perplexity."""
        return self.byte_perplexity

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
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
    """Yield the windows of a text that a model can read. Each token is predicted exactly once.

    The first window follows `before`, and has the maximum length. Each later window has `context` tokens
    before its predicted ones, and the last window as many as fit. With 1, windows hardly overlap, as in the
    harness. With `max_length`, each token except the first ones has the maximum context, but needs a separate
    pass.

    Args:
        ids: ids of the text.
        before: ids before the text, at least one.
        max_length: maximum number of positions, at least the length of `before`.
        context: number of context tokens, 1 to `max_length`.

    Raises:
        ValueError: `context` is out of range, or `before` is too long.
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
        # An index in `whole` is n higher than in `ids`. The last token is predicted, but never read.
        first = max(0, end + n - 1 - max_length)
        yield TokenRequest(whole[first : start + n], whole[start + n : end + n])


def score_texts(
    scorer: Scorer, texts: Sequence[str], *, context: int = 1, max_length: int | None = None
) -> PerplexityResult:
    """Score each text from its beginning.

    The first window follows the tokens that the tokenizer prepends or, if there are none, the prefix token
    (`TextTokenizer.encode_whole`). They are read but not scored, even if the text itself begins with them,
    because no model is trained to predict them.

    Args:
        scorer: scorer whose tokenizer prepends tokens or has a prefix token.
        texts: non-empty texts.
        context: see `rolling_windows`.
        max_length: maximum length of a window. None: the limit of the model.

    Raises:
        ValueError: no texts, an empty text, no prefix token, an unknown maximum length, or one above the
            limit of the model.
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
