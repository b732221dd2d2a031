"""StackCache: cache of the outputs of a frozen prefix of a Rack.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from stackwise.model.quantization import plain_tensors
from stackwise.model.rack import Rack
from stackwise.support.arguments import check_sizes, require

__all__ = ["StackCache", "StackCacheStatistics", "tensors_digest"]


@dataclass(frozen=True)
class StackCacheStatistics:
    """Statistics of a StackCache.

    Attributes:
        hits: number of calls that were answered from the cache.
        misses: number of calls that were computed.
        evictions: number of entries that were removed because the budget was exceeded.
        entries: current number of entries.
        bytes: size of the entries.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


class StackCache:
    """Cache of the hidden states after the first Stacks of a Rack, computed once per batch.

    For training on a frozen prefix over several epochs. Use one cache for each Rack. The key of an entry
    consists of the batch, the number of Stacks and the dtype of autocast. An entry is removed if a parameter
    or buffer of its prefix was replaced, moved, cast or written to. The cache does not see steps of fused
    optimizers, writes through `.data` or NumPy arrays, and changed settings or code of a module: call `clear`
    after them. Hooks of the prefix do not run on a hit, and random results are stored as any others.

    Entries are in host memory. If the budget is exceeded, the least recently used ones are removed.

    Args:
        byte_budget: maximum size of all entries. A larger entry is not stored.

    Raises:
        ValueError: a budget below 1.
    """

    def __init__(self, byte_budget: int) -> None:
        check_sizes(byte_budget=byte_budget)
        self.byte_budget = byte_budget
        self._entries: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()
        self._versions: dict[int, list[_Version]] = {}  # by number of Stacks
        self._hits = self._misses = self._evictions = self._bytes = 0

    def prefix(
        self,
        rack: Rack,
        input_ids: Tensor,
        n_stacks: int,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return `rack.forward_from_stack(rack.embed(input_ids), 0, n_stacks, attention_mask, document_ids)`.

        Args:
            rack: Rack with frozen embedding and frozen first `n_stacks` Stacks.
            input_ids: integer (B, T).
            n_stacks: 1 to the number of Stacks.
            attention_mask: bool or integer (B, T), nonzero at real tokens.
            document_ids: integer (B, T), equal within a document.

        Returns:
            (B, T, C), without gradient; the caller may modify it.

        Raises:
            ValueError: a prefix that trains or has active dropout; inputs that the Rack rejects.
        """
        check_sizes(n_stacks=n_stacks)
        require(n_stacks <= len(rack.stacks), "n_stacks", n_stacks, f"1 to {len(rack.stacks)}")
        is_integer = input_ids.ndim == 2 and input_ids.dtype in (torch.int32, torch.int64)
        seen = f"{input_ids.dtype} {tuple(input_ids.shape)}"
        require(is_integer, "input_ids", seen, "int32 or int64 (batch, positions)")
        modules: dict[str, nn.Module] = {"embedding": rack.embedding}
        modules |= {f"stacks.{i}": stack for i, stack in enumerate(rack.get_stacks()[:n_stacks])}
        _check_frozen(modules)
        self._drop_outdated(n_stacks, modules)
        device = rack.embedding.weight.device
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        key = (n_stacks, autocast, tensors_digest(input_ids, attention_mask, document_ids))
        if key in self._entries:
            self._hits += 1
            self._entries.move_to_end(key)
            return self._entries[key].to(device, copy=True)
        self._misses += 1
        hidden_BTC = rack.forward_from_stack(rack.embed(input_ids), 0, n_stacks, attention_mask, document_ids)
        trains = hidden_BTC.requires_grad  # because of a tensor that is not a parameter
        require(not trains, "prefix", "hidden states with a gradient", "a prefix that is frozen")
        self._store(key, hidden_BTC)
        return hidden_BTC

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self._bytes = 0

    @property
    def statistics(self) -> StackCacheStatistics:
        """Statistics so far, and the current size."""
        return StackCacheStatistics(
            self._hits, self._misses, self._evictions, len(self._entries), self._bytes
        )

    def _drop_outdated(self, n_stacks: int, modules: dict[str, nn.Module]) -> None:
        """Remove the entries of this number of Stacks if their weights changed since the last call."""
        tensors = list(_plain_tensors(modules.values()))
        known = self._versions.get(n_stacks, [])
        if len(known) == len(tensors) and all(
            version.is_of(tensor) for version, tensor in zip(known, tensors, strict=True)
        ):
            return
        self._versions[n_stacks] = [_Version(tensor) for tensor in tensors]
        for key in [key for key in self._entries if key[0] == n_stacks]:
            self._bytes -= self._entries.pop(key).nbytes

    def _store(self, key: tuple[object, ...], hidden_BTC: Tensor) -> None:
        if hidden_BTC.nbytes > self.byte_budget:
            return
        while self._bytes + hidden_BTC.nbytes > self.byte_budget:
            self._bytes -= self._entries.popitem(last=False)[1].nbytes
            self._evictions += 1
        self._entries[key] = hidden_BTC.to("cpu", copy=True)
        self._bytes += hidden_BTC.nbytes


class _Version:
    """State of a tensor at one time, without its values."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)  # a new tensor may have the address of one that was freed
        self._facts = self._facts_of(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Return True if this is the same tensor, and torch has recorded no change of it."""
        # torch counts no versions of inference tensors.
        is_same = self._tensor() is tensor and not tensor.is_inference()
        return is_same and self._facts_of(tensor) == self._facts

    @staticmethod
    def _facts_of(tensor: Tensor) -> tuple[object, ...]:
        if tensor.is_inference():
            return ()
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return tensor._version, storage, tensor.storage_offset(), tensor.dtype, tensor.device, tensor.shape


def tensors_digest(*tensors: Tensor | None) -> str:
    """Return the SHA-256, in hexadecimal, of values, shapes and dtypes. Tensors of a GPU are copied."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
        else:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            yield from plain_tensors(tensor)


def _check_frozen(modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        for path, part in module.named_modules(prefix=name):
            for own, tensor in (*part.named_parameters(path, False), *part.named_buffers(path, False)):
                require(not tensor.requires_grad, "prefix", f"{own} that trains", "a prefix that is frozen")
            rate = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0)
            fixed = not (part.training and isinstance(rate, float | int) and rate > 0)
            require(fixed, "prefix", f"{path} with dropout={rate}", "eval mode, or no dropout")
