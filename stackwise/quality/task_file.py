"""Task file: rows of a data set, from JSON Lines, Parquet or Hugging Face."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stackwise.support.arguments import require
from stackwise.support.files import parse_json

__all__ = ["Dataset", "in_place", "index_of", "read_rows", "text_of", "texts_of"]

Row = dict[str, Any]
_ENDINGS = (".jsonl", ".parquet")
_ALL = "all"  # if a folder has both the parts and a merged set, the merged set is used


@dataclass(frozen=True)
class Dataset:
    """Published data set, in a local folder or on Hugging Face.

    Attributes:
        name: name of its folder.
        repository: repository on Hugging Face.
        configuration: configuration of the repository. None: there is only one.
        splits: possible names of each split, in order of preference.
    """

    name: str
    repository: str
    configuration: str | None
    splits: dict[str, tuple[str, ...]]

    def rows(self, split: str, folder: Path | None) -> list[Row]:
        """Return all rows of a split.

        Args:
            split: one of `splits`.
            folder: folder with a subfolder `name`. It contains JSON Lines or Parquet files with the split in
                their names, as published. None: from Hugging Face.

        Raises:
            FileNotFoundError: the file does not exist, or the download failed. The message names the files to
                download and their folder.
            ImportError: the library for Parquet or for the download is not installed.
            ValueError: a damaged file, files of both kinds, or two files with the same rows, which would
                count twice.
        """
        if folder is None:
            return self._fetched(split)
        files = self._files(split, folder / self.name)
        if not files:
            raise FileNotFoundError(
                f"{folder / self.name}: no file of the split {split}; {self._advice(folder)}"
            )
        rows: dict[Path, list[Row]] = {}
        for file in files:
            found = read_rows(file)
            for other, known in rows.items():
                key = f"files of the split {split}"
                require(found != known, key, f"{other}, {file}", "each once: both have the same rows")
            rows[file] = found
        return [row for found in rows.values() for row in found]

    def _files(self, split: str, folder: Path) -> list[Path]:
        found = sorted(path for path in folder.rglob("*") if path.suffix in _ENDINGS and path.is_file())
        whole = [path for path in found if _ALL in path.relative_to(folder).parts[:-1]]
        by_name = [
            [path for path in whole or found if called in re.split("[^a-z]+", path.stem.lower())]
            for called in self.splits[split]
        ]
        every = [path for named in by_name for path in named]
        kinds = {path.suffix for path in every}
        shown = ", ".join(map(str, every))
        require(len(kinds) < 2, f"files of the split {split}", shown, "all .jsonl or all .parquet")
        return next((named for named in by_name if named), [])

    def _fetched(self, split: str) -> list[Row]:
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                f"{self.name} from Hugging Face: pip install 'stackwise[quality]' ({error})"
            ) from error
        arguments = [self.repository] + ([self.configuration] if self.configuration else [])
        try:
            rows = datasets.load_dataset(*arguments, split=self.splits[split][0])
        except Exception as error:  # the network layers have different error classes
            text = " ".join(str(error).split())[:300]
            raise FileNotFoundError(
                f"{self.name}: Hugging Face could not be read ({type(error).__name__}: {text}); where there "
                f"is no network, {self._advice(Path('FOLDER'))} and name FOLDER (--data FOLDER)"
            ) from error
        return [dict(row) for row in rows]

    def _advice(self, folder: Path) -> str:
        inside = f"{self.configuration}/" if self.configuration else ""
        kinds = " and ".join(f"{inside}*{names[0]}*.parquet" for names in self.splits.values())
        return (
            f"download {kinds} of https://huggingface.co/datasets/{self.repository} "
            f"(or the same as .jsonl) into {folder / self.name}"
        )


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSON Lines or Parquet file.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: pyarrow is not installed, which is needed for Parquet.
        ValueError: another suffix, a damaged file, text that is not UTF-8, or a line that is not a JSON
            object.
    """
    require(path.suffix in _ENDINGS, "file", str(path), f"one that ends in {' or '.join(_ENDINGS)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return _parquet(path) if path.suffix == ".parquet" else _json_lines(path)


@contextmanager
def in_place(place: str) -> Iterator[None]:
    """Add the location of a row to the errors in the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def text_of(row: Mapping[str, Any], key: str) -> str:
    """Return the text of a row under a key.

    Raises:
        ValueError: the value is not a text, or contains an unpaired surrogate, which no tokenizer accepts.
    """
    value: Any = row.get(key)
    require(_is_text(value), key, value, "a text that UTF-8 can write")
    return str(value)


def texts_of(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return several texts of a row under a key, from a list or a similar collection, such as an array.

    Raises:
        ValueError: the value is not a list of texts.
    """
    values: Any = row.get(key)
    several = isinstance(values, Collection) and not isinstance(values, str | Mapping | Set)
    sound = several and all(map(_is_text, values))
    require(sound, key, values, "a list of texts that UTF-8 can write")
    return tuple(map(str, values))


def index_of(row: Mapping[str, Any], key: str) -> int:
    """Return an integer of a row under a key. Integers of Python and numpy are accepted.

    Raises:
        ValueError: the value is not an integer, or is a bool.
    """
    value: Any = row.get(key)
    try:
        index = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        index = None
    if index is None:
        raise ValueError(f"{key}: got {value!r}; allowed: an integer")
    return index


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_lines(path: Path) -> list[Row]:
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: no JSON: {error}") from None
        require(isinstance(row, dict), f"{path}:{number}", line.strip()[:60], "a JSON object")
        rows.append(row)
    return rows


def _parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError(
            f"{path}: Parquet needs pyarrow: pip install 'stackwise[quality]' ({error})"
        ) from error
    try:
        table = parquet.read_table(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path}: no Parquet file: {error}") from None
    rows: Sequence[Row] = table.to_pylist()
    return list(rows)
