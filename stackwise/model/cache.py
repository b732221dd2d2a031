"""KV caches and state caches for incremental decoding.

Shapes: B batch, H heads, T tokens of this pass, S tokens in the cache, D size, M features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from stackwise.model.layout import Layout
from stackwise.model.mask import Keys, padding_mask

__all__ = ["BlockCache", "RackCache", "SlotCache", "StateCache"]


class SlotCache:
    """Cache with one slot per token, for keys and values or other tensors with a time axis.

    With a sliding window smaller than the capacity, the slots are a ring buffer of the window's size: token t
    is in slot t mod S. Memory is allocated once, at construction.

    Args:
        batch_size: B.
        capacity: maximum number of tokens, of prompt and generation together.
        window: size of the sliding window, or None.
        sizes: (H, D) of each cached tensor.
        dtype: dtype of each tensor.
        device: device of each tensor.
    """

    def __init__(
        self,
        batch_size: int,
        capacity: int,
        window: int | None,
        sizes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.n_slots = capacity if window is None else min(window, capacity)
        self.rolling = self.n_slots < capacity
        self.slots = [
            torch.zeros(batch_size, heads, self.n_slots, size, dtype=dtype, device=device)
            for heads, size in sizes
        ]

    def append(self, layout: Layout, *new_BHTD: Tensor) -> tuple[list[Tensor], Keys | None]:
        """Store the tensors of this pass, and return all entries that its queries may see.

        Returns:
            Each tensor as (B, H, S, D), in the dtype of its input, and the times of the keys; None: the
            result is exactly the tokens of this pass.
        """
        if isinstance(layout.start, int):
            whole, keys = self._append(layout, layout.start, *new_BHTD)
        else:
            whole, keys = self._append_on_device(layout.start, *new_BHTD)
        return [each.to(new.dtype) for each, new in zip(whole, new_BHTD, strict=True)], keys

    def _append(self, layout: Layout, start: int, *new_BHTD: Tensor) -> tuple[list[Tensor], Keys | None]:
        n_new = new_BHTD[0].shape[2]
        # The slots are detached: otherwise every pass would retain the graphs of all earlier ones.
        graph = torch.is_grad_enabled()
        if not self.rolling or start + n_new <= self.n_slots:
            for slots, new in zip(self.slots, new_BHTD, strict=True):
                slots[:, :, start : start + n_new] = new.detach()
            if start == 0:
                return list(new_BHTD), None
            if graph:
                whole = [
                    torch.cat((slots[:, :, :start], new.to(slots.dtype)), dim=2)
                    for slots, new in zip(self.slots, new_BHTD, strict=True)
                ]
            else:
                whole = [slots[:, :, : start + n_new] for slots in self.slots]
            return whole, Keys(torch.arange(start + n_new, device=layout.device), True)
        if n_new == 1 and not graph:
            for slots, new in zip(self.slots, new_BHTD, strict=True):
                slots[:, :, start % self.n_slots] = new[:, :, 0]
            if layout.keep_BS is None:  # then a single query does not depend on the order of the slots
                return self.slots, Keys(torch.arange(self.n_slots, device=layout.device), True)
            return self.slots, Keys(self._times(torch.tensor(start, device=layout.device)), False)
        # Early queries of the pass still need slots that its later tokens overwrite.
        n_before = min(start, self.n_slots)
        time_S = torch.arange(start - n_before, start + n_new, device=layout.device)
        before, last = time_S[:n_before] % self.n_slots, time_S[-self.n_slots :] % self.n_slots
        whole = []
        for slots, new in zip(self.slots, new_BHTD, strict=True):
            whole.append(torch.cat((slots[:, :, before], new.to(slots.dtype)), dim=2))
            slots[:, :, last] = whole[-1][:, :, -self.n_slots :].detach()
        return whole, Keys(time_S, True) if start else None

    def _append_on_device(self, start: Tensor, *new_BHTD: Tensor) -> tuple[list[Tensor], Keys]:
        """Append one token like `append`, without a host value of `start`."""
        slot = (start % self.n_slots).reshape(1)
        for slots, new in zip(self.slots, new_BHTD, strict=True):
            assert new.shape[2] == 1, "one token at a time where the position is on the device"
            slots.index_copy_(2, slot, new.detach().to(slots.dtype))
        return self.slots, Keys(self._times(start), False)

    def _times(self, start: Tensor) -> Tensor:
        """Return the time of the token in each slot, after the one at `start` was stored; negative: empty."""
        slot_S = torch.arange(self.n_slots, device=start.device)
        return start - (start - slot_S) % self.n_slots

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(slots.nbytes for slots in self.slots)


class StateCache:
    """Running sums over all tokens so far. Their size does not depend on the number of tokens.

    Args:
        sums: sums before the first token. Float32, because a bfloat16 sum stops growing after a few hundred
            terms.
    """

    def __init__(self, sums: Sequence[Tensor]) -> None:
        self.sums = list(sums)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(each.nbytes for each in self.sums)


BlockCache = SlotCache | StateCache


class RackCache:
    """Caches of all Blocks, and the padding mask of the tokens so far.

    Padding has no position but occupies a slot, and a sliding window counts slots. If padding lies between
    real tokens, as after a turn that is padded on the right, the window contains fewer real tokens.

    Args:
        blocks: one cache per Block, grouped by Stack.
        batch_size: B.
        capacity: maximum number of tokens.
        device: device of the caches.

    Attributes:
        length: number of cached tokens.
        device: device of the caches.
    """

    _made_for: list[ref[nn.Module]] | None = None  # the Blocks, in order

    def __init__(
        self, blocks: Sequence[Sequence[BlockCache]], batch_size: int, capacity: int, device: torch.device
    ) -> None:
        self.blocks, self.batch_size, self.capacity = blocks, batch_size, capacity
        self.length = 0
        self.device = device
        self._opened_at: int | None = None  # length at the start of a pass that has not finished
        self._keep_BS: Tensor | None = None
        self._length_on_device: Tensor | None = None

    def bind(self, blocks: Sequence[nn.Module]) -> None:
        """Bind the cache to these Blocks, in this order. It stores only weak references."""
        self._made_for = [ref(block) for block in blocks]

    def is_for(self, blocks: Sequence[nn.Module]) -> bool:
        """Return True if the cache is for these Blocks. An empty cache is bound to them."""
        if self._made_for is not None and [each() for each in self._made_for] == list(blocks):
            return True
        if self._made_for is not None and self.length:
            return False
        self.bind(blocks)
        return True

    def __getstate__(self) -> dict[str, Any]:
        # A copy may come with a copy of the Rack, so it is bound to the Blocks of its first pass.
        return {**self.__dict__, "_made_for": None}

    def layout(self, x_BTC: Tensor, attention_mask: Tensor | None) -> Layout:
        """Return the Layout of a pass of T more tokens; see `admit`."""
        start, keep_BS = self.admit(x_BTC.shape[0], x_BTC.shape[1], attention_mask)
        return Layout(x_BTC, start=start, keep_BS=keep_BS)

    def admit(
        self, batch_size: int, seq_len: int, attention_mask: Tensor | None = None
    ) -> tuple[int | Tensor, Tensor | None]:
        """Return `start` and `keep_BS` for the Layout of `seq_len` more tokens.

        Args:
            batch_size: B.
            seq_len: T.
            attention_mask: bool or integer (B, T), nonzero at real tokens; None: all are real.

        Raises:
            ValueError: another batch size, too many tokens, or a failed earlier pass that changed running
                sums or a ring buffer.
        """
        if batch_size != self.batch_size:
            raise ValueError(f"input_ids: got {batch_size} rows; allowed: {self.batch_size}, as in the cache")
        if self.length + seq_len > self.capacity:
            raise ValueError(
                f"input_ids: got {seq_len} tokens after {self.length}; allowed: {self.capacity} in all, "
                "the capacity of the cache"
            )
        keep_BT = padding_mask(attention_mask, batch_size, seq_len)
        if self._opened_at == self.length:
            self._forget_failed_pass()
        self._opened_at = self.length
        if keep_BT is not None and self._keep_BS is None:
            self._keep_BS = torch.ones(batch_size, self.capacity, dtype=torch.bool, device=self.device)
        if self._keep_BS is not None and keep_BT is not None:
            self._keep_BS[:, self.length : self.length + seq_len] = keep_BT
        return self.length if self._length_on_device is None else self._length_on_device, self._keep_BS

    def _forget_failed_pass(self) -> None:
        """Clear a failed pass. Slots are overwritten later; sums and ring buffers cannot be restored."""
        blocks = [cache for stack in self.blocks for cache in stack]
        if any(isinstance(cache, StateCache) or cache.rolling for cache in blocks):
            raise ValueError(
                f"cache: got one in which a pass failed after {self.length} tokens, and left what cannot be "
                "taken out; allowed: a new one"
            )
        if self._keep_BS is not None:
            self._keep_BS[:, self.length :] = True

    def advance(self, n_tokens: int) -> None:
        """Add `n_tokens` to the length."""
        self._opened_at = None
        self.length += n_tokens
        if self._length_on_device is not None:
            self._length_on_device += n_tokens

    def count_on_device(self) -> None:
        """Store the length on the device from here on, and accept only single tokens.

        One captured or compiled step can then be used for every position. It reads all slots each time.
        """
        self._length_on_device = torch.tensor(self.length, device=self.device)

    def snapshot(self) -> list[Tensor]:
        """Return copies of the state that a second step would not simply overwrite; for `restore`."""
        return [each.clone() for each in self._running()]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Undo the steps since `snapshot` on the device. The caller resets `length`."""
        for each, before in zip(self._running(), snapshot, strict=True):
            each.copy_(before)

    def _running(self) -> list[Tensor]:
        blocks = [cache for stack in self.blocks for cache in stack]
        sums = [each for cache in blocks if isinstance(cache, StateCache) for each in cache.sums]
        return sums if self._length_on_device is None else [self._length_on_device, *sums]

    @property
    def nbytes(self) -> int:
        """Size of the caches of all Blocks in bytes."""
        return sum(cache.nbytes for stack in self.blocks for cache in stack)
