"""Results that a history refuses to store."""

import math

import pytest

from stackwise.gate.history.point import Result


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"level": 0.0}, "level of a: got 0.0; allowed: a number > 0"),
        ({"level": math.nan}, "level of a: got nan"),
        ({"log_ratio": math.inf}, "log-ratio of a: got inf; allowed: a finite number"),
        ({"test": ""}, "test: got ''; allowed: a name"),
        ({"metric": ""}, "metric: got ''; allowed: a name"),
    ],
)
def test_result_without_a_finite_number_or_a_name_is_refused(values, message):
    given = {"test": "a", "metric": "time", "level": 1.0, "log_ratio": 0.0}
    with pytest.raises(ValueError, match=message):
        Result(**{**given, **values})
