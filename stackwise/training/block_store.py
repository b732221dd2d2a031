"""BlockStore: storage of the Blocks of a Rack while they do not train (offloading).

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from stackwise.model.block import Block
from stackwise.model.layout import Layout
from stackwise.model.rack import Rack
from stackwise.model.weight_folder import read_tensors
from stackwise.support.arguments import require
from stackwise.support.files import replacing
from stackwise.support.lock import file_lock
from stackwise.support.system_errors import safetensors_as_os_error
from stackwise.training.targets import Targets

__all__ = ["BlockStore", "block_writer", "hidden_states"]


class BlockStore:
    """Blocks of a Rack: those that train are on the device, the others are offloaded.

    - `none`: all Blocks stay on the device.
    - `cpu`: in CPU memory.
    - `disk`: in memory-mapped safetensors files, `block-00000.safetensors` and so on. The Rack stays
      complete: a Block that is used is read from its file, and occupies memory only while it is used.

    A background thread prefetches the next Block. A Block that returns to the device gets new parameters, so
    create an optimizer inside `resident`.

    Args:
        rack: its Blocks are offloaded at once. Embedding, final norm and head stay in place.
        device: device of the training.
        kind: `none`, `cpu` or `disk`, as above.
        directory: folder of the files. It is created if it does not exist; existing files are replaced.

    Raises:
        ValueError: `cpu` on the CPU, `disk` without a directory, a directory that another run uses for its
            Blocks, or weights that a file cannot store, such as quantized ones.
        OSError: the directory cannot be written.
    """

    def __init__(
        self,
        rack: Rack,
        device: torch.device,
        kind: Literal["none", "cpu", "disk"] = "none",
        directory: str | Path | None = None,
    ) -> None:
        moves = kind != "cpu" or device.type != "cpu"
        require(moves, "training.scope.offload", kind, "none or disk, as this device is the CPU")
        require((kind == "disk") == (directory is not None), "training.scope.offload_dir", directory, kind)
        self.blocks, self.device, self.kind = rack.get_blocks(), device, kind
        if kind == "disk":
            _check_plain(self.blocks)
        self._directory = None if directory is None else Path(directory)
        self._lock = None if self._directory is None else _locked(self._directory)
        self._resident: set[int] = set(range(len(self.blocks)))
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="blocks")
        self._ahead = torch.Stream(device) if device.type == "cuda" else None
        if kind == "none":
            for block in self.blocks:
                block.to(device)
        else:
            self._leave(self._resident)

    @contextmanager
    def resident(self, indices: Collection[int]) -> Iterator[None]:
        """Move these Blocks to the device inside the context. At the end their updated weights are stored."""
        arriving = [] if self.kind == "none" else [i for i in indices if i not in self._resident]
        for i in arriving:
            block = self.blocks[i]
            _assign(block, {name: t.to(self.device, copy=True) for name, t in block.state_dict().items()})
        self._resident.update(arriving)
        try:
            yield
        finally:
            self._leave(arriving)

    def expect(self, indices: Collection[int]) -> None:
        """Prefetch the files of these Blocks into the page cache, in the background."""
        if self._directory is not None:
            for i in indices:
                self._reader.submit(_read_ahead, self._path(i))

    @torch.no_grad()
    def run(self, indices: Sequence[int], x_BTC: Tensor, layout: Layout) -> Tensor:
        """Return the output of these Blocks in order for hidden states (B, T, C), without gradients."""
        coming = [self._fetched(i) for i in indices[:1]]
        for place, i in enumerate(indices):
            tensors = coming.pop()()
            coming += [self._fetched(following) for following in indices[place + 1 : place + 2]]
            if tensors is None:
                x_BTC = self.blocks[i](x_BTC, layout=layout)
            else:
                x_BTC = functional_call(self.blocks[i], tensors, (x_BTC,), {"layout": layout})
        return x_BTC

    def close(self) -> None:
        """Stop the prefetch thread and release the folder lock. The Blocks stay in their current place."""
        self._reader.shutdown()
        if self._lock is not None:
            self._lock.release()

    def _leave(self, indices: Collection[int]) -> None:
        for i in sorted(indices):
            block = self.blocks[i]
            block.zero_grad(set_to_none=True)
            if self._directory is not None:
                _write(block, self._path(i))
                _assign(block, read_tensors(self._path(i)))
            else:
                _assign(block, {name: t.cpu().pin_memory() for name, t in block.state_dict().items()})
        self._resident.difference_update(indices)

    def _fetched(self, i: int) -> Callable[[], dict[str, Tensor] | None]:
        """Start to fetch a Block. Return a function that waits for its tensors; None: it is on the device."""
        if i in self._resident:
            return lambda: None
        future: Future[tuple[dict[str, Tensor], torch.Event | None]] = self._reader.submit(self._fetch, i)

        def wait() -> dict[str, Tensor]:
            tensors, arrived = future.result()
            if arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(arrived)
                for tensor in tensors.values():
                    tensor.record_stream(torch.cuda.current_stream(self.device))
            return tensors

        return wait

    def _fetch(self, i: int) -> tuple[dict[str, Tensor], torch.Event | None]:
        if self._directory is None:
            tensors = self.blocks[i].state_dict()
        else:
            _read_ahead(self._path(i))
            tensors = read_tensors(self._path(i))  # a new mapping: the Block's own one would stay in memory
        if self._ahead is None:
            return tensors, None
        with torch.cuda.stream(self._ahead):  # type: ignore[arg-type]  # torch.Stream is the base class
            pinned = {name: t if t.is_pinned() else t.pin_memory() for name, t in tensors.items()}
            tensors = {name: t.to(self.device, non_blocking=True) for name, t in pinned.items()}
            arrived = torch.Event(self.device)
            arrived.record(self._ahead)
            arrived.synchronize()  # `pinned` must live until the copy is complete
        return tensors, arrived

    def _path(self, i: int) -> Path:
        assert self._directory is not None
        return _path(self._directory, i)


def hidden_states(rack: Rack, targets: Targets, device: torch.device) -> Tensor:
    """Return the input of the head, (B, T, C). A Block on another device is copied for its forward pass."""
    x_BTC = rack.embed(targets.input_ids)
    layout = Layout(x_BTC, targets.attention_mask, targets.document_ids)
    for block in rack.get_blocks():
        held = next(block.parameters()).device
        there = held.type == device.type and device.index in (None, held.index)
        tensors = {} if there else {name: t.to(device) for name, t in block.state_dict().items()}
        x_BTC = functional_call(block, tensors, (x_BTC,), {"layout": layout})
    return x_BTC


def block_writer(directory: str | Path) -> Callable[[Block], Block]:
    """Return a function that moves a new Block to disk, for `create_rack_from_config(config, place=...)`.

    It needs the memory of one Block, for a Rack of any depth. Existing files are replaced.

    Raises:
        ValueError: raised by the function: another run uses the directory for its Blocks. Their files are
            unchanged.
        OSError: raised by the function: the directory cannot be written.
    """
    folder, count = Path(directory), iter(range(2**63))

    def write(block: Block) -> Block:
        path = _path(folder, next(count))
        with _locked(folder):  # only while writing: a mapped Block survives the replacement of its file
            _write(block, path)
            _assign(block, read_tensors(path))
        return block

    return write


def _locked(directory: Path) -> FileLock:
    """Return the acquired lock of a directory. The directory is created if it does not exist."""
    lock = file_lock(directory / "lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        key, allowed = "training.scope.offload_dir", "a folder that no other run has its Blocks in"
        raise ValueError(f"{key}: got {str(directory)!r}; allowed: {allowed}") from None
    return lock


def _check_plain(blocks: Sequence[Block]) -> None:
    """Raise if a weight cannot be stored in a file, such as a quantized one, before any Block is moved."""
    for i, block in enumerate(blocks):
        for name, tensor in block.state_dict().items():
            said = f"none or cpu: {name} of Block {i} is of {type(tensor).__name__}, which files do not hold"
            require(type(tensor) is Tensor, "training.scope.offload", "disk", said)


def _path(directory: Path, i: int) -> Path:
    return directory / f"block-{i:05}.safetensors"


def _write(block: Block, path: Path) -> None:
    with replacing(path) as scratch, safetensors_as_os_error(path):
        save_file({name: t.detach().contiguous() for name, t in block.state_dict().items()}, scratch)


def _assign(block: nn.Module, tensors: dict[str, Tensor]) -> None:
    block.load_state_dict(tensors, assign=True)


def _read_ahead(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)
