"""Request: a context and what follows it, as text and as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stackwise.quality.text_tokenizer import TextTokenizer
from stackwise.support.arguments import require

__all__ = ["Request", "Score", "TokenRequest", "encode_request"]


class Request(NamedTuple):
    """How likely is it that `continuation` follows `context`?

    Attributes:
        context: may be empty.
        continuation: at least one token. A space between the two belongs to it.
    """

    context: str
    continuation: str


@dataclass(frozen=True)
class TokenRequest:
    """A request in tokens.

    Attributes:
        context: at least one id.
        continuation: at least one id.
        cut: how many tokens of the context were left out, at its beginning.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    cut: int = 0

    def __post_init__(self) -> None:
        require(len(self.context) > 0, "context", self.context, "at least one token")
        require(len(self.continuation) > 0, "continuation", self.continuation, "at least one token")

    def fitted(self, max_length: int | None) -> TokenRequest:
        """The same with no more context than a model of `max_length` positions reads; None: all of it.

        The last token is predicted and never read, so that there is room for one more than the model takes.

        Raises:
            ValueError: the continuation alone is longer than that.
        """
        if max_length is None:
            return self
        n = len(self.continuation)
        require(n <= max_length, "continuation", f"{n} tokens", f"at most {max_length}, as the model takes")
        cut = len(self.context) + n - (max_length + 1)
        return TokenRequest(self.context[cut:], self.continuation, self.cut + cut) if cut > 0 else self


@dataclass(frozen=True)
class Score:
    """What a model says of a request.

    Attributes:
        log_probability: natural logarithm, of the whole continuation.
        is_greedy: whether each of its tokens is the most likely one.
        tokens: how many it has.
        cut: how many tokens of the context were left out, at its beginning, for want of room.
    """

    log_probability: float
    is_greedy: bool
    tokens: int
    cut: int = 0


def encode_request(
    tokenizer: TextTokenizer, context: str, continuation: str, known: dict[str, list[int]] | None = None
) -> TokenRequest:
    """The tokens of a context and of its continuation.

    Both are encoded together and parted behind the tokens of the context alone. White space at the end of the
    context goes to the continuation first, since most tokenizers join it with the word that follows. Where
    there is no context, the tokenizer's `prefix_token_id` stands for it; where the continuation begins with
    that token itself, the token is the context.

    Args:
        tokenizer: of the model.
        context: may be empty.
        continuation: what follows it.
        known: the ids of contexts so far, of which those of this one are made a part; None: none are kept.

    Raises:
        ValueError: nothing is left to be predicted, or a context is wanted and there is no prefix token.
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
