"""TokenWindows: rows of a token sequence, in an order that depends on seed and epoch.

Shapes: B rows of a batch, N tokens in a row.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stackwise.data.batches import Batch, Batches
from stackwise.data.token_sequence import TokenArray, TokenSequence
from stackwise.support.arguments import check_sizes, require

__all__ = ["TokenWindows"]


class TokenWindows(Batches):
    """Batches of windows of a token sequence, at a distance of `seq_len`. Each pass over it is one epoch.

    With `shuffle`, every epoch has another offset of the windows and another order. Both depend only on
    (seed, epoch), and not on `batch_size` or the number of processes. The order needs 4 bytes per window: for
    1e8 windows (4e11 tokens in windows of 4096), 0.4 GB and some seconds per epoch.

    Args:
        tokens: integers (number of tokens,), or a TokenSequence.
        batch_size: rows per batch. An incomplete last batch is omitted.
        seq_len: number of tokens that the model reads.
        row_length: `seq_len + 1`, the default, if the last token is only a target, or `seq_len`.
        seed: seed of the order.
        shuffle: False: the same order in each epoch.
        pack_documents: True: return `document_ids`, which show the tokens of each document.
        rank: rank of this process; see `Batches`.
        world_size: number of processes that share the rows.

    Yields:
        {"input_ids": int64 (B, N)}. With `pack_documents`, also {"document_ids": int64 (B, N)}: the number of
        each token's document in the sequence.

    Raises:
        ValueError: too few tokens for one batch, or `pack_documents` with unknown document boundaries.
    """

    def __init__(
        self,
        tokens: Tensor | TokenSequence,
        batch_size: int,
        seq_len: int,
        *,
        row_length: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        pack_documents: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_sizes(batch_size=batch_size, seq_len=seq_len, world_size=world_size)
        check_sizes(0, seed=seed)
        self.row_length = seq_len + 1 if row_length is None else row_length
        allowed = f"{seq_len} or {seq_len + 1}, with seq_len={seq_len}"
        require(self.row_length in (seq_len, seq_len + 1), "row_length", row_length, allowed)
        self.sequence = tokens if isinstance(tokens, TokenSequence) else TokenArray(tokens)
        documents = "True only for tokens whose documents are known"
        require(not pack_documents or self.sequence.has_documents, "pack_documents", True, documents)
        self.seq_len, self.seed, self.shuffle, self.pack_documents = seq_len, seed, shuffle, pack_documents
        # The offset may be anywhere in the first window, and the last window still needs its target.
        unused = self.row_length - seq_len + (seq_len - 1 if shuffle else 0)
        rows = batch_size * world_size
        if len(self.sequence) < (needed := rows * seq_len + unused):
            raise ValueError(
                f"tokens: got {len(self.sequence)}; one batch of {rows} rows of {seq_len} needs {needed}"
            )
        self.n_windows = (len(self.sequence) - unused) // seq_len
        super().__init__(batch_size, self.n_windows // rows, rank=rank, world_size=world_size)
        self._order: tuple[int, int, Tensor | None] | None = None

    def batch(self, epoch: int, i: int) -> Batch:
        """Return batch `i` of `epoch`, both counted from 0.

        Raises:
            ValueError: the batch does not exist.
        """
        check_sizes(0, epoch=epoch, i=i)
        require(i < len(self), "i", i, f"0 to {len(self) - 1}")
        offset, order = self._order_of(epoch)
        first = (i * self.world_size + self.rank) * self.batch_size
        chosen = torch.arange(first, first + self.batch_size)
        if order is not None:
            chosen = order[chosen].long()
        starts_B = offset + chosen * self.seq_len
        batch = {"input_ids": self.sequence.rows(starts_B, self.row_length)}
        if self.pack_documents:
            batch["document_ids"] = self.sequence.document_ids(starts_B, self.row_length)
        return batch

    def identity(self) -> dict[str, Any]:
        """See `Batches`."""
        return {
            "kind": "windows",
            "tokens": len(self.sequence),
            "digest": self._digest,
            "rows_per_step": self.batch_size * self.world_size,
            "seq_len": self.seq_len,
            "row_length": self.row_length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "pack_documents": self.pack_documents,
        }

    @cached_property
    def _digest(self) -> str:
        return self.sequence.digest()

    def _order_of(self, epoch: int) -> tuple[int, Tensor | None]:
        """Return the offset and the order of the windows in an epoch. The last result is cached."""
        if not self.shuffle:
            return 0, None
        if self._order is None or self._order[0] != epoch:
            self._order = None  # so that only one order is in memory
            # torch seeds its CPU generator with 32 bits. The higher bits are mixed in.
            mixed = self.seed * 1_000_003 + (self.seed >> 32) * 0x9E3779B1 + epoch
            generator = torch.Generator().manual_seed(mixed % 2**32)
            offset = int(torch.randint(self.seq_len, (1,), generator=generator))
            dtype = torch.int32 if self.n_windows < 2**31 else torch.int64
            order = torch.randperm(self.n_windows, generator=generator, dtype=dtype)
            self._order = epoch, offset, order
        return self._order[1], self._order[2]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the order, because computing it is faster than sending it."""
        return {**self.__dict__, "_order": None}
