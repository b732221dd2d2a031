"""Scalars of TensorBoard, as its own reader sees them."""

import errno
import math
import sys

import pytest
import torch

from stackwise.stability import StepRecord
from stackwise.training.record_log import TensorBoardLog


@pytest.fixture(autouse=True)
def names_in_order(monkeypatch):
    """TensorBoard sorts the files of one second by a number without leading zeros: 10 comes before 9."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(1000))


def record(step=0, loss=1.5, norms=None):
    return StepRecord(step, loss, 2.0, 0.1, False, 64, norms)


def test_tensor_board(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoardLog(tmp_path) as log:
        log.write([record(0, 3.0, {"a": 4.0}), record(1, math.nan, {"a": 5.0})], {"tokens_per_second": 7.0})
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert scalars.keys() == {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/skipped",
        "train/tokens",
        "gradient_norm/a",
        "throughput/tokens_per_second",
    }
    assert scalars["gradient_norm/a"] == [(0, 4.0), (1, 5.0)]
    assert scalars["throughput/tokens_per_second"] == [(1, 7.0)]
    assert scalars["train/loss"][0] == (0, 3.0) and math.isnan(scalars["train/loss"][1][1])


def test_what_a_new_run_would_hide_is_set_aside(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for loss in (1.0, 2.0, 3.0):
        with TensorBoardLog(tmp_path, 0) as log:
            log.write([record(0, loss)])
    for folder, loss in (("before-1", 1.0), ("before-2", 2.0), ("", 3.0)):
        events = accumulator.EventAccumulator(str(tmp_path / folder)).Reload()
        assert [event.value for event in events.Scalars("train/loss")] == [loss]


def test_events_of_another_run_are_set_aside(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for run, first_step, loss in (("a", None, 1.0), ("a", 1, 2.0), ("b", 1, 3.0)):
        with TensorBoardLog(tmp_path, first_step, run) as log:
            log.write([record(1, loss)])
    for folder, losses in (("before-1", [2.0]), ("", [3.0])):
        events = accumulator.EventAccumulator(str(tmp_path / folder)).Reload()
        assert [event.value for event in events.Scalars("train/loss")] == losses


def test_a_full_disk_ends_the_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    log = TensorBoardLog(tmp_path)
    written = []

    def full(tag, value, step):
        written.append(step)
        raise OSError(errno.ENOSPC, "No space left on device")

    log._writer.add_scalar = full
    with pytest.warns(UserWarning, match=f"{tmp_path}: nothing more is written: .*No space left"):
        log.write([record(0)])
    log.write([record(1)])
    log.close()
    assert written == [0]


def test_without_tensor_board(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"tensorboard >= 2\.18: pip install 'stackwise\[train\]'"):
        TensorBoardLog(tmp_path)
