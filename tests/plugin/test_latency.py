"""Limits of latency: which of several counts, how many calls they take, what is told of one not kept."""

import re

import pytest
import torch

from pytest_stackwise.latency import LatencyError, LatencyLimit, least_arguments, require_within
from stackwise.benchmark.generation import GenerationMeasurement
from stackwise.benchmark.timing.measurement import Measurement
from stackwise.benchmark.timing.warmup import WarmUp
from stackwise.benchmark.workload import Workload

STEADY = WarmUp(6, 0.1, True, None)
CALL = Workload("call", lambda: None, torch.device("cpu"))


def generation(new_tokens):
    return Workload(
        "text", lambda: None, torch.device("cpu"), new_tokens=new_tokens, each_token=lambda on_token: None
    )


def limits(*markers):
    return [LatencyLimit.read(**marker) for marker in markers]


def calls_of(seconds, **changes):
    return Measurement("call", tuple(seconds), 0, **{"warmup": STEADY, **changes})


def generations_of(*token_seconds):
    return GenerationMeasurement("text", tuple(token_seconds), 1, 4, warmup=STEADY)


def beyond(found, *markers, said=None):
    """What is told of each limit that is not kept."""
    with pytest.raises(LatencyError) as error:
        require_within(limits(*markers), found, said or {})
    message = str(error.value)
    assert message.startswith("max_latency: ")
    return re.split("; (?=p)", message.removeprefix("max_latency: "))


class TestWhichCounts:
    def test_each_percentile_of_several_limits_is_judged(self):
        found = calls_of([0.01] * 200)
        assert beyond(found, {"p95": "20ms"}, {"p50": "5ms"}) == ["p50 was 10 ms; allowed: at most 5 ms"]
        assert len(beyond(found, {"p95": "9ms"}, {"p50": "5ms"})) == 2
        require_within(limits({"p95": "20ms"}, {"p50": "15ms"}), found, {})

    def test_of_one_percentile_the_closest(self):
        found = calls_of([0.01] * 200)
        require_within(limits({"p50": "1s", "p95": "1s"}, {"p50": "5ms"}, {"p95": "5ms"}), found, {})
        [told] = beyond(found, {"p50": "1s"}, {"p50": "5ms", "p95": "6ms"})
        assert told == "p95 was 10 ms; allowed: at most 6 ms"

    @pytest.mark.parametrize("of", [None, "itl"])
    def test_a_limit_of_a_generation_that_does_not_say_of_what_is_of_the_gaps(self, of):
        """Then the other one is of the same latency."""
        found = generations_of((0.5, 0.6, 0.7))
        near, far = {"of": of}, {"of": None if of else "itl"}
        require_within(limits({"p50": "1s", **near}, {"p50": "1ns", **far}), found, {})
        [told] = beyond(found, {"p50": "1ns", **near}, {"p50": "1s", **far})
        assert told == "p50 of ITL was 100 ms; allowed: at most 1 ns"

    def test_other_latencies_are_others(self):
        found = generations_of((0.5, 0.6, 0.7))
        told = beyond(found, {"p50": "1s"}, {"p50": "1ms", "of": "tpot"}, {"p50": "2ms", "of": "ttft"})
        assert told == [
            "p50 of TPOT was 100 ms; allowed: at most 1 ms",
            "p50 of TTFT was 500 ms; allowed: at most 2 ms",
        ]


