"""PrefixOutputs: cache of the frozen prefix's activations.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

import socket
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stackwise.model.layout import Layout
from stackwise.model.rack import Rack
from stackwise.model.stack_cache import tensors_digest
from stackwise.support.system_errors import safetensors_as_os_error
from stackwise.support.temporary_folder import temporary_folder
from stackwise.training.block_store import BlockStore
from stackwise.training.targets import Targets

__all__ = ["PrefixOutputs", "PrefixStatistics", "batch_key"]


@dataclass
class PrefixStatistics:
    """Savings and size of the cache.

    Attributes:
        asked: number of Blocks that would have been computed without a cache.
        computed: number of Blocks that were computed.
        bytes: size of the cached outputs, in memory or on disk.
    """

    asked: int = 0
    computed: int = 0
    bytes: int = 0


@dataclass
class _Entry:
    depth: int
    nbytes: int
    place: Tensor | Path


class PrefixOutputs:
    """Hidden states after the first Blocks of a Rack, which are frozen while their output is used.

    Units train on the same batches one after another. A cached output advances from unit to unit: a phase
    computes only the Blocks between the cached output and its own first Block, once, and replaces the entry.
    So with a budget that fits the data, the cost of a phase does not depend on its depth. Outputs beyond the
    budget are recomputed from the embedding. Entries are not evicted: batches arrive in the same order in
    every phase, so that the least recently used ones are needed next. If the disk is full before the budget
    is reached, the current size becomes the budget, with a warning.

    The trainer owns the weights and calls `forget` before it trains them, so the batch is the whole key. For
    weights that other code may change, see `stackwise.model.stack_cache.StackCache`.

    Args:
        rack: Rack that computes the outputs.
        store: storage of its Blocks.
        byte_budget: maximum size of the cache in bytes; 0: no cache.
        directory: store the cache in files of a new folder in this directory, which `close` removes; None: in
            memory. Folders of killed processes of this machine are removed.
    """

    def __init__(
        self, rack: Rack, store: BlockStore, byte_budget: int = 0, directory: str | Path | None = None
    ) -> None:
        self._rack, self._store, self.byte_budget = rack, store, byte_budget
        self._entries: dict[str, _Entry] = {}
        self._awaited = 0  # number of batches without a cache hit, after which a warning is issued
        self.statistics = PrefixStatistics()
        self._folder: Path | None = None
        self._exit = ExitStack()
        if directory is not None:
            # Not every file system shares locks between machines. A host name contains no @.
            prefix = f"prefix-{socket.gethostname()}@"
            self._folder = self._exit.enter_context(temporary_folder(prefix, Path(directory)))

    @torch.no_grad()
    def computed(self, targets: Targets, depth: int) -> Tensor:
        """Return the hidden states of a batch that is used once, without the cache and its statistics."""
        return self._on(self._rack.embed(targets.input_ids), 0, targets, depth)

    @torch.no_grad()
    def __call__(self, key: str, targets: Targets, depth: int) -> Tensor:
        """Return the hidden states (B, T, C) of a batch after `depth` Blocks, on the device of the training.

        Args:
            key: `batch_key` of the batch.
            targets: the batch, on the device.
            depth: number of Blocks, at least 1.
        """
        self.statistics.asked += depth
        entry = self._entries.get(key)
        self._await(entry)
        if entry is not None and entry.depth == depth:
            return self._read(entry)
        if entry is not None and entry.depth < depth:
            x_BTC, start = self._read(entry), entry.depth
        else:
            x_BTC, start = self._rack.embed(targets.input_ids), 0
        x_BTC = self._on(x_BTC, start, targets, depth)
        self.statistics.computed += depth - start
        self._keep(key, depth, x_BTC)
        return x_BTC

    def forget(self, first: int) -> None:
        """Drop outputs that depend on the Block `first` or a later one, because it trains.

        With 0 the embedding may train as well, so everything is dropped. If n outputs remain and the next n
        batches have no cache hit, a warning is issued.
        """
        for key, entry in list(self._entries.items()):
            if entry.depth > first:
                self._drop(key)
        self._awaited = len(self._entries)

    def close(self) -> None:
        """Drop everything."""
        self.forget(0)
        self._exit.close()

    def _await(self, entry: _Entry | None) -> None:
        if entry is not None:
            self._awaited = 0
        elif self._awaited:
            self._awaited -= 1
            if not self._awaited:
                none = f"none of the {len(self._entries)} batches that are kept is among as many of this unit"
                cause = (
                    "the loader composes others for each unit, as one does that shuffles by the random state"
                )
                warnings.warn(f"training.scope.cache_bytes spares nothing: {none}; {cause}", stacklevel=2)

    def _on(self, x_BTC: Tensor, start: int, targets: Targets, depth: int) -> Tensor:
        layout = Layout(x_BTC, targets.attention_mask, targets.document_ids)
        return self._store.run(range(start, depth), x_BTC, layout)

    def _keep(self, key: str, depth: int, x_BTC: Tensor) -> None:
        held = self._entries[key].nbytes if key in self._entries else 0
        if self.statistics.bytes - held + x_BTC.nbytes > self.byte_budget:
            return
        if held:
            self._drop(key)
        place: Tensor | Path
        if self._folder is None:
            # Pinned, so that the host waits neither for this copy nor for the copy back, in the same stream.
            place = torch.empty_like(x_BTC, device="cpu", pin_memory=x_BTC.is_cuda)
            place.copy_(x_BTC, non_blocking=True)
        else:
            place = self._folder / key
            try:
                with safetensors_as_os_error(place):
                    save_file({"hidden": x_BTC.cpu().contiguous()}, place)
            except OSError as error:
                place.unlink(missing_ok=True)
                self.byte_budget = self.statistics.bytes
                said = f"{self._folder}: no room for more than {self.byte_budget} bytes: {error}"
                warnings.warn(f"{said}; the rest is computed again", stacklevel=2)
                return
        self._entries[key] = _Entry(depth, x_BTC.nbytes, place)
        self.statistics.bytes += x_BTC.nbytes

    def _read(self, entry: _Entry) -> Tensor:
        if isinstance(entry.place, Tensor):
            return entry.place.to(self._store.device, non_blocking=True)
        with safe_open(entry.place, framework="pt") as file:
            kept: Tensor = file.get_tensor("hidden")
        return kept.to(self._store.device)

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key)
        self.statistics.bytes -= entry.nbytes
        if isinstance(entry.place, Path):
            entry.place.unlink(missing_ok=True)


def batch_key(targets: Targets) -> str:
    """Return a digest of the batch's tensors that determine its hidden states. CUDA tensors are copied."""
    return tensors_digest(targets.input_ids, targets.attention_mask, targets.document_ids)
