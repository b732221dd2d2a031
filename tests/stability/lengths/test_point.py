"""The verdict on a length by its seeds; two looks joined; numbers of gradient norms."""

import math
from dataclasses import replace

import pytest

from stackwise.stability import Alarm, StabilityRun, StepRecord
from stackwise.stability.lengths.instability import Instability, SeedRun
from stackwise.stability.lengths.point import LengthPoint, reference_notes, token_notes


def seed_run(seed, *kinds, alarms=(), norms=(1.0, 2.0)):
    records = [StepRecord(step, 2.0, norm, 1e-3, False) for step, norm in enumerate(norms)]
    run = StabilityRun("m", 8, records, list(alarms), (), (), True, len(records))
    return SeedRun(seed, run, tuple(Instability(kind, 1, f"{kind} of {seed}") for kind in kinds))


def point(*runs, loss=2.0, **changes):
    return LengthPoint("m", 8, 4, loss, 1.0, 1.0, 0.5, tuple(runs), **changes)


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        ([[], [], []], "stable"),
        ([["spike"], [], []], "spiky"),
        ([["spike"], ["spike"], []], "unstable"),
        ([["spike"], ["divergence"], []], "unstable"),
        ([["divergence"], [], []], "spiky"),
        ([["gradient growth"], [], []], "spiky"),
        ([["spike"], []], "spiky"),
        ([["spike"], ["spike"]], "unstable"),
        ([["spike"], ["spike"], [], []], "spiky"),
        ([["spike"], ["spike"], ["spike"], []], "unstable"),
        ([["non-finite"], [], []], "unstable"),
        ([["fault"], [], []], "unstable"),
    ],
)
def test_verdict_of_several_seeds(kinds, verdict):
    assert point(*(seed_run(seed, *each) for seed, each in enumerate(kinds))).verdict == verdict


@pytest.mark.parametrize(
    ("kinds", "alarms", "verdict"),
    [
        ([], [], "stable"),
        (["spike"], [], "spiky"),
        (["spike"], [Alarm(1, "gradient spike", 9.0)], "unstable"),
        (["gradient growth"], [], "unstable"),
        (["divergence", "spike"], [], "unstable"),
        (["non-finite"], [Alarm(1, "non-finite loss", math.nan)], "unstable"),
    ],
)
def test_verdict_of_one_seed(kinds, alarms, verdict):
    assert point(seed_run(0, *kinds, alarms=alarms)).verdict == verdict


def test_what_the_untouched_model_gives_has_to_be_finite():
    seen = point(seed_run(0), loss=math.nan)
    assert not seen.finite
    assert seen.verdict == "unstable"
    assert seen.why == "loss nan, largest logit 1: not finite"


def test_why_names_the_first_seed_in_trouble_and_how_many_are():
    seen = point(seed_run(3), seed_run(4, "spike", "divergence"), seed_run(5, "spike"))
    assert seen.unstable_seeds == [4, 5]
    assert seen.why == "training of seed 4: spike of 4; divergence of 4; 2 of 3 seeds"
    assert point(seed_run(3)).why == ""


def test_gradient_norms_of_all_seeds():
    seen = point(seed_run(0, norms=(1.0, 2.0, 3.0)), seed_run(1, norms=(4.0, 5.0)))
    assert (seen.gradient_median, seen.gradient_max) == (3.0, 5.0)
    broken = point(seed_run(0, norms=(1.0, math.nan, 3.0)))
    assert (broken.gradient_median, broken.gradient_max) == (3.0, math.inf)
    assert math.isnan(point().gradient_median)
    assert math.isnan(point().gradient_max)


def test_speed_is_of_all_rows():
    assert point(seed_run(0)).tokens_per_second == 4 * 8 / 0.5
    assert math.isnan(LengthPoint("m", 8, 4).tokens_per_second)


def test_joined_has_the_seeds_of_both():
    one = point(seed_run(0), seed_run(1, "spike"), peak_bytes=5)
    other = point(seed_run(2, "spike"), seed_run(3, "spike"), peak_bytes=7)
    both = one.joined(other)
    assert [each.seed for each in both.runs] == [0, 1, 2, 3]
    assert (one.verdict, other.verdict, both.verdict) == ("spiky", "unstable", "unstable")
    assert both.peak_bytes == 7
    assert one.joined(point(seed_run(2), loss=math.nan)).verdict == "unstable"
    assert point(seed_run(2), loss=math.nan).joined(one).verdict == "unstable"
    full = LengthPoint("m", 8, 4, stopped="out of memory")
    assert one.joined(full).verdict == "out of memory"
    assert one.joined(full).loss == 2.0
    slow = replace(point(seed_run(2), loss=math.nan), step_seconds=9.0)
    assert (one.joined(slow).step_seconds, slow.joined(one).step_seconds) == (0.5, 9.0)


@pytest.mark.parametrize("stopped", ["out of memory", "not run"])
def test_length_that_was_not_run(stopped):
    seen = LengthPoint("m", 8, 4, stopped=stopped)
    assert seen.verdict == seen.why == stopped
    with pytest.raises(ValueError, match=f"run: T=8 has none: {stopped}"):
        _ = seen.run
    plain = seen.to_dict()
    assert (plain["model"], plain["seq_len"], plain["verdict"]) == ("m", 8, stopped)
    assert plain["alarms"] == plain["faults"] == plain["records"] == []
    assert str(seen).split() == ["T=8", *stopped.split()]


def test_plain_values_are_those_of_the_first_seed_under_the_verdict_of_all():
    plain = point(seed_run(0), seed_run(1, "spike"), peak_bytes=3 * 2**20).to_dict()
    assert plain["verdict"] == "spiky"
    assert [record["grad_norm"] for record in plain["records"]] == [1.0, 2.0]
    length = plain["length"]
    assert [each["instabilities"] for each in length["seeds"]] == [
        [],
        [{"kind": "spike", "step": 1, "text": "spike of 1"}],
    ]
    assert (length["batch_size"], length["peak_bytes"], length["gradient_max"]) == (4, 3 * 2**20, 2.0)


def test_line_of_a_length():
    text = " ".join(str(point(seed_run(0), peak_bytes=3 * 2**20)).split())
    assert text == "T=8 4 rows loss 2 largest logit 1 gradient norm 1.5 at most 2 64 tokens/s 3 MiB stable"
    assert repr(point(seed_run(0))) == "<T=8: stable>"


def test_lengths_that_do_not_divide_the_tokens():
    points = [
        LengthPoint("m", 8, 8),
        LengthPoint("m", 24, 2),
        LengthPoint("m", 40, 1, stopped="out of memory"),
        LengthPoint("m", 60, 1, stopped="not run"),
    ]
    assert token_notes(points[:1], 64) == token_notes(points, None) == []
    [note] = token_notes(points, 64)
    assert note == "not 64 tokens a step, which they do not divide: 2 x 24 = 48, 1 x 40 = 40"


def test_growth_that_is_not_judged_is_told():
    troubled = point(seed_run(0, "spike"), seed_run(1, "divergence"))
    longer = replace(troubled, seq_len=16)
    [note] = reference_notes([troubled, longer])
    assert note.startswith("gradient growth is not judged: it is held against T=8, where every seed is")
    # A sound seed gives the norms; and where there is nothing longer, nothing is left out.
    assert reference_notes([point(seed_run(0, "spike"), seed_run(1)), longer]) == []
    assert reference_notes([troubled]) == []
    assert reference_notes([troubled, LengthPoint("m", 16, 4, stopped="out of memory")]) == []
    assert reference_notes([LengthPoint("m", 8, 4, stopped="out of memory"), longer]) == []