class TestCalls:
    @pytest.mark.parametrize(
        ("markers", "wanted"),
        [
            ([{"p50": "1s"}], {"min_calls": 5}),
            ([{"p95": "1s"}], {"min_calls": 200, "calls_per_sample": 1}),
            ([{"p99": "1s"}], {"min_calls": 1000, "calls_per_sample": 1}),
            ([{"p50": "1s"}, {"p95": "1s"}], {"min_calls": 200, "calls_per_sample": 1}),
        ],
    )
    def test_that_a_percentile_takes(self, markers, wanted):
        """Never fewer than are made anyway: the median is known of one."""
        assert least_arguments(limits(*markers), CALL) == wanted

    @pytest.mark.parametrize(
        ("marker", "new_tokens", "generations"),
        [
            ({"p50": "1s"}, 2, 5),
            ({"p95": "1s"}, 2, 200),
            ({"p95": "1s"}, 21, 10),
            ({"p95": "1s"}, 22, 10),
            ({"p99": "1s"}, 21, 50),
            ({"p99": "1s"}, 30, 35),
            # The gaps of one generation slow down together: there are several all the same.
            ({"p95": "1s"}, 500, 5),
            ({"p95": "1s", "of": "itl"}, 21, 10),
            ({"p95": "1s", "of": "tpot"}, 21, 200),
            ({"p99": "1s", "of": "ttft"}, 21, 1000),
            ({"p95": "1s", "of": "e2e"}, 1, 200),
        ],
    )
    def test_of_a_generation_as_many_as_have_so_many_gaps(self, marker, new_tokens, generations):
        assert least_arguments(limits(marker), generation(new_tokens)) == {"min_calls": generations}

    def test_most_of_several(self):
        several = limits({"p95": "1s"}, {"p50": "1s", "of": "ttft"}, {"p95": "1s", "of": "tpot"})
        assert least_arguments(several, generation(21)) == {"min_calls": 200}

    @pytest.mark.parametrize("of", ["ttft", "itl", "tpot", "e2e"])
    def test_what_has_no_tokens_has_no_such_latency(self, of):
        wanted = f"of: got '{of}'; allowed: none here, since call does not tell its tokens"
        with pytest.raises(ValueError, match=wanted):
            least_arguments(limits({"p50": "1s"}, {"p50": "1s", "of": of}), CALL)

    @pytest.mark.parametrize(("of", "name"), [(None, "itl"), ("itl", "itl"), ("tpot", "tpot")])
    def test_one_token_has_no_gap(self, of, name):
        with pytest.raises(ValueError, match=f"new_tokens: got 1; allowed: 2 or more, of which {name} is"):
            least_arguments(limits({"p50": "1s", "of": of}), generation(1))


class TestWhatIsTold:
    def test_of_a_tail(self):
        found = calls_of([0.01] * 900 + [0.03] * 100)
        require_within(limits({"p50": "10ms", "p95": "30ms", "p99": "30ms"}), found, {})
        assert beyond(found, {"p50": "10ms", "p99": "20ms"}) == ["p99 was 30 ms; allowed: at most 20 ms"]

    def test_of_whole_generations(self):
        found = generations_of((0.5, 0.6, 0.7), (0.5, 0.6, 0.9))
        assert beyond(found, {"p50": "600ms", "of": "e2e"}) == [
            "p50 of E2E was 800 ms; allowed: at most 600 ms"
        ]

    @pytest.mark.parametrize(
        ("seconds", "was"),
        [(0.0200001, "20.0001 ms"), (0.020001, "20.001 ms"), (0.0201, "20.1 ms"), (0.02 + 1e-16, "20.0000")],
    )
    def test_the_two_times_can_be_told_apart(self, seconds, was):
        [told] = beyond(calls_of([seconds]), {"p50": "20ms"})
        assert told.startswith(f"p50 was {was}")
        first, second = told.removeprefix("p50 was ").split("; allowed: at most ")
        assert first != second

    def test_of_too_few_samples(self):
        [told] = beyond(calls_of([0.01] * 199), {"p95": "1s"})
        assert told == "p95 is not known of 199 samples: it takes 200, each of one call"

    def test_of_samples_of_several_calls(self):
        """The mean of three hides the slowest."""
        [told] = beyond(calls_of([0.01] * 300, calls_per_sample=3), {"p95": "1s"})
        assert told == "p95 is not known of 300 samples: it takes 200, each of one call"

    def test_what_the_test_itself_said(self):
        said = {"min_calls": 7, "warmup_seconds": 0.0}
        told = beyond(calls_of([0.01] * 7), {"p95": "1s"}, said=said)
        assert told[0].endswith("it takes 200, each of one call; the test itself says min_calls=7")
        told = beyond(calls_of([0.01] * 300, calls_per_sample=3), {"p95": "1s"}, said={"calls_per_sample": 3})
        assert told[0].endswith("; the test itself says calls_per_sample=3")

    def test_whether_it_was_steady(self):
        found = calls_of([0.01], warmup=WarmUp(6, 0.1, False, "two windows differed by 4.0%"))
        [told] = beyond(found, {"p50": "1ms"})
        assert told == "p50 was 10 ms; allowed: at most 1 ms (not steady: two windows differed by 4.0%)"
