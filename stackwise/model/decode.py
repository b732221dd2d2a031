"""DecodeStep: decoding of one token, with CUDA graph capture or compilation.

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
from stackwise.support.arguments import require
from stackwise.support.mode import evaluating

if TYPE_CHECKING:
    from stackwise.model.rack import Rack

__all__ = ["DecodeStep"]

_LEAST_CAPACITY = 256
_passes: WeakKeyDictionary[Rack, dict[tuple[object, ...], Replayable]] = WeakKeyDictionary()


class DecodeStep:
    """Decoding step in eval mode: token ids (B,) to the logits (B, V) that follow them.

    On CUDA, the first call captures a CUDA graph, and later calls replay it: launching the kernels of a small
    model takes longer than running them. The next call overwrites the returned tensor. The graph reads
    weights at their addresses: they may change in value, but must not be cast or moved.

    Compiled, one graph is used for every position, because the position is a tensor. It reads all slots of
    the cache each time. Compiled steps are reused for caches of equal batch size and capacity, with and
    without padding. From the second call on, only the graph runs, on the tensors of the first call: weights
    may change in value. A change of their dtype or device, or of the Stacks of the Rack, repeats the first
    call. Other changes affect only the next DecodeStep.

    Args:
        rack: causal Rack.
        cache: result of `rack.new_cache`, with the prompt.
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
        self._stacks: list[nn.Module] = []  # Stacks in the last pass through the modules
        if compile:
            cache.count_on_device()
        self.capture = cache.device.type == "cuda" if capture is None else capture
        self._graph: torch.cuda.CUDAGraph | None = None
        self._token_B1 = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device=cache.device)
        self._logits_BV: Tensor | None = None

    @torch.no_grad()
    def __call__(self, token_B: Tensor) -> Tensor:
        """Add the tokens to the cache, and return the logits that follow them."""
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
        """Return a capacity for `n_tokens`, rounded up, so that few compiled steps cover all prompts."""
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
        """Run all modules. If compiled, also store the function that replays the step."""
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
        """Return the captured graph. Capture changes no state; the warm-up does, and is undone."""
        cache = self.cache
        cache.count_on_device()
        length, before = cache.length, cache.snapshot()
        kind = cache.device.type
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Weights in autocast's cache may be freed before the graph is replayed.
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
    """Return True if a single vector may be float32: widening is free, and `Linear` is optimised for it."""
    layers = [module for module in rack.modules() if isinstance(module, nn.Linear)]
    wide = all(isinstance(layer, Linear) and layer.takes_float32 for layer in layers)
    return wide and rack.embedding.weight.device.type == "cpu"


def _compiled(rack: Rack, *sizes: object) -> Replayable:
    """Return the compiled pass for one size of cache: the compiler limits the graphs per code object."""
    of_rack = _passes.setdefault(rack, {})
    if sizes not in of_rack:
        of_rack[sizes] = Replayable(_pass)
    return of_rack[sizes]
