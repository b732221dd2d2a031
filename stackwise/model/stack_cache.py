"""StackCache: cache of the outputs of a frozen prefix of a Rack, keyed by a digest of all inputs.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from stackwise.checkpoint.folder import flush
from stackwise.model.attention import Attention
from stackwise.model.backend import rules_in_force
from stackwise.model.content_hash import ContentHash, from_elsewhere, tensor_digest
from stackwise.model.latent import LatentAttention
from stackwise.model.mask import document_runs, padding_mask
from stackwise.model.rack import Rack
from stackwise.support.arguments import check_sizes, require
from stackwise.support.files import replacing
from stackwise.support.lock import file_lock
from stackwise.support.random_state import random_states, random_states_equal

__all__ = ["StackCache", "StackCacheStatistics"]

_ENTRY = r"[0-9a-f]{64}\.safetensors"
_PARTIAL = rf"\.{_ENTRY}\.\d+\.[0-9a-f]{{8}}"  # name of an entry while `replacing` writes it


@dataclass(frozen=True)
class StackCacheStatistics:
    """Statistics of a StackCache.

    Attributes:
        hits: number of calls that were answered from the cache.
        misses: number of calls that were computed.
        evictions: number of entries that this cache has evicted.
        entries: current number of entries; on disk, of all processes.
        bytes: size of the entries; on disk, with file headers.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


