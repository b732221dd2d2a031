"""Request: context and continuation to score, as text and as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stackwise.quality.text_tokenizer import TextTokenizer
from stackwise.support.arguments import require

__all__ = ["Request", "Score", "TokenRequest", "encode_request"]


class Request(NamedTuple):
    """Request for the probability of `continuation` after `context`.

    Attributes:
        context: text before the continuation. May be empty.
        continuation: text of at least one token. It includes a space between the two texts.
    """

    context: str
    continuation: str


@dataclass(frozen=True)
class TokenRequest:
    """Request in tokens.

    Attributes:
        context: at least one id.
        continuation: at least one id.
        cut: number of tokens that were cut from the start of the context.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    cut: int = 0

    def __post_init__(self) -> None:
        require(len(self.context) > 0, "context", self.context, "at least one token")
        require(len(self.continuation) > 0, "continuation", self.continuation, "at least one token")

    def fitted(self, max_length: int | None) -> TokenRequest:
        """Return the request with its context cut to fit a model of `max_length` positions. None: no limit.

        The last token is predicted, but not read. The request may therefore have one token more than
        `max_length`.

        Raises:
            ValueError: the continuation itself is longer than the limit.
        """
        if max_length is None:
            return self
        n = len(self.continuation)
        require(n <= max_length, "continuation", f"{n} tokens", f"at most {max_length}, as the model takes")
        cut = len(self.context) + n - (max_length + 1)
        return TokenRequest(self.context[cut:], self.continuation, self.cut + cut) if cut > 0 else self


@dataclass(frozen=True)
class Score:
    """Score of a request.

    Attributes:
        log_probability: natural logarithm of the probability of the continuation.
        is_greedy: True if each token of the continuation is the most likely one.
        tokens: number of tokens of the continuation.
        cut: number of tokens that were cut from the start of the context, because the sequence was too long.
    """

    log_probability: float
    is_greedy: bool
    tokens: int
    cut: int = 0


def encode_request(
    tokenizer: TextTokenizer, context: str, continuation: str, known: dict[str, list[int]] | None = None
) -> TokenRequest:
    """Return the tokens of a context and of its continuation.

    Both are encoded together, and split after the tokens of the context. White space at the end of the
    context is moved to the continuation first, because most tokenizers join it with the next word. An empty
    context is replaced by the tokenizer's `prefix_token_id`. If the continuation itself begins with this
    token, the token is used as the context.

    Args:
        tokenizer: tokenizer of the model.
        context: text before the continuation. May be empty.
        continuation: text to score.
        known: cache of the ids of contexts, which is updated. None: no cache.

    Raises:
        ValueError: the continuation has no tokens, or a prefix token is needed and the tokenizer has none.
    """
    kept = context.rstrip()
    continuation, context = context[len(kept) :] + continuation, kept
    if context:
        known = {} if known is None else known
        if context not in known:
            known[context] = tokenizer.encode(context)
        whole, before = tokenizer.encode(context + continuation), known[context]
        context_ids, ids = tuple(before), tuple(whole[len(before) :])
    else:
        ids, prefix = tuple(tokenizer.encode(continuation, begins=False)), tokenizer.needed_prefix()
        context_ids, ids = ((prefix,), ids) if ids[:1] != (prefix,) else (ids[:1], ids[1:])
    shown: Sequence[str] = (context[-40:], continuation)
    require(len(ids) > 0, "request", shown, "a continuation of at least one token of its own")
    return TokenRequest(context_ids, ids)
