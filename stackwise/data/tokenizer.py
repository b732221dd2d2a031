"""Tokenizers: conversion of text to ids and back, by bytes or with a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from stackwise.support.arguments import check_choice, require
from stackwise.support.files import parse_json

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "check_vocabulary", "create_tokenizer"]

_BYTES = 256
_SPECIALS = ("bos", "eos", "mask")


class Tokenizer(Protocol):
    """Interface of a tokenizer for the trainer.

    Attributes:
        name: argument of `create_tokenizer`.
        vocab_size: size of the vocabulary. Ids are below it.
        bos: id of the begin token. None: no such token.
        eos: id of the end token. None: no such token.
        mask: id of the mask token. None: no such token.
    """

    name: str
    vocab_size: int
    bos: int | None
    eos: int | None
    mask: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without additional tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens."""


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: ids 0 to 255, and special tokens above.

    Args:
        specials: special tokens, a subset of `bos`, `eos`, `mask`. Their ids start at 256, in this order.

    Raises:
        ValueError: an unknown or repeated special token.
    """

    def __init__(self, specials: Sequence[str] = ()) -> None:
        for special in specials:
            check_choice("specials", special, _SPECIALS)
        require(len(set(specials)) == len(specials), "specials", specials, "each once")
        ids = {special: _BYTES + i for i, special in enumerate(specials)}
        self.name = "byte"
        self.vocab_size = _BYTES + len(ids)
        self.bos, self.eos, self.mask = (ids.get(special) for special in _SPECIALS)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`.

        Raises:
            ValueError: the text contains an unpaired surrogate, which has no UTF-8 encoding.
        """
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD, and special tokens are omitted.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        ids = list(ids)
        for i in ids:
            require(0 <= i < self.vocab_size, "ids", i, f"0 to {self.vocab_size - 1}")
        return bytes(i for i in ids if i < _BYTES).decode(errors="replace")


class HuggingFaceTokenizer:
    """Tokenizer from a `tokenizer.json` of Hugging Face's tokenizers.

    The file's `truncation` and `padding` are ignored, because they apply to the rows of a batch.

    The begin, end and mask tokens are read from `tokenizer_config.json` in the same folder, if it exists,
    because `tokenizer.json` does not name them.

    Args:
        path: path of the file, or of the folder that contains it.

    Raises:
        ImportError: tokenizers is not installed.
        FileNotFoundError: the file does not exist.
        ValueError: the file is not a tokenizer, or has no such token.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import Tokenizer as Inner
        except ImportError as error:
            raise ImportError(
                f"a tokenizer.json needs tokenizers: pip install 'stackwise[hf]' ({error})"
            ) from error
        self.name = str(path)
        file = Path(path)
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: missing; allowed: a tokenizer.json, or the folder that holds it"
            )
        try:
            self._inner = Inner.from_file(str(file))
        except Exception as error:  # tokenizers has no error class
            raise ValueError(f"{file}: no tokenizer: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = max(self._inner.get_vocab().values(), default=-1) + 1
        said = _special_tokens(file.with_name("tokenizer_config.json"))
        self.bos, self.eos, self.mask = (self._id(key, said[key]) for key in _SPECIALS)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`. Special tokens in the text are recognised.

        Args:
            text: text to encode. May be empty.
            add_special_tokens: True: add the tokens that the file defines for the start and end of a text.
        """
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, by default without special tokens."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _id(self, key: str, token: str | None) -> int | None:
        if token is None:
            return None
        found: int | None = self._inner.token_to_id(token)
        require(found is not None, f"{self.name}: {key}", token, "a token of the vocabulary, or none")
        return found


def create_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Return the tokenizer `byte`, or that of a `tokenizer.json` or of the folder that contains it.

    Raises:
        ImportError, FileNotFoundError, ValueError: errors of `HuggingFaceTokenizer`.
    """
    return ByteTokenizer() if name_or_path == "byte" else HuggingFaceTokenizer(name_or_path)


def check_vocabulary(vocab_size: int, needed: int, of: str) -> None:
    """Refuse a model with fewer embeddings than ids.

    Args:
        vocab_size: vocabulary size of the model.
        needed: vocabulary size of the tokens.
        of: source of the tokens, for the message.

    Raises:
        ValueError: `vocab_size` is too small. The message names both sizes.
    """
    require(vocab_size >= needed, "model.vocab_size", vocab_size, f"at least {needed}, the ids of {of}")


def _special_tokens(file: Path) -> dict[str, str | None]:
    said: dict[str, str | None] = dict.fromkeys(_SPECIALS)
    if not file.is_file():
        return said
    try:
        content = parse_json(file.read_bytes())
        for key in _SPECIALS:
            token = content.get(f"{key}_token")
            said[key] = token["content"] if isinstance(token, dict) else token
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{file}: no configuration of a tokenizer: {error}") from None
    return said