class StackCache:
    """Cache of the hidden states after the first Stacks of a Rack, computed once per input.

    For training on top of a frozen prefix over several epochs: a hit costs one pass over the prefix's weights
    instead of a forward pass over all tokens. The key is a digest of the bytes of all weights and buffers,
    settings and code of the prefix (`ContentHash`), of the inputs, and of the numerics: device, dtypes,
    autocast, matrix product precision, selection of attention kernels, and the version of torch. A result is
    stored only if the digest and the random states are unchanged after the computation: random results are
    not reusable.

    Entries are in memory, or in one safetensors file each in a directory. Files survive the process and can
    be shared by several processes. A file is created atomically. It is used only if its content has the
    digest that it was written with; otherwise it is removed. The least recently used entries are evicted
    first.

    Args:
        byte_budget: maximum size of all entries. A larger entry is not stored.
        directory: created if it does not exist; None: in memory.
        code_version: name of the user-defined classes, which are otherwise identified by their objects in
            this process. With it, entries of Racks with such classes survive the process. Change it whenever
            their code computes a different result, because the code is then not inspected.

    Raises:
        ValueError: a budget below 1.
    """

    def __init__(
        self, byte_budget: int, directory: str | Path | None = None, *, code_version: str | None = None
    ) -> None:
        check_sizes(byte_budget=byte_budget)
        self._entries = (
            _Memory(byte_budget) if directory is None else _Directory(byte_budget, Path(directory))
        )
        self._content = ContentHash(code_version)
        self._hits = self._misses = 0

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
            rack: Rack with frozen embedding and frozen first `n_stacks` Stacks. A subclass must not override
                `embed` and `forward_from_stack`.
            input_ids: integer (B, T).
            n_stacks: 1 to the number of Stacks.
            attention_mask: bool or integer (B, T), nonzero at real tokens.
            document_ids: integer (B, T), equal within a document.

        Returns:
            (B, T, C), without gradient; the caller may modify it.

        Raises:
            ValueError: a prefix that is trainable, has active dropout or is computed by an overridden method,
                or has content that cannot be in a digest (`ContentHash`); inputs that the Rack rejects.
            OSError: the directory cannot be written or read.
        """
        check_sizes(n_stacks=n_stacks)
        require(n_stacks <= len(rack.stacks), "n_stacks", n_stacks, f"1 to {len(rack.stacks)}")
        _check_known(rack)
        modules: dict[str, nn.Module] = {"embedding": rack.embedding}
        modules |= {f"stacks.{i}": rack.get_stack(i) for i in range(n_stacks)}
        _check_fixed(modules)
        key = self._key(rack, modules, input_ids, attention_mask, document_ids)
        hidden_BTC = self._entries.get(key)
        if hidden_BTC is not None:
            self._hits += 1
            return hidden_BTC.to(rack.embedding.weight.device)
        self._misses += 1
        before = random_states()
        hidden_BTC = rack.forward_from_stack(rack.embed(input_ids), 0, n_stacks, attention_mask, document_ids)
        trains = hidden_BTC.requires_grad  # because of a tensor that is not a parameter
        require(not trains, "prefix", "hidden states with a gradient", "a prefix that is frozen")
        drew = not random_states_equal(before, random_states())
        if not drew and self._key(rack, modules, input_ids, attention_mask, document_ids) == key:
            self._entries.put(key, hidden_BTC)
        return hidden_BTC

    @property
    def statistics(self) -> StackCacheStatistics:
        """Statistics so far, and the current size."""
        sizes = self._entries.sizes()
        return StackCacheStatistics(self._hits, self._misses, self._entries.evictions, len(sizes), sum(sizes))

    def _key(
        self,
        rack: Rack,
        modules: dict[str, nn.Module],
        input_ids: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> str:
        require(input_ids.ndim == 2, "input_ids", tuple(input_ids.shape), "(batch, positions)")
        is_integer = input_ids.dtype in (torch.int32, torch.int64)
        require(is_integer, "input_ids", input_ids.dtype, "int32 or int64")
        device = rack.embedding.weight.device.type
        backends: Any = torch.backends
        products = backends.cuda.matmul
        inputs = (
            input_ids.long(),
            padding_mask(attention_mask, *input_ids.shape),
            document_runs(document_ids, *input_ids.shape),
        )
        facts = (
            self._content(modules),
            self._content.code_of(type(rack)),
            *(None if each is None else tensor_digest(each) for each in inputs),
            torch.__version__,
            device,
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            [each.fp32_precision for each in (backends, products, backends.mkldnn.matmul)],
            products.allow_fp16_reduced_precision_reduction,
            products.allow_bf16_reduced_precision_reduction,
            rules_in_force(_query_shapes(modules, *input_ids.shape)),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _query_shapes(modules: dict[str, nn.Module], B: int, T: int) -> set[tuple[int, ...]] | None:
    """Return (B, H, T, D) of all attention modules; None: external code may use any shape."""
    parts = [part for module in modules.values() for part in module.modules()]
    kinds: set[type] = {type(part) for part in parts}
    if any(map(from_elsewhere, kinds)):
        return None
    return {(B, p.n_heads, T, p.head_dim) for p in parts if isinstance(p, Attention | LatentAttention)}


def _check_known(rack: Rack) -> None:
    """Raise if the prefix of a Rack may depend on more than its embedding and Stacks."""
    for name in ("embed", "forward_from_stack"):
        known = getattr(getattr(rack, name), "__func__", None) is getattr(Rack, name)
        require(known, "rack", f"another {name} in {type(rack).__name__}", f"Rack.{name}")


def _check_fixed(modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        for path, part in module.named_modules(prefix=name):
            for own, tensor in (*part.named_parameters(path, False), *part.named_buffers(path, False)):
                require(not tensor.requires_grad, "prefix", f"{own} that trains", "a prefix that is frozen")
            rate = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0)
            fixed = not (part.training and isinstance(rate, float | int) and rate > 0)
            require(fixed, "prefix", f"{path} with dropout={rate}", "eval mode, or no dropout")


class _Memory:
    """Entries in memory, in order of last use, oldest first."""

    def __init__(self, byte_budget: int) -> None:
        self.byte_budget, self.evictions = byte_budget, 0
        self._tensors: OrderedDict[str, Tensor] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Tensor | None:
        with self._lock:
            if key not in self._tensors:
                return None
            self._tensors.move_to_end(key)
            return self._tensors[key].clone()

    def put(self, key: str, tensor: Tensor) -> None:
        if tensor.nbytes > self.byte_budget:
            return
        copy = tensor.to("cpu", copy=True)
        with self._lock:
            if key in self._tensors:  # another thread was faster
                return
            while self._total + copy.nbytes > self.byte_budget:
                self._total -= self._tensors.popitem(last=False)[1].nbytes
                self.evictions += 1
            self._tensors[key] = copy
            self._total += copy.nbytes

    def sizes(self) -> list[int]:
        with self._lock:
            return [tensor.nbytes for tensor in self._tensors.values()]


class _Directory:
    """Entries as files `DIGEST.safetensors`. The modification time is the time of last use.

    No state of the directory is stored, so that changes by other processes are seen.
    """

    def __init__(self, byte_budget: int, directory: Path) -> None:
        self.byte_budget, self.evictions, self.directory = byte_budget, 0, directory
        directory.mkdir(parents=True, exist_ok=True)
        self._last = 0

    def get(self, key: str) -> Tensor | None:
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                stored: Tensor = file.get_tensor("hidden").clone()  # the mapped file may be removed
                sound = file.metadata() == self._metadata(key, stored)
        except FileNotFoundError:
            return None
        except SafetensorError:
            sound = False
        if not sound:
            path.unlink(missing_ok=True)
            return None
        self._touch(path)
        return stored

    def put(self, key: str, tensor: Tensor) -> None:
        tensor = tensor.cpu().contiguous()
        content = save({"hidden": tensor}, self._metadata(key, tensor))
        if len(content) > self.byte_budget:
            return
        with file_lock(self.directory / "lock"):
            if self._path(key).exists():  # another process was faster
                return
            for left_behind in self._files(_PARTIAL):
                left_behind[-1].unlink(missing_ok=True)
            files = self._files()
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total + len(content) <= self.byte_budget:
                    break
                path.unlink(missing_ok=True)
                total -= size
                self.evictions += 1
            with replacing(self._path(key)) as scratch:
                scratch.write_bytes(content)
                flush(scratch)
                self._touch(scratch)

    @staticmethod
    def _metadata(key: str, tensor: Tensor) -> dict[str, str]:
        return {"key": key, "digest": tensor_digest(tensor)}

    def sizes(self) -> list[int]:
        return [size for _, size, _ in self._files()]

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"

    def _files(self, pattern: str = _ENTRY) -> list[tuple[int, int, Path]]:
        """Return the time of last use, size and path of each entry. Other files are ignored."""
        found = []
        for path in self.directory.iterdir():
            if re.fullmatch(pattern, path.name):
                try:
                    status = path.stat()
                except FileNotFoundError:  # another process was faster
                    continue
                found.append((status.st_mtime_ns, status.st_size, path))
        return found

    def _touch(self, path: Path) -> None:
        self._last = max(self._last + 1, time.time_ns())
        try:
            os.utime(path, ns=(self._last, self._last))
        except FileNotFoundError:
            return
