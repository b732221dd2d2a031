"""Text tokenizer: anybody's tokenizer, as scoring and generation ask it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from stackwise.support.arguments import check_sizes

__all__ = ["TextTokenizer"]


class TextTokenizer:
    """Text to ids and back.

    A tokenizer that puts tokens before a text, as Llama's does, does so for whatever begins a sequence,
    unless the text begins with that token itself. What it puts behind a text is left out: nothing ends there.
    Truncation and padding, which one of tokenizers may be set to and which are for the rows of a batch, are
    not done.

    Args:
        tokenizer: of transformers or tokenizers, or any with `encode(text) -> ids` and `decode(ids) -> text`.
        prefix_token_id: what stands before a text that follows nothing; None: the token that begins a text,
            else the one that ends one, if the tokenizer names them (`bos_token_id`, `eos_token_id`, or `bos`,
            `eos`).
        eos_token_id: what ends a text; None: as the tokenizer says.

    Attributes:
        name: of the tokenizer.
        prefix_token_id, eos_token_id: as above; None: there is none.
        vocab_size: ids are below it; None: the tokenizer does not say.

    Raises:
        TypeError: it cannot encode or decode.
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
        # Of transformers, of tokenizers, and of a tokenizer.json; those of others add nothing.
        self._adds = "add_special_tokens" in _parameters(tokenizer.encode)
        self._skips = "skip_special_tokens" in _parameters(tokenizer.decode)
        self._before = self._put_before()

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The ids of `text`.

        Args:
            text: may be empty.
            begins: whether it begins a sequence, so that what the tokenizer puts before a text comes first.
        """
        ids = self._encode(text)
        if not begins or not self._before or self._begins_itself(text):
            return ids
        return [*self._before, *ids]

    def encode_whole(self, text: str) -> tuple[list[int], list[int]]:
        """What a text that follows nothing is read after, and the ids of the text without that.

        It is the `prefix_token_id` that was given, else all that the tokenizer puts before a text, else the
        token that begins or ends one. Where the text itself begins with it, it is not there twice.

        Raises:
            ValueError: there is none of these.
        """
        ids, before = self._encode(text), self._before
        if self._given_prefix is not None or not before or self._begins_itself(text):
            before = [self.needed_prefix()]
        n = len(before)
        return before, ids[n:] if ids[:n] == before else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""
        more = {"skip_special_tokens": True} if self._skips else {}
        text: str = self.inner.decode(list(ids), **more)
        return text

    def special_token(self, text: str) -> int | None:
        """The id of the special token of that name, which `decode` leaves out; None: there is none."""
        ids = self._encode(text)
        if len(ids) != 1 or not self._skips or self.decode(ids):
            return None
        shown: str = self.inner.decode(ids, skip_special_tokens=False)
        return ids[0] if shown and shown == text else None

    def needed_prefix(self) -> int:
        """`prefix_token_id`.

        Raises:
            ValueError: there is none.
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
        """What the tokenizer puts before every text."""
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
    """The same, or a copy where it is one of tokenizers that cuts texts or fills them up."""
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
    except (TypeError, ValueError):  # none to see
        return ()


def _vocab_size(tokenizer: Any) -> int | None:
    # Ids may have gaps, so that a count of them would leave out the last ones.
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
