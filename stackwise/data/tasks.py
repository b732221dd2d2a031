"""Tasks: synthetic sequences with a known minimum loss.

Shapes: B rows, N tokens in a row, V tokens of the vocabulary, S states of a chain.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from stackwise.config import TaskKind
from stackwise.data.batches import IGNORED, Batch, Batches
from stackwise.support.arguments import check_sizes, require

__all__ = ["CopyTask", "InductionTask", "MarkovTask", "ShiftTask", "Task", "TaskBatches", "create_task"]
Array = npt.NDArray[Any]


class Task(ABC):
    """Generator of rows of tokens.

    Each row depends only on (seed, stream, epoch, index) and the version of NumPy. Labels are not shifted. A
    label is the token itself if the earlier tokens help to predict it, otherwise -100.

    Attributes:
        best_loss: expected next-token loss of the best possible predictor, in nats, as a mean over labels.

    Args:
        vocab_size: size of the vocabulary. Ids are below it.
        row_length: number N of tokens in a row.
        seed: seed of the rows.

    Raises:
        ValueError: a vocabulary or a row is too small for the task.
    """

    kind: ClassVar[TaskKind]
    best_loss: float = 0.0
    _smallest: ClassVar[tuple[int, int]] = (2, 2)

    def __init__(self, vocab_size: int, row_length: int, *, seed: int = 0) -> None:
        smallest_vocabulary, smallest_row = self._smallest
        check_sizes(smallest_vocabulary, vocab_size=vocab_size)
        check_sizes(smallest_row, row_length=row_length)
        check_sizes(0, seed=seed)
        self.vocab_size, self.row_length, self.seed = vocab_size, row_length, seed

    def rows(self, epoch: int, indices: Sequence[int], *, stream: int = 0) -> Batch:
        """Return rows by their indices.

        Args:
            epoch: epoch of the rows. Rows differ between epochs.
            indices: B indices, from 0 and without an upper limit.
            stream: number of the stream. Streams have different rows, for example for validation.

        Returns:
            {"input_ids": int64 (B, N), "labels": int64 (B, N)}
        """
        generators = [np.random.default_rng((self.seed, stream, epoch, index)) for index in indices]
        tokens_BN = np.empty((len(generators), self.row_length), np.int64)
        labelled_BN = np.zeros(tokens_BN.shape, bool)
        self._fill(generators, tokens_BN, labelled_BN)
        labels_BN = np.where(labelled_BN, tokens_BN, IGNORED)
        return {"input_ids": torch.from_numpy(tokens_BN), "labels": torch.from_numpy(labels_BN)}

    @abstractmethod
    def _fill(self, generators: list[np.random.Generator], tokens_BN: Array, labelled_BN: Array) -> None:
        """Write the rows, and mark the tokens that have labels."""

    def identity(self) -> dict[str, Any]:
        """Return plain values that identify the rows."""
        return {
            "task": self.kind,
            "vocab_size": self.vocab_size,
            "row_length": self.row_length,
            "seed": self.seed,
        }


class CopyTask(Task):
    """Task with rows of random tokens that are repeated once.

    Labels are on the repetition, and the best loss is 0.
    """

    kind = "copy"

    def _fill(self, generators: list[np.random.Generator], tokens_BN: Array, labelled_BN: Array) -> None:
        _repeat(generators, self.vocab_size, (self.row_length + 1) // 2, tokens_BN, labelled_BN)


class ShiftTask(Task):
    """Task in which each token equals the one `lag` positions before it. The first `lag` tokens are random.

    Labels are on all tokens except the first `lag`, and the best loss is 0.

    Args:
        vocab_size: size of the vocabulary. Ids are below it.
        row_length: number of tokens in a row.
        seed: seed of the rows.
        lag: 1 to `row_length - 1`. None: 4, or `row_length - 1` for a shorter row.

    Raises:
        ValueError: a vocabulary or a row is too small, or the lag is out of range.
    """

    kind = "shift"

    def __init__(self, vocab_size: int, row_length: int, *, seed: int = 0, lag: int | None = None) -> None:
        super().__init__(vocab_size, row_length, seed=seed)
        self.lag = min(4, row_length - 1) if lag is None else lag
        check_sizes(lag=self.lag)
        require(self.lag < row_length, "lag", lag, f"1 to {row_length - 1}")

    def _fill(self, generators: list[np.random.Generator], tokens_BN: Array, labelled_BN: Array) -> None:
        _repeat(generators, self.vocab_size, self.lag, tokens_BN, labelled_BN)

    def identity(self) -> dict[str, Any]:
        """See `Task`."""
        return super().identity() | {"lag": self.lag}


class InductionTask(Task):
    """Task with pairs of a key and a value, followed by questions: a key, and its value as the answer.

    Keys are from the lower half of the vocabulary, and each is in one pair. Values are from the upper half.
    About half of the row are pairs. The questions are drawn with repetition. Labels are on the answers. The
    best loss is 0, because an induction head is sufficient (Olsson et al. 2022, arXiv:2209.11895).
    """

    kind = "induction"
    _smallest = (2, 4)

    def _fill(self, generators: list[np.random.Generator], tokens_BN: Array, labelled_BN: Array) -> None:
        n_keys = self.vocab_size // 2
        n_pairs = min(self.row_length // 4, n_keys)
        n_questions = -(-(self.row_length - 2 * n_pairs) // 2)
        labelled_BN[:, 2 * n_pairs + 1 :: 2] = True
        for generator, tokens_N in zip(generators, tokens_BN, strict=True):
            keys = generator.permutation(n_keys)[:n_pairs]
            values = generator.integers(n_keys, self.vocab_size, n_pairs)
            asked = np.concatenate((np.arange(n_pairs), generator.integers(n_pairs, size=n_questions)))
            tokens_N[:] = np.stack((keys[asked], values[asked]), 1).ravel()[: self.row_length]


class MarkovTask(Task):
    """Task with rows of a Markov chain that starts in its stationary distribution.

    All transitions are possible. Labels are on all tokens except the first. The best loss is the entropy rate
    of the chain, -sum_i p_i sum_j P_ij ln P_ij (Cover & Thomas, Elements of Information Theory, 2nd ed.,
    eq. 4.27).

    Attributes:
        transition_SS: float64 probabilities P_ij of j after i: softmax of normal numbers of standard
            deviation 2.
        stationary_S: float64 probabilities p_i of the states.

    Args:
        vocab_size: size of the vocabulary. Ids are below it.
        row_length: number of tokens in a row.
        seed: seed of the chain and of the rows.
        n_states: number S of ids that occur, from 0. None: 32, or `vocab_size` if it is smaller.

    Raises:
        ValueError: a vocabulary or a row is too small, or there are more states than ids.
    """

    kind = "markov"

    def __init__(
        self, vocab_size: int, row_length: int, *, seed: int = 0, n_states: int | None = None
    ) -> None:
        super().__init__(vocab_size, row_length, seed=seed)
        self.n_states = min(32, vocab_size) if n_states is None else n_states
        check_sizes(2, n_states=self.n_states)
        require(self.n_states <= vocab_size, "n_states", n_states, f"2 to vocab_size={vocab_size}")
        drawn_SS = 2.0 * np.random.default_rng(seed).standard_normal((self.n_states, self.n_states))
        exponents_SS = np.exp(drawn_SS - drawn_SS.max(1, keepdims=True))
        self.transition_SS: Array = exponents_SS / exponents_SS.sum(1, keepdims=True)
        # p P = p and sum(p) = 1. One equation of p P = p is redundant.
        equations_SS = self.transition_SS.T - np.eye(self.n_states)
        equations_SS[-1] = 1.0
        self.stationary_S: Array = np.linalg.solve(equations_SS, np.eye(self.n_states)[-1])
        entropy_S = -(self.transition_SS * np.log(self.transition_SS)).sum(1)
        self.best_loss = math.fsum(self.stationary_S * entropy_S)
        self._below_SS = self.transition_SS.cumsum(1)[:, :-1]
        self._below_S = self.stationary_S.cumsum()[:-1]

    def _fill(self, generators: list[np.random.Generator], tokens_BN: Array, labelled_BN: Array) -> None:
        labelled_BN[:, 1:] = True
        drawn_BN = np.stack([generator.random(self.row_length) for generator in generators])
        tokens_BN[:, 0] = (drawn_BN[:, :1] >= self._below_S).sum(1)
        for t in range(1, self.row_length):
            tokens_BN[:, t] = (drawn_BN[:, t, None] >= self._below_SS[tokens_BN[:, t - 1]]).sum(1)

    def identity(self) -> dict[str, Any]:
        """See `Task`."""
        return super().identity() | {"n_states": self.n_states}


class TaskBatches(Batches):
    """Batches of rows of a task.

    Args:
        task: task that generates the rows.
        batch_size: rows of a batch.
        n_batches: number of batches of an epoch. None: unlimited.
        stream: number of the stream. Streams have different rows.
        fixed: True: every epoch has the rows of the first.
        labels: False: omit the labels, for objectives that choose their targets.
        rank: rank of this process; see `Batches`.
        world_size: number of processes that share the rows.

    Yields:
        {"input_ids": int64 (B, N), "labels": int64 (B, N)}
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,
        n_batches: int | None = None,
        *,
        stream: int = 0,
        fixed: bool = False,
        labels: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(batch_size, n_batches, rank=rank, world_size=world_size)
        check_sizes(0, stream=stream)
        self.task, self.stream, self.fixed, self.labels = task, stream, fixed, labels

    def batch(self, epoch: int, i: int) -> Batch:
        """Return batch `i` of `epoch`, both counted from 0."""
        first = (i * self.world_size + self.rank) * self.batch_size
        epoch = 0 if self.fixed else epoch
        batch = self.task.rows(epoch, range(first, first + self.batch_size), stream=self.stream)
        if not self.labels:
            del batch["labels"]
        return batch

    def identity(self) -> dict[str, Any]:
        """See `Batches`."""
        return self.task.identity() | {
            "rows_per_step": self.batch_size * self.world_size,
            "n_batches": self.n_batches,
            "stream": self.stream,
            "fixed": self.fixed,
        }


def create_task(kind: TaskKind, vocab_size: int, row_length: int, *, seed: int = 0) -> Task:
    """Return the task of a kind, with its defaults.

    Raises:
        ValueError: a vocabulary or a row is too small for the task.
    """
    tasks: dict[TaskKind, type[Task]] = {
        "copy": CopyTask,
        "shift": ShiftTask,
        "induction": InductionTask,
        "markov": MarkovTask,
    }
    return tasks[kind](vocab_size, row_length, seed=seed)


def _repeat(
    generators: list[np.random.Generator], vocab_size: int, period: int, tokens_BN: Array, labelled_BN: Array
) -> None:
    labelled_BN[:, period:] = True
    for generator, tokens_N in zip(generators, tokens_BN, strict=True):
        tokens_N[:] = np.resize(generator.integers(vocab_size, size=period), len(tokens_N))
