"""The supply of twins: when they import ahead of their round, what, and how many at once."""

import os
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from stackwise.gate import twin_supply
from stackwise.gate.side.channel import ChannelClosedError
from stackwise.gate.twin_supply import TwinSupply

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are none")


class Pair:
    """In the place of twins."""

    made: ClassVar = []
    lost = False

    def __init__(self, seed, log, imports=()):
        self.seed, self.log, self.imports, self.awaited, self.ended = seed, log, list(imports), False, False
        Pair.made.append(self)

    def pid(self, number):
        self.awaited = True
        if Pair.lost and self is Pair.made[-1]:
            raise ChannelClosedError("gone")
        return 1

    def end(self):
        self.ended = True


@pytest.fixture
def supply(tmp_path, monkeypatch):
    monkeypatch.setattr(twin_supply, "Twins", Pair)
    monkeypatch.setattr(Pair, "made", [])
    monkeypatch.setattr(Pair, "lost", False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    return TwinSupply(tmp_path)


def over(supply, base, head):
    """What both sides of a round have told of their imports."""
    supply.sides = {"head": SimpleNamespace(early=head), "base": SimpleNamespace(early=base)}


def test_later_ones_have_imported_what_both_sides_had(supply):
    first = supply.next(7, "files")
    assert (first.seed, first.imports, first.awaited) == (7, [], False)
    over(supply, base=["numpy", "torch", "scipy", "torch.nn"], head=["torch", "numpy", "torch.nn"])
    later = [supply.next(100 * number, "files") for number in range(1, 4)]
    assert Pair.made == [first, *later]  # one on each processor, at once
    assert [pair.imports for pair in later] == [["torch", "numpy", "torch.nn"]] * 3
    assert [pair.seed for pair in later] == [100, 101, 102] and all(pair.awaited for pair in later)
    assert len({pair.log for pair in Pair.made}) == 4
    over(supply, base=["torch"], head=["torch"])
    assert supply.next(9, "files").imports == ["torch"] and len(Pair.made) == 7


@pytest.mark.parametrize(
    "base, head", [(["torch"], None), (None, ["torch"]), (None, None), (["torch"], []), ([], [])]
)
def test_nothing_ahead_where_a_side_forbids_it_or_has_nothing(supply, base, head):
    supply.next(0, "files")
    over(supply, base, head)
    assert supply.next(1, "files").imports == [] and len(Pair.made) == 2


@pytest.mark.parametrize("purpose", ["files", "fewer"])
def test_what_waits_ends_where_a_side_forbids_it(supply, purpose):
    """A test that is reached later may be the first to do so, also behind a crash, for another purpose."""
    supply.next(0, "files")
    over(supply, ["torch"], ["torch"])
    supply.next(1, "files")
    over(supply, ["torch"], ["torch"])
    assert supply.next(2, purpose).imports == ["torch"]
    for base, head in ((None, None), (["torch"], None)):
        over(supply, base, head)
        assert supply.next(3, "files").imports == []
    assert [pair.ended for pair in Pair.made if pair.imports] == [False, False, True]
    # Where the rounds that follow allow it again, it is begun afresh.
    over(supply, ["numpy"], ["numpy"])
    assert supply.next(4, "files").imports == ["numpy"]


def test_each_purpose_has_its_own(supply):
    supply.next(0, "all")
    over(supply, ["torch"], ["torch"])
    supply.next(1, "all")
    # Two are left, of which nobody knows whether they are needed; then it is seen what is.
    for _ in range(2):
        over(supply, ["torch"], ["torch"])
        assert supply.next(2, "some").imports == ["torch"]
    over(supply, ["torch"], ["torch"])
    assert supply.next(3, "some").imports == []
    over(supply, ["numpy"], ["numpy"])
    assert supply.next(4, "some").imports == ["numpy"]


def test_where_imports_fail_ahead_sides_import_for_themselves(supply):
    supply.next(0, "files")
    over(supply, ["torch"], ["torch"])
    Pair.lost = True
    pair = supply.next(1, "files")
    assert pair.imports == [] and not pair.ended
    assert all(each.ended for each in Pair.made if each.imports)
    tried = len(Pair.made)
    for purpose in ("files", "fewer", "fewer"):  # not again, which may take a minute each time
        over(supply, ["torch"], ["torch"])
        assert supply.next(2, purpose).imports == []
    assert len(Pair.made) == tried + 3


def test_none_is_left(supply):
    supply.next(0, "files")
    over(supply, ["torch"], ["torch"])
    taken = supply.next(1, "files")
    supply.end()
    supply.end()
    assert [pair.ended for pair in Pair.made] == [False, False, True, True] and not taken.ended
