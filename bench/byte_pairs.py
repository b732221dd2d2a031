"""Byte pairs: a tokenizer made of the documentation that every CPython carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stackwise.data.text import documentation_pages

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["byte_pairs"]


def byte_pairs(vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Bytes, joined in the pairs that are most frequent, until there are `vocab_size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documentation_pages(), trainer)
    return tokenizer
