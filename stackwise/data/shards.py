"""Token shards: memory-mapped tokens on disk, with a checksum for every byte.

A folder of shards contains `tokens-00000.safetensors`, ... and `shards.json`, which lists them. A shard has
the tensors `tokens` (uint16 or uint32), `document_starts` (int64, relative to the first token of the shard)
and `checksums` (uint8 (chunks, 32)): a SHA-256 of each MiB of `tokens`, then of each MiB of
`document_starts`. For each file, the list contains sizes and a SHA-256 of the checksums. It also contains a
SHA-256 of itself.

Shapes: B rows, N tokens in a row.
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import itertools
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from stackwise.checkpoint.folder import flush
from stackwise.data.token_sequence import TokenSequence
from stackwise.support.arguments import check_sizes, require
from stackwise.support.files import parse_json
from stackwise.support.system_errors import safetensors_as_os_error

__all__ = ["MANIFEST", "TokenShards", "write_shards"]

MANIFEST = "shards.json"
CHUNK = 2**20  # bytes per checksum
_VERSION = 2

Document = Sequence[int] | npt.NDArray[Any] | Tensor
Integers = npt.NDArray[Any]


def write_shards(
    directory: str | Path,
    documents: Iterable[Document] | Tensor | npt.NDArray[Any],
    *,
    vocab_size: int,
    tokens_per_shard: int = 2**26,
) -> TokenShards:
    """Write a folder of token shards. The folder appears only if it is complete.

    All files are written into a hidden folder in the same parent, flushed, and renamed. One shard and one
    document at a time are in memory.

    Args:
        directory: new or empty folder. Its parents are created.
        documents: iterable of documents, each the ids of its tokens; or one tensor or array of tokens, which
            is one document. No separator is added between documents.
        vocab_size: size of the vocabulary. Up to 65536, an id needs two bytes, otherwise four.
        tokens_per_shard: number of tokens of each shard except the last.

    Returns:
        The opened shards.

    Raises:
        ValueError: a folder that is not empty, no documents, an empty document, a document that is not a
            one-dimensional sequence of integers, or an id outside the vocabulary. The message names the
            document.
        OSError: a file cannot be written.
    """
    check_sizes(vocab_size=vocab_size, tokens_per_shard=tokens_per_shard)
    require(vocab_size <= 2**32, "vocab_size", vocab_size, "1 to 2**32")
    target = Path(directory).resolve()
    require(target.is_dir() or not target.exists(), "directory", str(directory), "a folder")
    held = sorted(path.name for path in target.iterdir())[:3] if target.exists() else []
    require(not held, "directory", f"{target} with {', '.join(held)}", "a new folder, or an empty one")
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    scratch.mkdir(parents=True)
    try:
        dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        if isinstance(documents, Tensor | np.ndarray):
            documents = [documents]
        checked = (_checked(i, document, vocab_size) for i, document in enumerate(documents))
        shards: list[dict[str, Any]] = []
        for tokens, starts in _filled(checked, dtype, tokens_per_shard):
            shards.append(_write_shard(scratch / f"tokens-{len(shards):05d}.safetensors", tokens, starts))
        require(bool(shards), "documents", "none", "at least one")
        content: dict[str, Any] = {"version": _VERSION, "vocab_size": vocab_size, "dtype": dtype.name}
        content["shards"] = shards
        content["digest"] = _digest(content)
        (scratch / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        flush(scratch / MANIFEST)
        flush(scratch)
        scratch.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return TokenShards(target)


class TokenShards(TokenSequence):
    """Tokens of a folder that `write_shards` created, read-only, indexed across all shards.

    When the folder is opened, the list and the size of each file are read. A shard is mapped when it is first
    read. A chunk is checked when it is first read, once per process, at 2 GB/s on a processor with
    instructions for SHA-256, or half a millisecond per MiB. Unread parts need no memory.

    An instance can be sent to another process, which opens the folder itself.

    Args:
        directory: folder of the shards.

    Raises:
        FileNotFoundError: the folder has no list of shards.
        ValueError: the list is invalid or changed, or a shard is missing, truncated or too long. Reads raise
            it for a changed shard, with the name of the chunk.
    """

    has_documents = True

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        content = _read_manifest(self.directory / MANIFEST)
        self.vocab_size: int = content["vocab_size"]
        self._digest: str = content["digest"]
        self._shards = [
            _Shard(self.directory, np.dtype(content["dtype"]), entry) for entry in content["shards"]
        ]
        for shard in self._shards:
            shard.check_size()
        self._first_tokens = [0, *itertools.accumulate(shard.n_tokens for shard in self._shards)]
        self._first_documents = [0, *itertools.accumulate(shard.n_documents for shard in self._shards)]
        self._start, self._stop = 0, self._first_tokens[-1]

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, places: slice) -> Tensor:
        """Return the tokens of a slice without a step: int64 (n,)."""
        start, stop, step = places.indices(len(self))
        require(step == 1, "step", step, "1")
        return self.rows(torch.tensor([start]), max(stop - start, 0))[0]

    def rows(self, starts_B: Tensor, length: int) -> Tensor:
        """See `TokenSequence`."""
        rows_BN = np.empty((len(starts_B), length), np.int64)
        for row_N, start in zip(rows_BN, starts_B.tolist(), strict=True):
            for shard, first, begin, end in self._pieces(start, length):
                row_N[first : first + end - begin] = self._shards[shard].tokens(begin, end)
        return torch.from_numpy(rows_BN)

    def document_ids(self, starts_B: Tensor, length: int) -> Tensor:
        """See `TokenSequence`. In a part, document numbers are those of the entire sequence."""
        ids_BN = np.empty((len(starts_B), length), np.int64)
        for row_N, start in zip(ids_BN, starts_B.tolist(), strict=True):
            for shard, first, begin, end in self._pieces(start, length):
                places = np.arange(begin, end)
                number = np.searchsorted(self._shards[shard].document_starts(), places, side="right")
                row_N[first : first + end - begin] = self._first_documents[shard] + number - 1
        return torch.from_numpy(ids_BN)

    def part(self, start: int, stop: int) -> Self:
        """See `TokenSequence`."""
        require(0 <= start <= stop <= len(self), "start and stop", (start, stop), f"within 0 to {len(self)}")
        part = copy.copy(self)  # open shards and results of checks are shared
        part._start, part._stop = self._start + start, self._start + stop
        return part

    def digest(self) -> str:
        """See `TokenSequence`. It is computed from the checksums in the list, without reading tokens."""
        return f"{self._digest} {self._start} {self._stop}"

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (shard, position in the row, begin and end in the shard) of the pieces of a row."""
        require(0 <= start <= len(self) - length, "start", start, f"0 to {len(self) - length}")
        first, place, stop = self._start + start, self._start + start, self._start + start + length
        shard = bisect.bisect_right(self._first_tokens, place) - 1
        while place < stop:
            begin = self._first_tokens[shard]
            end = min(stop, self._first_tokens[shard + 1])
            yield shard, place - first, place - begin, end - begin
            place, shard = end, shard + 1


