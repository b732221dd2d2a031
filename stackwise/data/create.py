"""Data: batches of a text, of token shards or of a task, as configured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stackwise.config import StackWiseConfig
from stackwise.data.batches import Batches
from stackwise.data.shards import TokenShards
from stackwise.data.tasks import TaskBatches, create_task
from stackwise.data.text import documentation_pages, documentation_text, standard_library_text
from stackwise.data.token_sequence import TokenArray, TokenSequence
from stackwise.data.tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, create_tokenizer
from stackwise.data.windows import TokenWindows
from stackwise.support.arguments import require

__all__ = ["TokenWindows", "create_data", "documentation_text", "standard_library_text"]


def create_data(
    config: StackWiseConfig, rank: int = 0, world_size: int = 1
) -> tuple[Batches, Batches | None]:
    """Return the training and validation batches of `config.data`, which `docs/reference/data.md` describes.

    For a text or shards, the validation part is the end of the data. For a task, an epoch has the number of
    batches that a process uses in `max_steps`. Validation has `validation_fraction` of this number, at least
    one batch, with different rows.

    Args:
        config: configuration. Used are `data`, the sizes, the seed and the kind of the objective in
            `training`, and the vocabulary size in `model`.
        rank: rank of this process.
        world_size: number of processes with `batch_size` rows each; see `Batches`.

    Returns:
        (training, validation). Validation is None if `data.validation_fraction` is 0.

    Raises:
        ValueError: a vocabulary that is too small for the tokens, a text that is too short, `pack_documents`
            without known documents, a `mask_token_id` that occurs in the text, damaged shards, or a tokenizer
            for shards.
        OSError: the file or the folder cannot be read.
        ImportError: the library of the tokenizer is not installed.
    """
    if config.data.task is not None:
        return _task_batches(config, rank, world_size)
    sequence = _sequence(config)
    n_validation = int(len(sequence) * config.data.validation_fraction)
    n_training = len(sequence) - n_validation

    def windows(part: TokenSequence, shuffle: bool) -> TokenWindows:
        return TokenWindows(
            part,
            config.training.batch_size,
            config.training.seq_len,
            row_length=_row_length(config),
            seed=config.training.seed,
            shuffle=shuffle,
            pack_documents=config.data.pack_documents,
            rank=rank,
            world_size=world_size,
        )

    try:
        training = windows(sequence.part(0, n_training), config.data.shuffle)
    except ValueError as error:
        where = f"data.dataset_path={config.data.dataset_path!r}"
        raise ValueError(f"{where} with training.batch_size and training.seq_len: {error}") from None
    if n_validation == 0:
        return training, None
    try:
        validation = windows(sequence.part(n_training, len(sequence)), False)
    except ValueError as error:
        raise ValueError(
            f"data.validation_fraction: got {config.data.validation_fraction}, which is {n_validation} of "
            f"{len(sequence)} tokens; {error}, or 0 for no validation"
        ) from None
    return training, validation


def _row_length(config: StackWiseConfig) -> int:
    """Return the number of tokens of a row.

    Next-token training needs one extra token, which is only a target.
    """
    return config.training.seq_len + (config.training.objective.kind == "next_token")


def _task_batches(config: StackWiseConfig, rank: int, world_size: int) -> tuple[Batches, Batches | None]:
    settings, kind = config.training, config.data.task
    assert kind is not None
    packed = config.data.pack_documents
    require(
        not packed, "data.pack_documents", packed, f"false with data.task={kind!r}: a row is one document"
    )
    vocab_size, mask = config.model.vocab_size, settings.objective.mask_token_id
    if mask is not None:
        last = vocab_size - 1
        allowed = f"{last}, the last id, with data.task={kind!r}: the task takes all others"
        require(mask == last, "training.objective.mask_token_id", mask, allowed)
        vocab_size = last
    try:
        task = create_task(kind, vocab_size, _row_length(config), seed=settings.seed)
    except ValueError as error:
        raise ValueError(f"data.task={kind!r} with model.vocab_size and training.seq_len: {error}") from None
    labels = settings.objective.kind == "next_token"
    n_training = settings.max_steps * settings.accumulation_steps
    n_validation = max(1, round(n_training * config.data.validation_fraction))

    def batches(n_batches: int, stream: int, fixed: bool) -> TaskBatches:
        return TaskBatches(
            task,
            settings.batch_size,
            n_batches,
            stream=stream,
            fixed=fixed,
            labels=labels,
            rank=rank,
            world_size=world_size,
        )

    training = batches(n_training, 0, not config.data.shuffle)
    return training, batches(n_validation, 1, True) if config.data.validation_fraction else None


def _sequence(config: StackWiseConfig) -> TokenSequence:
    """Return all tokens, including the validation part."""
    path = None if config.data.dataset_path is None else Path(config.data.dataset_path)
    vocab_size = config.model.vocab_size
    if path is not None and path.is_dir():
        unasked = f"'byte', the default, with the shards in {path}, which are tokens already"
        require(config.data.tokenizer == "byte", "data.tokenizer", config.data.tokenizer, unasked)
        shards = TokenShards(path)
        check_vocabulary(vocab_size, shards.vocab_size, f"the shards in {path}")
        return shards
    tokenizer = create_tokenizer(config.data.tokenizer)
    check_vocabulary(vocab_size, tokenizer.vocab_size, f"tokenizer {tokenizer.name!r}")
    tokens = _pages(tokenizer) if path is None else _file(path, tokenizer)
    mask = config.training.objective.mask_token_id
    if mask is not None:
        taken = bool((tokens.tokens == mask).any())
        require(not taken, "training.objective.mask_token_id", mask, "an id that is no token of the text")
    packed = config.data.pack_documents
    documents = (
        f"false for {path} with tokenizer {tokenizer.name!r}, which has no token that ends a document; or a "
        "folder of shards, which know their documents"
    )
    require(not packed or tokens.has_documents, "data.pack_documents", packed, documents)
    return tokens


def _pages(tokenizer: Tokenizer) -> TokenArray:
    """Return the tokens of the documentation. Each page is a document."""
    pages = documentation_pages()
    texts = [page + "\n\n" for page in pages[:-1]] + pages[-1:]
    ids = [_ids(tokenizer, text.encode(), "the documentation") for text in texts]
    ends = np.cumsum([len(each) for each in ids])
    return TokenArray(torch.cat(ids), torch.tensor([0, *ends[:-1]]))


def _file(path: Path, tokenizer: Tokenizer) -> TokenArray:
    """Return the tokens of a text file.

    If the tokenizer has an end token, each end token ends a document.
    """
    if path.exists():  # a device may be endless
        require(path.is_file(), "data.dataset_path", str(path), "a text file, or a folder of shards")
    raw = path.read_bytes()
    if not raw:
        raise ValueError(f"data.dataset_path: {path} is empty")
    tokens = _ids(tokenizer, raw, str(path))
    if tokenizer.eos is None:
        return TokenArray(tokens)
    behind = (tokens == tokenizer.eos).nonzero().flatten() + 1
    return TokenArray(tokens, torch.cat((torch.zeros(1, dtype=torch.int64), behind[behind < len(tokens)])))


def _ids(tokenizer: Tokenizer, raw: bytes, source: str) -> Tensor:
    if isinstance(tokenizer, ByteTokenizer):
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)  # raw, even if it is not UTF-8
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.dataset_path: {source} is no UTF-8, which tokenizer {tokenizer.name!r} needs: {error}"
        ) from None
    return torch.tensor(tokenizer.encode(text), dtype=torch.int32)
