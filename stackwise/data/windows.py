"""TokenWindows: a token sequence cut into rows, in an order that the seed and the epoch decide.

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
    """Batches of windows of a token sequence, `seq_len` apart; each pass over it is one epoch.

    With `shuffle`, every epoch cuts the sequence at another offset and visits the windows in another
    order, both functions of (seed, epoch) alone: not of `batch_size` nor of the processes. The order is an
    array of as many numbers as there are windows, 4 bytes each: 0.4 GB and some seconds an epoch for 1e8
    windows, which of 4096 tokens are 4e11.

    Args:
        tokens: integer (number of tokens,), or a TokenSequence.
        batch_size: rows per batch; an incomplete last batch is left out.
        seq_len: what the model sees.
        row_length: `seq_len + 1`, the default, where the last token is only a target; or `seq_len`.
        seed: of the order.
        shuffle: False gives the same order each epoch.
        pack_documents: say in `document_ids` which tokens are of one document.
        rank: of this process; see `Batches`.
        world_size: how many processes share the rows.

    Yields:
        {"input_ids": int64 (B, N)}; packed, also {"document_ids": int64 (B, N)}: the number of each token's
        document in the sequence.

    Raises:
        ValueError: too few tokens for one batch; `pack_documents` of tokens whose documents are not known.
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
        # A cut may be anywhere in the first window; the last one has its target still.
        unused = self.row_length - seq_len + (seq_len - 1 if shuffle else 0)
        rows = batch_size * world_size
        if len(self.sequence) < (needed := rows * seq_len + unused):
            raise ValueError(
                f"tokens: got {len(self.sequence)}; one batch of {rows} rows of {seq_len} needs {needed}"
            )
        self.n_windows = (len(self.sequence) - unused) // seq_len
        super().__init__(batch_size, self.n_windows // rows, rank=rank, world_size=world_size)
        self._order: tuple[int, int, Tensor | None] | None = None

    @property
    def tokens(self) -> Tensor | TokenSequence:
        """What is cut into windows: a tensor where it is in memory."""
        return self.sequence.tokens if isinstance(self.sequence, TokenArray) else self.sequence

    def batch(self, epoch: int, i: int) -> Batch:
        """Batch `i` of `epoch`, both counted from 0.

        Raises:
            ValueError: there is no such batch.
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
        """Where the epoch is cut, and which window comes when: that of the last epoch asked for is kept."""
        if not self.shuffle:
            return 0, None
        if self._order is None or self._order[0] != epoch:
            self._order = None  # two orders are never held at a time
            # torch seeds its CPU generator with 32 bits: those above them are mixed in.
            mixed = self.seed * 1_000_003 + (self.seed >> 32) * 0x9E3779B1 + epoch
            generator = torch.Generator().manual_seed(mixed % 2**32)
            offset = int(torch.randint(self.seq_len, (1,), generator=generator))
            dtype = torch.int32 if self.n_windows < 2**31 else torch.int64
            order = torch.randperm(self.n_windows, generator=generator, dtype=dtype)
            self._order = epoch, offset, order
        return self._order[1], self._order[2]

    def __getstate__(self) -> dict[str, Any]:
        """Without the order: another process makes it quicker than it is sent."""
        return {**self.__dict__, "_order": None}