class _Shard:
    """File of a shard. It is mapped, and its checksums are compared with the list, when it is first read."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], entry: dict[str, Any]) -> None:
        self.path, self.dtype = folder / entry["file"], dtype
        self.n_bytes: int = entry["bytes"]
        self.n_tokens: int = entry["tokens"]
        self.n_documents: int = entry["documents"]
        self._digest: str = entry["digest"]
        self._open: dict[str, _Chunked] | None = None

    def check_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{self.path}: missing; {MANIFEST} lists it") from None
        if size != self.n_bytes:
            state = "truncated" if size < self.n_bytes else "too long"
            n_chunks = -(-self.n_tokens * self.dtype.itemsize // CHUNK)
            chunk = min(size // CHUNK, n_chunks - 1)
            raise ValueError(
                f"{self.path}: {state}: got {size} bytes, which end about chunk {chunk} of {n_chunks}; "
                f"it was written with {self.n_bytes}"
            )

    def tokens(self, begin: int, end: int) -> Integers:
        return self._opened()["tokens"].read(begin, end)

    def document_starts(self) -> Integers:
        return self._opened()["document_starts"].read(0, self.n_documents)

    def _opened(self) -> dict[str, _Chunked]:
        if self._open is None:
            self.check_size()
            n_chunks = -(-self.n_tokens * self.dtype.itemsize // CHUNK)
            n_others = -(-self.n_documents * 8 // CHUNK)
            wanted = {
                "tokens": (self.dtype, (self.n_tokens,)),
                "document_starts": (np.dtype(np.int64), (self.n_documents,)),
                "checksums": (np.dtype(np.uint8), (n_chunks + n_others, 32)),
            }
            parts = _mapped(self.path)
            same = {name: (part.dtype, part.shape) for name, part in parts.items()} == wanted
            if not same or hashlib.sha256(parts["checksums"].data).hexdigest() != self._digest:
                raise ValueError(
                    f"{self.path}: its header or its checksums were changed since it was written"
                )
            of_tokens, of_starts = np.split(parts["checksums"], [n_chunks])
            self._open = {
                "tokens": _Chunked(f"{self.path}: tokens", parts["tokens"], of_tokens),
                "document_starts": _Chunked(
                    f"{self.path}: document_starts", parts["document_starts"], of_starts
                ),
            }
        return self._open

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the mapping, because its content would be sent, too."""
        return {**self.__dict__, "_open": None}


