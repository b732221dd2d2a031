"""Data: text as bytes, cut into batches in an order that the seed and the epoch decide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stackwise.config import StackWiseConfig

__all__ = ["TokenWindows", "create_data", "documentation_text"]

BYTE_VOCABULARY = 256


def documentation_text() -> str:
    """The documentation of the Python language that every CPython carries: about 450 kB of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class TokenWindows:
    """Batches of non-overlapping windows of a token sequence; each pass over it is one epoch.

    With `shuffle`, every epoch cuts the sequence at another offset and visits the windows in another
    order, both functions of (seed, epoch) alone.

    Args:
        tokens: integer (number of tokens,).
        batch_size: rows per batch; an incomplete last batch is left out.
        seq_len: what the model sees; a row has one token more, the last one's target.
        seed: of the order.
        shuffle: False gives the same order each epoch.

    Yields:
        {"input_ids": int64 (batch_size, seq_len + 1)}

    Raises:
        ValueError: too few tokens for one batch.
    """

    def __init__(
        self, tokens: Tensor, batch_size: int, seq_len: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        needed = batch_size * seq_len + 1 + (seq_len - 1 if shuffle else 0)
        if len(tokens) < needed:
            raise ValueError(
                f"tokens: got {len(tokens)}; one batch of {batch_size} rows of {seq_len} needs {needed}"
            )
        self.tokens, self.batch_size, self.seq_len = tokens, batch_size, seq_len
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0

    def __len__(self) -> int:
        usable = len(self.tokens) - 1 - (self.seq_len - 1 if self.shuffle else 0)
        return usable // self.seq_len // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one of `epoch`. Without it, each pass is the next epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        n_windows = len(self) * self.batch_size
        order, offset = torch.arange(n_windows), 0
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            offset = int(torch.randint(self.seq_len, (1,), generator=generator))
            order = torch.randperm(n_windows, generator=generator)
        row = torch.arange(self.seq_len + 1)
        for starts in (offset + order * self.seq_len).view(-1, self.batch_size):
            yield {"input_ids": self.tokens[starts[:, None] + row].long()}


def create_data(config: StackWiseConfig) -> tuple[TokenWindows, TokenWindows | None]:
    """Training and validation batches of the configured text; the validation part is its end.

    Returns:
        (training, validation); validation is None where `data.validation_fraction` is 0.

    Raises:
        ValueError: a vocabulary smaller than a byte, or too little text.
        OSError: the file cannot be read.
    """
    if config.model.vocab_size < BYTE_VOCABULARY:
        raise ValueError(
            f"model.vocab_size: got {config.model.vocab_size}; bytes need at least {BYTE_VOCABULARY}"
        )
    path = config.data.dataset_path
    raw = documentation_text().encode() if path is None else Path(path).read_bytes()
    if not raw:
        raise ValueError(f"data.dataset_path: {path} is empty")
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    n_validation = int(len(tokens) * config.data.validation_fraction)
    training = TokenWindows(
        tokens[: len(tokens) - n_validation],
        config.training.batch_size,
        config.training.seq_len,
        seed=config.training.seed,
        shuffle=config.data.shuffle,
    )
    if n_validation == 0:
        return training, None
    held_out = tokens[len(tokens) - n_validation :]
    try:
        validation = TokenWindows(
            held_out, config.training.batch_size, config.training.seq_len, shuffle=False
        )
    except ValueError as error:
        raise ValueError(
            f"data.validation_fraction: got {config.data.validation_fraction}, which is {n_validation} of "
            f"{len(tokens)} tokens; {error}, or 0 for no validation"
        ) from None
    return training, validation
