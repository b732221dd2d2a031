"""UpdateClock: medians and sums of made-up times."""

import torch

from stackwise.prototype.trial import UpdateClock


def test_the_first_update_is_left_out_where_there_are_more(monkeypatch):
    times = iter([0.0, 9.0, 10.0, 11.0, 20.0, 22.0, 30.0, 34.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = UpdateClock(torch.device("cpu"))
    assert clock.tokens_per_second() == 0.0
    for place, tokens in enumerate((90, 100, 100, 100)):
        with clock.update():
            pass
        clock.count(tokens)
        if place == 0:
            assert clock.tokens_per_second() == 10.0
    assert clock.seconds() == [9.0, 1.0, 2.0, 4.0]
    assert clock.tokens_per_second() == 50.0
