"""Language model: anybody's model that says what comes next, as scoring and generation call it.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stackwise.benchmark.token_stream import empty_cache
from stackwise.quality.cache_rows import CacheRows
from stackwise.quality.packed_ends import PackedEnds, Stem
from stackwise.subject.call_form import forward_parameters
from stackwise.subject.inference import infer, logits_of
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_sizes, require
from stackwise.support.random_state import seeded
from stackwise.support.system_errors import is_out_of_memory

__all__ = ["LanguageModel"]

_TRIAL = 12
_LONGEST_TRIAL = 512


class LanguageModel:
    """A causal model of tokens.

    What it can do beyond a plain pass is seen from outside, as `ModelSpec.of` sees it, and tried before it is
    relied on: a cache whose rows cannot be taken, or that gives other logits than a plain pass, is not used.

    With LongRoPE (Ding et al. 2024, arXiv:2402.13753), as in Phi-3, all positions get other rotary angles
    once the longest row of a call is beyond the length of the first training: see `span`. With dynamic NTK
    scaling they change with each length beyond it, so that such a model is read no farther than that.

    Args:
        subject: a module, which is used as it is, where it is, and left in the mode that it is in; or what
            `ModelSpec.of` takes, of which a model is made.
        device: where it is to be; None: where it is.
        max_length: how many positions it may read at once; None: as many as it says that it takes.
        reuse: whether to read what several sequences begin with only once, where the model keeps a cache.

    Attributes:
        spec: how it is called.
        model: in the mode that it was in.
        max_length: as above; None: no limit known.

    Raises:
        InferenceError, FactoryError, TypeError: as of `ModelSpec.of`.
        ValueError: it takes no tokens, or its outputs are no numbers, or depend on later tokens.
    """

    def __init__(
        self,
        subject: Any,
        *,
        device: torch.device | str | None = None,
        max_length: int | None = None,
        reuse: bool = True,
    ) -> None:
        self.spec, self.model = _described(subject, device)
        name = self.spec.name
        require(self.spec.inputs == "tokens", f"{name}: inputs", self.spec.inputs, "'tokens'")
        require(
            self.spec.causal is True, f"{name}: causal", self.spec.causal, "True: what comes next is asked"
        )
        if max_length is not None:
            check_sizes(max_length=max_length)
        self._switches, dynamic = _rotary_lengths(self.model)
        known = [limit for limit in (max_length, self.spec.max_length, *dynamic) if limit is not None]
        self.max_length = min(known) if known else None
        self._reuse = reuse
        self._packing: dict[int, bool] = {}  # by the length that it was tried at
        self._refuse_reading_ahead()

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self.spec.width

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends a text, as the model says: in its `generation_config`, else in its `config`."""
        for name in ("generation_config", "config"):
            found = getattr(getattr(self.model, name, None), "eos_token_id", None)
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
        return frozenset()

    @cached_property
    def device(self) -> torch.device:
        """Where its inputs belong."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In eval mode, without gradients; each module's mode is put back."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def logits(self, ids_BT: Tensor, first: int = 0) -> Tensor:
        """(B, T - first, V): what follows each position from `first` on."""
        if first and self._keeps_logits:
            model: Any = _CalledWith(self.model, logits_to_keep=ids_BT.shape[1] - first)
            return logits_of(self.spec.forward(model, ids_BT))
        return self.spec.logits(self.model, ids_BT)[:, first:]

    def follow(self, ids_BT: Tensor, cache: Any, first: int = 0) -> tuple[Tensor, Any]:
        """Logits (B, T - first, V) of tokens that follow those in a cache, and the cache with them."""
        assert self.spec.decode is not None
        model: Any = self.model
        if first and self._keeps_logits:
            model = _CalledWith(model, logits_to_keep=ids_BT.shape[1] - first)
            output, cache = self.spec.decode(model, ids_BT, cache)
            return logits_of(output), cache
        output, cache = self.spec.decode(model, ids_BT, cache)
        return logits_of(output)[:, first:], cache

    def follow_packed(self, ends: PackedEnds, cache: Any) -> Tensor:
        """Logits (B, T, V) of all positions, where it `packs_ends`; the cache is of no use afterwards."""
        assert self.spec.decode is not None
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        ids_BT, position_BT, visible_BTS = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (ends.ids_BT, ends.position_BT, ends.visible_BTS)
        )
        # Added to the attention logits, which models take whether their kernel would take a bool or not.
        hidden_BTS = torch.zeros(visible_BTS.shape, dtype=dtype, device=self.device)
        hidden_BTS.masked_fill_(~visible_BTS, torch.finfo(dtype).min)
        model: Any = _CalledWith(self.model, attention_mask=hidden_BTS[:, None], position_ids=position_BT)
        return logits_of(self.spec.decode(model, ids_BT, cache)[0])

    def empty_cache(self, batch_size: int, capacity: int) -> Any:
        """For so many sequences of at most `capacity` tokens; None: it grows by itself."""
        return empty_cache(self.model, batch_size, capacity)

    def span(self, length: int) -> int:
        """Which rotary angles it takes for sequences so long: those of two spans are not read together."""
        return sum(length > switch for switch in self._switches)

    @property
    def keeps_cache(self) -> bool:
        """Whether it keeps what it has read, and that is to be used."""
        return self._reuse and self.spec.decode is not None and self._cache_problem is None

    @cached_property
    def cache_rows(self) -> CacheRows | None:
        """How to take rows of its cache; None: `reuse_note` says why not."""
        return self._tried_rows[0]

    @property
    def reuse_note(self) -> str:
        """Whether what several sequences begin with is read once, and if not, why."""
        return self._tried_rows[1]

    @cached_property
    def grows_cache(self) -> bool:
        """Whether a cache has room for however much follows."""
        return self.empty_cache(1, 1) is None

    def packs_ends(self, length: int) -> bool:
        """Whether sequences that begin alike can be read as `PackedEnds`, in rows of so many positions.

        It is tried at the next power of two: what hides by the place in a row, and not by the position that
        is told, is seen only in rows that are as long. Kernels that take no mask of pairs are not asked.
        """
        takes = {"attention_mask", "position_ids"} <= set(forward_parameters(self.model))
        if not takes or self.cache_rows is None or not _takes_masks_of_pairs(self.model):
            return False
        n = max(16, 1 << (length - 1).bit_length())
        n = n if self.max_length is None else min(n, self.max_length)
        if n not in self._packing:
            with self.reading(), seeded(0, self.device):
                try:
                    self._packing[n] = self._try_packed(n)
                except Exception as error:  # any failure but this one is an answer: it takes no such mask
                    if is_out_of_memory(error):
                        raise
                    self._packing[n] = False
        return length <= n and self._packing[n]

    @cached_property
    def _tried_rows(self) -> tuple[CacheRows | None, str]:
        if not self._reuse:
            return None, "not asked for"
        if self.spec.decode is None:
            return None, self.spec.cache_problem or "the model keeps no cache"
        n = self._trial_length()
        if n < 4:
            return None, f"it takes only {n} positions"
        if self._cache_problem is not None:
            return None, self._cache_problem
        with self.reading(), seeded(0, self.device):
            try:
                rows, note = self._try_rows(n), "what several sequences begin with is read once"
                longer = f", in those of at most {self._switches[0]} tokens" if self._switches else ""
                return rows, note + longer
            except Exception as error:  # whatever else goes wrong: this cache cannot be taken apart
                if is_out_of_memory(error):
                    raise
                return None, _not_used(error)

    @cached_property
    def _cache_problem(self) -> str | None:
        """Why its cache is not used; None: token by token it gives what a plain pass does."""
        n = self._trial_length()
        if n < 2:
            return None
        with self.reading(), seeded(0, self.device):
            try:
                self._try_cache(n)
            except Exception as error:  # whatever else goes wrong: nothing can be read behind this cache
                if is_out_of_memory(error):
                    raise
                return _not_used(error)
        return None

    def _try_cache(self, n: int) -> None:
        """Read some tokens, and more of them one by one.

        Raises:
            ValueError: their logits are not those of a plain pass.
            Exception: whatever the model raises.
        """
        ids_2T = torch.randint(self.vocab_size, (2, n), device=self.device)
        start, cache = n - min(n // 2, 5), self.empty_cache(2, n)
        got, cache = self.follow(ids_2T[:, :start], cache, first=start - 1)
        parts = [got]
        for i in range(start, n):
            got, cache = self.follow(ids_2T[:, i : i + 1], cache)
            parts.append(got)
        if not self._are_equal(torch.cat(parts, dim=1), self.logits(ids_2T)[:, start - 1 :]):
            raise ValueError("other logits than without it")

    def _try_rows(self, n: int) -> CacheRows:
        """Rows of a cache, where what is computed with them is what is computed without.

        Raises:
            ValueError: it is not.
            Exception: whatever the model raises.
        """
        ids_3T = torch.randint(self.vocab_size, (3, n), device=self.device)
        half = n - min(n // 2, 5)
        _, two = self.follow(ids_3T[:2, :half], self.empty_cache(2, n))
        _, three = self.follow(ids_3T[:, :half], self.empty_cache(3, n))
        rows = CacheRows(two, three)
        order = torch.tensor([1, 0, 1, 1], device=self.device)
        whole_4T = ids_3T[order].clone()
        whole_4T[:, half:] = torch.randint(self.vocab_size, (4, n - half), device=self.device)
        wanted = self.logits(whole_4T)[:, half:]
        for _ in range(2):  # the second time shows that the first has not written into what it took from
            got, _ = self.follow(whole_4T[:, half:], rows.take(two, order))
            if not self._are_equal(got, wanted):
                raise ValueError("other logits than without it")
        kept, _ = self.follow(whole_4T[:, half:], rows.take(two, order), first=1)
        if not self._are_equal(kept, wanted[:, 1:]):
            raise ValueError("other logits where fewer are asked for")
        return rows

    def _try_packed(self, n: int) -> bool:
        """Whether ends give the logits that they give by themselves, and what is in one moves no other."""
        half = n // 2
        ids_2T = torch.randint(self.vocab_size, (2, half), device=self.device)
        long = (n - half) // 2
        stems = [
            Stem(self._drawn(1), [self._drawn(long - 1), self._drawn(n - half - long)]),
            Stem(self._drawn(0), [self._drawn(2), self._drawn(n - half - 2)]),
        ]
        ends, got = self._packed_logits(ids_2T, stems)
        for row, (stem, columns) in enumerate(zip(stems, ends.columns, strict=True)):
            for end, column in zip(stem.ends, columns, strict=True):
                rest = torch.from_numpy(np.concatenate((stem.trunk, end))).to(self.device)
                wanted = self.logits(torch.cat((ids_2T[row], rest))[None], half + len(stem.trunk))
                if not self._are_equal(got[row : row + 1, column : column + len(end)], wanted):
                    return False
        # Rounding may hide the state of a convolution that goes on from one end to the next.
        others = [Stem(stem.trunk, [self._drawn(len(stem.ends[0])), stem.ends[1]]) for stem in stems]
        _, moved = self._packed_logits(ids_2T, others)
        return all(
            self._are_equal(moved[row, columns[1] :], got[row, columns[1] :], 1e-4)
            for row, columns in enumerate(ends.columns)
        )

    def _packed_logits(self, ids_BT: Tensor, stems: Sequence[Stem]) -> tuple[PackedEnds, Tensor]:
        before = ids_BT.shape[1]
        ends = PackedEnds.of(stems, before)
        capacity = before + max(stem.length for stem in stems)
        _, cache = self.follow(ids_BT, self.empty_cache(len(ids_BT), capacity))
        return ends, self.follow_packed(ends, cache)

    def _drawn(self, length: int) -> np.ndarray:
        return torch.randint(self.vocab_size, (length,), device=self.device).cpu().numpy()

    def _trial_length(self) -> int:
        """Beyond what a window hides, where that is short enough to be tried."""
        window = self.spec.window if isinstance(self.spec.window, int) else 0
        wanted = window + _TRIAL if window + _TRIAL <= _LONGEST_TRIAL else _TRIAL
        return wanted if self.max_length is None else min(wanted, self.max_length)

    @cached_property
    def _keeps_logits(self) -> bool:
        """Whether it leaves out logits that are not asked for, as models of transformers do."""
        if "logits_to_keep" not in forward_parameters(self.model):
            return False
        ids_1T = torch.arange(3, device=self.device)[None] % self.vocab_size
        model: Any = _CalledWith(self.model, logits_to_keep=1)
        with self.reading():
            try:
                fewer = logits_of(self.spec.forward(model, ids_1T))
            except Exception as error:  # any failure but this one is an answer: it is not asked so
                if is_out_of_memory(error):
                    raise
                return False
            return self._are_equal(fewer, self.spec.logits(self.model, ids_1T)[:, 2:])

    def _refuse_reading_ahead(self) -> None:
        """Refuse a model whose outputs depend on what comes later, such as the padding behind a sequence."""
        n = self._trial_length()
        if n < 2:
            return
        with self.reading(), seeded(0, self.device):
            ids_1T = torch.randint(self.vocab_size, (1, n), device=self.device)
            whole, part = (
                self.spec.logits(self.model, ids_1T),
                self.spec.logits(self.model, ids_1T[:, : n // 2]),
            )
        if whole.isnan().any():
            raise ValueError(f"{self.spec.name}: outputs: got NaN; allowed: logits, finite or infinite")
        if not self._are_equal(whole[:, : n // 2], part):
            raise ValueError(
                f"{self.spec.name}: its outputs depend on later tokens; allowed: a causal model, "
                "which is asked what comes next"
            )

    @staticmethod
    def _are_equal(one: Tensor, two: Tensor, tolerance: float | None = None) -> bool:
        """But for rounding, or for a share of the spread of all."""
        if one.shape != two.shape:
            return False
        if tolerance is None:
            tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 5e-2
        one, two = one.float(), two.float()
        # Ids that are never written may have a logit of minus infinity.
        known = two[two.isfinite()]
        spread = (known.max() - known.min()).clamp(min=1e-6) if known.numel() else 0.0
        apart = (one - two).abs().masked_fill(one == two, 0.0)
        return bool(apart.max() <= tolerance * spread)


class _CalledWith:
    """A model that is given arguments of ours as well, however it is called."""

    def __init__(self, model: nn.Module, **ours: Any) -> None:
        self._model, self._ours = model, ours

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        return self._model(*inputs, **more, **self._ours)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _not_used(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"its cache is not used: {type(error).__name__}: {text}"


def _takes_masks_of_pairs(model: nn.Module) -> bool:
    """Whether its kernel of attention takes a mask of pairs, as far as it says which it is.

    Others read something else from it: flash attention takes its entries for places of tokens, which on a
    GPU no error is told of until later.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    kernels = {getattr(config, "_attn_implementation", None) for config in configs}
    return kernels <= {"eager", "sdpa", None}


