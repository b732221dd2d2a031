"""Packed ends: who sees whom in a row of several ends, by hand."""

import numpy as np

from stackwise.quality.packed_ends import PackedEnds, Stem


def ids(*values):
    return np.array(values, np.int64)


def test_two_rows():
    stems = [Stem(ids(7), [ids(1, 2), ids(3)]), Stem(ids(), [ids(4), ids(5)])]
    ends = PackedEnds.of(stems, before=2)
    assert ends.ids_BT.tolist() == [[7, 1, 2, 3], [4, 5, 0, 0]]
    assert ends.position_BT.tolist()[0] == [2, 3, 4, 3] and ends.position_BT.tolist()[1][:2] == [2, 2]
    assert ends.columns == ((1, 3), (0, 1))
    assert ends.visible_BTS[:, :, :2].all()
    assert ends.visible_BTS[0, :, 2:].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, False, False, True],
    ]
    assert ends.visible_BTS[1, :2, 2:].tolist() == [[True, False, False, False], [False, True, False, False]]
    # Padding sees itself: a row of nothing but minus infinity would be NaN.
    assert ends.visible_BTS[1, 2:, 2:].any(axis=-1).all()


def test_lengths():
    assert Stem(ids(1, 2), [ids(3), ids(4, 5)]).length == 5
