"""Tokenizers: text to ids and back, by bytes or as a tokenizer.json says."""

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
    """What the trainer asks of a tokenizer.

    Attributes:
        name: as `create_tokenizer` takes it.
        vocab_size: ids are below it.
        bos: the id of the token that begins a text; None: there is none.
        eos: the id of the token that ends a text; None: there is none.
        mask: the id of the token that stands for no other; None: there is none.
    """

    name: str
    vocab_size: int
    bos: int | None
    eos: int | None
    mask: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; nothing is put before or behind it."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""


class ByteTokenizer:
    """The bytes of UTF-8: ids 0 to 255, and special tokens above.

    Args:
        specials: which of `bos`, `eos`, `mask` there are, with ids from 256 in this order.

    Raises:
        ValueError: a special token that is none of these, or twice.
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
        """The bytes of `text`.

        Raises:
            ValueError: half a surrogate pair, which UTF-8 cannot say.
        """
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; what is no UTF-8 becomes U+FFFD, and special tokens nothing.

        Raises:
            ValueError: an id beyond the vocabulary.
        """
        ids = list(ids)
        for i in ids:
            require(0 <= i < self.vocab_size, "ids", i, f"0 to {self.vocab_size - 1}")
        return bytes(i for i in ids if i < _BYTES).decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers.

    Of the file's `truncation` and `padding`, which are for the rows of a batch, neither is done.

    Which token begins, ends or masks a text is in the `tokenizer_config.json` beside it, if there is one; a
    `tokenizer.json` itself does not say.

    Args:
        path: the file, or the folder that holds it under this name.
        bos: the token that begins a text; None: as `tokenizer_config.json` says.
        eos: the token that ends one.
        mask: the token that stands for no other.

    Raises:
        ImportError: tokenizers is not installed.
        FileNotFoundError: there is no such file.
        ValueError: it is no tokenizer, or has no such token.
    """

    def __init__(
        self, path: str | Path, *, bos: str | None = None, eos: str | None = None, mask: str | None = None
    ) -> None:
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
        except Exception as error:  # tokenizers raises no class of its own
            raise ValueError(f"{file}: no tokenizer: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = max(self._inner.get_vocab().values(), default=-1) + 1
        said = _special_tokens(file.with_name("tokenizer_config.json"))
        given = {"bos": bos, "eos": eos, "mask": mask}
        self.bos, self.eos, self.mask = (self._id(key, given[key] or said[key]) for key in _SPECIALS)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`. Special tokens in the text count as such.

        Args:
            text: may be empty.
            add_special_tokens: put around it what the file says; False: nothing.
        """
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, without special tokens unless asked for."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _id(self, key: str, token: str | None) -> int | None:
        if token is None:
            return None
        found: int | None = self._inner.token_to_id(token)
        require(found is not None, f"{self.name}: {key}", token, "a token of the vocabulary, or none")
        return found


def create_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """`byte`, or the tokenizer of a `tokenizer.json` or of the folder that holds it.

    Raises:
        ImportError, FileNotFoundError, ValueError: as `HuggingFaceTokenizer`.
    """
    return ByteTokenizer() if name_or_path == "byte" else HuggingFaceTokenizer(name_or_path)


def check_vocabulary(vocab_size: int, needed: int, of: str) -> None:
    """Refuse a model that has no embedding for some of the ids.

    Args:
        vocab_size: of the model.
        needed: of the tokens.
        of: what these are.

    Raises:
        ValueError: naming both.
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
