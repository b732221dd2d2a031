"""DecodeStep: one more token, captured or compiled.

Shapes: B batch, S slots of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stackwise.model.cache import BlockCache, RackCache
from stackwise.model.compilation import Replayable
from stackwise.model.layout import Layout
from stackwise.model.linear import Linear
from stackwise.model.mode import evaluating
from stackwise.support.arguments import require

if TYPE_CHECKING:
    from stackwise.model.rack import Rack

__all__ = ["DecodeStep"]

_LEAST_CAPACITY = 256
_passes: WeakKeyDictionary[Rack, dict[tuple[object, ...], Replayable]] = WeakKeyDictionary()


class DecodeStep:
    """One more token, in eval mode: ids (B,) to the logits (B, V) that follow it.

    Captured once in a CUDA graph, at the first call, and replayed: launching the kernels of a small
    model takes longer than running them. The tensor returned is then overwritten by the next call. The graph
    reads weights where they lay: they may change in value, but not be cast or moved.

    Compiled, one graph serves every position, since the position is a tensor; it reads all slots of
    the cache each time. What is compiled is kept for caches of the same batch size and capacity, with
    and without padding. From the second call on the graph alone is run, with the tensors of the first:
    weights may change in value. Where their dtype or device, or the Stacks of the Rack, have become others,
    that call is a first one again; whatever else changes is seen by the next DecodeStep.

    Args:
        rack: causal.
        cache: of `rack.new_cache`; holds the prompt.
        capture: False: launch the kernels each time; None: capture on CUDA.
        compile: compile the step.
    """

    def __init__(
        self,
        rack: Rack,
        cache: RackCache,
        *,
        capture: bool | None = None,
        compile: bool = False,  # noqa: A002  # the name in PyTorch
    ) -> None:
        self.rack, self.cache = rack, cache
        self._compile = compile
        self._again: Callable[[], Tensor | None] | None = None
        self._stacks: list[nn.Module] = []  # of the last pass through the modules
        if compile:
            cache.count_on_device()
        self.capture = cache.device.type == "cuda" if capture is None else capture
        self._graph: torch.cuda.CUDAGraph | None = None
        self._token_B1 = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device=cache.device)
        self._logits_BV: Tensor | None = None

    @torch.no_grad()
    def __call__(self, token_B: Tensor) -> Tensor:
        """Put the tokens into the cache; the logits that follow them."""
        rows, allowed = len(token_B), self.cache.batch_size
        require(rows == allowed, "token_B", rows, f"{allowed} rows, as in the cache")
        self._token_B1.copy_(token_B[:, None])
        if not self.capture:
            return self._step()
        assert self.cache.length < self.cache.capacity, "the device cannot say that the cache is full"
        if self._graph is None or self._stacks != [*self.rack.stacks]:
            with torch.cuda.device(self.cache.device):
                self._graph = self._captured()
        assert self._logits_BV is not None
        self._graph.replay()
        self.cache.length += 1
        return self._logits_BV

    @staticmethod
    def capacity(n_tokens: int) -> int:
        """Room for `n_tokens`, rounded up so that few different compiled steps serve all prompts."""
        return max(_LEAST_CAPACITY, 1 << (n_tokens - 1).bit_length())

    def _step(self) -> Tensor:
        start, keep_BS = self.cache.admit(*self._token_B1.shape)
        logits_BV = None
        if self._again is not None and self._stacks == [*self.rack.stacks]:
            logits_BV = self._again()
        if logits_BV is None:
            logits_BV = self._whole_step(start, keep_BS)
        self.cache.advance(1)
        return logits_BV

    def _whole_step(self, start: int | Tensor, keep_BS: Tensor | None) -> Tensor:
        """Through all modules; compiled, it also says how to do the same again."""
        rack, cache = self.rack, self.cache
        rack.check_cache(cache)
        with evaluating(rack):
            if self._compile:
                run = _compiled(rack, cache.batch_size, cache.capacity, keep_BS is not None)
                wide = cache.batch_size == 1 and _takes_float32(rack)
                logits_BV, self._again = run(self._token_B1, rack, start, keep_BS, cache.blocks, wide)
            else:
                logits_BV = _pass(self._token_B1, rack, start, keep_BS, cache.blocks)
        self._stacks = [*rack.stacks]
        return logits_BV

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The graph. Capture changes nothing: warming up does, and is undone."""
        cache = self.cache
        cache.count_on_device()
        length, before = cache.length, cache.snapshot()
        kind = cache.device.type
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Weights that autocast keeps in its cache may be gone when the graph is replayed.
        with torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        ):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream().wait_stream(side)
            cache.restore(before)
            cache.length = length
            with torch.cuda.graph(graph, stream=side):
                self._logits_BV = self._step()
            cache.length = length
        return graph


def _pass(
    token_B1: Tensor,
    rack: Rack,
    start: int | Tensor,
    keep_BS: Tensor | None,
    caches: Sequence[Sequence[BlockCache]],
    wide: bool = False,
) -> Tensor:
    x_B1C = rack.embed(token_B1)
    if wide:
        x_B1C = x_B1C.float()
    x_B1C = rack.follow(x_B1C, Layout(x_B1C, start=start, keep_BS=keep_BS), caches)
    return rack.head(x_B1C)[:, 0]


def _takes_float32(rack: Rack) -> bool:
    """Whether a single vector may pass in float32: it costs nothing to widen, and `Linear` is made for it."""
    layers = [module for module in rack.modules() if isinstance(module, nn.Linear)]
    wide = all(isinstance(layer, Linear) and layer.takes_float32 for layer in layers)
    return wide and rack.embedding.weight.device.type == "cpu"


def _compiled(rack: Rack, *sizes: object) -> Replayable:
    """The pass compiled for one size of cache: the compiler keeps few graphs for each code object."""
    of_rack = _passes.setdefault(rack, {})
    if sizes not in of_rack:
        of_rack[sizes] = Replayable(_pass)
    return of_rack[sizes]
