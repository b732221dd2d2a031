"""Content: part of a checkpoint that one process writes or reads.

Files of process R: `state-R.json` has plain values. `state-R.safetensors` has the tensors that each process
stores for itself. `tensors/rank-R.safetensors` has its part of the tensors that all processes share.
"""

from __future__ import annotations

import errno
import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from stackwise.checkpoint import tree
from stackwise.checkpoint.folder import (
    TENSORS,
    DamagedCheckpointError,
    Manifest,
    check_extra_name,
    read_regular,
    verify_files,
)
from stackwise.checkpoint.object_state import Objects, equal_bits, plain_name
from stackwise.checkpoint.ranks import Ranks
from stackwise.checkpoint.sharded import Place, own_parts, part_of, read_like
from stackwise.checkpoint.tensor_file import (
    FileEntry,
    MalformedFileError,
    Part,
    TensorIndex,
    check_dtypes,
    write_bytes,
    write_parts,
    write_tensors,
)
from stackwise.support.arguments import require
from stackwise.support.random_state import keep_random_states, random_states, set_random_states

__all__ = ["Content", "Loaded", "check_readable", "tensors_of"]

_STATE_BYTES = 2**28
_SHARED, _OWN, _RANDOM = "shared", "own", "random"


@dataclass(frozen=True)
class Content:
    """Part of a checkpoint that a process writes.

    Attributes:
        rank: rank of the process.
        plain: values of its JSON file.
        files: tensors by name, for each of its safetensors files.
    """

    rank: int
    plain: dict[str, Any]
    files: dict[str, dict[str, Part]]

    @classmethod
    def of(
        cls,
        objects: Mapping[str, Any],
        rank: int,
        files: Mapping[str, Callable[[Path], None] | Mapping[str, Tensor]],
    ) -> Self:
        """Return the current state of `objects` in process `rank`. The tensors are not copied.

        Args:
            objects: objects by name.
            rank: rank of this process.
            files: additional files, of which the first process writes those with tensors.

        Raises:
            ValueError: a value that cannot be stored; the message has its place.
        """
        ours = Objects(objects)
        plain: dict[str, Any] = {_SHARED: {}, _OWN: {}}
        own: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        for name in ours:
            is_shared = ours.is_shared(name)
            encoded = tree.encode(ours.state(name), (name,), shared if is_shared else own)
            plain[_SHARED if is_shared else _OWN][name] = encoded
        plain[_RANDOM] = tree.encode(random_states(), (_RANDOM,), own)
        for name, tensor in own.items():
            sharded = "modules and optimizers only, whose parts are put together again"
            require(not tree.is_sharded(tensor), name, "a DTensor", sharded)
        if rank > 0:
            plain[_SHARED] = {}
            shared = {name: tensor for name, tensor in shared.items() if tree.is_sharded(tensor)}
        parts = {name: part for name, tensor in shared.items() if (part := part_of(name, tensor))}
        held = {_own_file(rank): {name: Part.whole(tensor) for name, tensor in own.items()}}
        held |= {_shared_file(rank): parts} if parts else {}
        held |= _extra_files(files) if rank == 0 else {}
        content = cls(rank, plain, held)
        # Checked here, since a thread that writes the tensors cannot report an error to the caller.
        check_dtypes((name, part.tensor) for (_, name), part in content.parts().items())
        return content

    def places(self) -> list[Place]:
        """Return the places of its parts of shared tensors."""
        return [(name, part.offsets) for name, part in self.files.get(_shared_file(self.rank), {}).items()]

    def without(self, places: Sequence[list[Place]]) -> Self:
        """Return a copy without the parts that other processes write."""
        file = _shared_file(self.rank)
        parts = own_parts(self.files.get(file, {}), places)
        others = {name: held for name, held in self.files.items() if name != file}
        return replace(self, files=others | ({file: parts} if parts else {}))

    def parts(self) -> dict[tuple[str, str], Part]:
        """Return all tensors, by file and name."""
        return {(file, name): part for file, held in self.files.items() for name, part in held.items()}

    def with_parts(self, parts: Mapping[tuple[str, str], Part]) -> Self:
        """Return a copy with other tensors of the same files and names."""
        files = {file: {name: parts[file, name] for name in held} for file, held in self.files.items()}
        return replace(self, files=files)

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Write the files of the process, and open them as `restore` does.

        Raises:
            ValueError: too many plain values.
            OSError: a write failed, or a file cannot be opened by its reader.
        """
        text = json.dumps(self.plain, allow_nan=False, separators=(",", ":")).encode()
        allowed = f"up to {_STATE_BYTES} of values that are no tensors or arrays"
        require(len(text) <= _STATE_BYTES, "objects", f"{len(text)} bytes", allowed)
        entries = {_plain_file(self.rank): write_bytes(folder / _plain_file(self.rank), [text])}
        for file, parts in self.files.items():
            if file.startswith(f"{TENSORS}/"):
                entries[file] = write_parts(folder / file, parts)
            else:
                tensors = {name: part.tensor for name, part in parts.items()}
                entries[file] = write_tensors(folder / file, tensors)
        try:
            # A disk may accept a write without an error and still truncate the file.
            verify_files(folder, entries, contents=False)
            with _decoding(folder):
                _Reader(folder, entries).open([self.rank], self.files)
        except DamagedCheckpointError as error:
            raise OSError(errno.EIO, str(error)) from error
        return entries


def _extra_files(
    files: Mapping[str, Callable[[Path], None] | Mapping[str, Tensor]],
) -> dict[str, dict[str, Part]]:
    """Return the tensors of additional files. Refuse files that cannot be written."""
    found = {}
    for file, content in files.items():
        check_extra_name(file)
        if callable(content):
            continue
        allowed = "a function of a path, or tensors by name"
        require(isinstance(content, Mapping), f"files[{file!r}]", content, allowed)
        for name, tensor in content.items():
            plain = (
                isinstance(tensor, Tensor) and not tree.is_sharded(tensor) and tensor.layout == torch.strided
            )
            allowed = "a dense tensor that is whole in this process"
            require(plain, f"files[{file!r}][{name!r}]", type(tensor).__name__, allowed)
        found[file] = {name: Part.whole(tensor) for name, tensor in content.items()}
    return found


def check_readable(folder: Path, manifest: Manifest) -> None:
    """Open every file of a checkpoint as `restore` does. No tensor is read.

    Raises:
        DamagedCheckpointError: a file that cannot be opened, or that has other content.
    """
    with _decoding(folder):
        _Reader(folder, manifest.files).open(range(manifest.world_size))


def tensors_of(
    folder: Path, manifest: Manifest, name: str
) -> tuple[TensorIndex, dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a module in a checkpoint. Its state must consist of tensors by name.

    Args:
        folder: folder of the checkpoint. Its files were verified.
        manifest: manifest of the folder.
        name: name of the module among the objects.

    Returns:
        index of the tensors, a meta tensor of each key, and the name of each key in the files.

    Raises:
        DamagedCheckpointError: a file cannot be decoded.
        ValueError: the checkpoint has no such module.
    """
    with _decoding(folder):
        return _Reader(folder, manifest.files).module(name)


