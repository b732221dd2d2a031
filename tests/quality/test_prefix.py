"""Prefixes: each sequence is read once, and the most is saved that can be."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stackwise.quality import prefix
from stackwise.quality.prefix import Family, Group, _best_ranges, group_by_prefix

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


@given(SEQUENCES, st.data())
def test_each_sequence_is_in_one_group_and_begins_as_all_there_do(sequences, data):
    asked = [data.draw(st.integers(0, len(ids) - 1)) for ids in sequences]
    groups = group_by_prefix(sequences, asked)
    members = [i for group in groups for family in group.families for i in family.members]
    assert sorted(members) == list(range(len(sequences)))
    for group in groups:
        beginnings = set()
        for family in group.families:
            shared = {tuple(sequences[i][: family.shared]) for i in family.members}
            assert len(shared) == 1 and all(asked[i] == family.shared for i in family.members)
            assert group.shared <= family.shared
            beginnings |= {beginning[: group.shared] for beginning in shared}
        assert len(beginnings) == 1


def common(one, two):
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))))


def most_saved(heights, cost):
    """By trying every way to cut the row of keys into ranges."""
    n = len(heights) + 1
    best = [0] * (n + 1)
    for end in range(1, n + 1):
        best[end] = best[end - 1]
        for start in range(end - 1):
            saved = min(heights[start : end - 1]) * (end - start - 1) - cost
            best[end] = max(best[end], best[start] + saved)
    return best[n]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_the_most_is_saved(keys):
    keys = sorted({tuple(key) for key in keys})
    heights = [common(a, b) for a, b in itertools.pairwise(keys)]
    with_cost = prefix._PASS_TOKENS
    try:
        prefix._PASS_TOKENS = 2
        ranges = _best_ranges(heights)
    finally:
        prefix._PASS_TOKENS = with_cost
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(ranges))
    for shared, start, end in ranges:
        assert shared == min(heights[start : end - 1])
    assert sum(shared * (end - start - 1) - 2 for shared, start, end in ranges) == most_saved(heights, 2)


def test_questions_after_the_same_examples():
    examples = list(range(300))
    choices = ((1, 2), (3,), (4, 5, 6))
    questions = [[*examples, 1000 + q, 2000, *choice] for q in range(3) for choice in choices]
    # What follows position 301 is asked, so that everything before it is shared by the choices.
    groups = group_by_prefix([*questions, [7, 8], [9, 10, 11]], [301] * 9 + [1, 1])
    families = [Family(301, (3 * q, 3 * q + 1, 3 * q + 2)) for q in range(3)]
    assert groups == [Group(0, (Family(1, (9,)), Family(1, (10,)))), Group(300, tuple(families))]


def test_choices_of_a_question_are_a_family():
    context = [5] * 20
    sequences = [[*context, 1, 2], [*context, 3], [*context, 1, 4]]
    assert group_by_prefix(sequences, [20, 20, 20]) == [Group(0, (Family(20, (0, 1, 2)),))]
