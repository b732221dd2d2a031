"""A threshold on a share."""

import pytest

from bench.gate.tools.share_rule import judged


def test_threshold_of_a_rule():
    raw = {"base": {"mean": 100.0, "min": 90.0}, "head": {"mean": 106.0, "min": 90.0}}
    found = judged(raw, ("mean:5%", "mean:10%", "min:5%"))
    assert found.verdicts == {"mean:5%": "REGRESSED", "mean:10%": "PASS", "min:5%": "PASS"}
    assert found.estimates == pytest.approx({"mean:5%": 0.06, "mean:10%": 0.06, "min:5%": 0.0})
