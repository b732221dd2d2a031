"""bench.suite: what it keeps of each test, from a run of pytest-benchmark."""

import io
import json

import pytest
from rich.console import Console

from bench import suite
from bench.racks import ATTENTION, LARGE, SMALL, rack_of, sizes

pytest_plugins = ["pytester"]


@pytest.fixture
def recorded(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # workers measure nothing
    pytester.makepyfile(
        test_small="""
        import pytest
        import torch

        @pytest.mark.benchmark(group="forward")
        def test_linear(throughput):
            throughput(torch.nn.Linear(4, 4), batch_size=2, seq_len=3, min_seconds=0.05, warmup_seconds=0.1)
        """
    )
    result = pytester.runpytest_subprocess("--benchmark-json=out.json", "-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    return json.loads((pytester.path / "out.json").read_text())


@pytest.mark.slow
def test_a_row_has_what_was_measured_and_the_table_shows_it(recorded):
    [(name, row)] = suite.rows_of(recorded).items()
    [benchmark] = recorded["benchmarks"]
    assert name == "test_small.py::test_linear"
    assert (row["group"], row["model"], row["mode"]) == ("forward", "Linear", "forward")
    assert (row["batch_size"], row["seq_len"]) == (2, 3)
    assert row["median"] == benchmark["stats"]["median"] > 0
    assert row["tokens_per_second"] == pytest.approx(2 * 3 / row["median"])
    assert row["peak_memory_bytes"] > 2**20
    assert row["p50"] == pytest.approx(row["median"])
    assert row["mfu"] is None  # of a CPU no peak is published
    out = io.StringIO()
    Console(width=140, file=out).print(suite.table({f"{name}[small-1]": row}))
    assert f"{name}[small-1]" in out.getvalue()


def test_large_shapes_are_for_the_gpu_alone():
    small, large = sizes([{"batch_size": 1}], [{"batch_size": 2}])
    assert (small.values, small.id, small.marks) == ((SMALL, {"batch_size": 1}), "small-batch_size1", ())
    assert large.values == (LARGE, {"batch_size": 2})
    assert [mark.name for mark in large.marks] == ["gpu"]


@pytest.mark.parametrize("attention", ATTENTION)
def test_every_kind_of_attention_can_be_built(attention):
    from bench.peer_models import Shape

    assert rack_of(Shape(32, 1, 4, 2, 64, vocab_size=64), attention).causal