class _Chunked:
    """Numbers with checksums. A checksum is verified when its chunk is first read."""

    def __init__(self, name: str, numbers: Integers, checksums: Integers) -> None:
        self.name, self.numbers, self.checksums = name, numbers, checksums
        self.unchecked = np.ones(len(checksums), bool)

    def read(self, begin: int, end: int) -> Integers:
        size = self.numbers.itemsize
        chunks = slice(begin * size // CHUNK, -(-end * size // CHUNK))
        if self.unchecked[chunks].any():
            for chunk in range(chunks.start, chunks.stop):
                self._check(chunk)
        return self.numbers[begin:end]

    def _check(self, chunk: int) -> None:
        under = self.numbers.view(np.uint8)[chunk * CHUNK : (chunk + 1) * CHUNK]
        seen, wanted = hashlib.sha256(under.data).hexdigest(), self.checksums[chunk].tobytes().hex()
        if seen != wanted:
            raise ValueError(
                f"{self.name}: chunk {chunk} of {len(self.checksums)} was changed since it was written: "
                f"got SHA-256 {seen[:16]}..., expected {wanted[:16]}..."
            )
        self.unchecked[chunk] = False


def _checked(i: int, document: Document, vocab_size: int) -> Integers:
    array = np.asarray(document)
    sound = array.ndim == 1 and (array.dtype.kind in "iu" or array.size == 0)
    kind = f"{type(document).__name__} of {array.dtype} {array.shape}"
    require(sound, f"documents[{i}]", kind, "the ids of its tokens, in one dimension")
    require(array.size > 0, f"documents[{i}]", "no token", "at least one")
    smallest, largest = int(array.min()), int(array.max())
    wrong = smallest if smallest < 0 else largest
    require(0 <= wrong < vocab_size, f"documents[{i}]", wrong, f"ids 0 to vocab_size - 1 = {vocab_size - 1}")
    return array


def _filled(
    documents: Iterable[Integers], dtype: np.dtype[Any], capacity: int
) -> Iterator[tuple[Integers, Integers]]:
    """Yield the tokens of each shard and the document starts in it."""
    buffer, filled = np.empty(capacity, dtype), 0
    starts: list[int] = []
    for document in documents:
        starts.append(filled)
        taken = 0
        while taken < len(document):
            count = min(capacity - filled, len(document) - taken)
            buffer[filled : filled + count] = document[taken : taken + count]
            taken, filled = taken + count, filled + count
            if filled == capacity:
                yield buffer, np.array(starts, np.int64)
                starts, filled = [], 0
    if filled:
        yield buffer[:filled], np.array(starts, np.int64)


def _write_shard(path: Path, tokens: Integers, document_starts: Integers) -> dict[str, Any]:
    checksums = [
        hashlib.sha256(under[i : i + CHUNK]).digest()
        for under in (tokens.data.cast("B"), document_starts.tobytes())
        for i in range(0, len(under), CHUNK)
    ]
    stored = np.frombuffer(b"".join(checksums), np.uint8).reshape(-1, 32)
    with safetensors_as_os_error(path):
        save_file({"tokens": tokens, "document_starts": document_starts, "checksums": stored}, path)
    flush(path)
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "tokens": len(tokens),
        "documents": len(document_starts),
        "digest": hashlib.sha256(stored.data).hexdigest(),
    }


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of the list of shards.

    Raises:
        FileNotFoundError: the list is missing.
        ValueError: the list was changed, or is of another version.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing; allowed: a folder that write_shards made")
    try:
        content = parse_json(path.read_bytes())
        recorded = content.pop("digest")
        digest = _digest(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: no list of shards: {error}") from None
    require(content.get("version") == _VERSION, f"{path}: version", content.get("version"), str(_VERSION))
    if digest != recorded:
        raise ValueError(f"{path}: changed since it was written: its own digest does not fit")
    return {**content, "digest": recorded}


def _mapped(path: Path) -> dict[str, Integers]:
    """Return the memory-mapped tensors of a file, read-only; none if it is no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118  no dict
    except SafetensorError:
        return {}
    for part in parts.values():
        part.setflags(write=False)
    return parts


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
