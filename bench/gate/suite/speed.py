"""The benchmarks, for pytest-benchmark's fixture and whoever provides it."""

import pytest
from subject.effect import NAMES
from subject.work import make


@pytest.mark.parametrize("name", NAMES)
def test_speed(benchmark, name):
    benchmark(make(name))