def _rotary_lengths(model: nn.Module) -> tuple[list[int], list[int]]:
    """Beyond which lengths it takes other rotary angles for all positions: others once; others each time."""
    found: dict[str, set[Any]] = {"longrope": set(), "dynamic": set()}
    for config in [getattr(module, "config", None) for module in model.modules()]:
        longest = getattr(config, "max_position_embeddings", None)
        first = getattr(config, "original_max_position_embeddings", None) or longest
        for name in ("rope_parameters", "rope_scaling"):
            given = getattr(config, name, None)
            given = given if isinstance(given, Mapping) else {}
            # Some have one for each type of layer.
            for each in (given, *(part for part in given.values() if isinstance(part, Mapping))):
                match each.get("rope_type", each.get("type")):
                    case "longrope" | "su":
                        found["longrope"].add(each.get("original_max_position_embeddings") or first)
                    case "dynamic":
                        found["dynamic"].add(longest)
    switches, limits = (sorted(lengths - {None}) for lengths in found.values())
    return switches, limits


def _described(subject: Any, device: torch.device | str | None) -> tuple[ModelSpec, nn.Module]:
    if isinstance(subject, nn.Module):
        model = subject if device is None else subject.to(device)
        training = [module for module in model.modules() if module.training]
        name = type(model).__name__
        here = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            with seeded(0, here):
                inferred = infer(model.eval(), {"name": name})
        finally:
            for module in training:
                module.training = True
        return ModelSpec(build=lambda: model, name=name, **inferred), model
    if callable(subject):
        # Called once, and not as often as `ModelSpec.of` would: it may load a large model.
        with seeded(0):
            return _described(subject(), device)
    spec = ModelSpec.of(subject)
    return spec, spec.create("cpu" if device is None else device)
