"""Tensor tree: tensors in nested containers, in order and by their paths."""

from collections import OrderedDict

import pytest
import torch

from stackwise.support.tensor_tree import LEVELS, leaves, shown_path, tensors_of

ONE, TWO, THREE = torch.zeros(2), torch.ones(()), torch.nn.Parameter(torch.zeros(1))


def nested(levels):
    tree = ONE
    for _ in range(levels):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    "tree, tensors",
    [
        ([ONE, {"a": (1, TWO, None)}, OrderedDict(b=[THREE, "text"])], [ONE, TWO, THREE]),
        (ONE, [ONE]),
        ({"a": 1}, []),
    ],
)
def test_tensors_are_found_in_order(tree, tensors):
    assert list(map(id, tensors_of(tree))) == list(map(id, tensors))


def test_leaves_have_their_paths():
    found = leaves([ONE, {"a": (1, TWO, None)}])
    assert list(found) == [(0,), (1, "a", 1)]
    assert found[1, "a", 1] is TWO


def test_tree_that_contains_itself_is_refused():
    assert len(leaves(nested(LEVELS))) == 1
    tree = {}
    tree["a"] = [tree]
    for each in (tree, nested(LEVELS + 2)):
        with pytest.raises(ValueError, match=r"\.\.\.: got a state with too many levels"):
            leaves(each)


@pytest.mark.parametrize(
    "path, text",
    [
        (("a", 0, "b"), "a.0.b"),
        ((ONE, "a"), "[...].a"),
        (("\ud800",), "\\ud800"),
        (range(9), "0.1.2.3.4.5.6.7...."),
    ],
)
def test_path_is_shown_as_printable_text(path, text):
    assert shown_path(tuple(path)) == text