@dataclass(frozen=True)
class Loaded:
    """Part of a checkpoint that a process reads.

    Attributes:
        states: state of each object.
        random: states of the random generators; None: they are drawn from `seed`.
        seed: seed for a process that did not exist when the checkpoint was saved.
        remarks: differences from the saved state.
    """

    states: dict[str, Any]
    random: dict[str, Any] | None
    seed: int
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, objects: Objects, folder: Path, manifest: Manifest, ranks: Ranks) -> Self:
        """Read a checkpoint with verified files. No object is changed.

        Raises:
            DamagedCheckpointError: a file cannot be decoded.
            ValueError: a state does not fit the objects.
        """
        reader = _Reader(folder, manifest.files, manifest.world_size, ranks.size)
        with _decoding(folder):
            states = {name: reader.state(name, objects, ranks.rank) for name in objects}
            remarks = reader.remarks(objects)
            if ranks.rank < manifest.world_size:
                return cls(states, reader.random(ranks.rank), 0, remarks)
            first = reader.random(0)["torch"].numpy().tobytes()
        digest = hashlib.sha256(first + ranks.rank.to_bytes(8, "little")).digest()
        return cls(states, None, int.from_bytes(digest[:8], "little") >> 1, remarks)

    def into(self, objects: Objects) -> None:
        """Load the states into the objects and the random generators.

        Raises:
            Exception: an object refuses a state that does not fit.
        """
        objects.load(self.states)
        if self.random is not None:
            set_random_states(self.random)
        else:
            torch.manual_seed(self.seed)
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)  # noqa: NPY002  the global one is meant


