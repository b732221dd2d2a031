"""Lines of JSON: what is written comes back, also after a kill."""

import errno
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.stability import StepRecord
from stackwise.training.record_log import JsonLinesLog, read_json_lines

NUMBERS = st.floats(width=32)
RECORDS = st.lists(
    st.builds(
        StepRecord,
        step=st.integers(0, 2**40),
        loss=NUMBERS,
        grad_norm=NUMBERS,
        lr=st.floats(0, 1),
        skipped=st.booleans(),
        tokens=st.none() | st.integers(1, 2**40),
        parameter_norms=st.none() | st.dictionaries(st.text(max_size=5), NUMBERS, max_size=3),
    ),
    max_size=4,
)


def record(step=0, loss=1.5, norms=None):
    return StepRecord(step, loss, 2.0, 0.1, False, 64, norms)


def same(left, right):
    """Equal, NaN to NaN."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right or (left != left and right != right)


@given(batches=st.lists(RECORDS, max_size=3))
def test_records_come_back(batches, tmp_path_factory):
    path = tmp_path_factory.mktemp("logs") / "run.jsonl"
    for records in batches:  # each time opened again
        with JsonLinesLog(path) as log:
            log.write(records)
    written = [record.to_dict() for records in batches for record in records]
    lines, partial = read_json_lines(path) if batches else ([], "")
    assert partial == ""
    assert len(lines) == len(written)
    assert all(same(line, row) for line, row in zip(lines, written, strict=True))


def test_every_line_is_strict_json(tmp_path):
    path = tmp_path / "run.jsonl"
    with JsonLinesLog(path) as log:
        log.write([record(0, math.nan, {"a": math.inf}), record(1, -math.inf)], {"mfu": math.nan})

    def no_constant(name):
        raise AssertionError(name)

    first, last = (json.loads(line, parse_constant=no_constant) for line in path.read_text().splitlines())
    assert (first["loss"], first["parameter_norms"]) == ("NaN", {"a": "Infinity"})
    assert (last["loss"], last["mfu"]) == ("-Infinity", "NaN")


def test_figures_are_those_of_the_last_record(tmp_path):
    with JsonLinesLog(tmp_path / "run.jsonl") as log:
        log.write([record(0), record(1)], {"tokens_per_second": 10.0})
        log.write([], {"tokens_per_second": 20.0})
    lines, _ = read_json_lines(tmp_path / "run.jsonl")
    assert [line.get("tokens_per_second") for line in lines] == [None, 10.0]


def test_lines_are_there_before_the_file_is_closed(tmp_path):
    log = JsonLinesLog(tmp_path / "of" / "a" / "run.jsonl")
    log.write([record()])
    assert len(read_json_lines(log.path).lines) == 1
    log.close()


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_partial_last_line(tmp_path, cut):
    path = tmp_path / "run.jsonl"
    with JsonLinesLog(path) as log:
        log.write([record(0), record(1), record(2)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    lines, partial = read_json_lines(path)
    assert [line["step"] for line in lines] == [0, 1]
    assert partial and whole.decode()[:-cut].endswith("\n" + partial)

    with JsonLinesLog(path) as log:
        log.write([record(2)])
    assert path.read_bytes() == whole


def test_a_partial_line_of_many_pieces(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"step": 0}\n' + b"x" * 200_000)
    JsonLinesLog(path).close()
    assert path.read_bytes() == b'{"step": 0}\n'
    path.write_bytes(b"x" * 200_000)
    JsonLinesLog(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["{", "[1]", "", "\xff"])
def test_a_line_that_is_none(tmp_path, line):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line.encode("latin-1") + b'\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"run\.jsonl, line 2: got .*; allowed: a JSON object"):
        read_json_lines(path)


class Disk(io.FileIO):
    """A file on a disk with room for so many bytes; None: for any."""

    room = None

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(bytes(data)[: self.room])
        self.room = None if self.room is None else self.room - written
        return written


@pytest.mark.parametrize("room", [0, 10, 150])
def test_a_full_disk_costs_lines(tmp_path, room):
    path = tmp_path / "run.jsonl"
    log = JsonLinesLog(path)
    log._file.close()
    log._file = Disk(path, "ab")
    log.write([record(0)])
    log._file.room = room
    for step in (1, 3):
        with pytest.warns(UserWarning, match=r"run\.jsonl: lines are skipped: .*No space left on device"):
            log.write([record(step), record(step + 1)])
    assert [line["step"] for line in read_json_lines(path).lines] == [0]
    log._file.room = None
    log.write([record(5)])
    log.close()
    lines, partial = read_json_lines(path)
    assert ([line["step"] for line in lines], partial) == ([0, 5], "")


def test_steps_that_are_made_again_are_taken_out(tmp_path):
    path = tmp_path / "run.jsonl"
    with JsonLinesLog(path) as log:
        log.write([record(0), record(1), record(2)])
    with JsonLinesLog(path, 1) as log:
        log.write([record(1)])
    assert [line["step"] for line in read_json_lines(path).lines] == [0, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_file_of_nothing_else_is_set_aside(tmp_path):
    """It may be that of another run."""
    path = tmp_path / "run.jsonl"
    for loss in (1.0, 2.0, 3.0):
        with JsonLinesLog(path, 0) as log:
            log.write([record(0, loss), record(1, loss)])
    names = {"run.jsonl": 3.0, "run.jsonl.1": 1.0, "run.jsonl.2": 2.0}
    assert sorted(each.name for each in tmp_path.iterdir()) == list(names)
    for name, loss in names.items():
        assert [line["loss"] for line in read_json_lines(tmp_path / name).lines] == [loss, loss]


def test_file_of_another_run_is_renamed(tmp_path):
    path = tmp_path / "run.jsonl"
    with JsonLinesLog(path, run="a") as log:
        log.write([record(0, 1.0), record(1, 1.0)])
    with JsonLinesLog(path, 1, run="b") as log:
        log.write([record(1, 2.0)])
    assert [(line["step"], line["run"]) for line in read_json_lines(path).lines] == [(1, "b")]
    earlier = read_json_lines(tmp_path / "run.jsonl.1").lines
    assert [(line["step"], line["run"]) for line in earlier] == [(0, "a"), (1, "a")]


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json_lines(tmp_path / "none.jsonl")
