"""LanguageModel: uniform interface to any causal language model, for scoring and generation.

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
    """Causal model of tokens.

    Optional features are detected like in `ModelSpec.of`, and tested before use. If the rows of a cache
    cannot be copied, or if a cache gives other logits than a plain pass, the cache is not used.

    With LongRoPE (Ding et al. 2024, arXiv:2402.13753), as in Phi-3, the rotary angles of all positions change
    if the longest row of a call exceeds the original training length: see `span`. With dynamic NTK scaling,
    they change with each length above it, so `max_length` is at most this length.

    Args:
        subject: a module, which is not copied and keeps its mode; or an argument of
            `ModelSpec.of`, which creates a model.
        device: device for the model. None: it is not moved.
        max_length: maximum number of positions of a sequence. None: the limit that the model names.
        reuse: True: compute common prefixes of sequences once, if the model has a cache.

    Attributes:
        spec: description of the model's calls.
        model: the module.
        max_length: maximum number of positions. None: unknown.

    Raises:
        InferenceError, FactoryError, TypeError: errors of `ModelSpec.of`.
        ValueError: the inputs are not tokens, or the outputs are NaN or depend on later tokens.
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
        self._packing: dict[int, bool] = {}  # result of the test by its length
        self._refuse_reading_ahead()

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. Ids are below it."""
        return self.spec.width

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End tokens in the model's `generation_config` or, if it has none, in its `config`."""
        for name in ("generation_config", "config"):
            found = getattr(getattr(self.model, name, None), "eos_token_id", None)
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
        return frozenset()

    @cached_property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Set eval mode and disable gradients within the block.

        Restore the mode of each module afterwards.
        """
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def logits(self, ids_BT: Tensor, first: int = 0) -> Tensor:
        """Return the logits (B, T - first, V) after each position from `first` on."""
        if first and self._keeps_logits:
            model: Any = _CalledWith(self.model, logits_to_keep=ids_BT.shape[1] - first)
            return logits_of(self.spec.forward(model, ids_BT))
        return self.spec.logits(self.model, ids_BT)[:, first:]

    def follow(self, ids_BT: Tensor, cache: Any, first: int = 0) -> tuple[Tensor, Any]:
        """Return logits (B, T - first, V) of tokens that follow a cache, and the cache with these tokens."""
        assert self.spec.decode is not None
        model: Any = self.model
        if first and self._keeps_logits:
            model = _CalledWith(model, logits_to_keep=ids_BT.shape[1] - first)
            output, cache = self.spec.decode(model, ids_BT, cache)
            return logits_of(output), cache
        output, cache = self.spec.decode(model, ids_BT, cache)
        return logits_of(output)[:, first:], cache

    def follow_packed(self, ends: PackedEnds, cache: Any) -> Tensor:
        """Return logits (B, T, V) of all positions of packed ends.

        Needs `packs_ends`. The cache is invalid afterwards.
        """
        assert self.spec.decode is not None
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        ids_BT, position_BT, visible_BTS = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (ends.ids_BT, ends.position_BT, ends.visible_BTS)
        )
        # A mask that is added to the attention logits. Every kernel accepts it, but some refuse a bool mask.
        hidden_BTS = torch.zeros(visible_BTS.shape, dtype=dtype, device=self.device)
        hidden_BTS.masked_fill_(~visible_BTS, torch.finfo(dtype).min)
        model: Any = _CalledWith(self.model, attention_mask=hidden_BTS[:, None], position_ids=position_BT)
        return logits_of(self.spec.decode(model, ids_BT, cache)[0])

    def empty_cache(self, batch_size: int, capacity: int) -> Any:
        """Return a cache for `batch_size` sequences of at most `capacity` tokens. None: the cache grows."""
        return empty_cache(self.model, batch_size, capacity)

    def span(self, length: int) -> int:
        """Return the index of the rotary angles for this length.

        Sequences of two spans need separate passes.
        """
        return sum(length > switch for switch in self._switches)

    @property
    def keeps_cache(self) -> bool:
        """True if the model has a correct cache and `reuse` is set."""
        return self._reuse and self.spec.decode is not None and self._cache_problem is None

    @cached_property
    def cache_rows(self) -> CacheRows | None:
        """Object that copies rows of the cache. None: not available, for the reason in `reuse_note`."""
        return self._tried_rows[0]

    @property
    def reuse_note(self) -> str:
        """Note for reports: common prefixes are computed once, or the reason against it."""
        return self._tried_rows[1]

    @cached_property
    def grows_cache(self) -> bool:
        """True if a cache has no fixed capacity."""
        return self.empty_cache(1, 1) is None

    def packs_ends(self, length: int) -> bool:
        """Return True if sequences with a common prefix can be computed as `PackedEnds` of this length.

        The test uses the next power of two as its length. A model that masks by the position in a row,
        instead of the given position ids, only fails in rows of that length. Models with a kernel that takes
        no mask of position pairs are not tested.
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
                except Exception as error:  # any other error means that the model does not accept such a mask
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
            except Exception as error:  # any other error means that rows of this cache cannot be copied
                if is_out_of_memory(error):
                    raise
                return None, _not_used(error)

    @cached_property
    def _cache_problem(self) -> str | None:
        """Reason why the cache is not used. None: token by token, it gives the logits of a plain pass."""
        n = self._trial_length()
        if n < 2:
            return None
        with self.reading(), seeded(0, self.device):
            try:
                self._try_cache(n)
            except Exception as error:  # any other error means that this cache cannot be used
                if is_out_of_memory(error):
                    raise
                return _not_used(error)
        return None

    def _try_cache(self, n: int) -> None:
        """Read some tokens in one pass, and more of them one by one.

        Raises:
            ValueError: the logits differ from a plain pass.
            Exception: an error of the model.
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
        """Return the rows of a cache, if logits with copied rows equal the logits of a plain pass.

        Raises:
            ValueError: the logits differ.
            Exception: an error of the model.
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
        for _ in range(2):  # the second pass shows that the first one did not write into the source
            got, _ = self.follow(whole_4T[:, half:], rows.take(two, order))
            if not self._are_equal(got, wanted):
                raise ValueError("other logits than without it")
        kept, _ = self.follow(whole_4T[:, half:], rows.take(two, order), first=1)
        if not self._are_equal(kept, wanted[:, 1:]):
            raise ValueError("other logits where fewer are asked for")
        return rows

    def _try_packed(self, n: int) -> bool:
        """Return True if packed ends have the logits of separate sequences, and do not affect each other."""
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
        # If the state of a convolution continues from one end to the next, rounding may hide the difference.
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
        """Return a length that exceeds the attention window, if this is short enough for a test."""
        window = self.spec.window if isinstance(self.spec.window, int) else 0
        wanted = window + _TRIAL if window + _TRIAL <= _LONGEST_TRIAL else _TRIAL
        return wanted if self.max_length is None else min(wanted, self.max_length)

    @cached_property
    def _keeps_logits(self) -> bool:
        """True if the model can skip the logits of unneeded positions, like models of transformers."""
        if "logits_to_keep" not in forward_parameters(self.model):
            return False
        ids_1T = torch.arange(3, device=self.device)[None] % self.vocab_size
        model: Any = _CalledWith(self.model, logits_to_keep=1)
        with self.reading():
            try:
                fewer = logits_of(self.spec.forward(model, ids_1T))
            except Exception as error:  # any other error means that the model does not support it
                if is_out_of_memory(error):
                    raise
                return False
            return self._are_equal(fewer, self.spec.logits(self.model, ids_1T)[:, 2:])

    def _refuse_reading_ahead(self) -> None:
        """Refuse a model with outputs that depend on later tokens, such as the padding after a sequence."""
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
        """Return True if two tensors of logits are equal within a tolerance, relative to their range."""
        if one.shape != two.shape:
            return False
        if tolerance is None:
            tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 5e-2
        one, two = one.float(), two.float()
        # Ids that are never generated may have a logit of minus infinity.
        known = two[two.isfinite()]
        spread = (known.max() - known.min()).clamp(min=1e-6) if known.numel() else 0.0
        apart = (one - two).abs().masked_fill(one == two, 0.0)
        return bool(apart.max() <= tolerance * spread)