@contextmanager
def _decoding(folder: Path) -> Iterator[None]:
    try:
        yield
    except (MalformedFileError, tree.MalformedTreeError) as error:
        raise DamagedCheckpointError(folder, None, str(error)) from error


class _Reader:
    """Reader of the states in a folder.

    Args:
        folder: folder of a checkpoint.
        files: names of its verified files. No other file is read.
        saved: number of processes that saved.
        here: number of processes that restore.
    """

    def __init__(self, folder: Path, files: Collection[str], saved: int = 1, here: int = 1) -> None:
        self.folder, self.files, self._saved_by, self._here = folder, files, saved, here
        self._plain: dict[int, dict[str, Any]] = {}
        self._own: dict[int, TensorIndex] = {}
        self._shared: TensorIndex | None = None

    def open(self, ranks: Iterable[int], more: Iterable[str] = ()) -> None:
        """Parse the JSON files and open the tensor files of `ranks`, and `more` safetensors files."""
        for rank in ranks:
            self._state_of(rank)
            self._own_fetch(rank)
        self._shared_index()
        for name in more:
            TensorIndex([self.folder / name])

    def state(self, name: str, objects: Objects, rank: int) -> Any:
        first = self._state_of(0)
        if name in first[_SHARED]:
            return self._shared_state(first[_SHARED][name], name, objects)
        kept = sorted([*first[_SHARED], *first[_OWN]])
        require(name in first[_OWN], "objects", name, f"what {self.folder} has: {', '.join(kept)}")
        if self._here == self._saved_by:
            return self._own_state(name, rank)
        state = objects.common(name, self._own_state(name, 0))
        for other in range(1, self._saved_by):
            require(
                _same(state, objects.common(name, self._own_state(name, other))),
                f"objects[{name!r}]",
                f"a state of {self._saved_by} processes that differs between them",
                f"as many processes as have saved it; here there are {self._here}",
            )
        return state

    def random(self, rank: int) -> dict[str, Any]:
        states = tree.decode(self._state_of(rank)[_RANDOM], self._own_fetch(rank))
        try:
            with keep_random_states():
                set_random_states(states)
        except Exception as error:  # each generator raises errors of its own
            raise tree.MalformedTreeError(f"{_plain_file(rank)}: no random states: {error}") from None
        return dict(states)

    def module(self, name: str) -> tuple[TensorIndex, dict[str, Tensor], dict[str, str]]:
        shared = self._state_of(0)[_SHARED]
        require(name in shared, "name", name, f"what {self.folder} has together: {', '.join(sorted(shared))}")
        index, names = self._shared_index(), dict[int, str]()

        def fetch(tensor: str, shape: tuple[int, ...], path: tree.Path) -> Tensor:
            del path
            like = torch.empty(shape, dtype=index.dtype(tensor), device="meta")
            names[id(like)] = tensor
            return like

        state = tree.decode(shared[name], fetch)
        plain = isinstance(state, dict) and all(
            isinstance(key, str) and id(each) in names for key, each in state.items()
        )
        require(plain, "name", name, "a module whose state is tensors by name, and nothing else")
        likes = {plain_name(key): like for key, like in state.items()}
        return index, likes, {key: names[id(like)] for key, like in likes.items()}

    def remarks(self, objects: Objects) -> tuple[str, ...]:
        saved, here = self._saved_by, self._here
        if here == saved:
            return ()
        told = f"saved by {saved} processes, restored by {here}: "
        states = (
            f"the random states of ranks {here} to {saved - 1} are left out"
            if here < saved
            else f"the random states of ranks {saved} to {here - 1} are new, drawn from those of rank 0"
        )
        parted = [name for name in objects if objects.has_common(name)]
        of_parts = [f"{told}what each process had of {name!r} for itself is left out" for name in parted]
        return (told + states, *of_parts)

    def _shared_state(self, plain: Any, name: str, objects: Objects) -> Any:
        index, likes = self._shared_index(), objects.sharded(name)
        seen: dict[str, Tensor] = {}

        def fetch(tensor: str, shape: tuple[int, ...], path: tree.Path) -> Tensor:
            if tensor not in seen:
                path = tuple(plain_name(key) if isinstance(key, str) else key for key in path)
                # The state of a parameter is sharded like the parameter, if it has the same shape.
                like = likes.get(path, likes.get(path[:2]) if len(path) == 3 else None)
                if like is not None and path not in likes and tuple(like.shape) != shape:
                    like = None
                seen[tensor] = read_like(index, tensor, shape, like)
            return seen[tensor]

        return tree.decode(plain, fetch)

    def _shared_index(self) -> TensorIndex:
        if self._shared is None:
            names = [file for file in self.files if file.startswith(f"{TENSORS}/")]
            self._shared = TensorIndex(self.folder / name for name in names)
        return self._shared

    def _own_state(self, name: str, rank: int) -> Any:
        held = self._state_of(rank)[_OWN]
        if name not in held:
            raise tree.MalformedTreeError(f"{_plain_file(rank)}: {name} is missing")
        return tree.decode(held[name], self._own_fetch(rank))

    def _own_fetch(self, rank: int) -> tree.Fetch:
        if rank not in self._own:
            self._own[rank] = TensorIndex([self.folder / self._listed(_own_file(rank))])
        index = self._own[rank]
        seen: dict[str, Tensor] = {}

        def fetch(name: str, shape: tuple[int, ...], path: tree.Path) -> Tensor:
            del path
            if name not in seen:
                seen[name] = index.read(name, (0,) * len(shape), shape)
            return seen[name]

        return fetch

    def _state_of(self, rank: int) -> dict[str, Any]:
        if rank not in self._plain:
            file = self._listed(_plain_file(rank))
            try:
                plain = json.loads(read_regular(self.folder, file, _STATE_BYTES).decode())
                complete = all(isinstance(plain[part], dict) for part in (_SHARED, _OWN, _RANDOM))
            except DamagedCheckpointError:
                raise
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise tree.MalformedTreeError(f"{file}: no state: {error}") from None
            if not complete:
                raise tree.MalformedTreeError(f"{file}: no state")
            self._plain[rank] = plain
        return self._plain[rank]

    def _listed(self, file: str) -> str:
        """Return a file that was verified. Refuse any other."""
        if file not in self.files:
            raise tree.MalformedTreeError(f"{file}: not in the list of files")
        return file


def _plain_file(rank: int) -> str:
    return f"state-{rank:05d}.json"


def _own_file(rank: int) -> str:
    return f"state-{rank:05d}.safetensors"


def _shared_file(rank: int) -> str:
    return f"{TENSORS}/rank-{rank:05d}.safetensors"


def _same(ours: Any, theirs: Any) -> bool:
    """Return True if two states are equal, bit for bit."""
    held: list[dict[str, Tensor]] = [{}, {}]
    plain = [tree.encode(state, (), tensors) for state, tensors in zip((ours, theirs), held, strict=True)]
    return plain[0] == plain[1] and all(equal_bits(tensor, held[1][name]) for name, tensor in held[0].items())
