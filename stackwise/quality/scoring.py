"""Scorer: log-probabilities of continuations after their contexts, in batches.

Shapes: B rows, T positions, V vocabulary, N scored positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stackwise.quality.language_model import LanguageModel
from stackwise.quality.packed_ends import PackedEnds, Stem
from stackwise.quality.prefix import Family, Group, group_by_prefix
from stackwise.quality.request import Request, Score, TokenRequest, encode_request
from stackwise.quality.text_tokenizer import TextTokenizer
from stackwise.support.arguments import check_sizes, require

__all__ = ["Scorer", "loglikelihoods"]

# Maximum number of logits that are converted to float32 at once.
_WIDENED = 1 << 26
# Minimum number of tokens that the choices of a question must share for a separate pass of this prefix.
_LEAST_SHARED = 8
# Maximum difference of length between the families of a batch, in tokens.
_SPREAD = 16
# Size of packed ends, in batches: a question has about four ends.
_AT_ONCE = 4


class Scorer:
    """Model and tokenizer that compute log-probabilities.

    Requests are computed in batches of similar length, padded on the right. No mask is needed, because a
    causal model does not see later tokens. If the model has a suitable cache, common prefixes are computed
    once, such as the examples before all questions, or a question before its choices. If the model takes a
    mask of position pairs, all choices of a question are computed in one row (`PackedEnds`). In float32, none
    of this changes a log-probability by more than rounding. Sequences with different rotary angles
    (`LanguageModel.span`) are computed separately, each in one pass.

    Args:
        model: a `LanguageModel`, or its argument.
        tokenizer: a `TextTokenizer`, or its argument. None: only tokens are scored.
        batch_size: maximum number of sequences in a batch.
        device, max_length, reuse: options of `LanguageModel`.
        prefix_token_id: option of `TextTokenizer`.
        eos_token_id: end tokens of generated texts, one id or several. None: the end tokens of the tokenizer
            and of the model (`LanguageModel.eos_token_ids`).
        window_context: minimum number of tokens that the model reads before the scored ones, in each window
            of a text that exceeds the maximum length. 1: like in the harness. More is slower and more
            accurate.
        on_progress: called after each batch with the number of scored tokens and the number of all tokens of
            the current call of `score`.

    Attributes:
        model: the LanguageModel.
        tokenizer: the TextTokenizer, or None.
        eos_token_ids: end tokens of generated texts.
        window_context: see above.
        tokens_read: number of positions that the model has computed so far, including padding.
        tokens_cut: number of context tokens that were cut so far, because sequences were too long.

    Raises:
        ValueError, TypeError: errors of LanguageModel and TextTokenizer, a batch size below 1, or options
            together with a LanguageModel.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        batch_size: int = 32,
        device: torch.device | str | None = None,
        max_length: int | None = None,
        reuse: bool = True,
        prefix_token_id: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        window_context: int = 1,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size, window_context=window_context)
        self._on_progress = on_progress
        if isinstance(model, LanguageModel):
            options = {"device": device, "max_length": max_length, "reuse": None if reuse else reuse}
            for key, given in options.items():
                require(given is None, key, given, "what the LanguageModel was given")
            self.model = model
        else:
            self.model = LanguageModel(model, device=device, max_length=max_length, reuse=reuse)
        self.tokenizer = (
            None if tokenizer is None else TextTokenizer(tokenizer, prefix_token_id=prefix_token_id)
        )
        self.eos_token_ids = self._ends(eos_token_id)
        self.batch_size, self.window_context = batch_size, window_context
        self.tokens_read = self.tokens_cut = 0

    @property
    def texts(self) -> TextTokenizer:
        """Tokenizer of the scorer.

        Raises:
            ValueError: the scorer has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("tokenizer: got None; allowed: one, since text is to be scored")
        return self.tokenizer

    def score(self, requests: Iterable[Request | tuple[str, str]]) -> list[Score]:
        """Return the scores of the requests in their order.

        Raises:
            ValueError: an error of `encode_request` or `score_tokens`.
        """
        known: dict[str, list[int]] = {}  # choices share their context
        return self.score_tokens(
            [encode_request(self.texts, context, continuation, known) for context, continuation in requests]
        )

    def score_tokens(self, requests: Sequence[TokenRequest]) -> list[Score]:
        """Return the scores of tokenized requests in their order.

        Contexts that are too long are cut at their start.

        Raises:
            ValueError: a continuation exceeds the maximum length, an id is outside the vocabulary, or the
                model returns NaN.
        """
        requests = [request.fitted(self.model.max_length) for request in requests]
        self.tokens_cut += sum(request.cut for request in requests)
        self._check_ids(requests)
        sequences: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(requests):
            sequences.setdefault((*request.context, *request.continuation[:-1]), []).append(i)
        answers = _Answers([len(request.continuation) for request in requests], self._on_progress)
        readings = [
            _Reading(np.asarray(ids), _wanted(requests, asked, len(ids))) for ids, asked in sequences.items()
        ]
        with self.model.reading():
            self._read_all(readings, answers)
        totals, greedy = answers.sums()
        broken = int(np.isnan(totals).sum())
        seen = f"NaN for {broken} of {len(requests)} requests"
        require(not broken, f"log-probabilities of {self.model.spec.name}", seen, "numbers")
        return [
            Score(float(total), bool(best), len(request.continuation), request.cut)
            for total, best, request in zip(totals, greedy, requests, strict=True)
        ]

    def _ends(self, asked: int | Iterable[int] | None) -> frozenset[int]:
        if asked is None:
            eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
            return self.model.eos_token_ids | (frozenset() if eos is None else {eos})
        ends = [asked] if isinstance(asked, int) else list(asked)
        for end in ends:
            check_sizes(0, eos_token_id=end)
        return frozenset(ends)

    def _check_ids(self, requests: Sequence[TokenRequest]) -> None:
        for request in requests:
            ids = (*request.context, *request.continuation)
            for worst in (min(ids), max(ids)):
                allowed = f"0 to {self.model.vocab_size - 1}, the vocabulary of {self.model.spec.name}"
                require(0 <= worst < self.model.vocab_size, "token id", worst, allowed)

    def _read_all(self, readings: list[_Reading], answers: _Answers) -> None:
        spans: dict[int, list[_Reading]] = {}
        for reading in readings:
            spans.setdefault(self.model.span(len(reading.ids)), []).append(reading)
        for span, some in spans.items():
            # A prefix of a longer sequence may be in another span.
            (self._read_whole if span else self._read_sharing)(some, answers)

    def _read_sharing(self, readings: list[_Reading], answers: _Answers) -> None:
        # The model's cache is only tested if sequences share a prefix.
        groups = group_by_prefix([r.ids for r in readings], [r.first for r in readings])
        shares = any(group.shared or self._is_shared(f, 0) for group in groups for f in group.families)
        if not shares or self.model.cache_rows is None:
            self._read_whole(readings, answers)
            return
        for group in groups:
            self._read_group(group, readings, answers)

    def _read_whole(self, readings: Sequence[_Reading], answers: _Answers) -> None:
        for batch in _batches(range(len(readings)), [len(r.ids) for r in readings], self.batch_size):
            self._read_plain([readings[i] for i in batch], answers)

    @staticmethod
    def _is_shared(family: Family, known: int) -> bool:
        return len(family.members) > 1 and family.shared - known >= _LEAST_SHARED

    def _read_group(self, group: Group, readings: list[_Reading], answers: _Answers) -> None:
        """Compute the common prefix of a group, then that of each family, then the rest of each sequence."""
        start, before = group.shared, None
        if start:
            first = readings[group.families[0].members[0]]
            longest = max(len(readings[i].ids) for family in group.families for i in family.members)
            before = self._read_prefix([first.ids[:start]], None, longest)
        apart = [i for f in group.families if not self._is_shared(f, start) for i in f.members]
        for batch in _batches(apart, [len(readings[i].ids) for i in apart], self.batch_size):
            chosen = [readings[i] for i in batch]
            if before is None:
                self._read_plain(chosen, answers)
            else:
                self._read_rest(chosen, start, before, [0] * len(chosen), answers)
        families = [f for f in group.families if self._is_shared(f, start)]
        for some in _packed(families, self.batch_size):
            self._read_families(some, start, before, readings, answers)

    def _read_families(
        self,
        families: Sequence[Family],
        start: int,
        before: Any,
        readings: list[_Reading],
        answers: _Answers,
    ) -> None:
        """Compute families of similar length.

        All are read up to the length of the shortest prefix, so that the cache has no gaps.
        """
        cut = min(family.shared for family in families)
        members = [(row, readings[i]) for row, family in enumerate(families) for i in family.members]
        prefixes = [readings[family.members[0]].ids[start:cut] for family in families]
        longest = max(len(reading.ids) for _, reading in members)
        stems = [_stem(family, cut, readings) for family in families]
        if self._packs(stems, cut, longest) and (before is None or self.model.grows_cache):
            cache = self._read_prefix(prefixes, before, cut + max(stem.length for stem in stems))
            self._read_packed(families, stems, cut, cache, readings, answers)
            return
        cache = self._read_prefix(prefixes, before, longest)
        lengths = [len(reading.ids) for _, reading in members]
        for batch in _batches(range(len(members)), lengths, self.batch_size):
            rows, some = zip(*(members[i] for i in batch), strict=True)
            self._read_rest(some, cut, cache, rows, answers)

    def _packs(self, stems: Sequence[Stem], cut: int, longest: int) -> bool:
        """Return True if all ends can be computed in one pass.

        The number of logits must be similar to that of a batch of ends, and the number of position pairs to
        that of a batch of complete sequences.
        """
        width, end = max(stem.length for stem in stems), longest - cut
        positions, most = len(stems) * width, _AT_ONCE * self.batch_size
        fits = positions <= most * end and positions * (cut + width) <= most * longest**2
        return fits and self.model.packs_ends(cut + width)

    def _read_packed(
        self,
        families: Sequence[Family],
        stems: Sequence[Stem],
        cut: int,
        cache: Any,
        readings: list[_Reading],
        answers: _Answers,
    ) -> None:
        """Compute all ends of a family in one row of the cache."""
        ends = PackedEnds.of(stems, cut)
        self.tokens_read += ends.ids_BT.size
        placed = [
            _Placed(readings[i], row, family.shared - column)
            for row, family in enumerate(families)
            for i, column in zip(family.members, ends.columns[row], strict=True)
        ]
        answers.take(self.model.follow_packed(ends, cache), placed)

    def _read_prefix(self, prefixes: Sequence[np.ndarray], before: Any, capacity: int) -> Any:
        """Return the cache of sequences of equal length, after the sequence in `before`, if there is one."""
        model, n = self.model, len(prefixes)
        ids_BT = self._padded(prefixes)
        cache = model.empty_cache(n, capacity) if before is None else self._taken(before, [0] * n)
        return model.follow(ids_BT, cache, first=ids_BT.shape[1] - 1)[1]

    def _read_rest(
        self,
        readings: Sequence[_Reading],
        start: int,
        cache: Any,
        rows: Sequence[int],
        answers: _Answers,
    ) -> None:
        first = min(reading.first for reading in readings) - start
        ids_BT = self._padded([reading.ids[start:] for reading in readings])
        logits_BTV, _ = self.model.follow(ids_BT, self._taken(cache, rows), first)
        answers.take(logits_BTV, _in_rows(readings, start + first))

    def _read_plain(self, readings: Sequence[_Reading], answers: _Answers) -> None:
        first = min(reading.first for reading in readings)
        logits_BTV = self.model.logits(self._padded([reading.ids for reading in readings]), first)
        answers.take(logits_BTV, _in_rows(readings, first))

    def _taken(self, cache: Any, rows: Sequence[int]) -> Any:
        assert self.model.cache_rows is not None
        return self.model.cache_rows.take(cache, torch.tensor(rows, device=self.model.device))

    def _padded(self, sequences: Sequence[np.ndarray]) -> Tensor:
        """Return sequences as (B, T), padded with id 0."""
        longest = max(len(ids) for ids in sequences)
        ids_BT = np.zeros((len(sequences), longest), np.int64)
        for row, ids in zip(ids_BT, sequences, strict=True):
            row[: len(ids)] = ids
        self.tokens_read += ids_BT.size
        return torch.from_numpy(ids_BT).to(self.model.device, non_blocking=True)


def loglikelihoods(
    model: nn.Module | Any, tokenizer: Any, requests: Iterable[Request | tuple[str, str]], **options: Any
) -> list[Score]:
    """Return the log-probability of each continuation after its context.

    Args:
        model: a module that maps ids to logits, a Rack, a model of transformers, a ModelSpec or a factory.
        tokenizer: a tokenizer of transformers or tokenizers, or any object with `encode` and `decode`.
        requests: pairs of context and continuation.
        **options: options of `Scorer`.

    Raises:
        ValueError, TypeError: errors of `Scorer`.
    """
    return Scorer(model, tokenizer, **options).score(requests)


@dataclass(frozen=True)
class _Wanted:
    """Token to score: position before it, id, and index of the request."""

    position: int
    token: int
    request: int


@dataclass(frozen=True)
class _Reading:
    """Input of the model and the tokens to score.

    Attributes:
        ids: ids (T,).
        wanted: tokens to score, sorted by position.
    """

    ids: np.ndarray
    wanted: tuple[_Wanted, ...]

    @property
    def first(self) -> int:
        """First position with a needed output."""
        return self.wanted[0].position


@dataclass(frozen=True)
class _Placed:
    """Location of a reading's logits. Column i of the row has the logits after position `start` + i."""

    reading: _Reading
    row: int
    start: int