class _CalledWith:
    """Model that receives additional arguments in each call."""

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
    """Return True if the model names no attention kernel that refuses a mask of position pairs.

    Such kernels interpret the mask differently. Flash attention uses its entries as indices of tokens, which
    causes a delayed error on a GPU.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    kernels = {getattr(config, "_attn_implementation", None) for config in configs}
    return kernels <= {"eager", "sdpa", None}


def _rotary_lengths(model: nn.Module) -> tuple[list[int], list[int]]:
    """Return the lengths above which all rotary angles change: once (LongRoPE), or always (dynamic NTK)."""
    found: dict[str, set[Any]] = {"longrope": set(), "dynamic": set()}
    for config in [getattr(module, "config", None) for module in model.modules()]:
        longest = getattr(config, "max_position_embeddings", None)
        first = getattr(config, "original_max_position_embeddings", None) or longest
        for name in ("rope_parameters", "rope_scaling"):
            given = getattr(config, name, None)
            given = given if isinstance(given, Mapping) else {}
            # Some configurations have one entry per type of layer.
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
        # The factory is called only once, because it may load a large model. `ModelSpec.of` would call it
        # more often.
        with seeded(0):
            return _described(subject(), device)
    spec = ModelSpec.of(subject)
    return spec, spec.create("cpu" if device is None else device)
