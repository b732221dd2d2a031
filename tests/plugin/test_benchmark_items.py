"""Which tests the gate measures, and which benchmarks it only mentions."""

import pytest

from pytest_stackwise.benchmark_items import gated, not_gated

TESTS = """
import pytest

@pytest.fixture
def wrapped(request): return request.getfixturevalue("benchmark")
@pytest.fixture
def other(request): return request.getfixturevalue("tmp_path")

def test_argument(benchmark): pass
def test_throughput(throughput): pass
def test_requests(request): request.getfixturevalue("benchmark")(int)
def test_requests_in_a_fixture(wrapped): wrapped(int)
@pytest.mark.gate(time="3%")
def test_with_a_marker(request): request.getfixturevalue("benchmark")(int)
class TestIt:
    def test_method(self, request): request.getfixturevalue("benchmark")(int)

def test_ordinary(): pass
def test_requests_another(other, request): request.getfixturevalue("tmp_path")
def test_names_it(request): print("benchmark")

@pytest.mark.codspeed_benchmark
def test_marked(): pass
"""


@pytest.fixture
def items(pytester):
    """The tests of the file, by name."""
    pytester.makeini("[pytest]\nmarkers = codspeed_benchmark: of pytest-codspeed\n")
    return {item.name: item for item in pytester.getitems(TESTS)}


def test_gated_items_use_a_fixture_or_request_it(items):
    assert [item.name for item in gated(items.values())] == [
        "test_argument",
        "test_throughput",
        "test_requests",
        "test_requests_in_a_fixture",
        "test_with_a_marker",
        "test_method",
    ]


def test_benchmark_of_another_plugin_is_noted(items):
    measured = gated(items.values())
    assert not_gated(list(items.values()), measured) == [
        f"{items['test_marked'].nodeid}: not gated, since the test does not use `benchmark` or `throughput`"
    ]
    assert not_gated(measured, measured) == []


def test_many_benchmarks_of_another_plugin_are_counted(pytester):
    marked = "".join(f"@pytest.mark.codspeed_benchmark\ndef test_{n}(): pass\n" for n in range(5))
    found = pytester.getitems(f"import pytest\n{marked}")
    [note] = not_gated(found, [])
    assert "::test_2 and 2 more: not gated" in note
