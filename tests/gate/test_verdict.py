import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.gate.verdict import Decision, Verdict

SHARES = st.floats(-0.99, 10)


@st.composite
def decisions(draw):
    low, estimate, high = sorted(draw(st.tuples(SHARES, SHARES, SHARES)))
    if draw(st.booleans()):
        low, high = -math.inf, math.inf
    return Decision(
        draw(st.sampled_from(Verdict)),
        estimate,
        low,
        high,
        draw(st.floats(0, 1)),
        draw(st.integers(0, 100)),
        draw(st.booleans()),
        draw(st.text()),
    )


@given(decisions())
def test_a_decision_is_the_same_after_json(decision):
    text = json.dumps(decision.to_dict(), allow_nan=False)
    assert Decision.from_dict(json.loads(text)) == decision


def test_a_decision_of_no_rounds_is_the_same_after_json():
    decision = Decision(Verdict.INCONCLUSIVE, math.nan, -math.inf, math.inf, 0.0, 0, False, "stopped")
    values = json.loads(json.dumps(decision.to_dict(), allow_nan=False))
    assert values["estimate"] is None and values["low"] is None and values["high"] is None
    found = Decision.from_dict(values)
    assert math.isnan(found.estimate) and (found.low, found.high) == (-math.inf, math.inf)


def test_a_verdict_is_its_name():
    assert f"{Verdict.REGRESSED}" == "REGRESSED"
    assert [verdict.ok for verdict in Verdict] == [True, True, False, False]


def test_an_unknown_verdict_is_refused():
    values = Decision(Verdict.PASS, 0.0, 0.0, 0.0, 0.96, 4, False, "").to_dict()
    with pytest.raises(ValueError, match="verdict: got 'FINE'; allowed: PASS, IMPROVED"):
        Decision.from_dict({**values, "verdict": "FINE"})


def test_an_estimate_is_within_its_interval():
    with pytest.raises(ValueError, match=r"estimate: got 0\.2; allowed"):
        Decision(Verdict.PASS, 0.2, 0.0, 0.1, 0.96, 4, False, "")
