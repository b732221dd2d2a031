"""TextTokenizer: uniform interface to any tokenizer, for scoring and generation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from stackwise.support.arguments import check_sizes

__all__ = ["TextTokenizer"]


class TextTokenizer:
    """Conversion of text to ids and back.

    If the tokenizer prepends tokens to a text, as Llama's does, they are prepended to the start of each
    sequence, unless the text itself begins with this token. Tokens that it appends to a text are omitted,
    because the text continues. Truncation and padding of a tokenizer of tokenizers are ignored.

    Args:
        tokenizer: a tokenizer of transformers or tokenizers, or any object with `encode(text) -> ids` and
            `decode(ids) -> text`.
        prefix_token_id: token that replaces an empty context. None: the begin token of the tokenizer,
            otherwise its end token (`bos_token_id` and `eos_token_id`, or `bos` and `eos`).
        eos_token_id: end token. None: the end token of the tokenizer.

    Attributes:
        name: name of the tokenizer.
        prefix_token_id, eos_token_id: ids of these tokens. None: no such token.
        vocab_size: size of the vocabulary. Ids are below it. None: unknown.

    Raises:
        TypeError: the tokenizer cannot encode or decode.
    """

    def __init__(
        self, tokenizer: Any, *, prefix_token_id: int | None = None, eos_token_id: int | None = None
    ) -> None:
        if isinstance(tokenizer, TextTokenizer):
            known: TextTokenizer = tokenizer
            prefix_token_id = known._given_prefix if prefix_token_id is None else prefix_token_id
            eos_token_id = known.eos_token_id if eos_token_id is None else eos_token_id
            tokenizer = known.inner
        for method in ("encode", "decode"):
            if not callable(getattr(tokenizer, method, None)):
                raise TypeError(
                    f"tokenizer: got {type(tokenizer).__name__}, which has no {method}(); wanted encode "
                    "and decode"
                )
        for key, given in (("prefix_token_id", prefix_token_id), ("eos_token_id", eos_token_id)):
            if given is not None:
                check_sizes(0, **{key: given})
        self.inner: Any = _of_whole_texts(tokenizer)
        self.name = str(getattr(tokenizer, "name_or_path", None) or getattr(tokenizer, "name", "tokenizer"))
        eos = _special(tokenizer, "eos") if eos_token_id is None else eos_token_id
        bos = _special(tokenizer, "bos") if prefix_token_id is None else prefix_token_id
        self.eos_token_id: int | None = eos
        self.prefix_token_id: int | None = eos if bos is None else bos
        self._given_prefix: int | None = prefix_token_id
        self.vocab_size = _vocab_size(tokenizer)
        # Parameters of transformers, tokenizers and tokenizer.json. Without them, no special tokens are
        # added.
        self._adds = "add_special_tokens" in _parameters(tokenizer.encode)
        self._skips = "skip_special_tokens" in _parameters(tokenizer.decode)
        self._before = self._put_before()

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Return the ids of `text`.

        Args:
            text: text to encode. May be empty.
            begins: True if the text starts a sequence, so that the tokens of the tokenizer are prepended.
        """
        ids = self._encode(text)
        if not begins or not self._before or self._begins_itself(text):
            return ids
        return [*self._before, *ids]

    def encode_whole(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids before a text without a context, and the ids of the text without them.

        The first ids are the `prefix_token_id` argument if given, otherwise all tokens that the tokenizer
        prepends, otherwise its begin or end token. If the text itself begins with them, they are not
        repeated.

        Raises:
            ValueError: there are no such tokens.
        """
        ids, before = self._encode(text), self._before
        if self._given_prefix is not None or not before or self._begins_itself(text):
            before = [self.needed_prefix()]
        n = len(before)
        return before, ids[n:] if ids[:n] == before else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        more = {"skip_special_tokens": True} if self._skips else {}
        text: str = self.inner.decode(list(ids), **more)
        return text

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token with this name, which `decode` omits.

        Return None if there is none.
        """
        ids = self._encode(text)
        if len(ids) != 1 or not self._skips or self.decode(ids):
            return None
        shown: str = self.inner.decode(ids, skip_special_tokens=False)
        return ids[0] if shown and shown == text else None

    def needed_prefix(self) -> int:
        """Return `prefix_token_id`.

        Raises:
            ValueError: it is None.
        """
        if self.prefix_token_id is None:
            raise ValueError(
                "prefix_token_id: got None, and the tokenizer names no token that begins or ends a text; "
                "allowed: an id, to stand before a text that follows nothing"
            )
        return self.prefix_token_id

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        more = {"add_special_tokens": special} if self._adds else {}
        found = self.inner.encode(text, **more)
        return [int(each) for each in getattr(found, "ids", found)]

    def _put_before(self) -> list[int]:
        """Return the tokens that the tokenizer prepends to every text."""
        if not self._adds:
            return []
        whole, plain = self._encode("a", special=True), self._encode("a")
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
        return []

    def _begins_itself(self, text: str) -> bool:
        if self.prefix_token_id is None or not self._skips:
            return False
        shown: str = self.inner.decode([self.prefix_token_id], skip_special_tokens=False)
        return bool(shown) and text.startswith(shown)


def _of_whole_texts(tokenizer: Any) -> Any:
    """Return the tokenizer, or a copy without truncation and padding if it has them."""
    if not callable(getattr(tokenizer, "no_truncation", None)):
        return tokenizer
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    whole = copy.deepcopy(tokenizer)
    whole.no_truncation()
    whole.no_padding()
    return whole


def _parameters(function: Any) -> Sequence[str]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # no signature is available
        return ()


def _vocab_size(tokenizer: Any) -> int | None:
    # Ids may have gaps, so their number may be too small.
    if callable(vocabulary := getattr(tokenizer, "get_vocab", None)):
        return 1 + max(vocabulary().values(), default=-1)
    found = len(tokenizer) if hasattr(tokenizer, "__len__") else getattr(tokenizer, "vocab_size", None)
    return found if isinstance(found, int) else None


def _special(tokenizer: Any, name: str) -> int | None:
    for attribute in (f"{name}_token_id", name):
        found = getattr(tokenizer, attribute, None)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return None