def _in_rows(readings: Sequence[_Reading], start: int) -> list[_Placed]:
    return [_Placed(reading, row, start) for row, reading in enumerate(readings)]


def _stem(family: Family, cut: int, readings: Sequence[_Reading]) -> Stem:
    """Return the rest of a family after its first `cut` tokens."""
    ends = [readings[i].ids[family.shared :] for i in family.members]
    return Stem(readings[family.members[0]].ids[cut : family.shared], ends)


def _wanted(requests: Sequence[TokenRequest], asked: Sequence[int], length: int) -> tuple[_Wanted, ...]:
    found = [
        _Wanted(length - len(requests[i].continuation) + j, token, i)
        for i in asked
        for j, token in enumerate(requests[i].continuation)
    ]
    return tuple(sorted(found, key=lambda each: each.position))


@dataclass
class _Answers:
    """Log-probabilities of tokens, stored on the device until all are computed.

    Attributes:
        counts: number of tokens of each request.
        on_progress: see `Scorer`.
    """

    counts: Sequence[int]
    on_progress: Callable[[int, int], object] | None = None
    _requests: list[int] = field(default_factory=list)
    _found: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def take(self, logits_BTV: Tensor, placed: Sequence[_Placed]) -> None:
        """Store the log-probabilities of a batch."""
        spots: dict[tuple[int, int], int] = {}
        asked = [
            ((where.row, each.position - where.start), each)
            for where in placed
            for each in where.reading.wanted
        ]
        places = [spots.setdefault(spot, len(spots)) for spot, _ in asked]
        device = logits_BTV.device
        row_N, position_N = torch.tensor(list(spots), device=device).T
        place_M = torch.tensor(places, device=device)
        token_M = torch.tensor([each.token for _, each in asked], device=device)
        scores, best = [], []
        size = max(1, _WIDENED // logits_BTV.shape[-1])
        sorted_places = torch.tensor(places)
        for low in range(0, len(spots), size):
            logits_NV = logits_BTV[row_N[low : low + size], position_N[low : low + size]].float()
            chosen = ((sorted_places >= low) & (sorted_places < low + size)).nonzero()[:, 0].to(device)
            place, token = place_M[chosen] - low, token_M[chosen]
            scores.append(logits_NV[place, token] - logits_NV.logsumexp(-1)[place])
            best.append(logits_NV.argmax(-1)[place] == token)
        self._found.append((torch.cat(scores), torch.cat(best)))
        order = sorted(range(len(places)), key=lambda i: places[i] // size)
        self._requests += [asked[i][1].request for i in order]
        if self.on_progress is not None:
            self.on_progress(len(self._requests), sum(self.counts))

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of each request in float64, and True if all its tokens are greedy."""
        if not self._found:
            return np.zeros(0), np.zeros(0, bool)
        scores, best = (torch.cat(each).cpu().numpy() for each in zip(*self._found, strict=True))
        totals = np.bincount(self._requests, scores.astype(np.float64), len(self.counts))
        return totals, np.bincount(self._requests, best, len(self.counts)) == np.asarray(self.counts)


def _batches(items: Sequence[int], lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield batches, longest sequences first, so that a batch that does not fit into memory fails early."""
    order = sorted(range(len(items)), key=lambda i: -lengths[i])
    for i in range(0, len(order), size):
        yield [items[k] for k in order[i : i + size]]


def _packed(families: Sequence[Family], size: int) -> Iterator[list[Family]]:
    """Yield lists of at most `size` families of similar length, longest first."""
    packed: list[Family] = []
    for family in sorted(families, key=lambda f: -f.shared):
        if len(packed) == size or (packed and packed[0].shared - family.shared > _SPREAD):
            yield packed
            packed = []
        packed.append(family)
    if packed:
        yield packed
