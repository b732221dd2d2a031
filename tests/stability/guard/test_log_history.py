"""LogHistory: level and scatter of several signals, against the statistics of Python."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.stability.guard.history import LogHistory

CPU = torch.device("cpu")
NUMBER = st.floats(1e-6, 1e6) | st.sampled_from([0.0, -1.0, math.inf, -math.inf, math.nan])
STEP = st.tuples(NUMBER, NUMBER, st.booleans())


@given(st.lists(STEP, max_size=40), st.integers(1, 6), st.integers(6, 12))
def test_each_signal_has_the_statistics_of_its_own_sound_numbers(steps, recent, size):
    history = LogHistory(CPU, signals=2, recent=recent, history=size, minimum=3)
    kept = [[], []]
    for *values, sound in steps:
        history.accept(torch.tensor(values, dtype=torch.float64), torch.tensor(sound))
        for signal, value in zip(kept, values, strict=True):
            if sound and value > 0 and math.isfinite(value):
                signal.append(math.log(value))
    found = history.statistics()
    for i, signal in enumerate(logs[-size:] for logs in kept):
        assert found.enough_S[i].item() == (len(signal) >= 3)
        changes = [b - a for a, b in itertools.pairwise(signal)]
        middle = statistics.median(changes) if changes else 0.0
        scatter = statistics.median(abs(c - middle) for c in changes) if changes else 0.0
        assert found.scatter_S[i].item() == pytest.approx(scatter, abs=1e-12)
        if signal:
            assert found.level_S[i].item() == pytest.approx(statistics.median(signal[-recent:]), abs=1e-12)
        else:
            assert found.level_S[i].isnan()


def test_a_loaded_history_is_a_copy_and_its_end_where_it_is_longer():
    history = LogHistory(CPU, signals=1, recent=2, history=3, minimum=1)
    logs_SH = torch.arange(5.0)[None]
    history.load(logs_SH)
    assert history.logs_SH.tolist() == [[2.0, 3.0, 4.0]]
    same = torch.arange(3.0, dtype=torch.float64)[None]
    history.load(same)
    same.zero_()
    assert history.logs_SH.tolist() == [[0.0, 1.0, 2.0]]
    history.load(torch.ones(1, 1))
    assert history.logs_SH[0].isnan().tolist() == [True, True, False]
