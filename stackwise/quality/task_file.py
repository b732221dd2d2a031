"""Task file: rows of a data set, from JSON Lines or Parquet, or from Hugging Face."""

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
_ALL = "all"  # where a folder has its parts and all of them together, these


@dataclass(frozen=True)
class Dataset:
    """A published data set, as files of a folder or from Hugging Face.

    Attributes:
        name: of its folder.
        repository: on Hugging Face.
        configuration: of the repository; None: it has but one.
        splits: what each split is called, in the order in which it is looked for.
    """

    name: str
    repository: str
    configuration: str | None
    splits: dict[str, tuple[str, ...]]

    def rows(self, split: str, folder: Path | None) -> list[Row]:
        """All rows of a split.

        Args:
            split: one of `splits`.
            folder: holds a folder `name` with JSON Lines or Parquet files that have the split in their names,
                as published; None: from Hugging Face.

        Raises:
            FileNotFoundError: there is no such file, or it cannot be fetched; the message says what to
                download and where to put it.
            ImportError: what reads Parquet, or fetches, is not installed.
            ValueError: a file that is damaged, files of both kinds, which may well be the same rows, or two
                files of the same rows, which would count twice.
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
        except Exception as error:  # each layer of the network has classes of its own
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
    """The rows of a JSON Lines or Parquet file.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: pyarrow, which reads Parquet, is not installed.
        ValueError: another ending, a damaged file, no UTF-8, or a line that is no JSON object.
    """
    require(path.suffix in _ENDINGS, "file", str(path), f"one that ends in {' or '.join(_ENDINGS)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return _parquet(path) if path.suffix == ".parquet" else _json_lines(path)


@contextmanager
def in_place(place: str) -> Iterator[None]:
    """Errors of a row that say where it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def text_of(row: Mapping[str, Any], key: str) -> str:
    """What a row has under a key.

    Raises:
        ValueError: no text, or one with half a character, which no tokenizer takes.
    """
    value: Any = row.get(key)
    require(_is_text(value), key, value, "a text that UTF-8 can write")
    return str(value)


def texts_of(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The same of several, in a list or in what is as good as one, such as an array.

    Raises:
        ValueError: no list of texts.
    """
    values: Any = row.get(key)
    several = isinstance(values, Collection) and not isinstance(values, str | Mapping | Set)
    sound = several and all(map(_is_text, values))
    require(sound, key, values, "a list of texts that UTF-8 can write")
    return tuple(map(str, values))


def index_of(row: Mapping[str, Any], key: str) -> int:
    """An integer, of Python or of numpy.

    Raises:
        ValueError: anything else, or a bool.
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
