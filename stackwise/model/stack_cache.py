"""StackCache: the outputs of a frozen prefix of a Rack, kept under a digest of all that they depend on.

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
_PARTIAL = rf"\.{_ENTRY}\.\d+\.[0-9a-f]{{8}}"  # name that `replacing` gives to an entry until it is whole


@dataclass(frozen=True)
class StackCacheStatistics:
    """What a StackCache has done, and what it holds.

    Attributes:
        hits: calls that were answered from the cache.
        misses: calls that were computed.
        evictions: entries that this cache removed to make room.
        entries: how many there are now; on disk, of all processes.
        bytes: of them; on disk, with the headers of the files.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


class StackCache:
    """Hidden states behind the first Stacks of a Rack, computed once per input.

    For training what is above a frozen prefix over several epochs: the prefix then costs one pass over its
    weights instead of one over all tokens. The key is a digest of the bytes of all weights and buffers,
    settings and code of the prefix (`ContentHash`), of the inputs, and of the numerics in force: device,
    dtypes, autocast, the precision of products, the choice of attention kernels, the version of torch. A
    result is kept only when the digest is the same after it was computed as before, and so are the
    random states: what was drawn once is not what would be drawn now.

    Entries lie in memory, or as one safetensors file each in a directory, where they outlive the process and
    several processes may share them. A file appears whole under its name, and is believed only when its
    content has the digest that it was written with; another is removed. The least recently used go first.

    Args:
        byte_budget: the most that all entries may take. One that is larger is not kept.
        directory: created where it is missing; None: in memory.
        code_version: what classes of one's own are called, which otherwise count as the objects that they are
            in this process: with it entries of Racks that have some outlive the process. It has to be another
            one whenever their code computes something else, which is not looked at then.

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
        """`rack.forward_from_stack(rack.embed(input_ids), 0, n_stacks, attention_mask, document_ids)`.

        Args:
            rack: with embedding and first `n_stacks` Stacks frozen; it may be of a class of one's own, but
                computes the prefix by Rack's own `embed` and `forward_from_stack`.
            input_ids: integer (B, T).
            n_stacks: 1 to the number of Stacks.
            attention_mask: bool or integer (B, T), nonzero at real tokens.
            document_ids: integer (B, T), equal within a document.

        Returns:
            (B, T, C), without gradient, the caller's own to change.

        Raises:
            ValueError: a prefix that trains or drops out, that a Rack computes in its own way, or that has
                what no digest can hold (`ContentHash`); inputs that the Rack refuses.
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
        trains = hidden_BTC.requires_grad  # by a tensor that is no parameter
        require(not trains, "prefix", "hidden states with a gradient", "a prefix that is frozen")
        drew = not random_states_equal(before, random_states())
        if not drew and self._key(rack, modules, input_ids, attention_mask, document_ids) == key:
            self._entries.put(key, hidden_BTC)
        return hidden_BTC

    @property
    def statistics(self) -> StackCacheStatistics:
        """What happened so far, and what is held."""
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
    """(B, H, T, D) of all attention in modules; None: code from elsewhere may attend with any."""
    parts = [part for module in modules.values() for part in module.modules()]
    kinds: set[type] = {type(part) for part in parts}
    if any(map(from_elsewhere, kinds)):
        return None
    return {(B, p.n_heads, T, p.head_dim) for p in parts if isinstance(p, Attention | LatentAttention)}


def _check_known(rack: Rack) -> None:
    """Refuse a Rack whose prefix may depend on more than its embedding and Stacks."""
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
    """Entries in memory, the least recently used first."""

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
            if key in self._tensors:  # another thread was quicker
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
    """Entries as files `DIGEST.safetensors`, whose times of modification say when they were last used.

    Nothing is remembered of the directory, so that what another process does to it is seen.
    """

    def __init__(self, byte_budget: int, directory: Path) -> None:
        self.byte_budget, self.evictions, self.directory = byte_budget, 0, directory
        directory.mkdir(parents=True, exist_ok=True)
        self._last = 0

    def get(self, key: str) -> Tensor | None:
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                stored: Tensor = file.get_tensor("hidden").clone()  # from a mapped file, which may go away
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
            if self._path(key).exists():  # another process was quicker
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
        """Of each entry when it was last used, its bytes and where it is; files of others are none."""
        found = []
        for path in self.directory.iterdir():
            if re.fullmatch(pattern, path.name):
                try:
                    status = path.stat()
                except FileNotFoundError:  # another process was quicker
                    continue
                found.append((status.st_mtime_ns, status.st_size, path))
        return found

    def _touch(self, path: Path) -> None:
        self._last = max(self._last + 1, time.time_ns())
        try:
            os.utime(path, ns=(self._last, self._last))
        except FileNotFoundError:
            return
