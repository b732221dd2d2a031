"""Histogram: counts of all samples, whatever their spread."""

import json

import numpy as np
import pytest

from stackwise.benchmark.timing.histogram import histogram


@pytest.mark.parametrize(
    "samples",
    [
        np.random.default_rng(0).gamma(4.0, 1e-3, 2000),
        np.r_[np.random.default_rng(1).normal(1e-3, 1e-9, 990), np.full(10, 50.0)],
        np.full(40, 0.002),
        np.arange(5) / 100,
    ],
    ids=["skewed", "few far away", "equal", "five"],
)
def test_every_sample_is_counted_once(samples):
    found = histogram(list(samples))
    assert sum(found["counts"]) + found["above"] == len(samples)
    assert len(found["edges"]) == len(found["counts"]) + 1 <= 61
    assert found["edges"] == sorted(found["edges"])
    assert json.loads(json.dumps(found)) == found


def test_counts_are_those_of_numpy():
    samples = np.random.default_rng(2).uniform(0, 1, 500)
    found = histogram(list(samples))
    counts, _ = np.histogram(samples, bins=found["edges"])
    assert found["counts"] == counts.tolist()


def test_slow_samples_do_not_widen_the_bins():
    found = histogram([*np.linspace(1.0, 1.1, 999), 1000.0])
    assert found["edges"][-1] < 1.2
    assert found["above"] == 1


def test_four_samples_are_too_few():
    assert histogram([1.0, 2.0, 3.0, 4.0]) is None
