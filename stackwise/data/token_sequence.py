"""TokenSequence: long sequence of tokens with random access, and optionally with document boundaries.

Shapes: B rows, N tokens in a row.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from stackwise.support.arguments import require

__all__ = ["TokenArray", "TokenSequence"]


class TokenSequence(ABC):
    """Sequence of tokens, indexed from 0 to `len` - 1."""

    has_documents: bool

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, starts_B: Tensor, length: int) -> Tensor:
        """Return `length` tokens from each start: int64 (B, N), a copy that the caller may change."""

    @abstractmethod
    def document_ids(self, starts_B: Tensor, length: int) -> Tensor:
        """Return the number of the document of each of these tokens, counted from 0: int64 (B, N).

        Raises:
            ValueError: the document boundaries are unknown.
        """

    @abstractmethod
    def part(self, start: int, stop: int) -> Self:
        """Return the tokens `start` to `stop` (exclusive), without a copy."""

    @abstractmethod
    def digest(self) -> str:
        """Return a hexadecimal digest of the tokens and of the document boundaries."""


class TokenArray(TokenSequence):
    """Tokens in memory.

    Args:
        tokens: integers (number of tokens,).
        document_starts: start of each document, int64 (number of documents,), ascending from 0. None:
            unknown.

    Raises:
        ValueError: a wrong shape or type, or starts that do not ascend from 0 or exceed the tokens.
    """

    def __init__(self, tokens: Tensor, document_starts: Tensor | None = None) -> None:
        sound = tokens.ndim == 1 and not tokens.is_floating_point() and tokens.dtype != torch.bool
        require(sound, "tokens", f"{tokens.dtype} {tuple(tokens.shape)}", "integers (number of tokens,)")
        self.tokens, self.document_starts = tokens, document_starts
        self.has_documents = document_starts is not None
        if document_starts is not None:
            starts = document_starts
            sound = starts.ndim == 1 and starts.dtype == torch.int64 and len(starts) > 0
            sound = sound and int(starts[0]) <= 0 and bool((starts.diff() > 0).all())
            sound = sound and int(starts[-1]) < len(tokens)
            require(sound, "document_starts", starts, f"int64, ascending from 0, below {len(tokens)}")

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, starts_B: Tensor, length: int) -> Tensor:
        """See `TokenSequence`."""
        return self.tokens[starts_B[:, None] + torch.arange(length)].to(torch.int64, copy=False)

    def document_ids(self, starts_B: Tensor, length: int) -> Tensor:
        """See `TokenSequence`."""
        if self.document_starts is None:
            raise ValueError("document_starts: got None; allowed: where each document begins")
        places_BN = starts_B[:, None] + torch.arange(length)
        return torch.searchsorted(self.document_starts, places_BN, right=True) - 1

    def part(self, start: int, stop: int) -> Self:
        """See `TokenSequence`. Document numbers of the part start at 0."""
        starts = self.document_starts
        if starts is not None:
            first = int(torch.searchsorted(starts, start, right=True)) - 1
            starts = (starts[first : int(torch.searchsorted(starts, stop))] - start).clamp(min=0)
        return type(self)(self.tokens[start:stop], starts)

    def digest(self) -> str:
        """See `TokenSequence`."""
        digest = hashlib.sha256(str(self.tokens.dtype).encode())
        for tensor in (self.tokens, self.document_starts):
            digest.update(b"|" if tensor is None else tensor.contiguous().numpy().data)
        return digest.hexdigest()
